"""The paper's formulas against its own plotted intensities, and ceilings that make sense."""

import csv

import pytest
from fakes import PAPER

from experiments.measure.roofline import copy_bandwidth, product_flops, sgmv_flop, sgmv_intensity, sgmv_io_bytes
from experiments.workload.popularity import popularity


def paper_values(metric: str) -> list[tuple[str, int, float]]:
    with (PAPER / "fig07_sgmv_roofline.csv").open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["metric"] == metric and row["workload"]]
    return [(row["workload"], int(row["batch_size"]), float(row["value"])) for row in rows]


@pytest.mark.parametrize(
    ("metric", "formula"),
    [
        ("flop", lambda rows, adapters: sgmv_flop(rows, 16, 4096)),
        ("io_bytes", lambda rows, adapters: sgmv_io_bytes(rows, adapters, 16, 4096)),
        ("arithmetic_intensity", lambda rows, adapters: sgmv_intensity(rows, adapters, 16, 4096)),
        ("num_lora_models", lambda rows, adapters: adapters),
    ],
)
def test_formulas_give_the_papers_figure_7(metric, formula):
    values = paper_values(metric)
    assert len(values) >= 250
    for workload, rows, expected in values:
        ours = formula(rows, popularity(workload).number_of_adapters(rows))
        assert ours == pytest.approx(expected, rel=5e-6), (workload, rows)


@pytest.mark.slow
def test_measured_ceilings_of_this_cpu_are_plausible():
    assert 1e8 < copy_bandwidth("cpu") < 1e13
    assert 1e9 < product_flops("cpu", "float32") < 1e15
