"""`switchsd simulate`: sources of times, the table, JSON, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoding.costs import CostTable

SMALL = ("--batch", "2,4", "--draft-tokens", "1,4", "--requests", "12", "--tokens", "40")
CURVES = ("--verify-ms", '{"1": 40, "8": 50, "64": 90}', "--draft-ms", '{"1": 10, "8": 14}')


def test_published_figures(run) -> None:  # type: ignore[no-untyped-def]
    code, printed, told = run("simulate", "--hardware", "h100", "--target-size", "70b", "--draft-size", "0.5b", *SMALL)
    assert code == 0
    assert "70b target on 4 x h100" in told and "data sheet" in told
    assert "closed form" in printed and "overlapping never pays here (the best: m=" in printed
    assert "above 1 is faster" in printed and "a device of its own" in told and "no further contention" in told
    assert "note:" not in told
    code, printed, _ = run("simulate", "--hardware", "h100", "--target-size", "70b", "--batch", "4,8")
    assert code == 0 and "% at every m and k: verifying 2m costs hardly more than m" in printed


def test_where_it_pays(run) -> None:  # type: ignore[no-untyped-def]
    """The best m and k, whether plain decoding has a better k, and a line a reason."""
    verify = '{"4": {"1": 10, "4": 30}, "8": {"1": 20, "4": 60}, "16": {"1": 25, "4": 120}}'
    draft = '{"4": {"1": 5, "4": 20}, "8": {"1": 10, "4": 40}, "16": {"1": 20, "4": 80}}'
    options = ("--verify-ms", verify, "--draft-ms", draft, "--batch", "4,8", "--draft-tokens", "1,4")
    code, printed, _ = run("simulate", *options, "--requests", "200")
    assert code == 0
    assert ", k=4, gain 1.6" in printed and "best: m=" in printed and "overlapping gains in 4 of 4" in printed
    assert " at m=4,8 k=1,4" not in printed and " % at every m and k: verifying sets the pace" in printed
    assert "but plain decoding of the same requests is faster still with k=1" in printed
    code, printed, told = run("simulate", *options, "--shared", "--requests", "200", "--json")
    assert code == 0 and told == ""
    found = json.loads(printed)
    assert "take turns" in found["about"] and found["notes"] == [] and "never pays" in found["summary"]
    assert [r["step_ms"] for r in found["rows"]] == [15, 50, 30, 100]
    assert all("nothing overlaps" in r["verdict"] for r in found["rows"])
    code, printed, _ = run("simulate", *options, "--requests", "10")
    assert code == 0 and "--requests 10 do not fill the 2m places" in printed


def test_the_help_names_minedraft(run) -> None:  # type: ignore[no-untyped-def]
    code, printed, _ = run("simulate", "--help")
    assert code == 0 and "MineDraft" in printed


def test_curves_as_json(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, printed, _ = run("simulate", *CURVES, *SMALL, "--json")
    assert code == 0
    rows = json.loads(printed)["rows"]
    assert [(r["m"], r["k"]) for r in rows] == [(2, 1), (2, 4), (4, 1), (4, 4)]
    one = rows[1]
    assert one["draft_ms"] == pytest.approx(4 * (10 + 4 / 7)) and one["verify_ms"] == pytest.approx(50 + 40 * 2 / 56)
    assert one["closed_form"] == pytest.approx((one["draft_all_ms"] + one["verify_all_ms"]) / 2 / one["step_ms"])
    assert one["gain"] == pytest.approx(one["psd"]["tokens_per_second"] / one["sd"]["tokens_per_second"])
    file = tmp_path / "verify.json"
    file.write_text(json.dumps({"2": {"1": 40, "4": 50}, "8": {"1": 60, "4": 70}}))
    table = '{"2": {"1": 10, "4": 40}, "8": {"1": 20, "4": 80}}'
    code, printed, _ = run("simulate", "--verify-ms", file, "--draft-ms", table, *SMALL, "--rho", "0.1", "--json")
    assert code == 0 and json.loads(printed)["rows"][1]["step_ms"] == pytest.approx(50 * 1.1)


def test_a_cost_table(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "costs.json"
    key = {"target": "tiny", "machine": "a slow machine"}
    CostTable(key, [1, 8, 32], [64, 256], [[40.0, 50, 80]] * 2, {"eagle": [5.0, 9, 12, 15]}, 0.1, 0.1).save(file)
    code, printed, told = run("simulate", "--costs", file, *SMALL)
    assert code == 0 and "gain" in printed
    assert f"{file}, tiny on a slow machine, measured with one request" in told.replace("\n", " ")
    assert "drafter eagle, which drafts for one request after the other" in told and "as fast as in these times" in told
    assert "note: times are extrapolated for verifying 4 to 40 tokens (measured: 1 to 32)" in told
    assert "512 tokens in the cache (measured: 64 to 256)" in told
    code, _, told = run("simulate", "--costs", file, "--drafter", "draft", *SMALL)
    assert code == 2 and "no draft times of 'draft': it has eagle" in told
    code, _, told = run("simulate", "--costs", tmp_path / "none.json")
    assert code == 1 and "cannot read the cost table" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"draft_ms": {"eagle": [0.0, 1.0]}}, "0.0 ms is no time"),
        ({"draft_ms": {"eagle": []}}, "no times"),
        ({"draft_ms": [1]}, "no usable times"),
        ({"verify_ms": [[40.0, float("nan"), 80]]}, "nan ms is no time"),
        ({"verify_ms": [[40.0, 50]]}, "one time for each width"),
        ({"verify_ms": [40.0, 50, 60]}, "no usable times"),
        ({"widths": [8, 1, 32]}, "widths are [8, 1, 32]"),
        ({"contexts": ["64"]}, "contexts are"),
    ],
)
def test_a_damaged_cost_table(run, tmp_path: Path, change, told: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "costs.json"
    CostTable({}, [1, 8, 32], [64], [[40.0, 50, 80]], {"eagle": [5.0, 9]}, 0.1, 0.1).save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    code, _, errors = run("simulate", "--costs", file)
    assert code == 2 and told in errors and f"--costs {file}" in errors and "switchsd profile --out" in errors


def test_caches_that_do_not_fit_are_noted(run) -> None:  # type: ignore[no-untyped-def]
    code, _, told = run("simulate", "--hardware", "h100", "--context", "8000", *SMALL, "--batch", "64")
    assert code == 0 and "of 128 requests of 8000 tokens take 150 GB, 1 x h100 have 80 GB" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "name one source of times"),
        ((), "switchsd profile --out costs.json"),
        ((*CURVES, "--devices", "2"), "--devices is 2; it is for --hardware: leave it out"),
        ((*CURVES, "--target-size", "8b"), "--target-size is 8b; it is for --hardware"),
        (("--costs", "c.json", "--draft-size", "1b"), "--draft-size is 1b; it is for --hardware"),
        ((*CURVES, "--context", "9"), "--context is 9; it is for --hardware or --costs"),
        (("--hardware", "h100", "--drafter", "eagle"), "--drafter is eagle; it is for --costs"),
        (
            ("--hardware", "h100", "--target-size", "70b", "--devices", "1"),
            "take 141 GB, 1 x h100 have 80 GB: 2 devices",
        ),
        (("--hardware", "h100", "--draft-size", "70b"), "--draft-size 70b: its weights take 141 GB"),
        (
            ("--hardware", "a100", "--target-size", "32b", "--draft-size", "8b", "--shared", "--devices", "1"),
            "32b and 8b take 82 GB, 1 x a100 have 80 GB",
        ),
        (("--hardware", "z80"), "or measure it: `switchsd profile --out"),
        (("--hardware", "h100", "--batch", "1000000"), "more than 100000"),
        ((*CURVES, "--arrivals", "1e-300"), "arrivals is 1e-300; requests so rare never meet"),
        ((*CURVES[:2], "--draft-ms", '{"1": Infinity}'), "--draft-ms cannot be read (inf ms is no time"),
        ((*CURVES[:2], "--draft-ms", '{"1": NaN}'), "nan ms is no time"),
        ((*CURVES[:2], "--draft-ms", '{"1": 0}'), "0 ms is no time"),
        ((*CURVES[:2], "--draft-ms", '{"1": true}'), "True ms is no time"),
        ((*CURVES[:2], "--draft-ms", '{"1": {"1": {"1": 3}}}'), "three deep"),
        ((*CURVES[:2], "--draft-ms", '{"1": {}}'), "1 or more"),
        ((*CURVES[:2], "--draft-ms", "[1, 2]"), "list where {number: ms} belongs"),
        (("--hardware", "h100", *CURVES), "name one source of times"),
        (("--hardware", "z80"), "unknown hardware 'z80': use a100"),
        (("--hardware", "h100", "--target-size", "9b"), "unknown model size '9b'"),
        (("--hardware", "h100", "--devices", "-1"), "--devices is -1"),
        (("--hardware", "h100", "--context", "-1"), "--context is -1"),
        (("--hardware", "h100", "--batch", "0"), "--batch is (0,)"),
        (("--hardware", "h100", "--batch", "x"), "--batch: invalid literal"),
        (("--hardware", "h100", "--draft-tokens", ""), "--draft-tokens is ()"),
        (("--hardware", "h100", "--rho", "-0.5"), "--rho is -0.5"),
        (("--hardware", "h100", "--acceptance", "2"), "acceptance is 2.0"),
        (("--hardware", "h100", "--requests", "0"), "0 requests"),
        (CURVES[:2], "--draft-ms is missing"),
        ((*CURVES[:2], "--draft-ms", "nothing.json"), "--draft-ms cannot be read"),
        ((*CURVES[:2], "--draft-ms", "{}"), "--draft-ms cannot be read"),
        ((*CURVES[:2], "--draft-ms", '{"1": -3}'), "-3 ms is no time"),
        ((*CURVES[:2], "--draft-ms", '{"0": 3}'), "1 or more"),
        ((*CURVES[:2], "--draft-ms", '{"1": {"1": 3}, "2": 4}'), "side by side"),
        ((*CURVES[:2], "--draft-ms", '{"1": {"1": 3}}'), "must both be curves"),
        ((*CURVES[:2], "--draft-ms", '{"1": "x"}'), "--draft-ms cannot be read"),
    ],
)
def test_what_cannot_be_simulated(run, options, told: str) -> None:  # type: ignore[no-untyped-def]
    code, _, errors = run("simulate", *options)
    assert code == 2 and told in errors and "Traceback" not in errors
