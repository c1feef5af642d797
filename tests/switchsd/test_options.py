"""Options from config dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from switchsd.options import UsageError, build, expand, field_docs


@dataclass(frozen=True)
class Inner:
    """Nested."""

    depth: int = 3
    """How deep
    it goes."""


@dataclass(frozen=True)
class Config:
    """A config with every kind of field."""

    sites: tuple[str, ...] = ("a.1", "b.*")
    """Where to look."""
    sizes: tuple[int, ...] = ()
    """Numbers."""
    share: float = 0.5
    """A share."""
    fast: bool = False
    """Whether to hurry."""
    limit: int | None = None
    """At most so many."""
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.share > 1:
            raise ValueError(f"share is {self.share}; it must be at most 1")


def run(*arguments: str) -> tuple[Config, str]:
    seen: list[tuple[Config, str]] = []

    def command(name: Annotated[str, typer.Argument()], config: Config, note: str = "none") -> None:
        """Does it."""
        seen.append((config, f"{name} {note}"))

    app = typer.Typer()
    app.command()(expand(command))
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_defaults_are_the_config_s_own() -> None:
    config, rest = run("x")
    assert config == Config()
    assert rest == "x none"


def test_every_kind_of_field_is_parsed() -> None:
    config, rest = run(
        "x", "--sites", "resid_mid.3, embed", "--sizes", "4,5", "--share", "0.25", "--fast", "--limit", "7", "--depth",
        "9", "--note", "hello",
    )  # fmt: skip
    assert config == Config(("resid_mid.3", "embed"), (4, 5), 0.25, True, 7, Inner(9))
    assert rest == "x hello"


def test_help_texts_are_the_field_docstrings() -> None:
    assert field_docs(Config)["sites"] == "Where to look."
    assert field_docs(Inner) == {"depth": "How deep it goes."}

    def command(config: Config) -> None: ...

    app = typer.Typer()
    app.command()(expand(command))
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for text in ("Where to look. Separated by commas.", "How deep it goes.", "--no-fast"):
        assert text in output


def test_a_value_that_the_config_refuses_is_a_usage_error() -> None:
    values = {"sites": "a", "sizes": "", "share": 1.5, "fast": False, "limit": None, "depth": 1}
    with pytest.raises(UsageError, match=r"share is 1\.5"):
        build(Config, values)
    with pytest.raises(UsageError, match="--sizes"):
        build(Config, {**values, "share": 0.1, "sizes": "1,x"})


def test_two_options_of_one_name_are_refused() -> None:
    def command(config: Config, depth: int = 1) -> None: ...

    with pytest.raises(TypeError, match="depth"):
        expand(command)
