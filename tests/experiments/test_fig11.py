"""Figure 11 as an experiment: its grid, its rows, its ratios, its bad inputs, its command line."""

import itertools
import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from fakes import QUIET, composed
from omegaconf import OmegaConf

from experiments.facts.systems import SYSTEMS, measured_baselines
from experiments.fig11_textgen import EXPERIMENT, Fig11, ratios
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Point
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.harness.settings import settle
from experiments.measure.records import read_rows
from experiments.systems.hf_systems import HfSystem
from experiments.systems.serving import Served
from experiments.systems.whole_stream import Comparison
from experiments.workload import released_lengths, rescaled

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
    assert len(points(tmp_path)) == 4 * len(cell) + 1
    assert points(tmp_path)[-1].panel == "7B Model, across workloads ratios"


@pytest.mark.parametrize("systems", [5, 6, 7, 8])
def test_a_slow_minute_falls_on_no_workload_and_no_system_alone(systems):
    grid = [
        Point("p", str(system), workload, "m", 32, None, None if system < 2 else 16, {})
        for workload, system in itertools.product(["Distinct", "Uniform", "Skewed", "Identical"], range(systems))
    ]
    order = [group[0] for group in EXPERIMENT.together(grid)]
    assert sorted(map(Point.key, order)) == sorted(map(Point.key, grid))
    for first in range(len(order)):
        assert len({point.system for point in order[first : first + systems]}) == min(systems, len(order) - first)
        assert len({point.workload for point in order[first : first + 4]}) >= min(3, len(order) - first)


def test_ranks_do_not_take_turns_as_each_has_systems_of_its_own(tmp_path):
    measured = [one for one in points(tmp_path, "adapters.ranks=[4,8]") if not EXPERIMENT.is_derived(one)]
    ranks = [group[0].rank for group in EXPERIMENT.together(measured)]
    assert None in ranks[: ranks.index(8)]
    assert set(ranks[ranks.index(8) :]) == {8}


def test_slow_systems_have_shorter_windows(tmp_path):
    cell = points(tmp_path, "workload=skewed", "scale.window_steps=100", "scale.window_slow_steps=40")
    steps = {point.system: point.settings["windows"]["steps"] for point in cell}
    assert steps == {name: 40 if SYSTEMS.get(name).slow else 100 for name in steps}
    assert steps["hf_peft_mixed"] == 40
    assert cell[-1].settings["windows"] == {"pieces": 2, "steps": 100}  # of the ratios


@pytest.mark.parametrize("scale", ["gpu", "paper"])
def test_a_gpu_times_six_windows_of_a_hundred_steps_per_cell_two_in_each_repeat(tmp_path, scale):
    cfg = settle(composed(tmp_path, f"scale={scale}", "hardware=h200", "model=llama2-13b", name=NAME), EXPERIMENT)
    figure = cfg.figure
    assert (cfg.scale.passes, figure.pieces, figure.steps, figure.slow_steps) == (3, 2, 100, 10)
    assert (cfg.scale.max_len, cfg.engine.max_batch_size, figure.lengths) == (2048, 32, "released")


