"""Rows know the code that measured them: what makes them stale, what does not, and who says so."""

import ast
import json
import re
from dataclasses import replace

import pytest
from fakes import GRID, NAME, Fake, composed, rows_of

from experiments.harness import resume, source
from experiments.harness.counted import frame_of
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY
from experiments.harness.source import fingerprint
from experiments.report import machines
from tests.experiments.report.report_rows import decode_rows

FILES = {
    "experiments/__init__.py": "",
    "experiments/fig99.py": "from experiments.benches import clock, data\n"
    "from punica import ops\n\n\ndef f():\n    return ops.run(clock.REPEATS), data.read()\n",
    "experiments/benches/__init__.py": "",
    "experiments/benches/clock.py": '"""Times."""\n\nREPEATS = 3  # of a call\nOTHER = 4\n',
    "experiments/benches/data.py": "from pathlib import Path\n\n\ndef read():\n"
    '    tuned = Path(__file__).with_name("tuned")\n'
    '    return open("fig13.csv"), open("fig10_layer"), tuned, "experiments.systems.mine"\n',
    "experiments/benches/tuned/gpu.json": "{}",
    "experiments/systems/mine.py": "from experiments.systems.table import SYSTEMS\n\n\n"
    '@SYSTEMS.register("mine")\nclass Mine:\n    steps = 1\n    drawn_by = "bars"\n'
    '    clock, overlay = "host", "grid"\n',
    "experiments/systems/table.py": "class Registry:\n    pass\n\n\nSYSTEMS = Registry()\n",
    "experiments/harness/passes.py": "def repeat():\n    return 2\n",
    "experiments/plots/bars.py": "WIDTH = 2\n",
    "paper_results/fig13.csv": "a\n1\n",
    "paper_results/fig01.csv": "a\n1\n",
    "results/h200/fig10_layer.csv": "source_hash,value\nab,1\n",
    "punica/__init__.py": '__version__ = "0.1.0"\n',
    "experiments/measure/disturbance.py": "LIMIT = 1.1\n",
    "punica/ops/__init__.py": "from punica.ops.kernel import run\n",
    "punica/ops/kernel.py": "from punica.ops.other import half\n\n\n"
    "def run(x: int) -> int:\n    rows = [half(row) for row in range(x)]\n"
    "    return rows\n\n\ndef unused():\n    return 5\n",
    "punica/ops/other.py": "def half(y):\n    return y / 2\n\n\ndef rows():\n    return 0\n",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def hashed(tree):
    for one in (source.fingerprint, source.tree_of, source._content):
        one.cache_clear()
    return fingerprint(tree / "experiments/fig99.py", tree)


def changed(tree, file, old, new):
    """Tell whether an edit of a file changes the hash."""
    before = hashed(tree)
    assert old in FILES[file]
    (tree / file).write_text(FILES[file].replace(old, new, 1))
    return hashed(tree) != before


def test_the_hash_is_the_same_for_other_versions_of_python(tree, monkeypatch):
    before = hashed(tree)
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, "of_a_later_version"))
    monkeypatch.setattr(ast.FunctionDef, "of_a_later_version", [], raising=False)
    assert hashed(tree) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("punica/ops/other.py", "y / 2", "y / 3"),
        ("punica/ops/kernel.py", "range(x)", "range(x + 1)"),
        ("experiments/benches/clock.py", "REPEATS = 3", "REPEATS = 4"),
        ("experiments/systems/mine.py", "steps = 1", "steps = 2"),
        ("experiments/harness/passes.py", "2", "3"),
        ("experiments/measure/disturbance.py", "1.1", "1.2"),
        ("experiments/benches/tuned/gpu.json", "{}", '{"m": 1}'),
        ("paper_results/fig13.csv", "1", "2"),
        ("results/h200/fig10_layer.csv", "ab,1", "ab,2"),
    ],
)
def test_what_decides_a_number_changes_the_hash(tree, file, old, new):
    assert changed(tree, file, old, new)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param("experiments/benches/clock.py", '"""Times."""', '"""Reads the clock."""', id="docstring"),
        pytest.param("experiments/benches/clock.py", "  # of a call", '\n"""How often."""', id="comment"),
        pytest.param("experiments/benches/clock.py", "OTHER = 4", "OTHER = 5", id="other constant"),
        pytest.param("punica/ops/kernel.py", "return 5", "return 6", id="other function"),
        pytest.param("punica/ops/other.py", "return 0", "return 1", id="name of a local"),
        pytest.param("experiments/plots/bars.py", "2", "3", id="plot"),
        pytest.param("punica/__init__.py", "0.1.0", "1.0.0", id="version"),
        pytest.param("experiments/systems/mine.py", '"bars"', '"dots"', id="drawing"),
        pytest.param("experiments/systems/mine.py", '"grid"', '"table"', id="drawing beside"),
        pytest.param("paper_results/fig01.csv", "1", "2", id="other data"),
        pytest.param("results/h200/fig10_layer.csv", "ab,1", "cd,1", id="hash of rows that are read"),
        pytest.param(
            "experiments/fig99.py", "\n\n\ndef",
            "\nif TYPE_CHECKING:\n    from punica.ops.other import rows\n\n\ndef", id="import for types",
        ),
    ],
)  # fmt: skip
def test_what_decides_none_does_not(tree, file, old, new):
    assert not changed(tree, file, old, new)


