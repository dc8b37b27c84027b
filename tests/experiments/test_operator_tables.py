"""The tables of operators and experts, as far as they need no GPU: lines, anchors, columns, points."""

from dataclasses import replace

import pytest
from fakes import composed, interpreted, points_of

from experiments import ext_expert_tables, ext_operator_tables
from experiments.benches.expert_sets import TOLERANCE, ExpertSets, MoELayer
from experiments.benches.operator_lines import ANCHORS, SHAPES, Operator, anchors_of, best_existing, lines, read_anchors
from experiments.harness.resume import run
from experiments.report.operators import tabulated

TABLES, EXPERTS = ext_operator_tables.EXPERIMENT, ext_expert_tables.EXPERIMENT


@pytest.mark.parametrize(("table", "rows"), [("A", 29), ("B", 16), ("C", 18), ("shapes", 48), ("step", 14)])
def test_every_row_of_an_anchor_table_has_its_anchor(table, rows):
    found = lines(table)
    assert len({line.label for line in found}) == len(found) == rows
    for line in found:
        times = anchors_of(line)
        name, us = best_existing(line)
        assert not name.startswith(("proto", "floor"))
        assert us == min(value for key, value in times.items() if not key.startswith("proto"))
        file = ANCHORS if "group" in line.anchor else SHAPES
        same = [row for row in read_anchors(file) if all(row[key] == value for key, value in line.anchor.items())]
        op = line.operator
        if file == ANCHORS:
            assert op.floor_us() == pytest.approx(float(same[0]["floor_us"]), rel=0.01), line.label
        else:
            sizes = {(row["bytes"], row["T"], row["L"], row["S"]) for row in same}
            assert sizes == {tuple(map(str, (op.bytes(), op.tokens, len(op.sizes), len(op.widths))))}, line.label


def test_drawn_operators_are_the_same_every_time_and_compared_with_the_loop():
    found = lines("drawn")
    assert [line.operator for line in found] == [line.operator for line in lines("drawn")]
    assert len({line.label for line in found}) == 40
    assert {line.part for line in found} == {"decode", "prefill"}
    for line in found:
        op = line.operator
        assert min(op.sizes) >= 1
        assert op.tokens <= 8000
    found[0].us |= {"torch_loop": 3.0, "wrapper": 2.0}
    assert [best_existing(line) for line in found[:2]] == [("torch_loop", 3.0), None]


def test_bytes_count_true_ranks():
    narrow, wide = (Operator(4096, (4096,), 64, (1, 1), ranks) for ranks in ((8, 16), (64, 64)))
    assert wide.bytes() - narrow.bytes() == 2 * (128 - 24) * 8192
    assert wide.bytes() == Operator(4096, (4096,), 64, (1, 1)).bytes()


def test_every_batch_of_experts_has_its_anchor():
    best = {line.label: line.best_existing() for line in ext_expert_tables.lines()}
    assert len(best) == 16
    assert best["mixtral-8x7b T=32 4 adapters"] == pytest.approx(34.3, abs=0.1)
    assert best["qwen3-30b-a3b T=128 4 adapters"] == pytest.approx(48.6, abs=0.1)


def measured(table: str, **us: float) -> list:
    return [replace(line, us={name.replace("_", " "): value for name, value in us.items()}) for line in lines(table)]


def test_a_column_that_failed_leaves_its_cell_empty_and_counts_nowhere():
    found = measured("A", punica=2.0, wrapper=2.0)[:3]
    del found[1].us["wrapper"]
    text = tabulated("A", found)
    assert text[0].endswith("us | ratio, punica | ratio, wrapper |")
    assert len({line.count("|") for line in text[:5]}) == 1
    assert [line.rpartition(" ")[2] for line in text[6:]] == ["3", "2"]


def test_a_line_is_a_panel_and_a_column_a_system_of_its_own_clock(tmp_path):
    found = points_of(tmp_path, TABLES, "hardware=h200", "figure.tables=[A,ranks,A]")
    assert len({point.key() for point in found}) == len(found) == 29 * 6 + 2 * 2 + 20 * 5
    first = found[0]
    assert (first.panel, first.system, first.workload) == ("A: T=1 Distinct", "punica", "Distinct")
    assert (first.batch_size, first.rank) == (1, 16)
    assert Operator(**first.settings["operator"]) == lines("A")[0].operator
    eager = points_of(tmp_path, TABLES, "hardware=h200", "figure.tables=[A,B,C]", "timer=host_clock")
    assert len(eager) == 2 * (29 + 16)
    assert {point.system for point in eager} == {"punica", "wrapper"}


@pytest.mark.parametrize("experiment", [TABLES, EXPERTS], ids=["operators", "experts"])
def test_on_a_cpu_they_say_what_they_need_and_measure_nothing(tmp_path, capsys, experiment):
    outcome = run(composed(tmp_path, name=experiment.name), experiment)
    assert (outcome.points, outcome.measured, outcome.failed) == (0, 0, [])
    assert "it needs a GPU" in capsys.readouterr().err


INTERPRETED = """
import sys
from experiments.benches.operator_lines import Operator
from experiments.benches.operator_sets import COLUMNS, OperatorSets

kind, *names = sys.argv[1:]
op = {"slices": Operator(64, (24, 16), 16, (2, 1)), "ranks": Operator(64, (32,), 32, (1, 2), (8, 32))}.get(kind)
sets = OperatorSets(op or Operator(64, (32,), 32, (1, 2)), "cpu", rotating_bytes=20000)
assert sets.count == 2 and sets.stacked_a[1][0].shape[0] == 64
assert sets.stacked_a[1][0].data_ptr() == sets.a[1][0].data_ptr()
for name in names:
    print(name, sets.relative_error(COLUMNS[name](sets)), sep=";")
"""


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("slices", ["wrapper"]),
        pytest.param("slices", ["punica", "wrapper, normal launch", "normal shrink", "no overlap", "rank table",
                                "batch invariant", "wrapper, batch invariant"], marks=pytest.mark.slow),
        pytest.param("ranks", ["punica", "wrapper", "normal shrink"], marks=pytest.mark.slow),
        pytest.param("one", ["torch_loop", "torch_gbmm"], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_column_computes_the_operator(kind, names):
    errors = [line.split(";") for line in interpreted(INTERPRETED, kind, *names)]
    assert [name for name, _ in errors] == names
    assert all(float(error) < 1e-3 for _, error in errors), errors


@pytest.mark.parametrize(
    ("tokens", "aligned"),
    [(1, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((9, False), (40, True)))],
)
def test_the_calls_of_experts_are_right(tokens, aligned):
    sets = ExpertSets(MoELayer(64, 32, 4, 2), tokens, 2, 8, device="cpu", rotating_bytes=1)
    calls = sets.columns()
    assert ("alignment" in calls) == aligned, "what is not launched has no time"
    for name in calls:
        assert sets.error(name) <= TOLERANCE, name
    y = sets.products["w13"].y.fill_(1.0)
    calls["w13, delta"](0)
    delta = y[0].clone()
    calls["w13"](0)
    assert (y[0] - 2 * delta).abs().max() < 0.05
