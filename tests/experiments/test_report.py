"""`make report`: which rows it takes, what it writes, and clear errors when there is nothing to judge."""

import subprocess
import sys

import pytest

from experiments.commands.batch import SOURCES
from experiments.commands.report import choose, write_fresh
from experiments.harness.schema import REPOSITORY, ConfigError
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
def test_a_fresh_report_leaves_recorded_folders_alone(places):
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    write_rows(places.recorded_rows / "fig01_batching.csv", decode_rows())
    here, files = write_fresh(places)
    assert here.name == "this machine"
    assert 'data-label="cpu"' in files[-1].read_text(encoding="utf-8")
    assert [file.name for file in files] == ["claims.md", "report.html"]
    assert {file.parent for file in files} == {places.fresh_rows.parent}
    assert [path.name for path in places.recorded_rows.iterdir()] == ["fig01_batching.csv"]


@pytest.mark.parametrize("source", SOURCES)
def test_no_rows_says_how_to_get_some(places, source):
    with pytest.raises(ConfigError, match=r"no rows in .*: measure them with make reproduce"):
        choose(places, source)


def test_no_fresh_rows_names_the_recorded_ones(places):
    write_rows(places.recorded_rows.parent / "h200" / "fig01_batching.csv", decode_rows())
    with pytest.raises(ConfigError, match="make report ARGS=source=recorded"):
        choose(places, "fresh")


def test_unknown_source(places):
    with pytest.raises(ConfigError, match="source='old' must be one of auto, fresh, recorded"):
        choose(places, "old")


def command_line(tmp_path, *overrides):
    paths = [f"paths.{name}={tmp_path / name}" for name in ("outputs", "results", "figures")]
    command = [sys.executable, "-m", "experiments.commands.report", *paths, *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=900, check=False)


@pytest.mark.slow
def test_command_line(tmp_path):
    empty = command_line(tmp_path, "hardware=cpu")
    assert empty.returncode == 2
    assert empty.stderr.strip().splitlines()[-1].startswith("error: no rows in")
    assert "Traceback" not in empty.stderr
    path = tmp_path / "outputs/cpu/rows/fig01_batching.csv"
    write_rows(path, decode_rows())
    done = command_line(tmp_path, "hardware=cpu", "source=fresh")
    assert done.returncode == 0, done.stderr
    assert "this machine: 1 reproduced, " in done.stdout
    assert "6 holds by arithmetic" in done.stdout
    assert "Disturbed points: not known" in done.stdout
    assert f"Written: {tmp_path / 'outputs/cpu/report.html'}" in done.stdout
    path.write_text(path.read_text()[:-10])
    damaged = command_line(tmp_path, "hardware=cpu")
    assert damaged.returncode == 2
    assert "fig01_batching.csv, line 3" in damaged.stderr
    assert "Traceback" not in damaged.stderr


@pytest.mark.slow
def test_a_choice_of_hardware_among_recorded_rows_is_refused(tmp_path):
    write_rows(tmp_path / "results/h200/fig01_batching.csv", decode_rows())
    refused = command_line(tmp_path, "source=recorded", "hardware=h200")
    assert refused.returncode == 2
    assert "hardware= would change nothing" in refused.stderr
