"""What public docstrings owe the reader: shapes, units, errors. Read from the source, without importing it.

Public is what has no underscore before its name, in a module or class that has none either. Left out are properties,
dunders, and methods that a base class or a Protocol of the packages documents already. The functions of
switchsd/commands are held to less: their docstrings are the help of the command line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("activations", "probes", "decoding", "switchsd")
COMMANDS = "switchsd/commands/"

ARRAYS = {"Tensor", "ndarray", "NDArray", "ArrayLike"}
TABLES = {"dict", "Mapping", "MutableMapping", "OrderedDict"}
"""Arrays in these go by their names, not by one shape."""
SHAPE = re.compile(r"\[[\w\s,.+*/×()-]+\]|\b(?i:scalars?)\b")
"""A shape in brackets, such as [B, T], [rows] or [..., vocabulary]; or the word scalar."""
PLAIN = 3
"""A function of at most this many statements, without arrays or errors, may go without a docstring."""

MEASURED = re.compile(r"(?:^|_)(?:time|timeout|elapsed|duration|latency|latencies|delay|overhead|memory|bandwidth)$")
"""Names of quantities that have a unit."""
UNIT = re.compile(r"(?i)\b(?:seconds?|minutes?|hours?|milliseconds?|microseconds?|ms|µs|[sh]|bytes?|[kKMGT]i?B)\b")

CODE = re.compile(r"`[^`]*`|^ {4}.*$", re.MULTILINE)
LINK = re.compile(r"\[[^\[\]]*\][\[(]|^ {0,3}\[[^\[\]]*\]: *\S+ *$", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Unit:
    """A public module, class or function."""

    path: str
    """Of its file, from the root."""
    name: str
    """Dotted, inside its module; empty for the module itself."""
    node: ast.Module | ast.ClassDef | Function
    module: ast.Module
    owner: ast.ClassDef | None = None
    """The class of a method."""

    def __str__(self) -> str:
        return f"{self.path}:{getattr(self.node, 'lineno', 1)} {self.name}".rstrip()

    @property
    def text(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def with_class(self) -> str:
        """Its docstring, and that of its class."""
        return f"{self.text}\n{(self.owner and ast.get_docstring(self.owner)) or ''}"

    @property
    def with_module(self) -> str:
        """Its docstring, and those of its class and its module."""
        return f"{self.with_class}\n{ast.get_docstring(self.module) or ''}"


class Sources:
    """The files of packages, parsed."""

    def __init__(self, root: Path, packages: tuple[str, ...] = PACKAGES) -> None:
        files = sorted(path for package in packages for path in (root / package).rglob("*.py"))
        self.modules = {
            path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files
        }
        self.classes = {c.name: c for tree in self.modules.values() for c in tree.body if isinstance(c, ast.ClassDef)}
        self.arrays = {path: ARRAYS | aliases(tree) for path, tree in self.modules.items()}
        """By file: names that stand for arrays in its annotations."""
        for path, tree in self.modules.items():
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    there = aliases(self.modules.get(f"{node.module.replace('.', '/')}.py"))
                    self.arrays[path] |= {n.name for n in node.names} & there
        protocols = [c for c in self.classes.values() if is_protocol(c)]
        self.promised = {(f.name, arguments(f)) for c in protocols for f in functions(c) if ast.get_docstring(f)}
        """Methods that a Protocol documents, by name and arguments."""

    def units(self) -> Iterator[Unit]:
        for path, tree in self.modules.items():
            if any(part.startswith("_") and not part.startswith("__") for part in Path(path).parts):
                continue
            yield Unit(path, "", tree, tree)
            for node in tree.body:
                if isinstance(node, Function) and is_public(node):
                    yield Unit(path, node.name, node, tree)
                elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    yield Unit(path, node.name, node, tree)
                    for method in functions(node):
                        if is_public(method) and not self.inherits(node, method):
                            yield Unit(path, f"{node.name}.{method.name}", method, tree, node)

    def inherits(self, owner: ast.ClassDef, method: Function) -> bool:
        """Whether a base class or a Protocol of the packages documents the method."""
        if is_protocol(owner):
            return False
        bases = [self.classes[n] for b in owner.bases if (n := last_name(b)) in self.classes and n != owner.name]
        return (method.name, arguments(method)) in self.promised or any(
            any(f.name == method.name and ast.get_docstring(f) for f in functions(base)) or self.inherits(base, method)
            for base in bases
        )

    def has_arrays(self, path: str, *annotations: ast.AST | None) -> bool:
        return any(a is not None and names(a) & self.arrays[path] for a in annotations)


def aliases(tree: ast.Module | None) -> set[str]:
    """A module's own names for arrays: `Floats = NDArray[np.float64]`."""
    found = [
        node for node in (tree.body if tree else ()) if isinstance(node, ast.Assign) and names(node.value) & ARRAYS
    ]
    return {t.id for node in found for t in node.targets if isinstance(t, ast.Name) and re.match("[A-Z][a-z]", t.id)}


