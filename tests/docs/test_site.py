"""The documentation builds strictly, says what the code says, and needs no network to be read."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from switchsd.cli import main

ROOT = Path(__file__).parents[2]
PACKAGES = ("activations", "probes", "decoding", "switchsd")
CHROMIUM = Path("/usr/bin/chromium")
PAGES = ("index", "modes", "commands/write_text", "troubleshooting", "formats", "api/switchsd")
"""Pages that a browser opens: text, wide tables, options, quotes, the API."""

FOUND_ON = {
    "has no chat template": "troubleshooting.html",
    "is no capture store": "troubleshooting.html",
    "unknown target": "troubleshooting.html",
    "address already in use": "troubleshooting.html",
}
"""What a reader searches for, and the page that says what to do."""

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return loaded("hooks")


def loaded(name: str) -> ModuleType:
    """A module of the folder docs, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Loaded(HTMLParser):
    """What a page loads by itself (links are only followed when somebody clicks)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("canonical", "prev", "next"):
            return
        names = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "use": "href"}
        if tag in names and (value := values.get(names[tag])):
            self.found.append(value)


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for value in Loaded(page.read_text(encoding="utf-8")).found:
            assert not re.match(r"(https?:)?//", value), f"{page}: {value}"
    sheets = [*site.rglob("*.css"), *site.rglob("*.svg")]
    assert sheets
    for sheet in sheets:
        assert not re.search(r"(url\(|@import\s*)['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_no_marker_stays_unfilled(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.search(r"<!-- (options|modules):", page.read_text(encoding="utf-8")), page


def test_tables_are_whole() -> None:
    """A row stands behind another one; the first is followed by the rule. Otherwise it is shown as text."""
    pages = [ROOT / "README.md", ROOT / "FINDINGS.md", *(ROOT / "docs").rglob("*.md")]
    assert [row for page in pages for row in loose_rows(page.name, page.read_text(encoding="utf-8"))] == []
    assert list(loose_rows("p", "| a |\n| --- |\n| b |\n\n| c |\n")) == ["p:5: | c |"]
    assert list(loose_rows("p", "text\n| a |\n| --- |\n\n```\n| c |\n```\n")) == ["p:2: | a |"]


def loose_rows(name: str, text: str) -> Iterator[str]:
    lines = ["", *text.splitlines(), ""]
    code = False
    for number, line in enumerate(lines):
        code ^= line.startswith("```")
        if code or not line.startswith("|") or lines[number - 1].startswith("|"):
            continue
        if lines[number - 1] or not re.fullmatch(r"\|( *:?-+:? *\|)+", lines[number + 1]):
            yield f"{name}:{number}: {line}"


def test_every_command_is_described_once(hooks: ModuleType) -> None:
    told = [
        found
        for page in (ROOT / "docs").rglob("*.md")
        for found in re.findall(r"^<!-- options: (.+?) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(told) == sorted(hooks.names())


def test_described_options_are_those_of_help(
    hooks: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    monkeypatch.setenv("COLUMNS", "300")
    for name in hooks.names():
        assert main([*name.split(), "--help"]) == 0
        shown = set(re.findall(r"^│[ *]*(--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
        terms = re.findall(r"<dt>(.*?)</dt>", hooks.options(name))
        told = {flag for term in terms for flag in re.findall(r"<code>(--[a-z0-9-]+)</code>", term)[:1]}
        assert told == shown, name


def test_modules_of_the_api_are_all_public_ones(hooks: ModuleType) -> None:
    for package in PACKAGES:
        assert f"<!-- modules: {package} -->" in (ROOT / "docs" / "api" / f"{package}.md").read_text(encoding="utf-8")
        listed = hooks.modules(package).split("\n\n")
        files = [f for f in (ROOT / package).rglob("*.py") if f.stem == "__init__" or not f.stem.startswith("_")]
        assert len(listed) == len(files) == len(set(listed))


@pytest.mark.parametrize("package", PACKAGES[:3])
def test_the_tree_of_the_readme_names_what_is_there(package: str) -> None:
    tree = re.search(rf"^{package}/ .*\n((?:  .*\n)+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert tree is not None
    told = [name for line in tree[1].splitlines() if line[2] != " " for name in line[2:].split("  ")[0].split(" ")]
    there = [p.name + "/" * p.is_dir() for p in (ROOT / package).iterdir() if p.suffix == ".py" or p.is_dir()]
    assert sorted(told) == sorted(set(there) - {"__init__.py", "__pycache__/"})


def test_docstrings_are_shown_as_they_are_written() -> None:
    plain = loaded("docstrings").plain
    assert plain("Weights [out][in] of <name>, `a[b][c]` and `<x>`.") == (
        "Weights [out]\\[in] of &lt;name>, `a[b][c]` and `<x>`."
    )
    columns = "config.json     what it is\nweights         [out, in] of <name>"
    assert plain(f"Two files:\n\n{columns}\n\nDone.") == (
        "Two files:\n\n    config.json     what it is\n    weights         [out, in] of <name>\n\nDone."
    )
    code = "    x = a[b][c]   # <as it is>"
    assert plain(code) == code


def test_quoted_messages_are_those_of_the_code() -> None:
    """Quotes of the page on trouble stand in the sources, where `…` is what differs from case to case."""
    known = "\n".join(
        text for package in PACKAGES for file in (ROOT / package).rglob("*.py") for text in strings(file.read_text())
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^> (.+)$", page, re.MULTILINE)
    assert len(quotes) > 40
    for quote in quotes:
        assert len(quote.replace("…", "").split()) > 3, quote  # something to find
        pattern = ".*?".join(re.escape(part) for part in quote.split("…"))
        assert re.search(pattern, known), quote


def strings(source: str) -> Iterator[str]:
    """The texts in a module, on a line each; in f-strings `…` for what is put in, as far as it is no text itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            yield spelled(node).replace("\n", " ")


