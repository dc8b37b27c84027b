"""Figure 11 as an experiment: its grid, its rows, its bad inputs."""

import pytest
from fakes import composed, points_of, settled

from experiments.fig11_textgen import EXPERIMENT, Fig11
from experiments.harness.resume import run
from experiments.harness.schema import ConfigError
from experiments.measure.records import read_rows


def rows_of(tmp_path):
    return read_rows(tmp_path / "cpu" / "smoke" / "rows" / f"{EXPERIMENT.name}.csv")


def test_every_workload_has_all_systems(tmp_path):
    cell = points_of(tmp_path, EXPERIMENT, "workload=skewed")
    assert [point.system for point in cell] == settled(tmp_path, EXPERIMENT).figure.systems
    assert {point.system for point in cell if point.rank is None} == {"continuous_batching", "static_batching"}
    assert len(points_of(tmp_path, EXPERIMENT)) == 4 * len(cell)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scale.max_len=3", r"scale.max_len=3 must lie in \[4, 4096\]"),
        ("system.names=[vllm]", "'vllm'.*continuous_batching"),
        ("figure.lengths=sharegpt", "figure.lengths=sharegpt must be 'released' or 'stated'"),
        ("figure.whole_stream=true draw=true", "nothing to draw: choose draw=false"),
    ],
)
def test_sizes_that_cannot_run_are_refused_before_anything_runs(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        points_of(tmp_path, EXPERIMENT, *override.split())


def test_one_cell_is_measured_in_repeats_and_not_twice(tmp_path):
    cell = ("workload=skewed", "engine.max_batch_size=4", "scale.passes=2", "scale.tries=2")
    config = composed(tmp_path, *cell, name=EXPERIMENT.name)
    outcome = run(config, Fig11())
    assert (outcome.measured, outcome.failed) == (14, [])
    rows = rows_of(tmp_path)
    value = {(row.repeat, row.system, row.metric): row.value for row in rows}
    for repeat in (0, 1):
        cell = {key[1:]: found for key, found in value.items() if key[0] == repeat}
        assert cell["punica", "total_tokens"] == cell["hf_peft_mixed", "total_tokens"]
        assert {cell[name, "token_agreement"] for name in ("hf_peft", "static_batching")} == {1.0}
    assert value[0, "punica", "throughput"] != value[1, "punica", "throughput"]
    assert run(config, Fig11()).measured == 0
    assert rows_of(tmp_path) == rows


@pytest.mark.slow
def test_a_whole_stream_is_an_option_with_rows_of_its_own(tmp_path):
    options = ("workload=distinct", "system=punica", "figure.whole_stream=true", "engine.max_batch_size=4")
    run(composed(tmp_path, *options, name=EXPERIMENT.name), Fig11())
    metrics = {row.metric for row in rows_of(tmp_path)}
    assert "throughput" not in metrics
    assert {"prediction_over_stream", "stream_requests", "stream_mean_batch_size"} <= metrics  # C36 reads the last two
    run(composed(tmp_path, *options, "scale.requests=9", name=EXPERIMENT.name), Fig11())  # beside it, not in its place
    assert {row.panel for row in rows_of(tmp_path)} == {f"7B Model, whole stream, {n} requests" for n in (8, 9)}
