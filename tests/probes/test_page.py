"""The page stands alone, escapes all text, and a browser shows all of it."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes.artifact import ProbeError
from probes.page import page
from probes.result import read_report
from probes.study import StudyConfig
from probes.tables import headline, sections
from probes.train import TrainConfig, train

CHROMIUM = Path("/usr/bin/chromium")
SECTIONS = (
    "test", "gains", "calibration", "thresholds", "loops", "strata", "controls", "transfer", "sweep", "split",
    "provenance", "skipped",
)  # fmt: skip
EMPTY = {"meta", "link"}
NASTY = "</script><b id=\"x\">&amp; 'q' $x^2$ <svg/onload=alert(1)>"


@pytest.fixture(scope="module")
def file(fake_store: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation.json of everything."""
    store = fake_store(documents=48)
    store._rows["family"] = np.array(["code", "chat"])[store._rows["document"] // 3 % 2]
    config = TrainConfig(label="span_0", labels=("span_2",), l2=(1e-2,), resamples=20, estimators=("linear", "means"))
    result = train(store, config, measured=StudyConfig(folds=2))
    return result.save(tmp_path_factory.mktemp("run")) / "evaluation.json"


@pytest.fixture(scope="module")
def report(file: Path) -> dict[str, Any]:
    return read_report(file)


@pytest.fixture(scope="module")
def one(report: dict[str, Any]) -> str:
    return page({"here": report})


@pytest.fixture(scope="module")
def two(report: dict[str, Any]) -> str:
    return page({"one": report, NASTY: nasty(report, NASTY)})


class Read(HTMLParser):
    """Elements, attributes and text of a page; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.attributes if key == name]


def test_every_number_of_the_tables_is_there(report: dict[str, Any], one: str) -> None:
    read = Read(one)
    text = set(read.text)
    for section in sections(report):
        assert section.title in text
        for table in section.tables:
            for line in (table.head, *table.rows):
                assert {cell for cell in line if cell} <= text
    ids = read.values("id")
    assert len(set(ids)) == len(ids)
    assert {f"{key}-1" for key in SECTIONS} <= set(ids)
    assert read.tags["svg"] == 2 * 3 + 2 + 1 + 2 + 2 + 4 and "comparison" not in ids
    area = report["evaluations"]["best"][headline(report)]["roc_auc"]
    assert f"{area['estimate']:.3f}" in text and f"{area['lower']:.3f} to {area['upper']:.3f}" in text


def test_nothing_is_fetched_and_nothing_runs(two: str) -> None:
    read = Read(two)
    assert not {"script", "img", "iframe", "object", "embed", "image", "base"} & set(read.tags)
    assert not [name for _, name, _ in read.attributes if name.startswith("on") or name == "src"]
    links, ids = read.values("href"), set(read.values("id"))
    assert all(link == "data:," or link[1:] in ids for link in links)
    assert all(found in ids for found in re.findall(r"url\(#([^)]*)\)", two))
    assert "http" not in two and "@import" not in two and two.count("url(") == two.count("url(#")


def test_several_are_compared(report: dict[str, Any]) -> None:
    read = Read(page({"one": report, "two": {**report, "target": "other", "sites": [], "chosen": []}}))
    ids = read.values("id")
    assert "comparison" in ids and len(set(ids)) == len(ids)
    assert {"report-1", "report-2", "sweep-1", "test-2"} <= set(ids) and "sweep-2" not in ids
    assert read.text.count("Probes for other") == 1 and "2 evaluations of probes" in read.text


def nasty(report: dict[str, Any], text: str) -> dict[str, Any]:
    """All that comes from a store, a target or a person is this text."""
    odd = copy.deepcopy(report)
    odd |= {"target": text, "store": text, "warnings": [text], "skipped": [text], "provenance": {text: text}}
    odd["split"]["rule"] = text
    odd["label"]["name"] = text
    for probe in odd["probes"].values():
        probe |= {"site": text, "threshold_rule": text, "estimator": text}
    for found in odd["strata"].values():
        for stratum in found:
            stratum["value"] = text
    for number, cell in enumerate(odd["transfer"]):
        cell |= {"by": text, "train": f"{text}{number}", "test": text}
    for site in odd["sites"]:
        site |= {"label": text, "kind": text, "site": text}
    for control in odd["controls"]:
        control |= {"name": text, "expected": text, "skipped": text}
    return odd


def test_text_is_text(report: dict[str, Any], two: str) -> None:
    read = Read(two)
    assert not {"b", "script"} & set(read.tags) and "x" not in read.values("id")
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    plain = Read(page({"one": report, "name": nasty(report, "plain")}))
    assert set(read.tags) == set(plain.tags)
    assert all(read.tags[tag] == plain.tags[tag] for tag in ("svg", "td", "th", "p", "a", "li", "dd", "figure"))
    assert "".join(read.text).count(NASTY) > 30
    assert read.text.count(f"Probes for {NASTY}") == 1 and NASTY in read.text


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30))
def test_any_text(report: dict[str, Any], text: str) -> None:
    small = {**nasty(report, text), "transfer": [], "gains": {}, "calibration": [], "curves": {}}
    small["strata"] = {"all": small["strata"]["all"][:4]}
    small["sites"] = [s for s in small["sites"] if s["estimator"] == "linear"]
    read = Read(page({text: small}))
    assert f"Probes for {text}" in read.text and text in read.text


def test_numbers_that_are_missing(report: dict[str, Any]) -> None:
    """Undefined metrics, no second look, no classes: what an evaluation of little text may hold."""
    nothing = {"estimate": None, "lower": None, "upper": None}
    odd = copy.deepcopy(report)
    for e in odd["evaluations"].values():
        for scope in e.values():
            scope |= {"roc_auc": nothing, "f1": nothing}
    for curves in odd["curves"].values():
        for scope in curves.values():
            scope |= {"roc": {"fpr": [], "tpr": []}, "pr": {"recall": [], "precision": []}}
    odd |= {"gains": {}, "gain_over": "", "strata": {}, "loops": {}, "controls": [], "transfer": [], "thresholds": [],
            "calibration": [], "sites": [], "chosen": [], "skipped": []}  # fmt: skip
    read = Read(page({"one": odd, "two": odd}))
    assert "undefined" in read.text and "none" in read.text
    assert {i for i in read.values("id") if i.endswith("-1")} >= {"test-1", "split-1", "provenance-1"}


def test_what_is_no_evaluation(tmp_path: Path, report: dict[str, Any]) -> None:
    cases: dict[str, Any] = {
        "cannot read": "{", "found: none": "[]", "found: 7": json.dumps({**report, "version": 7}),
        "lacks curves": json.dumps({k: v for k, v in report.items() if k != "curves"}),
    }  # fmt: skip
    for number, (says, text) in enumerate(cases.items()):
        (tmp_path / f"{number}.json").write_text(text)
        with pytest.raises(ProbeError, match=says):
            read_report(tmp_path / f"{number}.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ProbeError, match="cannot read"):
        read_report(tmp_path / "bytes")


PROBE = """<script>addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("section, article, svg, .tiles dl")].map(e => e.getBoundingClientRect());
  document.title = JSON.stringify({
    wide: document.documentElement.scrollWidth, window: innerWidth, empty: boxes.filter(b => !b.width || !b.height).length,
    sections: [...document.querySelectorAll("section")].map(e => e.id), back: getComputedStyle(document.body).backgroundColor,
    small: Math.min(...[...document.querySelectorAll("svg text")].map(e => parseFloat(getComputedStyle(e).fontSize)
      * e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width)),
    fetched: performance.getEntriesByType("resource").length, bold: document.querySelectorAll("b").length,
  });
});</script>"""  # noqa: E501


def browse(file: Path, *options: str) -> tuple[str, list[str]]:
    """The page's markup after loading, and what the browser's console says."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
        f"--user-data-dir={file.parent / 'profile'}", *options, "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")
