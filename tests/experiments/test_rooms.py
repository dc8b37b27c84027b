"""The rooms of `experiments/`: which import which, and no module imports itself by a detour."""

import ast
from collections.abc import Iterator
from pathlib import Path

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


def modules(folder: Path) -> dict[str, Path]:
    """Dotted name -> file of every module below `folder`, `experiments` for `experiments/__init__.py`."""
    names = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(path: Path) -> Iterator[str]:
    """What a file imports, at any depth and for type checkers too: inside a function a circle is still a circle."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circle(folder: Path) -> list[str]:
    """Modules of the first circle of imports below `folder`; empty when there is none."""
    known = modules(folder)

    def target(name: str) -> str:
        return name if name in known else name.rpartition(".")[0]

    edges = {name: {target(other) for other in imports(path)} & set(known) - {name} for name, path in known.items()}
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        for other in sorted(edges[name] if name not in done else ()):
            if found := visit(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in known if (found := visit(name, []))), [])


def test_no_module_imports_itself_by_a_detour() -> None:
    assert circle(EXPERIMENTS) == []


def test_a_circle_is_seen_inside_functions_and_for_type_checkers(tmp_path: Path) -> None:
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "a.py").write_text("def f():\n    from experiments import b\n")
    (folder / "b.py").write_text("if TYPE_CHECKING:\n    from experiments.a import A\n")
    assert circle(folder) == ["experiments.a", "experiments.b", "experiments.a"]
