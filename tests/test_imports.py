"""Rules of the house that the source must show: who imports whom, no assert, no CUDA or Triton on the CPU path."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# imports point from a later row to an earlier one, or stay within one package; the members of a row are strangers
ORDER = [
    {"checks", "registry"},
    {"config", "metadata"},
    {"ops"},
    {"wrapper", "parallel"},
    {"layers"},
    {"adapters"},
    {"models"},
    {"engine"},
    {"cluster"},
]
RANK = {part: rank for rank, row in enumerate(ORDER) for part in row}
# beside that order: what each may import
BESIDE = {"workload": {"checks", "registry"}, "measure": {"checks", "registry", "workload"}}
PURE = ["punica/cluster/policy.py", "punica/engine/scheduler.py", *sorted((ROOT / "punica/workload").glob("*.py"))]


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything a file imports, at any depth."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str | None:
    """The part of the library that a dotted name lies in: ``punica.ops.torch_ops`` -> ``ops``."""
    pieces = name.split(".")
    return pieces[1] if pieces[0] == "punica" and len(pieces) > 1 else None


def upward_imports(path: Path) -> list[str]:
    own = path.relative_to(ROOT / "punica").with_suffix("").parts[0]
    leaf = path.relative_to(ROOT).as_posix() == "punica/parallel/group.py"
    wrong = []
    for name in imported(path):
        other = part_of(name)
        if other is None or other == own or other == "__version__":
            continue
        if own in BESIDE:
            allowed = other in BESIDE[own]
        else:
            allowed = RANK.get(other, len(ORDER)) < (1 if leaf else RANK[own])
        if not allowed:
            wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    return wrong


def test_every_part_of_the_library_has_a_place_in_the_order() -> None:
    parts = {path.relative_to(ROOT / "punica").with_suffix("").parts[0] for path in sources("punica")} - {"__init__"}
    assert parts <= set(RANK) | set(BESIDE)


@pytest.mark.parametrize("path", sources("punica"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path: Path) -> None:
    assert upward_imports(path) == []


def test_the_check_sees_an_upward_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "punica" / "ops" / "bad.py"
    module.parent.mkdir(parents=True)
    module.write_text("def f():\n    from punica.wrapper import PunicaWrapperCPU\n    from ..engine import Engine\n")
    assert upward_imports(module) == [
        "punica/ops/bad.py imports punica.wrapper.PunicaWrapperCPU",
        "punica/ops/bad.py imports punica.engine.Engine",
    ]


def test_the_library_imports_no_experiment_no_hydra_and_no_plotting() -> None:
    forbidden = {"experiments", "hydra", "omegaconf", "matplotlib", "seaborn"}
    found = {f"{path.relative_to(ROOT)}: {name}" for path in sources("punica") for name in imported(path)
             if name.split(".")[0] in forbidden}  # fmt: skip
    assert found == set()


def test_policies_and_workloads_are_pure() -> None:
    files = [path for path in (ROOT / entry for entry in PURE) if path.exists()]
    found = {f"{path.relative_to(ROOT)}: {name}" for path in files for name in imported(path)
             if name.split(".")[0] == "torch"}  # fmt: skip
    assert found == set()


def test_no_assert_statement_guards_user_input() -> None:
    """``python -O`` removes assert statements, so the library and the experiments have none."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("punica", "experiments")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


CPU_PATH_WITHOUT_TRITON = """
import importlib, pkgutil, sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, NoTriton())
import punica
# Triton kernels need Triton, and the cluster its own extra; everything else is the CPU path
optional = ("punica.ops.triton_ops", "punica.cluster")
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


def test_cpu_path_needs_neither_triton_nor_cuda() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CPU_PATH_WITHOUT_TRITON], capture_output=True, text=True, cwd=ROOT, check=False,
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]] False False"
