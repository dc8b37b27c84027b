"""Cost models of adapter loads, from rows that a known cost made, and from the recorded ones."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.cluster.load_costs import fitted, load_cost, recorded_load_costs, timed_links, timed_reads
from experiments.cluster.simulated_hour import load_readings
from experiments.harness.schema import ConfigError

RESULTS = Path(__file__).parents[2] / "results"
COLUMNS = ["panel", "system", "workload", "rank", "metric", "value", "unit", "statistic", "disturbed"]
FROM_DISK, FROM_MEMORY = "time_to_first_token_from_disk", "time_to_first_token_from_memory"


def frame(*lines: tuple) -> pd.DataFrame:
    return pd.DataFrame(lines, columns=COLUMNS)


def test_a_line_over_the_ranks_and_a_proportion_are_found():
    link = [("model", "punica", "", rank, "load_time", 0.5 + 0.25 * rank, "ms", "median", None) for rank in (8, 16, 64)]
    beside = ("overlap", "punica", "Distinct", 16, "load_time", 4500.0, "us", "median", None)
    others = [
        ("layer", "punica", "", 8, "load_time", 9.0, "us", "median", None),
        ("model", "pageable", "", 8, "load_time", 9.0, "ms", "median", None),
        ("model", "punica", "", 8, "load_time", 9.0, "ms", "p90", None),
        ("model", "punica", "", 8, "host_time", 9.0, "ms", "median", None),
    ]
    reads = [
        ("few", "punica", workload, 16, metric, value, "ms", "median", disturbed)
        for workload, disturbed, values in (("Zipf", False, (170.0, 10.0)), ("Uniform", True, (900.0, 10.0)))
        for metric, value in zip((FROM_DISK, FROM_MEMORY), values, strict=True)
    ]
    alone = ("few", "punica", "Skewed", 16, FROM_MEMORY, 5.0, "ms", "median", False)
    found = fitted("a machine", timed_links(frame(*link, beside, *others)), timed_reads(frame(*reads, alone)))
    assert found.cost.name == "a machine"
    assert found.cost.host_seconds(32) == pytest.approx(8.5e-3)
    assert found.cost.disk_seconds(32) == pytest.approx(0.32)
    assert set(found.residuals) == {"loads_from_host", "loads_from_disk"}
    assert max(one.largest for one in found.residuals.values()) < 1e-9


def test_residuals_tell_what_a_line_does_not():
    times = ((8, 1), (16, 3), (32, 4))
    uneven = frame(*(("model", "punica", "", rank, "load_time", ms, "ms", "median", None) for rank, ms in times))
    reads = frame(
        ("few", "punica", "Zipf", 16, FROM_DISK, 100.0, "ms", "median", False),
        ("few", "punica", "Zipf", 16, FROM_MEMORY, 20.0, "ms", "median", False),
    )
    found = fitted("uneven", timed_links(uneven), timed_reads(reads))
    host = found.residuals["loads_from_host"]
    assert 0.05 < host.median < 0.2 < host.largest < 0.5
    assert found.residuals["loads_from_disk"].relative.tolist() == pytest.approx([0.0])
    rows = {one.metric: one.value for one in load_readings(found)}
    assert rows["load_host_rank"] == pytest.approx(1e6 * found.cost.host_rank)
    assert rows["residual_median_loads_from_host"] == host.median


def test_recorded_loads_of_the_paper_s_rank_take_milliseconds_and_reads_a_hundred():
    found = recorded_load_costs(RESULTS)["h200", "llama2-7b"]
    assert len(found.residuals["loads_from_host"].relative) >= 5
    assert found.residuals["loads_from_host"].largest < 0.1
    cost = load_cost(RESULTS, "h200", "llama2-7b")
    assert 1e-3 < cost.host_seconds(16) < 5e-3 < 0.02 < cost.disk_seconds(16) < 1
    assert "h200 llama2-7b" in cost.name


def test_a_machine_without_loads_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'nowhere' has no recorded loads of llama2-7b; machines that have: .*h200"):
        load_cost(RESULTS, "nowhere", "llama2-7b")
    with pytest.raises(ConfigError, match="machines that have: none"):
        load_cost(tmp_path, "h200", "llama2-7b")
