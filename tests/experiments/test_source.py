"""Rows know the code that measured them: what makes them stale, what does not, and who says so."""

import ast
import json
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
    "experiments/benches/data.py": "from pathlib import Path\n\nfrom experiments.measure.records import read_rows\n\n\n"
    "def read():\n"
    '    tuned = Path(__file__).with_name("tuned")\n'
    '    return open("fig13.csv"), open("fig10_layer"), tuned, "experiments.systems.mine"\n',
    "experiments/benches/tuned/gpu.json": "{}",
    "experiments/systems/mine.py": "class Mine:\n    steps = 1\n",
    "experiments/harness/passes.py": "def repeat():\n    return 2\n",
    "experiments/plots/bars.py": "WIDTH = 2\n",
    "paper_results/fig13.csv": "a\n1\n",
    "paper_results/fig01.csv": "a\n1\n",
    "results/h200/fig10_layer.csv": "source_hash,value\nab,1\n",
    "punica/__init__.py": '__version__ = "0.1.0"\n',
    "experiments/measure/disturbance.py": "LIMIT = 1.1\n",
    "punica/ops/__init__.py": "from punica.ops.kernel import run\n",
    "punica/ops/kernel.py": "def run(x: int) -> int:\n    from punica.ops.other import half\n\n"
    "    return [half(row) for row in range(x)]\n",
    "punica/ops/other.py": "def half(y):\n    return y / 2\n",
    "punica/ops/unused.py": "ROWS = 5\n",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def hashed(tree):
    for one in (source.fingerprint, source.read, source._content):
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
        pytest.param("punica/ops/unused.py", "ROWS = 5", "ROWS = 6", id="other module"),
        pytest.param("experiments/plots/bars.py", "2", "3", id="plot"),
        pytest.param("punica/ops/__init__.py", "import run", "import run, run as again", id="import"),
        pytest.param("punica/__init__.py", "0.1.0", "1.0.0", id="version"),
        pytest.param("paper_results/fig01.csv", "1", "2", id="other data"),
        pytest.param("results/h200/fig10_layer.csv", "ab,1", "cd,1", id="hash of rows that are read"),
        pytest.param(
            "experiments/fig99.py", "\n\n\ndef",
            "\nif TYPE_CHECKING:\n    from punica.ops.unused import ROWS\n\n\ndef", id="import for types",
        ),
    ],
)  # fmt: skip
def test_what_decides_none_does_not(tree, file, old, new):
    assert not changed(tree, file, old, new)


@pytest.mark.parametrize(
    ("script", "reached", "others"),
    [
        (NAME, "experiments/measure/disturbance.py punica/ops/triton_ops/tuned/", "punica/engine/ results/"),
        ("fig11_textgen", "punica/engine/engine.py punica/ops/triton_ops/tuned/", "results/ experiments/cluster/"),
        ("ext_placement", "experiments/harness/passes.py results/h200/fig10_layer.csv", "results/h200/ext_placement"),
        ("fig13_cluster", "punica/cluster/policy.py paper_results/fig13_cluster.csv", "experiments/plots/"),
        ("ext_servers", "experiments/servers/worker.py punica/serve/app.py punica/vllm/", "experiments/claims/"),
    ],
)
def test_figures_reach_their_code_and_data(script, reached, others):
    path = REPOSITORY / f"experiments/{script}.py"
    modules = source.reached(path, REPOSITORY)
    paths = [one.path for one in modules] + [file for one in modules for file in source._files(one, path, REPOSITORY)]
    found = [one.relative_to(REPOSITORY).as_posix() for one in paths]
    assert all(any(one.startswith(begin) for one in found) for begin in reached.split())
    assert not [one for one in found if one.startswith(tuple(others.split()))]


def test_a_definition_may_move_to_a_module_beside(tree):
    before, (first, second) = hashed(tree), (tree / f"punica/ops/{name}.py" for name in ("kernel", "other"))
    second.write_text(first.read_text() + second.read_text())
    first.write_text("from punica.ops.other import run\n")
    assert hashed(tree) == before


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