@pytest.mark.parametrize(("width", "scheme"), [(500, "light"), (1600, "dark")])
def test_a_browser_shows_all_of_it(two: str, tmp_path: Path, width: int, scheme: str) -> None:
    where = tmp_path / "report.html"
    where.write_text(two + PROBE, encoding="utf-8")
    dark = "0" if scheme == "dark" else "1"
    dom, console = browse(where, f"--window-size={width},900", f"--blink-settings=preferredColorScheme={dark}")
    assert not console
    found = json.loads(re.search(r"<title>(.*?)</title>", dom, re.S)[1].replace("&quot;", '"'))  # type: ignore[index]
    assert found["window"] == width and found["wide"] <= width
    assert set(found["sections"]) == {"comparison"} | {f"{key}-{n}" for key in SECTIONS for n in (1, 2)}
    assert (found["empty"], found["fetched"], found["bold"]) == (0, 0, 0)
    assert found["small"] >= 9, "letters in pictures are large enough to read"
    assert found["back"] == ("rgb(20, 24, 29)" if scheme == "dark" else "rgb(255, 255, 255)")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")
def test_the_console_is_heard(tmp_path: Path) -> None:
    where = tmp_path / "broken.html"
    where.write_text("<!DOCTYPE html><title>x</title><script>console.error('broken')</script>")
    assert len(browse(where)[1]) == 1
