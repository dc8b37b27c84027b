"""Figure 11 as an experiment: its grid, its rows, its ratios, its bad inputs, its command line."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from fakes import QUIET, composed
from tiny import values

from experiments.facts.systems import measured_baselines
from experiments.fig11_textgen import EXPERIMENT, Fig11, ratios
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.harness.settings import settle
from experiments.measure.records import read_rows
from experiments.systems.hf_systems import HfSystem

NAME = "fig11_textgen"
CELL = ("workload=skewed", "engine.max_batch_size=4", "scale.passes=2", "scale.tries=2")


def points(tmp_path, *overrides):
    return EXPERIMENT.points(settle(composed(tmp_path, *overrides, name=NAME), EXPERIMENT))


def rows_of(tmp_path):
    return read_rows(tmp_path / "cpu" / "smoke" / "rows" / f"{NAME}.csv")


def test_every_workload_has_all_systems_and_then_its_ratios(tmp_path):
    cell = points(tmp_path, "workload=skewed")
    assert [point.system for point in cell[:-1]] == settle(composed(tmp_path, name=NAME), EXPERIMENT).figure.systems
    assert (cell[-1].system, cell[-1].panel) == ("punica", "7B Model ratios")
    assert {point.system for point in cell if point.rank is None} == {"continuous_batching", "static_batching"}
    assert len(points(tmp_path)) == 4 * len(cell) + 1
    assert points(tmp_path)[-1].panel == "7B Model, across workloads ratios"
    assert [point.system for point in points(tmp_path, "workload=skewed", "system=punica")] == ["punica"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scale.max_len=3", r"scale.max_len=3 must lie in \[4, 4096\]"),
        ("engine.num_blocks=1", "engine.num_blocks=1 cannot hold one request.*num_blocks=2 or more"),
        ("system.names=[vllm]", "'vllm'.*continuous_batching"),
        ("figure.lengths=sharegpt", "figure.lengths=sharegpt must be 'released' or 'stated'"),
        (("figure.whole_stream=true", "draw=true"), "nothing to draw: choose draw=false"),
    ],
)
def test_sizes_that_cannot_run_are_refused_before_anything_runs(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        points(tmp_path, *([override] if isinstance(override, str) else override))


def test_ratios_split_the_gain_over_mixed_batches():
    speeds = {"punica": 300.0, "punica_static": 150.0, "hf_peft_mixed": 100.0}
    assert values(ratios({**speeds, **dict.fromkeys(measured_baselines(), 40.0), "hf_peft": 50.0})) == {
        "speedup_over_best_baseline": 6.0,
        "speedup_over_hf_peft_mixed": 3.0,
        "static_over_hf_peft_mixed": 1.5,
        "continuous_batching_gain": 2.0,
    }


def test_one_cell_is_measured_in_repeats_with_their_ratios_and_not_twice(tmp_path):
    config = composed(tmp_path, *CELL, name=NAME)
    outcome = run(config, Fig11())
    assert (outcome.measured, outcome.failed) == (16, [])
    rows = rows_of(tmp_path)
    value = {(row.repeat, row.system, row.metric): row.value for row in rows}
    for repeat in (0, 1):
        cell = {key[1:]: found for key, found in value.items() if key[0] == repeat}
        assert cell["punica", "total_tokens"] == cell["hf_peft_mixed", "total_tokens"]
        assert cell["punica", "static_over_hf_peft_mixed"] == pytest.approx(
            cell["punica_static", "throughput"] / cell["hf_peft_mixed", "throughput"]
        )
        assert {cell[name, "token_agreement"] for name in measured_baselines()} == {1.0}
    assert value[0, "punica", "throughput"] != value[1, "punica", "throughput"]
    assert run(config, Fig11()).measured == 0
    assert rows_of(tmp_path) == rows


def test_ratios_are_marked_where_one_of_their_systems_was_disturbed(tmp_path, machine):
    busy = replace(QUIET, disturbed=True, other_cpu=0.3)
    machine.script = [QUIET, busy, *[QUIET] * 5, busy, *[QUIET] * 7, busy]  # the second of 7, after each pass too
    outcome = run(composed(tmp_path, *CELL, name=NAME), Fig11())
    assert outcome.disturbed == 1
    marked = [(row.panel, row.repeat) for row in rows_of(tmp_path) if row.disturbed]
    assert set(marked) == {("7B Model", 0), ("7B Model ratios", 0)}


def test_ratios_are_refused_when_a_system_failed_its_check(tmp_path, monkeypatch):
    right = HfSystem.forced

    def wrong(self, jobs, tokens):
        return [2 * rows if self.facts.name == "hf_peft" else rows for rows in right(self, jobs, tokens)]

    monkeypatch.setattr(HfSystem, "forced", wrong)
    outcome = run(composed(tmp_path, "workload=skewed", "engine.max_batch_size=4", name=NAME), Fig11())
    assert outcome.measured == 6
    assert "hf_peft gives logits that differ" in outcome.failed[0]
    assert "no throughput of hf_peft" in outcome.failed[1]
    assert not [row for row in rows_of(tmp_path) if row.system == "hf_peft" or "ratios" in row.panel]


@pytest.mark.slow
def test_a_whole_stream_is_an_option_with_rows_of_its_own(tmp_path, capsys):
    options = ("workload=distinct", "system=punica", "figure.whole_stream=true", "engine.max_batch_size=4")
    run(composed(tmp_path, *options, name=NAME), Fig11())
    value = {row.metric: row.value for row in rows_of(tmp_path)}
    assert "throughput" not in value
    assert f"{100 * (value['prediction_over_stream'] - 1):+.1f} %" in capsys.readouterr().out
    run(composed(tmp_path, *options, "scale.requests=9", name=NAME), Fig11())  # beside it, not in its place
    assert {row.panel for row in rows_of(tmp_path)} == {f"7B Model, whole stream, {n} requests" for n in (8, 9)}


def test_ratios_across_workloads_are_those_of_the_same_repeat(tmp_path):
    options = ("workload.names=[Distinct,Identical]", "system.names=[punica,continuous_batching]", "scale.passes=2")
    outcome = run(composed(tmp_path, *options, "engine.max_batch_size=4", name=NAME), Fig11())
    assert (outcome.measured, outcome.failed) == (10, [])
    rows = rows_of(tmp_path)
    speed = {(row.repeat, row.system, row.workload): row.value for row in rows if row.metric == "throughput"}
    found = {(row.repeat, row.metric): row.value for row in rows if row.panel.endswith("ratios")}
    for repeat in (0, 1):
        distinct, identical = (speed[repeat, "punica", workload] for workload in ("Distinct", "Identical"))
        backbone = speed[repeat, "continuous_batching", "Identical"]
        assert found[repeat, "distinct_over_backbone_identical"] == pytest.approx(distinct / backbone)
        assert found[repeat, "identical_over_backbone_identical"] == pytest.approx(identical / backbone)
        assert found[repeat, "distinct_over_own_identical"] == pytest.approx(distinct / identical)


def command(tmp_path, *overrides):
    line = [sys.executable, "-m", f"experiments.{NAME}", f"paths.outputs={tmp_path}", "hardware=cpu", *overrides]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_the_whole_figure_at_smoke_scale(tmp_path):
    done = command(tmp_path, "scale=smoke")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["points"], outcome["measured"], outcome["failed"]) == (33, 33, [])
    assert all((tmp_path / "cpu" / "smoke" / "figures" / f"{NAME}.{kind}").exists() for kind in ("pdf", "png"))
