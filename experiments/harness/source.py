"""Source hash of a row: over the definitions and the data that decide its number.

From an experiment's script it follows names. Code counts without docstrings, comments, imports and its module, so that
moving it changes no hash; data where a counted definition names it. Rooms that only show or judge numbers do not count.
"""

import ast
import csv
import hashlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from experiments.harness.schema import REPOSITORY

PACKAGES = ("experiments", "punica")
DATA = ("paper_results", "results")
_SHOWING = ("plots", "commands", "claims", "report", "harness.catalogue", "harness.command", "harness.source")
ONLY_SHOW = tuple(f"experiments.{room}" for room in _SHOWING)
ALWAYS = ("experiments.harness.passes", "experiments.measure.disturbance")
"""Modules: what repeats, drops and marks the measurements of every figure."""
DRAWING = {"drawn_by", "overlay", "shown"}
"""Attributes of experiments that decide a picture, and no number."""
_NAMED = re.compile(r"(experiments|punica)(\.\w+)*")
_FILE = re.compile(r"[\w.]+")
_NO_CODE = {"__version__", "__all__"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_IGNORED = {"type_comment", "ctx", "kind", "type_ignores"}
_IMPORTS = (ast.Import, ast.ImportFrom)


class Place(NamedTuple):
    """A definition by its module and name; a whole module without a name."""

    module: str
    name: str = ""


def source_of(experiment: object) -> str:
    return fingerprint(Path(inspect.getfile(type(experiment))).resolve())


@cache
def fingerprint(script: Path, root: Path = REPOSITORY) -> str:
    """Return twelve hex digits over the code and data below ``root`` that decide the numbers of ``script``."""
    reach = Reach(tree_of(root), script)
    parts = [*sorted(reach.codes), *(f"{path.name} {_content(path)}" for path in sorted(reach.data))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@cache
def tree_of(root: Path) -> "Tree":
    """Return the code below ``root``, each file of which is read once."""
    return Tree(root)


@cache
def _content(path: Path) -> str:
    """Digest a data file; of rows without the hash of their own source."""
    data = path.read_bytes()
    if path.suffix == ".csv" and b"source_hash" in data[:1000]:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [{k: v for k, v in row.items() if k != "source_hash"} for row in csv.DictReader(file)]
        data = repr(rows).encode()
    return hashlib.sha256(data).hexdigest()


class Module:
    """Top-level statements of a file by name, and what its imports and texts name; `registered`: registry and name of a
    definition; `effects`: statements that define nothing.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.definitions: dict[str, list[ast.stmt]] = defaultdict(list)
        self.bound: dict[str, Place] = {}
        self.named: set[str] = set()
        self.registered: list[tuple[ast.expr, str]] = []
        self.effects: list[ast.stmt] = []
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, _IMPORTS):
                self._bind(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.fullmatch(node.value):
                self.named |= {node.value, f"{node.value}.__main__"}
        for statement in tree.body:
            self._sort(statement)

    def _bind(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                if (node.module or "").split(".")[0] in PACKAGES:
                    self.bound[alias.asname or alias.name] = Place(str(node.module), alias.name)
            elif (package := alias.name.split(".")[0]) in PACKAGES:
                self.bound[alias.asname or package] = Place(alias.name if alias.asname else package)

    def _sort(self, statement: ast.stmt) -> None:
        for_types = isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")
        names = list(_defined(statement))
        if for_types or not _counts(statement) or (names and set(names) <= _NO_CODE):
            return
        for name in names:
            self.definitions[name].append(statement)
        if not names:
            self.effects.append(statement)
        for call in getattr(statement, "decorator_list", []):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "register":
                self.registered += [(call.func.value, name) for name in names]


def _defined(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a top-level statement defines or fills."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    for target in getattr(statement, "targets", None) or filter(None, [getattr(statement, "target", None)]):
        yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    if isinstance(statement, (ast.If, ast.Try, ast.With, ast.For)):
        for part in ast.iter_child_nodes(statement):
            yield from _defined(part)


def _counts(statement: object) -> bool:
    """Tell if a statement is code: neither an import nor a string alone, which documents what is beside it."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return False
    return True


class Code:
    """Statements as text in which only code counts; definitions and modules they `reached`, and their `strings`."""

    def __init__(self, tree: "Tree", module: Module, statements: Iterable[ast.AST]) -> None:
        self._tree, self._module = tree, module
        self.reached: set[Place] = set()
        self.strings: set[str] = set()
        self.text = "".join(self._write(statement, frozenset()) for statement in statements)

    def _write(self, value: object, local: frozenset[str]) -> str:
        if isinstance(value, list):
            return f"[{','.join([self._write(one, local) for one in value if _counts(one)])}]"
        if not isinstance(value, ast.AST):
            if isinstance(value, str):
                self.strings.add(value)
            return repr(value)
        if isinstance(value, (ast.Name, ast.Attribute)) and (found := self._tree.meant(self._module, value, local)):
            self.reached.add(found)
            return f"Name({found.name or found.module.rpartition('.')[2]})"
        if isinstance(value, ast.arg):  # its type is text, by which nothing is reached
            return f"{value.arg}:{ast.unparse(value.annotation)}" if value.annotation else value.arg
        if isinstance(value, ast.Attribute):
            return f"{self._write(value.value, local)}.{value.attr}"
        if isinstance(value, ast.Name):
            return f"Name({value.id})"
        if isinstance(value, _SCOPES):
            local |= _local(value)
        parts = []
        for name, entry in ast.iter_fields(value):
            if isinstance(value, ast.ClassDef) and name == "body":
                entry = [one for one in map(_undrawn, entry) if one]
            if entry is None or entry == [] or name in _IGNORED:
                continue
            parts.append(ast.unparse(entry) if name == "returns" else f"{name}={self._write(entry, local)}")
        return f"{type(value).__name__}({','.join(parts)})"


def _undrawn(statement: ast.stmt) -> ast.stmt | None:
    """Return a statement of a class without attributes of `DRAWING`; None where nothing is left."""
    match statement:
        case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]) if name in DRAWING:
            return None
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            kept = [pair for pair in zip(names, values, strict=True) if getattr(pair[0], "id", "") not in DRAWING]
            return ast.Assign([ast.Tuple([name for name, _ in kept])], ast.Tuple([one for _, one in kept]), lineno=0)
    return statement


