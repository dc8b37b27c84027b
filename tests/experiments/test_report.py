"""`make report`: which rows it takes, what it writes, and clear errors when there is nothing to judge."""

import subprocess
import sys

import pytest

from experiments.commands.report import choose
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import write_rows
from tests.experiments.report.report_rows import decode_rows, folders_in


@pytest.fixture
def places(tmp_path):
    return folders_in(tmp_path)


def test_fresh_rows_come_first_and_any_recorded_machine_will_do(places):
    write_rows(places.recorded_rows.parent / "h200" / "fig01_batching.csv", decode_rows())
    assert choose(places, "auto") == choose(places, "recorded") == "recorded"
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    assert choose(places, "auto") == "fresh"
    assert choose(places, "recorded") == "recorded"


@pytest.mark.slow
def test_the_command_writes_beside_fresh_rows_alone_and_names_what_is_wrong(tmp_path):
    def command(*overrides):
        paths = [f"paths.{name}={tmp_path / name}" for name in ("outputs", "results", "figures")]
        words = [sys.executable, "-m", "experiments.commands.report", *paths, *overrides]
        return subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, timeout=900, check=False)

    path, recorded = tmp_path / "outputs/cpu/rows/fig01_batching.csv", tmp_path / "results/cpu/fig01_batching.csv"
    write_rows(path, decode_rows())
    write_rows(recorded, decode_rows())
    done = command("hardware=cpu", "source=fresh")
    assert done.returncode == 0, done.stderr
    assert "this machine: 1 reproduced, " in done.stdout
    written = {file.name for file in (tmp_path / "outputs/cpu").iterdir()}
    assert written - {"runs"} == {"rows", "claims.csv", "claims.md"}
    assert [one.name for one in recorded.parent.iterdir()] == [recorded.name]
    path.write_text(path.read_text()[:-10])
    for overrides, words in (
        (["hardware=cpu"], "fig01_batching.csv, line 3"),
        (["source=recorded", "hardware=h200"], "hardware= would change nothing"),
    ):
        refused = command(*overrides)
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
        assert words in refused.stderr
