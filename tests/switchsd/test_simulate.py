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
    assert "closed form" in printed and "m=4 k=4: loses" in printed


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
    CostTable({}, [1, 8, 32], [64, 256], [[40.0, 50, 80]] * 2, {"eagle": [5.0, 9, 12, 15]}, 0.1, 0.1).save(file)
    code, printed, _ = run("simulate", "--costs", file, *SMALL)
    assert code == 0 and "gain" in printed
    code, _, told = run("simulate", "--costs", file, "--drafter", "draft", *SMALL)
    assert code == 2 and "no draft times of 'draft': it has eagle" in told
    code, _, told = run("simulate", "--costs", tmp_path / "none.json")
    assert code == 1 and "cannot read the cost table" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "name one source of times"),
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