def spelled(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(spelled, node.values))
    return "…"


def opened(site: Path, address: str, width: int, scheme: str) -> dict[str, Any]:
    """What happened when a page was opened: errors, requests, whether it is wider than the window."""
    from playwright.sync_api import sync_playwright

    errors: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: asked.append(r.url))
        found: dict[str, Any] = {"errors": errors, "asked": asked, "wide": {}, "schemes": {}}
        for name in PAGES:
            page.goto(f"{address}/{name}.html", wait_until="load")
            found["wide"][name] = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            seen = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
            if name == PAGES[0]:
                page.locator("label[for^=__palette]:visible").first.click()
                seen.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                page.locator("label[for^=__palette]:visible").first.click()
            found["schemes"][name] = seen
        browser.close()
    return found


@pytest.mark.skipif(not CHROMIUM.is_file(), reason="no Chromium")
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1600, "light")])
def test_in_a_browser(site: Path, width: int, scheme: str) -> None:
    pytest.importorskip("playwright.sync_api")
    found = opened(site, site.as_uri(), width, scheme)
    assert found["errors"] == []
    assert [url for url in found["asked"] if not url.startswith(("file:", "data:", "blob:"))] == []
    assert {name: extra for name, extra in found["wide"].items() if extra > 0} == {}
    before, after = found["schemes"][PAGES[0]]
    assert before != after  # the toggle


@pytest.mark.skipif(not CHROMIUM.is_file(), reason="no Chromium")
def test_search_needs_no_server(site: Path) -> None:
    """And finds the page that helps, not whichever has the begin of a word in a title."""
    pytest.importorskip("playwright.sync_api")
    found = {text: searched(site, text) for text in FOUND_ON}
    assert {text: pages[:1] for text, pages in found.items() if FOUND_ON[text] != pages[0]} == {}
    assert "concepts.html" in searched(site, "copy intent")[:5]


def searched(site: Path, text: str) -> list[str]:
    """Names of the pages that a search finds in the site on the disk, the best one first."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        asked: list[str] = []
        page.on("request", lambda r: asked.append(r.url))
        page.goto(f"{site.as_uri()}/commands/train.html", wait_until="load")  # in a folder of its own
        page.locator("input.md-search__input").click()
        page.keyboard.type(text)
        page.wait_for_selector(".md-search-result__item")
        page.wait_for_timeout(500)  # until the last letter counts
        links = page.eval_on_selector_all(".md-search-result__item", "all => all.map(i => i.querySelector('a').href)")
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
    return [Path(link.split("?")[0].split("#")[0]).name for link in links]
