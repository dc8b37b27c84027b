"""House rules checked on the source: import order, no CUDA or Triton on the CPU path."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# imports point from a later row to an earlier one, or stay within one package; the members of a row are strangers
ORDER = [
    {"capture", "checks", "lazy", "processes", "progress", "registry", "threads"},
    {"config", "scheduling", "metadata"},
    {"ops"},
    {"wrapper", "parallel"},
    {"layers"},
    {"adapters"},
    {"models"},
    {"engine"},
]
RANK = {part: rank for rank, row in enumerate(ORDER) for part in row}
# beside that order: what each may import
BESIDE = {
    "cluster": {*RANK},
    "vllm": {*RANK},
    "serve": {"checks", "processes", "threads", "adapters", "engine", "cluster"},
}
PURE = (
    "punica.checks", "punica.registry", "punica.scheduling", "punica.cluster", "experiments.simulator",
    "experiments.workload",
)  # fmt: skip


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports_of(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the absolute dotted names of everything that code in ``package`` imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported(path: Path) -> Iterator[str]:
    """Yield the absolute dotted names of everything a file imports."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    return imports_of(ast.parse(path.read_text(encoding="utf-8")), package)


def run_python(program: str) -> str:
    """Return the output of a program in a fresh interpreter without a GPU."""
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def part_of(name: str) -> str | None:
    """Return the part of the library of a dotted name: ``punica.ops.torch_ops`` -> ``ops``."""
    pieces = name.split(".")
    return pieces[1] if pieces[0] == "punica" and len(pieces) > 1 else None


def upward_imports(path: Path) -> list[str]:
    own = path.relative_to(ROOT / "punica").with_suffix("").parts[0]
    leaf = path.relative_to(ROOT).as_posix() == "punica/parallel/group.py"
    wrong = []
    for name in imported(path):
        other = part_of(name)
        below = own not in BESIDE and RANK.get(other, len(ORDER)) < (1 if leaf else RANK[own])
        if other not in (None, own, "__version__") and other not in BESIDE.get(own, ()) and not below:
            wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    return wrong


def test_imports_point_down() -> None:
    """In an order that names every part of the library and no other."""
    parts = {path.relative_to(ROOT / "punica").with_suffix("").parts[0] for path in sources("punica")} - {"__init__"}
    assert parts == set(RANK) | set(BESIDE)
    assert [wrong for path in sources("punica") for wrong in upward_imports(path)] == []


def test_the_library_imports_no_experiment_no_hydra_and_no_plotting() -> None:
    forbidden = {"experiments", "hydra", "omegaconf", "matplotlib", "seaborn"}
    found = {f"{path.relative_to(ROOT)}: {name}" for path in sources("punica") for name in imported(path)
             if name.split(".")[0] in forbidden}  # fmt: skip
    assert found == set()


def test_policies_and_workloads_leave_torch_out() -> None:
    """In a fresh interpreter; a module that does not exist fails, too."""
    program = f"import sys, {', '.join(PURE)}; print(sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    assert run_python(program) == "[]"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(files: list[Path]) -> dict[str, set[str]]:
    """Map each module of ``files`` to the modules that it imports, lazy imports included.

    A re-exported name counts as an import of its home module, so ``__init__`` files have no edges of their own, except
    the lazy imports of their functions.
    """
    trees = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    packages = {module_name(path) for path in files if path.name == "__init__.py"}
    exported: dict[str, str] = {}  # name in a package -> where the package has it from

    def home(name: str) -> str | None:
        while name in exported:
            name = exported[name]
        while name and name not in trees:
            name = name.rpartition(".")[0]
        return name or None

    for package in packages:
        for node in trees[package].body:
            if isinstance(node, ast.ImportFrom):
                found = imports_of(ast.Module([node], []), tuple(package.split(".")))
                pairs = zip(node.names, found, strict=True)
                exported.update({f"{package}.{alias.asname or alias.name}": name for alias, name in pairs})
    graph = {}
    for module, tree in trees.items():
        if module in packages:
            functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            tree, inside = ast.Module(functions, []), module
        else:
            inside = module.rpartition(".")[0]
        homes = {home(name) for name in imports_of(tree, tuple(inside.split(".")))}
        graph[module] = {name for name in homes if name and name != module}
    return graph


def circle_in(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules of one import circle; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


@pytest.mark.parametrize("package", ["punica", "experiments"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    graph = import_graph(sources(package))
    assert len(graph) > 50  # it sees the package
    assert circle_in(graph) == set()


def test_the_checks_see_an_upward_import_and_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The circle goes through a re-export and a lazy import."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    package = tmp_path / "punica" / "ops"
    package.mkdir(parents=True)
    for name, text in {
        "../__init__": "", "__init__": "from punica.ops.a import f\nfrom punica.ops.c import h\n",
        "a": "from punica.ops import h\n", "b": "def g():\n    from punica.ops import f\n", "c": "import torch\n",
        "bad": "def f():\n    from punica.wrapper import PunicaWrapperCPU\n    from ..engine import Engine\n",
    }.items():  # fmt: skip
        (package / f"{name}.py").write_text(text)
    names = [wrong.rpartition(".")[2] for wrong in upward_imports(package / "bad.py")]
    assert names == ["PunicaWrapperCPU", "Engine"]
    assert circle_in(import_graph(sources("punica"))) == set()
    (package / "c.py").write_text("from .b import g\n")
    assert circle_in(import_graph(sources("punica"))) == {f"punica.ops.{name}" for name in "abc"}


CPU_PATH_WITHOUT_TRITON = """
import importlib, pkgutil, sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, NoTriton())
import punica
# Triton kernels need Triton, the server its extra; everything else is the CPU path
optional = ("punica.ops.triton_ops", "punica.serve", "punica.vllm.ops")
def import_all(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.name.startswith(optional):
            loaded = importlib.import_module(module.name)
            if module.ispkg:
                import_all(loaded)
import_all(punica)
import torch
from punica.metadata import LoRAMapping
from punica.wrapper import get_punica_wrapper
wrapper = get_punica_wrapper(4, 4, "cpu", max_loras=2)
wrapper.update_metadata(LoRAMapping((7, 0, 9), (7, 0, 9)), [7, 9], 3, 100)
y = torch.zeros(3, 2)
wrapper.add_lora_linear(y, torch.ones(3, 4), (torch.ones(2, 1, 1, 4),), (torch.ones(2, 1, 2, 1),), 0.5, (2,))
print(y.tolist(), "triton" in sys.modules, torch.cuda.is_initialized())
"""


@pytest.mark.slow
def test_cpu_path_needs_neither_triton_nor_cuda() -> None:
    assert run_python(CPU_PATH_WITHOUT_TRITON) == "[[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]] False False"


SUBMODULES_LAST = """
import importlib, pkgutil
import punica.ops.triton_ops as package
ops = [name for names in package._HOMES.values() for name in names]
before = {name: id(getattr(package, name)) for name in [*vars(package), *ops] if callable(getattr(package, name))}
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print([name for name, value in before.items() if id(getattr(package, name)) != value])
"""


def test_importing_a_submodule_hides_no_operator_of_its_name() -> None:
    pytest.importorskip("triton")
    assert run_python(SUBMODULES_LAST) == "[]"