def test_without_all_systems_there_are_no_ratios(tmp_path):
    assert [point.system for point in points(tmp_path, "workload=skewed", "system=punica")] == ["punica"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scale.max_len=3", r"scale.max_len=3 must lie in \[4, 4096\]"),
        ("scale.max_len=5000", r"scale.max_len=5000 must lie in \[4, 4096\]"),
        ("engine.num_blocks=1", "engine.num_blocks=1 cannot hold one request.*num_blocks=2 or more"),
        ("system.names=[vllm]", "'vllm'.*continuous_batching"),
        ("scale.window_steps=0", "scale.window_steps=0 must be at least 1"),
        ("scale.passes=0", "scale.passes=0 must be at least 1"),
        ("figure.lengths=sharegpt", "figure.lengths='sharegpt' must be one of released, stated"),
        ("figure.check_requests=0", "figure.check_requests=0 must be at least 1"),
        ("engine.max_batch_size=0", "engine.max_batch_size=0 must be at least 1"),
        (("figure.whole_stream=true", "draw=true"), "nothing to draw: choose draw=false"),
    ],
)
def test_sizes_that_cannot_run_are_refused_before_anything_runs(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        points(tmp_path, *([override] if isinstance(override, str) else override))


def test_ratios_split_the_gain_over_mixed_batches():
    found = {
        reading.metric: reading.value
        for reading in ratios(
            {
                "punica": 300.0,
                "punica_static": 150.0,
                "hf_peft_mixed": 100.0,
                **dict.fromkeys(measured_baselines(), 40.0),
                "hf_peft": 50.0,
            }
        )
    }
    assert found == {
        "speedup_over_best_baseline": 6.0,
        "speedup_over_hf_peft_mixed": 3.0,
        "static_over_hf_peft_mixed": 1.5,
        "continuous_batching_gain": 2.0,
    }


CELL = ("workload=skewed", "engine.max_batch_size=4", "scale.passes=2", "scale.tries=2")


def test_one_cell_is_measured_in_repeats_with_their_ratios_and_not_twice(tmp_path):
    config = composed(tmp_path, *CELL, name=NAME)
    outcome = run(config, Fig11())
    assert (outcome.measured, outcome.failed) == (16, [])
    rows = rows_of(tmp_path)
    value = {(row.repeat, row.system, row.metric): row.value for row in rows}
    for repeat in (0, 1):
        cell = {key[1:]: found for key, found in value.items() if key[0] == repeat}
        assert cell["punica", "total_tokens"] == cell["hf_peft_mixed", "total_tokens"]
        seconds = next(
            row.value / 1e3
            for row in rows
            if (row.repeat, row.system, row.metric, row.statistic) == (repeat, "punica", "step_latency", "value")
        )
        tokens = cell["punica", "total_tokens"] / cell["punica", "steps"]
        assert cell["punica", "throughput"] == pytest.approx(tokens / seconds)
        assert cell["punica", "static_over_hf_peft_mixed"] == pytest.approx(
            cell["punica_static", "throughput"] / cell["hf_peft_mixed", "throughput"]
        )
        assert 0 < cell["punica", "mean_batch_size"] <= 4
        assert cell["continuous_batching", "idle_share"] == 0 < cell["hf_peft_mixed", "idle_share"]
        assert {cell[name, "token_agreement"] for name in measured_baselines()} == {1.0}
    assert value[0, "punica", "throughput"] != value[1, "punica", "throughput"]
    assert run(config, Fig11()).measured == 0
    assert rows_of(tmp_path) == rows


def test_ratios_are_marked_where_one_of_their_systems_was_disturbed(tmp_path, machine):
    busy = replace(QUIET, disturbed=True, other_cpu=0.3)
    machine.script = [QUIET, busy, *[QUIET] * 5, busy, *[QUIET] * 7, busy]  # the second of 7, after each pass too
    outcome = run(composed(tmp_path, *CELL, name=NAME), Fig11())
    assert outcome.disturbed == 1
    marked = {(row.system, row.repeat, row.panel) for row in rows_of(tmp_path) if row.disturbed}
    assert marked == {("continuous_batching", 0, "7B Model"), ("punica", 0, "7B Model ratios")}


def test_ratios_are_refused_when_a_system_failed_its_check(tmp_path, monkeypatch):
    right = HfSystem.serve

    def wrong(self, jobs):
        if self.facts.name == "hf_peft":
            raise CheckFailed("wrong token")
        return right(self, jobs)

    monkeypatch.setattr(HfSystem, "serve", wrong)
    outcome = run(composed(tmp_path, "workload=skewed", "engine.max_batch_size=4", name=NAME), Fig11())
    assert outcome.measured == 6
    assert "wrong token" in outcome.failed[0]
    assert "no throughput of hf_peft" in outcome.failed[1]
    assert not [row for row in rows_of(tmp_path) if row.system == "hf_peft" or "ratios" in row.panel]


@pytest.mark.slow
def test_a_whole_stream_is_an_option_with_rows_of_its_own(tmp_path, capsys):
    options = ("workload=distinct", "system=punica", "figure.whole_stream=true", "engine.max_batch_size=4")
    run(composed(tmp_path, *options, name=NAME), Fig11())
    rows = rows_of(tmp_path)
    assert {row.panel for row in rows} == {"7B Model, whole stream, 8 requests"}
    value = {row.metric: row.value for row in rows}
    ratio = value["predicted_throughput"] / value["stream_throughput"]
    assert value["prediction_over_stream"] == pytest.approx(ratio)
    assert "throughput" not in value
    printed = capsys.readouterr().out
    assert f"8 requests, {value['stream_steps']:.0f} steps" in printed
    assert f"{100 * (ratio - 1):+.1f} %" in printed
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


def test_a_prediction_says_how_sure_it_is_and_whether_it_is_near():
    served = Served([], [[1] * 300], 10, 320, 0, 1.0, {})
    near = Comparison("punica", "Distinct", served, [300.0, 306.0] * 6)
    error = 3 * (12 / 11) ** 0.5 / 12**0.5  # every prediction lies 3 beside the mean
    assert near.interval == pytest.approx((303 - 2 * error, 303 + 2 * error))
    assert "+1.0 %" in str(near)
    assert "; within 3 %" in str(near)
    far = Comparison("punica", "Distinct", served, [330.0] * 12)
    assert "NOT within 3 %" in str(far)
    assert far.interval == (330.0, 330.0)


@pytest.mark.slow
def test_every_printed_command_can_be_pasted(tmp_path):
    """A shell joins its lines, and the configuration takes its words."""
    from experiments import fig11_textgen

    text = fig11_textgen.__doc__.replace("\\\n", " ")
    commands = [shlex.split(line)[3:] for line in text.splitlines() if line.strip().startswith("python -m")]
    assert len(commands) == 9
    for words in commands:
        cfg = settle(composed(tmp_path, *words, name=NAME), EXPERIMENT)
        assert EXPERIMENT.points(cfg)
        if cfg.figure.whole_stream:
            assert (cfg.scale.passes, cfg.scale.tries) == (1, 0)
        if cfg.scale.name == "paper":
            assert cfg.figure.minutes["paper"] == 8
            assert cfg.scale.tries <= 1
    pieces = [words for words in commands if "whole_stream" not in " ".join(words)]
    assert any("workload.names=[Distinct,Uniform]" in words and "model=llama2-13b" in words for words in pieces)


def test_stated_lengths_are_panels_of_their_own(tmp_path):
    words = ("workload=distinct", "engine.max_batch_size=4", "figure.lengths=stated")
    outcome = run(composed(tmp_path, *words, name=NAME), EXPERIMENT)
    assert outcome.failed == []
    rows = read_rows(tmp_path / "cpu" / "smoke" / "rows" / f"{NAME}.csv")
    assert {row.panel.partition(" Model")[2] for row in rows} == {", stated lengths", ", stated lengths ratios"}
    value = {(row.system, row.metric): row.value for row in rows}
    released = released_lengths(8)
    assert value["punica", "new_tokens"] < rescaled(released, 20).new_tokens
    assert value["punica", "static_over_hf_peft_mixed"] > 0


def command(tmp_path, *overrides):
    line = [sys.executable, "-m", f"experiments.{NAME}", f"paths.outputs={tmp_path}", "hardware=cpu", *overrides]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)


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
    assert (outcome["points"], outcome["measured"], outcome["failed"]) == (33, 33, [])
    assert all((tmp_path / "cpu" / "smoke" / "figures" / f"{NAME}.{kind}").exists() for kind in ("pdf", "png", "json"))


@pytest.mark.slow
def test_multirun_sweeps_systems(tmp_path):
    done = command(
        tmp_path, "scale=smoke", "workload=skewed", "system=punica,static_batching", "draw=false", "--multirun"
    )
    assert done.returncode == 0, done.stderr
    assert {row.system for row in rows_of(tmp_path)} == {"punica", "static_batching"}
