"""What MkDocs builds beside the written pages: options of the commands, the list of modules, two files of the root.

In a page, a line `<!-- options: generate -->` becomes the arguments and options of that command, from its own
definition, and `<!-- modules: decoding -->` every public module of that package for mkdocstrings. The README is the
first page, FINDINGS.md one of its own. How much a page counts in the search stands here, too, because
a forge would show it at the head of the page. Nothing here imports a model or asks the network.
"""

from __future__ import annotations

import html
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"index.md": "README.md", "findings.md": "FINDINGS.md"}
"""Pages that are files of the root, so that their text stands once."""
BOOST = {"troubleshooting": 4, "concepts": 3, "commands/": 2, "api/": 0.3, "findings": 0.3}
"""How much a hit counts in the search, by the begin of a page's name; 1 for all others."""
MARKER = re.compile(r"^<!-- (options|modules): (.+?) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Import the package of this checkout, installed or not (MkDocs undoes it where a hook does it as it is loaded)."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's files as pages."""
    for page, source in PARTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the markers, and turn links that hold on a forge into those of the site."""
    name = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for begin, boost in BOOST.items() if name.startswith(begin)), 1)}
    if name in PARTS:
        markdown = markdown.replace("](docs/", "](").replace('="docs/', '="').replace("](FINDINGS.md", "](findings.md")
    else:
        up = "../" * name.count("/")
        for target, source in PARTS.items():
            markdown = markdown.replace(f"]({up}../{source}", f"]({up}{target}")
    return MARKER.sub(_filled, markdown)


def _filled(found: re.Match[str]) -> str:
    what, name = found.groups()
    return options(name) if what == "options" else modules(name)


def command(name: str) -> Callable[..., None]:
    """The function behind `switchsd NAME`, its options as parameters. Raises KeyError where there is none."""
    from switchsd.options import expand

    group, _, part = name.partition(" ")
    module = importlib.import_module(f"switchsd.commands.{group.replace('-', '_')}")
    if part:
        return expand({c.__name__: c for c in module.SUBCOMMANDS}[part])
    return expand(getattr(module, group.replace("-", "_")))


def names() -> Iterator[str]:
    """All commands, subcommands by `group name`."""
    from switchsd.cli import COMMANDS

    for name in COMMANDS:
        module = importlib.import_module(f"switchsd.commands.{name.replace('-', '_')}")
        if hasattr(module, "SUBCOMMANDS"):
            yield from (f"{name} {part.__name__}" for part in module.SUBCOMMANDS)
        else:
            yield name


def options(name: str) -> str:
    """Arguments and options of a command as an HTML list of terms; what `--help` says, readable on a phone."""
    terms = []
    for parameter in inspect.signature(command(name)).parameters.values():
        hint, info = _parts(parameter.annotation)
        if isinstance(info, typer.models.ArgumentInfo):
            term = f"<code>{html.escape(parameter.name.upper())}</code>"
            needed = parameter.default is inspect.Parameter.empty
            notes = ["required"] if needed else []
        else:
            declared = [d for d in (info.default, *(info.param_decls or ())) if isinstance(d, str) and d[:1] == "-"]
            flag = "--" + parameter.name.replace("_", "-")
            off = [f"--no-{flag[2:]}"] if hint is bool and parameter.default is True else []
            told = [name for d in declared for name in d.split("/")] or [flag, *off]
            spoken = " ".join(f"<code>{html.escape(name)}</code>" for name in told)
            kind = "" if hint is bool else f" <em>{html.escape(_kind(hint))}</em>"
            term = spoken + kind
            notes = _default(parameter.default)
        text = _marked(info.help or "")
        more = f" <span class='default'>{'; '.join(notes)}</span>" if notes else ""
        terms.append(f"<dt>{term}{more}</dt><dd>{text}</dd>")
    return f'<dl class="options">{"".join(terms)}</dl>'


def _parts(annotation: Any) -> tuple[Any, Any]:
    """The type of a parameter, None aside, and typer's description of it."""
    hint, info = typing.get_args(annotation)[:2]
    inner = [a for a in typing.get_args(hint) if a is not type(None)]
    optional = type(None) in typing.get_args(hint)
    return (inner[0] if optional and len(inner) == 1 else hint), info


def _kind(hint: Any) -> str:
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if choices:
        return " | ".join(map(str, choices))
    inner = typing.get_args(hint)
    return f"{_kind(inner[0])} ..." if inner else {Path: "path", str: "text", float: "number"}.get(hint, hint.__name__)


def _default(value: Any) -> list[str]:
    if value is None or value is False or value == "" or value == []:
        return []
    return [f"default <code>{html.escape('on' if value is True else str(value))}</code>"]


def _marked(text: str) -> str:
    """Help text as HTML: `code` in backquotes, nothing else."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def modules(package: str) -> str:
    """`::: package.module` for every public module of a package, in the order of their names."""
    root = ROOT / package
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts):
            found.append(".".join(parts))
    return "\n\n".join(f"::: {name}" for name in found)
