"""What was asked of an H200: ratios with their spans, bounds on a GPU alone, and nothing without rows."""

from math import inf

import pandas as pd
import pytest
from claim_rows import frame, laptop, serving

from experiments.claims.asked import asked, asked_table

CELL = {"system": "punica", "batch_size": 32, "rank": 16, "statistic": "value"}
PUNICA = {"Distinct": 90.0, "Uniform": 95.0, "Skewed": 95.0, "Identical": 96.0}
BACKBONE = {"Distinct": 7.5, "Uniform": 8.0, "Skewed": 10.0, "Identical": 100.0}


def rows(repeats=(1.0, 1.1, 0.95), **about):
    lines = []
    for repeat, factor in enumerate(repeats):
        for system, values in (("punica", PUNICA), ("continuous_batching", BACKBONE)):
            for workload, value in values.items():
                speed = value * (factor if (system, workload) == ("punica", "Distinct") else 1.0)
                cell = {**CELL, "system": system, "workload": workload, "metric": "throughput", "value": speed}
                lines.append(laptop("11", **{**cell, "panel": "7B Model", "repeat": repeat, **about}))
    return lines


def by_name(found):
    return {one.what.partition(": ")[2]: one for one in found}


def test_ratios_across_workloads_have_the_span_of_their_repeats():
    found = by_name(asked(frame(rows(model="llama2-7b", hardware="h200"))))
    one = found["Punica Distinct / backbone-only Identical"]
    assert (one.value, one.span, one.least, one.met) == (0.9, pytest.approx((0.855, 0.99)), 0.88, True)
    assert found["Punica Identical / backbone-only Identical"].value == pytest.approx(0.96)
    assert found["Punica Distinct / Identical"].value == pytest.approx(90 / 96)
    speedups = [found[f"Punica / best baseline, {name}"] for name in ("Distinct", "Uniform", "Skewed")]
    assert [one.value for one in speedups] == pytest.approx([12.0, 11.875, 9.5])
    assert [one.met for one in speedups] == [True, False, False]
    assert speedups[1].span is None  # no repeat changed it
    table = asked_table(list(found.values()))
    assert "| Punica Distinct / backbone-only Identical | 0.9 | 0.855 to 0.99 | at least 0.88 | yes |" in "\n".join(
        asked_table(asked(frame(rows(model="llama2-7b", hardware="h200"))))
    ).replace("llama2-7b: ", "")
    assert len(table) == 2 + 6


def test_a_baseline_that_is_missing_on_one_workload_costs_that_ratio_alone():
    lines = rows(model="llama2-7b", hardware="h200")
    hf_peft = {**CELL, "system": "hf_peft", "workload": "Distinct", "metric": "throughput", "value": 1.0}
    lines.append(laptop("11", **hf_peft, panel="7B Model", model="llama2-7b", hardware="h200", repeat=0))
    found = by_name(asked(frame(lines)))
    assert "Punica / best baseline, Distinct" in found
    assert not {f"Punica / best baseline, {name}" for name in ("Uniform", "Skewed")} & set(found)
    assert len(found) == 4


def test_what_is_gained_over_pefts_mixed_batches_is_split_in_two():
    lines = rows(model="llama2-7b", hardware="h200")
    for system, workload, value in (
        ("hf_peft_mixed", "Distinct", 20.0), ("punica_static", "Distinct", 45.0), ("hf_peft_mixed", "Skewed", 100.0),
    ):  # fmt: skip
        cell = {**CELL, "system": system, "workload": workload, "metric": "throughput", "value": value, "repeat": 0}
        lines.append(laptop("11", **cell, panel="7B Model", model="llama2-7b", hardware="h200"))
    found = {one.what: one for one in asked(frame(lines)) if "PEFT" in one.what or "static" in one.what}
    assert {what: one.value for what, one in found.items()} == pytest.approx({
        "llama2-7b, Distinct: Punica / PEFT's mixed batches": 4.5,
        "llama2-7b, Distinct: of that all but continuous batching, Punica in static batches / PEFT's": 2.25,
        "llama2-7b, Distinct: of that continuous batching, Punica / it in static batches": 2.0,
        "llama2-7b, Skewed: Punica / PEFT's mixed batches": 0.95,
    })  # fmt: skip
    assert [one.met for one in found.values()] == [True, True, True, False]


def test_a_cpu_has_values_and_no_bounds():
    found = asked(frame(rows(model="llama-small", hardware="cpu")))
    assert len(found) == 6
    assert {one.met for one in found} == {None}
    assert all(line.endswith("| - | - |") for line in asked_table(found)[2:])


def test_streams_of_two_lengths_stand_side_by_side():
    lines = rows(model="llama2-7b", hardware="h200")
    for requests, off in ((256, 1.02), (1024, 0.96)):
        panel = f"7B Model, whole stream, {requests} requests"
        cell = {**CELL, "workload": "Distinct", "panel": panel, "model": "llama2-7b", "hardware": "h200"}
        lines.append(laptop("11", metric="prediction_over_stream", value=off, **cell))
    found = [one for one in asked(frame(lines)) if "whole stream" in one.what]
    assert [(one.value, one.met) for one in found] == [(1.02, True), (0.96, False)]
    assert "256 requests" in found[0].what
    assert (found[0].least, found[0].most) == (0.97, 1.03)


def test_many_adapters_are_held_against_few_and_loading_against_resident():
    lines = []
    for panel, metric, value in (
        ("32 adapters", "throughput", 200.0), ("1000 adapters", "throughput", 170.0),
        ("16 adapters, 8 slots", "loading_over_resident", 1.2),
    ):  # fmt: skip
        cell = {**CELL, "workload": "Zipf", "panel": panel, "model": "llama2-7b", "hardware": "h200"}
        lines.append(laptop("ext many adapters", metric=metric, value=value, **cell))
    found = asked(frame(lines))
    assert [(one.value, one.least, one.most, one.met) for one in found] == [
        (0.85, 0.9, inf, False), (1.2, -inf, 1.3, True),
    ]  # fmt: skip
    assert [line.split(" | ")[3] for line in asked_table(found)[2:]] == ["at least 0.9", "at most 1.3"]


def test_no_rows_no_table():
    assert asked(frame([])) == []
    assert asked(pd.DataFrame(frame(serving())).assign(figure="12")) == []
