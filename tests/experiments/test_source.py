"""Rows know the code that measured them: what makes them stale, what does not, and who says so."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Fake, composed

from experiments.harness import resume, source
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY
from experiments.harness.source import decisive, fingerprint
from experiments.report.machines import machine_of, read_folder, recorded_folders, rows_files, script_of
from experiments.report.results import write_results
from punica.measure.records import COLUMNS, RowsError, read_rows, write_rows

FILES = {
    "experiments/__init__.py": "",
    "experiments/fig99.py": "from experiments.benches import clock\n\ndef f():\n    from punica import ops\n",
    "experiments/benches/__init__.py": "",
    "experiments/benches/clock.py": '"""Times."""\n\nREPEATS = 3  # of a call\n',
    "experiments/plots/__init__.py": "",
    "experiments/plots/bars.py": "WIDTH = 2\n",
    "punica/__init__.py": '__version__ = "0.1.0"\n',
    "punica/ops/__init__.py": "from punica.ops.kernel import run\n",
    "punica/ops/kernel.py": "def run(x):\n    return x + 1\n",
    "punica/ops/other.py": "def unused():\n    return 0\n",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def hashed(tree):
    fingerprint.cache_clear()
    source._code.cache_clear()
    return fingerprint(tree / "experiments/fig99.py", tree)


def test_what_decides_is_found_at_any_depth_and_inside_functions(tree):
    found = {path.relative_to(tree).as_posix() for path in decisive(tree / "experiments/fig99.py", tree)}
    unread = ("experiments/plots/__init__.py", "experiments/plots/bars.py", "punica/ops/other.py")
    assert found == {name for name in FILES if name.endswith(".py") and name not in unread}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("punica/ops/kernel.py", "def run(x):\n    return x + 2\n"),
        ("experiments/benches/clock.py", "REPEATS = 4\n"),
        ("experiments/fig99.py", "from punica import ops\n"),
        ("punica/ops/__init__.py", "from punica.ops.kernel import run\nfrom punica.ops import other\n"),
        ("punica/__init__.py", '__version__ = "0.1.0"\nversion = "1.0.0"\n'),
        ("punica/__init__.py", "__version__ = read()\n"),
    ],
    ids=["kernel", "bench", "script", "new-import", "no-version", "computed-version"],
)
def test_changed_code_changes_the_hash(tree, file, text):
    before = hashed(tree)
    (tree / file).write_text(text)
    assert hashed(tree) != before
    (tree / file).write_text(FILES[file])
    assert hashed(tree) == before


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("experiments/benches/clock.py", '"""Reads the clock, in other words."""\nREPEATS   =   3\n"""How often."""\n'),
        ("punica/ops/kernel.py", '# why\ndef run(x):\n    """One more."""\n\n    return (x + 1)\n'),
        ("experiments/plots/bars.py", "WIDTH = 3\n"),
        ("punica/ops/other.py", "def unused():\n    return 1\n"),
        ("punica/__init__.py", '__version__ = "1.0.0"\n'),
    ],
    ids=["docstring", "comment-and-layout", "plot", "unused-module", "version"],
)
def test_words_layout_plots_and_what_is_not_read_do_not(tree, file, text):
    before = hashed(tree)
    (tree / file).write_text(text)
    assert hashed(tree) == before


def test_what_only_a_type_checker_imports_decides_nothing(tree):
    script = tree / "experiments/fig99.py"
    before = decisive(script, tree)
    script.write_text(FILES["experiments/fig99.py"] + "if TYPE_CHECKING:\n    from punica.ops import other\n")
    source._code.cache_clear()
    assert decisive(script, tree) == before


def test_operator_figures_depend_on_kernels_and_on_no_engine():
    paths = decisive(REPOSITORY / "experiments/fig08_lora_operator.py")
    names = {path.relative_to(REPOSITORY).as_posix() for path in paths}
    assert {"experiments/benches/operators.py", "punica/ops/torch_ops.py", "punica/measure/timing.py"} <= names
    assert not [name for name in names if name.startswith(("punica/engine", "experiments/plots", "experiments/claims"))]


def test_a_class_that_is_named_in_a_string_decides_as_if_it_were_imported():
    paths = decisive(REPOSITORY / "experiments/fig11_textgen.py")
    names = {path.relative_to(REPOSITORY).as_posix() for path in paths}
    assert {"experiments/systems/hf_systems.py", "experiments/systems/engine_systems.py"} <= names


def test_rows_of_other_code_are_measured_again_and_replaced(tmp_path, monkeypatch):
    grid = ("workload=distinct", "figure.batch_sizes=[1,2]")
    run(composed(tmp_path, *grid), Fake())
    rows = tmp_path / "cpu" / "smoke" / "rows" / "fig08_lora_operator.csv"
    (first,) = {row.source_hash for row in read_rows(rows)}
    assert len(first) == 12
    monkeypatch.setattr(resume, "source_of", lambda *_: "0" * 12)
    fake = Fake()
    assert run(composed(tmp_path, *grid), fake).measured == 2
    assert {row.source_hash for row in read_rows(rows)} == {"0" * 12}
    assert run(composed(tmp_path, *grid), fake).skipped == 2


def old_file(path):
    """A file as it was written before rows had the column, with one row of Figure 8."""
    run(composed(path, "workload=distinct", "figure.batch_sizes=[1]"), Fake())
    rows = path / "cpu" / "smoke" / "rows" / "fig08_lora_operator.csv"
    write_rows(rows, [replace(row, scale="laptop") for row in read_rows(rows)])
    with rows.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    with rows.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [name for name in COLUMNS if name != "source_hash"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    return rows


def test_files_without_the_column_are_read_as_older_and_not_rewritten(tmp_path):
    rows = old_file(tmp_path)
    before = rows.read_bytes()
    assert {row.source_hash for row in read_rows(rows)} == {""}
    assert read_folder(rows.parent)["older"].all()
    assert rows.read_bytes() == before
    rows.write_text(before.decode().replace("config_hash,", "", 1))
    with pytest.raises(RowsError, match="line 1: the header misses the columns config_hash"):
        read_rows(rows)


def judged(rows, target):
    """Verdicts on the rows in the folder `rows`, written to `target`."""
    machine = machine_of(rows, target, REPOSITORY / "paper_results")
    write_results(machine, target / "claims.md", target)
    return machine.verdicts


def test_the_report_names_figures_of_older_source_and_keeps_their_verdicts(tmp_path):
    rows = old_file(tmp_path)
    old = judged(rows.parent, tmp_path / "old")
    count = len(read_rows(rows))
    assert (
        f"Rows of older source, to be measured again (make reproduce): {count} of {count} (100.0 %), "
        f"{count} of which do not say what source they are of; figure 8.\n"
    ) in (tmp_path / "old/claims.md").read_text()
    assert {verdict.older_source for verdict in old if verdict.figure == "8" and verdict.kind != "simulated"} == {"8"}
    assert {verdict.older_source for verdict in old if verdict.figure == "7"} == {""}
    current = fingerprint(script_of(rows))
    write_rows(rows, [replace(row, source_hash=current) for row in read_rows(rows)])
    new = judged(rows.parent, tmp_path / "new")
    assert "older source" not in (tmp_path / "new/claims.md").read_text()
    assert [verdict.verdict for verdict in new] == [verdict.verdict for verdict in old]


def test_a_rows_file_belongs_to_the_script_of_its_name_and_no_other():
    assert script_of(Path("rows/fig08_lora_operator.csv")).name == "fig08_lora_operator.py"
    assert script_of(Path("rows/ext_operator_tables_A.csv")).name == "ext_operator_tables.py"
    for name in ("mine", "fig08_lora_operator_old", "ext_operator_tables_Z", "fig01_batching2"):
        assert script_of(Path(f"rows/{name}.csv")) is None


def test_recorded_rows_have_a_script():
    files = [path for folder in recorded_folders(REPOSITORY / "results") for path in rows_files(folder)]
    assert [path for path in files if script_of(path) is None] == []


def test_rows_whose_script_was_renamed_or_deleted_are_older(tmp_path):
    """They counted as current: nothing was left to compare their hash with."""
    current = fingerprint(REPOSITORY / "experiments/fig08_lora_operator.py")
    rows = [replace(row, source_hash=current) for row in read_rows(old_file(tmp_path / "made"))]
    write_rows(tmp_path / "fig08_lora_operator.csv", rows)
    assert not read_folder(tmp_path)["older"].any()
    (tmp_path / "fig08_lora_operator.csv").rename(tmp_path / "fig08_operators.csv")
    assert read_folder(tmp_path)["older"].all()


@pytest.mark.parametrize(
    ("script", "engine", "older"),
    [("ext_server", "vllm 0.33.0", True), ("ext_server", "", False), ("ext_today", "punica 1.0.0", False),
     ("ext_own_server", "punica 1.0.0", False)],
)  # fmt: skip
def test_rows_of_an_engine_that_no_hashed_file_imports_are_older(tmp_path, script, engine, older):
    """The hash of a client says nothing of the server whose time is in the row."""
    current = fingerprint(REPOSITORY / f"experiments/{script}.py")
    rows = [replace(row, source_hash=current, engine=engine) for row in read_rows(old_file(tmp_path / "made"))]
    write_rows(tmp_path / f"{script}.csv", rows)
    assert set(read_folder(tmp_path)["older"]) == {older}
