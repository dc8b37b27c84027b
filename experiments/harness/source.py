"""Source hash of a row: over the definitions and the data that decide its number.

From an experiment's script it follows imports, and texts that name modules. All definitions of these count, without
docstrings, comments, imports and their module, so that moving one between them changes no hash; data where a module
names it. Rooms that only show or judge numbers do not count.
"""

import ast
import csv
import hashlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.schema import REPOSITORY

PACKAGES = ("experiments", "punica")
DATA = ("paper_results", "results")
_SHOWING = ("plots", "commands", "claims", "report", "harness.catalogue", "harness.command", "harness.source")
ONLY_SHOW = tuple(f"experiments.{room}" for room in _SHOWING)
ALWAYS = ("experiments.harness.passes", "experiments.measure.disturbance")
"""Modules: what repeats, drops and marks the measurements of every figure."""
_NAMED = re.compile(r"(experiments|punica)(\.\w+)*")
_FILE = re.compile(r"[\w.]+")
_IGNORED = {"type_comment", "ctx", "kind", "type_ignores"}


def source_of(experiment: object) -> str:
    return fingerprint(Path(inspect.getfile(type(experiment))).resolve())


@cache
def fingerprint(script: Path, root: Path = REPOSITORY) -> str:
    """Return twelve hex digits over the code and data below ``root`` that decide the numbers of ``script``."""
    modules = reached(script, root)
    data = {file for module in modules for file in _files(module, script, root)}
    codes = set[str]().union(*(module.codes for module in modules))
    parts = [*sorted(codes), *(f"{file.name} {_content(file)}" for file in sorted(data))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


class Module(NamedTuple):
    """A file's top-level statements as text in which only code counts, what it imports, and its texts."""

    path: Path
    codes: frozenset[str]
    imported: frozenset[str]
    texts: frozenset[str]


def reached(script: Path, root: Path) -> list[Module]:
    """Return the modules that decide the numbers of ``script``, and itself, which may be outside of ``root``."""
    waiting, found = [script, *(path for name in ALWAYS for path in _paths(name, root))], dict[Path, Module]()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = module = read(path)
            waiting += (one for name in module.imported for one in _paths(name, root))
    return list(found.values())


def _paths(name: str, root: Path) -> Iterator[Path]:
    """Yield the files of a module and of the packages that it is in; those of them that decide numbers."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        base, above = root.joinpath(*parts[:end]), ".".join(parts[:end])
        if not above.startswith(ONLY_SHOW):
            yield from filter(Path.is_file, (base / "__init__.py", base.with_suffix(".py")))


@cache
def read(path: Path) -> Module:
    tree = _Code().visit(ast.parse(path.read_text(encoding="utf-8")))
    imported, texts = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imported |= {one.name for one in names}
            case ast.ImportFrom(module=str(module), names=names):
                imported |= {f"{module}.{one.name}" for one in names}
            case ast.Constant(value=str(text)):
                texts.add(text)
    for text in filter(_NAMED.fullmatch, texts):  # a module that is imported later, or run as a program
        imported |= {text, f"{text}.__main__"}
    ours = frozenset(name for name in imported if name.startswith(PACKAGES))
    return Module(path, frozenset(map(_text, tree.body)), ours, frozenset(texts))


class _Code(ast.NodeTransformer):
    """Takes away what decides no number: texts alone, which document what is beside them, the version, and types."""

    def visit(self, node: ast.AST) -> Any:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Assign(targets=[ast.Name(id="__version__")]):
                return None
            case ast.If(test=test) if ast.unparse(test).endswith("TYPE_CHECKING"):
                return None
        return self.generic_visit(node)


def _text(node: object) -> str:
    """Write code alike in all versions of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return ""
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, one) for name, one in ast.iter_fields(node) if one not in (None, []) and name not in _IGNORED)
    return f"{type(node).__name__}({','.join(f'{name}={_text(one)}' for name, one in fields)})"


def _files(module: Module, script: Path, root: Path) -> Iterator[Path]:
    """Data files that a module names: the paper's, tuned schedules beside it; and rows, where it reads some."""
    reads = "experiments.measure.records.read_rows" in module.imported
    for text in filter(_FILE.fullmatch, module.texts):
        if text.endswith(".csv") and (root / "paper_results" / text).is_file():
            yield root / "paper_results" / text
        if text == "tuned":
            yield from (module.path.parent / text).glob("*.json")
        if reads and text != script.stem:
            yield from root.glob(f"results/*/{text}.csv")


@cache
def _content(path: Path) -> str:
    """Digest a data file; of rows without the hash of their own source."""
    data = path.read_bytes()
    if path.suffix == ".csv" and b"source_hash" in data[:1000]:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [{k: v for k, v in row.items() if k != "source_hash"} for row in csv.DictReader(file)]
        data = repr(rows).encode()
    return hashlib.sha256(data).hexdigest()
