"""The expert tables, as far as they need no GPU: lines, anchors, sums; and what is timed computes what it should."""

import pytest

from experiments import ext_expert_tables as tables
from experiments.benches.expert_sets import ExpertSets, MoELayer
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import read_rows


def test_every_line_has_its_anchor():
    found = tables.lines()
    assert len(found) == 16
    best = {line.label: line.best_existing() for line in found}
    assert best["mixtral-8x7b T=32 4 adapters"] == pytest.approx(34.3, abs=0.1)
    assert best["qwen3-30b-a3b T=128 4 adapters"] == pytest.approx(48.6, abs=0.1)


def test_sums_are_of_both_products_and_ratios_of_what_was_measured():
    found = tables.lines()[:2]
    found[0].us = {"w13": 8.0, "w2": 6.0, "w13, delta": 7.0, "w2, delta": 5.0}
    found[1].us = {"w13": 8.0}
    text = tables.show(found)
    assert "14.00" in text
    assert "12.00" in text
    assert f"geometric mean {found[0].best_existing() / 12:.2f}, lowest" in text
    assert text.count("rows 1") == 2
    assert {row.value for row in tables.rows_of(found)} == {8.0, 6.0, 7.0, 5.0}


def test_recorded_rows_took_time_and_the_ten_lines_without_alignment_have_no_cell():
    rows = read_rows(REPOSITORY / "results" / "h200" / "ext_expert_tables.csv")
    assert min(row.value for row in rows) > 1.0
    lines = {row.panel for row in rows}
    assert (len(lines), len(lines - {row.panel for row in rows if row.system == "alignment"})) == (16, 10)


@pytest.mark.parametrize(
    ("tokens", "aligned"),
    [(1, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((9, False), (40, True)))],
)
def test_what_is_timed_is_right(tokens, aligned):
    sets = ExpertSets(MoELayer(64, 32, 4, 2), tokens, 2, 8, device="cpu", rotating_bytes=1)
    assert ("alignment" in sets.calls) == aligned, "what is not launched has no time"
    for name in sets.calls:
        assert sets.error(name) <= tables.TOLERANCE, name
    sets.y13.fill_(1.0)
    sets.calls["w13, delta"](0)
    delta = sets.y13[0].clone()
    sets.calls["w13"](0)
    assert (sets.y13[0] - 2 * delta).abs().max() < 0.05
    assert 1 <= sets.pairs() <= 2 * tokens