def names(annotation: ast.AST) -> set[str]:
    """The last names in an annotation, also in one written as a string; not those in tables."""
    if isinstance(annotation, ast.Subscript) and last_name(annotation) in TABLES:
        return set()
    if isinstance(annotation, ast.Name | ast.Attribute):
        return {last_name(annotation)}
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return set(re.findall(r"\w+", annotation.value))
    return {name for node in ast.iter_child_nodes(annotation) for name in names(node)}


def last_name(node: ast.AST) -> str:
    """`Budget` of `Budget`, `budgets.Budget` and `Budget[int]`."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_protocol(owner: ast.ClassDef) -> bool:
    return any(last_name(base) == "Protocol" for base in owner.bases)


def is_public(function: Function) -> bool:
    marks = {last_name(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list}
    return not function.name.startswith("_") and not marks & {"property", "cached_property", "setter", "overload"}


def functions(owner: ast.ClassDef | ast.Module) -> list[Function]:
    return [node for node in owner.body if isinstance(node, Function)]


def arguments(function: Function) -> tuple[str, ...]:
    every = function.args
    return tuple(a.arg for a in (*every.posonlyargs, *every.args, *every.kwonlyargs))


def annotations(function: Function) -> list[ast.AST | None]:
    every = function.args
    return [a.annotation for a in (*every.posonlyargs, *every.args, *every.kwonlyargs)] + [function.returns]


def inside(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of a body, without those of functions and classes in it."""
    left: list[ast.AST] = list(nodes)
    while left:
        yield (node := left.pop())
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))


def raised(unit: Unit) -> set[str]:
    """Errors that a function raises, itself or through private functions of its module; not what it catches again."""
    assert isinstance(unit.node, Function)
    helpers = {f.name: f for f in [*functions(unit.module), *(functions(unit.owner) if unit.owner else [])]}
    found = _raised(unit.node.body, {k: f for k, f in helpers.items() if k.startswith("_") and k[1:2] != "_"}, set())
    return {name for name in found if name.endswith("Error")} - {"NotImplementedError", "AssertionError"}


def _raised(nodes: Iterable[ast.AST], helpers: Mapping[str, Function], seen: set[str]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Try):
            caught = {name for h in node.handlers for name in ({"Exception"} if h.type is None else names(h.type))}
            tried = _raised(node.body, helpers, seen)
            found |= set() if "Exception" in caught else tried - caught
            found |= _raised([*node.handlers, *node.orelse, *node.finalbody], helpers, seen)
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(last_name(node.exc.func))
        elif isinstance(node, ast.Call) and (name := last_name(node.func)) in helpers and name not in seen:
            found |= _raised(helpers[name].body, helpers, seen | {name})
        found |= _raised(ast.iter_child_nodes(node), helpers, seen)
    return found


