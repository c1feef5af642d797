"""Command-line options from config dataclasses: one source for options, saved JSON and documentation.

A command declares a parameter of a frozen dataclass; `expand` replaces it by one option a field, the help text
being the docstring under the field.
"""

from __future__ import annotations

import ast
import inspect
import os
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer


class UsageError(Exception):
    """A command line that cannot be carried out as it was written."""


def check_output(file: Path) -> None:
    """Raises UsageError for a place where a file cannot be written, before the work that it is to hold."""
    if not file.absolute().parent.is_dir():
        raise UsageError(f"no such folder: {file.absolute().parent}")
    if not os.access(file.absolute().parent, os.W_OK):
        raise UsageError(f"{file.absolute().parent} cannot be written to: choose another folder")
    if file.exists() and not file.is_file():  # a device would be replaced by a file
        raise UsageError(f"{file} is there and is no file: choose another name")


def check_trace(file: Path) -> None:
    """Raises UsageError for a place or a name that a trace cannot have."""
    from decoding.trace import check_name

    try:
        check_name(file)
    except ValueError as error:
        raise UsageError(f"--trace is {file}; {error}") from error
    check_output(file)


def write_page(file: Path, page: str) -> None:
    """Write a page, whole or not at all, and touch no other file."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.write_text(page, encoding="utf-8")
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Raises UsageError for a place where a folder cannot be made, before the work that it is to hold."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise UsageError(f"{there} is there and is no folder: choose another name")
    if not os.access(there, os.W_OK):
        raise UsageError(f"{there} cannot be written to: choose another folder")


def field_docs(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(config)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for statement, following in pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its dataclass parameters replaced by their fields (nested dataclasses too).

    Field names of all configs of one command must differ. A ValueError from a config's own checks is a usage error.
    Raises TypeError if they do not.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    configs = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in configs:
            parameters.extend(_options(typing.cast(type, configs[name])))
        else:
            parameters.append(parameter.replace(annotation=hints[name]))
    names = [p.name for p in parameters]
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise TypeError(f"{command.__name__}: option {sorted(twice)} is defined twice")

    def call(**values: Any) -> None:
        made = {name: build(typing.cast(type, config), values) for name, config in configs.items()}
        taken = {name for config in configs.values() for name in _names(typing.cast(type, config))}
        command(**{k: v for k, v in values.items() if k not in taken}, **made)

    call.__name__ = command.__name__
    call.__doc__ = command.__doc__
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def build(config: type, values: dict[str, Any]) -> Any:
    """A config from option values. Raises UsageError for values that it refuses."""
    hints = typing.get_type_hints(config)
    arguments = {}
    for field in _fields(config):
        hint = hints[field.name]
        if is_dataclass(hint):
            arguments[field.name] = build(typing.cast(type, hint), values)
        elif _is_tuple(hint) and isinstance(values[field.name], str):
            element = typing.get_args(hint)[0]
            parts = [part.strip() for part in values[field.name].split(",") if part.strip()]
            try:
                arguments[field.name] = tuple(element(part) for part in parts)
            except ValueError as error:
                raise UsageError(f"--{field.name.replace('_', '-')}: {error}") from error
        else:
            arguments[field.name] = values[field.name]
    try:
        return config(**arguments)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _fields(config: type) -> tuple[Field[Any], ...]:
    return tuple(f for f in fields(config) if f.init)


def _names(config: type) -> list[str]:
    return [p.name for p in _options(config)]


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _options(config: type) -> list[inspect.Parameter]:
    hints, docs = typing.get_type_hints(config), field_docs(config)
    parameters = []
    for field in _fields(config):
        hint, text = hints[field.name], docs.get(field.name, "")
        if is_dataclass(hint):
            parameters.extend(_options(typing.cast(type, hint)))
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if default is MISSING:
            raise TypeError(f"{config.__name__}.{field.name} needs a default to be an option")
        if _is_tuple(hint):
            hint, default = str, ",".join(map(str, typing.cast(tuple[Any, ...], default)))
            text = f"{text} Separated by commas.".strip()
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[_plain(hint), typer.Option(help=text)],
            )
        )
    return parameters


def _plain(hint: Any) -> Any:
    """The type that an option parses: `X | None` stays, anything else must be a plain type or a choice."""
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and len(arguments) == 1:
        return typing.Optional[_plain(arguments[0])]  # noqa: UP045 - a runtime value, not an annotation
    if typing.get_origin(hint) is typing.Literal or hint in (int, float, bool, str, Path):
        return hint
    raise TypeError(f"an option cannot have the type {hint}")