def _local(scope: ast.AST) -> frozenset[str]:
    """Return the names that a function or comprehension binds for itself."""
    found: set[str] = set()
    declared: set[str] = set()
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                found.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                declared |= set(names)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
                continue
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)
    return frozenset(found - declared)


class Tree:
    """Modules of the packages below a root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._found: dict[Place, Place | None] = {}
        self._codes, self._imports = dict[Place, Code](), dict[str, set[str]]()

    def module(self, name: str) -> Module | None:
        """Return a module that decides numbers; None where there is no such."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            paths = [] if name.startswith(ONLY_SHOW) else [base / "__init__.py", base.with_suffix(".py")]
            path = next((path for path in paths if path.is_file()), None)
            self._modules[name] = None if path is None else Module(name, path)
        return self._modules[name]

    def known(self, name: str) -> Module:
        """Return a module that decides numbers. LookupError: there is no such."""
        if (module := self.module(name)) is None:
            raise LookupError(f"{name} is no module that decides numbers")
        return module

    def module_of(self, path: Path) -> Module:
        """Return the module of a script, which may be outside of the packages."""
        inside = path.is_relative_to(self.root)
        name = ".".join(path.relative_to(self.root).with_suffix("").parts) if inside else path.stem
        self._modules[name] = self._modules.get(name) or Module(name, path)
        return self.known(name)

    def find(self, place: Place) -> Place | None:
        """Follow imports to where a name is defined; None where the house does not define it."""
        if place not in self._found:
            self._found[place] = None  # of names that import each other
            self._found[place] = self._follow(place)
        return self._found[place]

    def _follow(self, place: Place) -> Place | None:
        module = self.module(place.module)
        if module is None or not place.name:
            return place if module else None
        if place.name in module.definitions:
            return place
        if target := module.bound.get(place.name):
            return self.find(target)
        below = f"{place.module}.{place.name}"
        return Place(below) if self.module(below) else None

    def meant(self, module: Module, value: ast.AST, local: frozenset[str] = frozenset()) -> Place | None:
        """Find the definition that a name, or a chain of attributes of modules, means in a module."""
        if isinstance(value, ast.Name):
            return None if value.id in local else self.find(Place(module.name, value.id))
        if isinstance(value, ast.Attribute) and (above := self.meant(module, value.value, local)) and not above.name:
            return self.find(Place(above.module, value.attr))
        return None

    def code(self, place: Place) -> Code:
        """Return the code of a definition; of a whole module that of its statements that define nothing."""
        if place not in self._codes:
            module = self.known(place.module)
            statements = module.definitions[place.name] if place.name else module.effects
            self._codes[place] = Code(self, module, statements)
        return self._codes[place]

    def imports(self, name: str) -> set[str]:
        """Return the modules of the house that a module imports or names in a text, with their packages, and itself."""
        if name not in self._imports:
            module = self.known(name)
            found = {name, *module.named}.union(*((one.module, ".".join(one)) for one in module.bound.values()))
            self._imports[name] = {one for each in found for one in _with_packages(each) if self.module(one)}
        return self._imports[name]