def fields(owner: ast.ClassDef) -> Iterator[tuple[str, ast.AST, str]]:
    """A class's public annotated names, their annotations, and the docstrings under them."""
    for node, below in zip(owner.body, [*owner.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            value = below.value if isinstance(below, ast.Expr) else None
            yield node.target.id, node.annotation, str(value.value) if isinstance(value, ast.Constant) else ""


Rule = Callable[[Sources], Iterator[str]]


def docstring(sources: Sources) -> Iterator[str]:
    """Modules, classes, and functions of more than a few statements have one."""
    for unit in sources.units():
        if isinstance(unit.node, Function):
            count = sum(isinstance(node, ast.stmt) for node in inside(unit.node.body))
            if not unit.text and count > PLAIN:
                yield f"{unit}: no docstring for {count} statements"
        elif not unit.text:
            yield f"{unit}: no docstring"


def shape(sources: Sources) -> Iterator[str]:
    """A function with arrays says a shape, or its class does. A field that is an array says one, or its class does."""
    for unit in sources.units():
        if isinstance(unit.node, Function):
            if sources.has_arrays(unit.path, *annotations(unit.node)) and not SHAPE.search(unit.with_class):
                yield f"{unit}: has arrays, and says no shape"
        elif isinstance(unit.node, ast.ClassDef):
            for name, annotation, text in fields(unit.node):
                if sources.has_arrays(unit.path, annotation) and not SHAPE.search(f"{text}\n{unit.text}"):
                    yield f"{unit}.{name}: is an array, and says no shape"


def errors(sources: Sources) -> Iterator[str]:
    """A function that raises an error names it, or its class or module does."""
    for unit in sources.units():
        if isinstance(unit.node, Function) and not unit.path.startswith(COMMANDS):
            for name in sorted(raised(unit)):
                if not re.search(rf"\b{name}\b", unit.with_module):
                    yield f"{unit}: raises {name}, and does not say so"


def unit_of_measure(sources: Sources) -> Iterator[str]:
    """An argument or field that is a time or a size in memory says its unit, in its name or beside it."""
    for unit in sources.units():
        if isinstance(unit.node, Function):
            for name in arguments(unit.node):
                if MEASURED.search(name) and not UNIT.search(unit.with_class):
                    yield f"{unit}: no unit of {name}"
        elif isinstance(unit.node, ast.ClassDef):
            for name, _, text in fields(unit.node):
                if MEASURED.search(name) and not UNIT.search(f"{text}\n{unit.text}"):
                    yield f"{unit}.{name}: no unit"


def settings(sources: Sources) -> Iterator[str]:
    """Every field of a configuration has a docstring under it."""
    for unit in sources.units():
        if isinstance(unit.node, ast.ClassDef) and unit.name.endswith("Config"):
            for name, _, text in fields(unit.node):
                if not text:
                    yield f"{unit}.{name}: no docstring under the field"


def links(sources: Sources) -> Iterator[str]:
    """No shape reads as a link in Markdown: `[a][b]`, `[a](b)`, or `[a]: b` as a line. Code is left alone."""
    for unit in sources.units():
        texts = {str(unit): unit.text}
        if isinstance(unit.node, ast.ClassDef):
            texts |= {f"{unit}.{name}": text for name, _, text in fields(unit.node)}
        for where, text in texts.items():
            if found := LINK.search(CODE.sub("", text)):
                yield f"{where}: {found[0]!r} is a link in Markdown"


RULES: tuple[Rule, ...] = (docstring, shape, errors, unit_of_measure, settings, links)


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_public_docstrings(sources: Sources, rule: Rule) -> None:
    wrong = list(rule(sources))
    assert not wrong, f"{rule.__doc__}\n" + "\n".join(wrong)


def test_the_packages_are_read(sources: Sources) -> None:
    found = {(unit.path, unit.name) for unit in sources.units()}
    assert ("decoding/tree.py", "DraftTree") in found
    assert ("probes/calibration.py", "reliability") in found
    assert len(found) > 1000


SOURCES = {
    "activations/labels.py": "2609.20186",  # SwitchSD
    "activations/heads.py": "2209.11895",  # induction heads
    "activations/lookback.py": "2407.07071",  # Lookback Lens
    "activations/lens.py": "TransformerLens",
    "activations/sampling.py": "1411.0030",  # the Gumbel-max trick
    "activations/matching/__init__.py": "2411.10666",  # SAM-Decoding
    "activations/matching/shared.py": "2411.04975",  # SuffixDecoding
    "probes/calibration.py": "1706.04599",  # temperature, expected calibration error
    "probes/controls.py": "1909.03368",  # control tasks
    "probes/evaluation.py": "Field and Welsh 2007",  # the cluster bootstrap
    "probes/linear.py": "2609.20186",
    "probes/thresholds.py": "2609.20186",
    "decoding/gates.py": "2609.20186",
    "decoding/rejection.py": "2211.17192",
    "decoding/tree.py": "2305.09781",  # SpecInfer
    "decoding/eagle/head.py": "2503.01840",  # EAGLE-3
    "decoding/eagle/drafter.py": "2406.16858",  # EAGLE-2
    "decoding/eagle/training.py": "2503.01840",
    "decoding/ltd/budget.py": "2603.01639",
    "decoding/ltd/training.py": "2603.01639",
    "decoding/cospec/verifier.py": "2605.24793",
    "decoding/minedraft/simulator.py": "2603.18016",
    "decoding/smc/verifier.py": "2604.15672",
    "decoding/policies/ppo.py": "1707.06347",
}


@pytest.mark.parametrize("path", SOURCES)
def test_an_algorithm_names_its_source(sources: Sources, path: str) -> None:
    """In the docstring of its module, or of a public part of it."""
    assert any(SOURCES[path] in " ".join(unit.text.split()) for unit in sources.units() if unit.path == path)


GOOD = '''
"""A module."""
from __future__ import annotations
from typing import Protocol
import torch
from numpy.typing import NDArray

Floats = NDArray


class ThingError(Exception):
    """Something is wrong."""


class ThingConfig:
    """Settings."""

    timeout: float = 1.0
    """Seconds."""


class Drafter(Protocol):
    """What drafts."""

    def draft(self, x: torch.Tensor) -> int:
        """Draft for states [rows, width]."""
        ...


class Chain:
    """A drafter."""

    def draft(self, x: torch.Tensor) -> int:
        return 1


def load(path: str) -> dict[str, torch.Tensor]:
    """Read tensors. Raises ThingError if there are none."""
    try:
        raise ValueError("caught below")
    except ValueError as error:
        raise ThingError("none") from error


def short(x: int) -> int:
    return x
'''


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        (docstring, '"""A module."""', ""),
        (docstring, '"""A drafter."""', ""),
        (docstring, "    return x", "    y = x\n    y += 1\n    y += 1\n    return y"),
        (shape, "[rows, width]", "of rows"),
        (shape, "class Drafter(Protocol)", "class Drafter"),  # Chain then inherits nothing
        (shape, "def short(x: int)", "def short(x: Floats)"),
        (shape, "    timeout: float = 1.0", "    timeout: torch.Tensor"),
        (errors, "Raises ThingError if there are none.", "There may be none."),
        (errors, "except ValueError as error", "except KeyError as error"),
        (errors, "    return x", "    return _checked(x)\n\n\ndef _checked(x):\n    raise ThingError('bad')"),
        (unit_of_measure, "Seconds.", "How long."),
        (settings, '    """Seconds."""', ""),
        (links, "[rows, width]", "[rows, width][0]"),
        (links, "Seconds.", "[rows]: seconds"),
    ],
)
def test_each_rule_can_fail(tmp_path: Path, rule: Rule, old: str, new: str) -> None:
    module = tmp_path / "package" / "module.py"
    module.parent.mkdir()
    module.write_text(GOOD)
    assert [wrong for each in RULES for wrong in each(Sources(tmp_path, ("package",)))] == []
    assert old in GOOD
    module.write_text(GOOD.replace(old, new))
    assert len(list(rule(Sources(tmp_path, ("package",))))) == 1
