"""Source hash of a row: a short hash over the modules that decide its number.

Those modules are the experiment's script and everything of `experiments` and `punica` that it imports, at any depth,
inside functions too. Rooms that only show or judge numbers (plots, commands, claims) and imports for type checkers are
left out. Docstrings, comments and the package's version do not count: they make no rows stale.
"""

import ast
import hashlib
import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from experiments.harness.schema import REPOSITORY

PACKAGES = ("experiments", "punica")
NAMED = r"experiments(\.\w+)+"
"""A module named in a string, as in `facts.systems`, counts as imported."""
VERSION = ast.parse('__version__ = "0.1.0"').body[0]
"""The version of the first recorded rows, as which every version is hashed."""
ONLY_SHOW = (
    "experiments.plots", "experiments.commands", "experiments.claims", "experiments.harness.catalogue",
    "experiments.harness.command", "experiments.harness.keys", "experiments.harness.source",
)  # fmt: skip


@lru_cache(maxsize=64)
def fingerprint(script: Path, root: Path = REPOSITORY) -> str:
    """Twelve hex digits over the code below `root` that decides the numbers of `script`."""
    found = {_name(path, root): _code(path)[0] for path in decisive(script, root)}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:12]


def source_of(experiment: object) -> str:
    """The fingerprint of `experiment`'s own script."""
    return fingerprint(Path(inspect.getfile(type(experiment))).resolve())


def decisive(script: Path, root: Path = REPOSITORY) -> set[Path]:
    """The files that decide the numbers of `script`, itself among them."""
    seen, waiting = set(), [script]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += _imported(path, root)
    return seen


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


@lru_cache(maxsize=512)
def _imported(path: Path, root: Path) -> tuple[Path, ...]:
    """The module files that importing the file `path` runs."""
    return tuple(dict.fromkeys(file for name in _code(path)[1] for file in _files(name, root)))


def _files(name: str, root: Path) -> Iterator[Path]:
    """The module files that importing the dotted `name` runs: packages on the way, the module, if `name` is one."""
    parts = name.split(".")
    if parts[0] not in PACKAGES or name.startswith(ONLY_SHOW):
        return
    for end in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:end])
        yield from (path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file())


@lru_cache(maxsize=512)
def _code(path: Path) -> tuple[str, tuple[str, ...]]:
    """The code of a file as text in which only code counts, and the dotted names that it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return _canonical(tree), tuple(_imports(tree))


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(NAMED, node.value):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


def _canonical(value: object) -> str:
    """`ast.dump` without docstrings, version and empty fields: the same text on every Python that parses the code."""
    if isinstance(value, list):
        return f"[{','.join(_canonical(entry) for entry in value if not _is_text(entry))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    if isinstance(value, ast.Assign) and _is_version(value):
        value = VERSION
    fields = [(name, entry) for name, entry in ast.iter_fields(value) if entry is not None and entry != []]
    return f"{type(value).__name__}({','.join(f'{name}={_canonical(entry)}' for name, entry in fields)})"


def _is_version(statement: ast.Assign) -> bool:
    return ast.unparse(statement.targets[0]) == "__version__" and isinstance(statement.value, ast.Constant)


def _is_text(statement: object) -> bool:
    """Check for a string statement: a docstring of a module, class, function or variable."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False