def reach(script):
    found = source.Reach(source.tree_of(REPOSITORY), REPOSITORY / f"experiments/{script}.py")
    names = {name for code in found.codes for name in re.findall(r"^(?:FunctionDef|ClassDef)\(name='(\w+)'", code)}
    return names, {path.relative_to(REPOSITORY).as_posix() for path in found.data}


@pytest.mark.parametrize(
    ("script", "names", "others", "data"),
    [
        (NAME, {"Passes", "CpuTimes", "TritonOps"}, {"Engine", "Scheduler"}, "punica/ops/triton_ops/tuned/"),
        ("fig11_textgen", {"Engine", "EngineSystem", "Scheduler"}, set(), "punica/ops/triton_ops/tuned/"),
        ("ext_placement", {"Passes"}, set(), "results/h200/fig10_layer.csv"),
        ("fig13_cluster", {"Passes", "RayCluster"}, set(), "paper_results/fig13_cluster.csv"),
        ("ext_servers", {"Engine", "Server", "_Parser", "Vllm"}, set(), "punica/ops/triton_ops/tuned/"),
    ],
)  # fmt: skip
def test_figures_reach_their_code_and_data(script, names, others, data):
    found, files = reach(script)
    assert (names - found, others & found) == (set(), set())
    assert [file for file in files if file.startswith(data)]


def test_rows_of_other_code_are_measured_again_and_replaced(tmp_path, monkeypatch):
    run(composed(tmp_path, *GRID, "scale.passes=1"), Fake())
    assert {len(row.source_hash) for row in rows_of(tmp_path)} == {12}
    monkeypatch.setattr(resume, "source_of", lambda *_: "0" * 12)
    assert run(composed(tmp_path, *GRID, "scale.passes=1"), Fake()).measured == 2
    assert {row.source_hash for row in rows_of(tmp_path)} == {"0" * 12}
    assert run(composed(tmp_path, *GRID, "scale.passes=1"), Fake()).skipped == 2


@pytest.mark.parametrize("hardware", ["cpu", "h200"])
def test_rows_of_other_versions_are_older(hardware):
    pinned = machines.pinned_versions(hardware)
    (row,) = decode_rows()[:1]
    same = replace(row, hardware=hardware, **pinned)
    others = ({"torch": f"{pinned['torch']}.post1+cu130"}, {"torch": "2.9.1"}, {"triton": ""})
    rows = [same, *(replace(same, **other) for other in others)]
    assert machines.other_versions(frame_of(rows)).tolist() == [False, False, True, True]


def test_rows_of_other_settings_are_older():
    recorded = json.loads((REPOSITORY / "results/h200/fig08_lora_operator.json").read_text())
    assert machines.changed_settings("fig08_lora_operator", recorded) == []
    for group, key, value in (("figure", "h1", 1024), ("scale", "warmup", 3), ("figure", "dtype", "float32")):
        changed = {**recorded, group: {**recorded[group], key: value}}
        assert machines.changed_settings("fig08_lora_operator", changed) == [f"{group}.{key}"]
    decided = {**recorded, "hardware": {**recorded["hardware"], "bandwidth_gb_s": None, "threads": 3}}
    assert machines.changed_settings("fig08_lora_operator", decided) == []