def _with_packages(module: str) -> list[str]:
    """Return a module's name after those of the packages that it is in."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


class Reach:
    """Texts of definitions, and files of data, that decide the numbers of a script."""

    def __init__(self, tree: Tree, script: Path) -> None:
        self._tree, self._script = tree, tree.module_of(script)
        self.codes: set[str] = set()
        self.data: set[Path] = set()
        seen: set[Place] = set()
        waiting = [place for name in (self._script.name, *ALWAYS) for place in self._all_of(name)]
        while waiting:
            place = waiting.pop()
            if place not in seen and tree.module(place.module):
                seen.add(place)
                waiting += self._next(place)

    def _next(self, place: Place) -> Iterator[Place]:
        """Count a definition, and yield what it uses."""
        code = self._tree.code(place)
        self.codes |= {code.text} if code.text else set()
        for used in code.reached:  # a module as a value can be asked for any of its names
            yield from [used] if used.name else self._all_of(used.module)
        yield from self._registered.get(place, ())
        yield from map(Place, _with_packages(place.module))
        for text in filter(_NAMED.fullmatch, code.strings):  # a module that is imported later, or run as a program
            yield from self._all_of(f"{text}.__main__")
            yield from self._all_of(text) if "." in text else ()
        self.data |= set(self._files(place.module, code.strings))

    def _all_of(self, name: str) -> Iterator[Place]:
        """Yield the definitions of a module, and what it does when it is imported."""
        if module := self._tree.module(name):
            yield Place(name)
            yield from (Place(name, one) for one in module.definitions)

    @cached_property
    def _registered(self) -> dict[Place, list[Place]]:
        """Registry -> the definitions that imported modules register there."""
        seen: set[str] = set()
        waiting, found = [self._script.name], defaultdict(list)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            waiting += self._tree.imports(name)
            module = self._tree.known(name)
            for registry, one in module.registered:
                if place := self._tree.meant(module, registry):
                    found[place].append(Place(name, one))
        return found

    def _files(self, module: str, texts: Iterable[str]) -> Iterator[Path]:
        """Data files that texts of a definition name: the paper's, those beside its module, rows of another script."""
        root, beside = self._tree.root, self._tree.known(module).path.parent
        of_script = module.count(".") == 1 and module.startswith("experiments.")
        for text in filter(_FILE.fullmatch, texts):
            if text.endswith(".csv") and (root / "paper_results" / text).is_file():
                yield root / "paper_results" / text
            if (beside / text).is_dir() and text.isidentifier():
                yield from (beside / text).glob("*.json")
            if not of_script and text != self._script.name.rpartition(".")[2]:
                yield from root.glob(f"results/*/{text}.csv")
