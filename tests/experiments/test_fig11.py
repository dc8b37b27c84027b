"""Figure 11 as an experiment: its grid, its rows, its ratios, its bad inputs, its command line."""

import json
import subprocess
import sys

import pytest
from fakes import composed
from omegaconf import OmegaConf

from experiments.fig11_textgen import BASELINES, EXPERIMENT, Fig11, ratios
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.harness.settings import settle
from punica.measure.records import read_rows

NAME = "fig11_textgen"


def points(tmp_path, *overrides):
    return EXPERIMENT.points(settle(composed(tmp_path, *overrides, name=NAME), EXPERIMENT))


def rows_of(tmp_path):
    return read_rows(tmp_path / "cpu" / "smoke" / "rows" / f"{NAME}.csv")


def test_every_workload_has_all_systems_and_then_its_ratios(tmp_path):
    cell = points(tmp_path, "workload=skewed")
    assert [point.system for point in cell[:-1]] == list(
        settle(composed(tmp_path, name=NAME), EXPERIMENT).figure.systems
    )
    assert (cell[-1].system, cell[-1].panel) == ("punica", "7B Model ratios")
    assert {point.system for point in cell if point.rank is None} == {"continuous_batching", "static_batching"}
    assert {point.batch_size for point in cell} == {32}
    assert len(points(tmp_path)) == 4 * len(cell)


def test_without_all_systems_there_are_no_ratios(tmp_path):
    assert [point.system for point in points(tmp_path, "workload=skewed", "system=punica")] == ["punica"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scale.max_len=3", r"scale.max_len=3 must lie in \[4, 4096\]"),
        ("scale.max_len=5000", r"scale.max_len=5000 must lie in \[4, 4096\]"),
        ("engine.num_blocks=1", "engine.num_blocks=1 cannot hold one request.*num_blocks=2 or more"),
        ("system.names=[vllm]", "'vllm'.*continuous_batching"),
        ("scale.max_steps=0", "scale.max_steps=0 must be at least 1"),
        ("figure.check_requests=0", "figure.check_requests=0 must be at least 1"),
        ("engine.max_batch_size=0", "engine.max_batch_size=0 must be at least 1"),
    ],
)
def test_sizes_that_cannot_run_are_refused_before_anything_runs(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        points(tmp_path, override)


def test_ratios_split_the_gain_over_mixed_batches():
    found = {
        reading.metric: reading.value
        for reading in ratios(
            {
                "punica": 300.0,
                "punica_static": 150.0,
                "hf_peft_mixed": 100.0,
                **dict.fromkeys(BASELINES, 40.0),
                "hf_peft": 50.0,
            }
        )
    }
    assert found == {
        "speedup_over_best_baseline": 6.0,
        "speedup_over_hf_peft_mixed": 3.0,
        "operator_gain": 1.5,
        "continuous_batching_gain": 2.0,
    }


def test_one_cell_is_measured_with_its_ratios_and_not_twice(tmp_path):
    config = composed(tmp_path, "workload=skewed", "engine.max_batch_size=4", name=NAME)
    outcome = run(config, Fig11())
    assert (outcome.measured, outcome.failed) == (8, [])
    rows = rows_of(tmp_path)
    value = {(row.system, row.metric): row.value for row in rows}
    assert value["punica", "total_tokens"] == value["hf_peft_mixed", "total_tokens"]
    throughput = value["punica", "total_tokens"] / value["punica", "wall_time"]
    assert value["punica", "throughput"] == pytest.approx(throughput)
    assert value["punica", "operator_gain"] == pytest.approx(
        value["punica_static", "throughput"] / value["hf_peft_mixed", "throughput"]
    )
    assert value["continuous_batching", "mean_batch_size"] < value["punica", "mean_batch_size"] <= 4
    assert value["continuous_batching", "idle_share"] == 0 < value["hf_peft_mixed", "idle_share"]
    assert run(config, Fig11()).measured == 0
    assert rows_of(tmp_path) == rows


def test_ratios_are_refused_when_a_system_failed_its_check(tmp_path, monkeypatch):
    from experiments.systems import SYSTEMS

    def wrong(self, jobs):
        raise CheckFailed("wrong token")

    monkeypatch.setattr(SYSTEMS.get("hf_peft"), "serve", wrong)
    outcome = run(composed(tmp_path, "workload=skewed", "engine.max_batch_size=4", name=NAME), Fig11())
    assert outcome.measured == 6
    assert "wrong token" in outcome.failed[0]
    assert "no throughput of hf_peft" in outcome.failed[1]
    assert not [row for row in rows_of(tmp_path) if row.system == "hf_peft" or "ratios" in row.panel]


def command(tmp_path, *overrides):
    line = [sys.executable, "-m", f"experiments.{NAME}", f"paths.outputs={tmp_path}", "hardware=cpu", *overrides]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


def test_the_configuration_can_be_printed(tmp_path):
    done = command(
        tmp_path, "workload=skewed", "model=llama-tiny", "system=punica", "engine.max_batch_size=8", "--cfg", "job"
    )
    assert done.returncode == 0, done.stderr
    printed = OmegaConf.create(done.stdout)
    assert (printed.workload.names, printed.system.names) == (["Skewed"], ["punica"])
    assert printed.engine.max_batch_size == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [("engine.max_batch=8", "max_batch"), ("system=vllm", "vllm"), ("engine.max_batch_size=eight", "eight")],
)
def test_mistyped_keys_and_values_fail_with_their_name(tmp_path, override, message):
    done = command(tmp_path, override)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_whole_figure_at_smoke_scale(tmp_path):
    done = command(tmp_path, "scale=smoke")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["points"], outcome["measured"], outcome["failed"]) == (32, 32, [])
    assert all((tmp_path / "cpu" / "smoke" / "figures" / f"{NAME}.{kind}").exists() for kind in ("pdf", "png", "json"))


@pytest.mark.slow
def test_multirun_sweeps_systems(tmp_path):
    done = command(
        tmp_path, "scale=smoke", "workload=skewed", "system=punica,static_batching", "draw=false", "--multirun"
    )
    assert done.returncode == 0, done.stderr
    assert {row.system for row in rows_of(tmp_path)} == {"punica", "static_batching"}
