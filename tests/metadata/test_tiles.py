"""The tile lists of a step against a slow definition, its shape, and the graphs worth capturing."""

import numpy as np
import pytest

from punica.metadata import HEIGHTS, LoRABatch, RowGroups, StepShape, captured_adapters
from punica.metadata.rows import TileLists, capacities


def fields(record: int) -> tuple[int, int, int]:
    return record >> 32 & 0xFFFFFF, record & 0xFFFFFFFF, record >> 56


def steps() -> list[list[int]]:
    generator = np.random.default_rng(0)
    drawn = [generator.integers(-1, 5, generator.integers(0, 90)).tolist() for _ in range(30)]
    return [[], [-1], [3], list(range(9)), [2] * 200, [1] * 70 + [0, 2, 3, -1, 4] * 2, [0] * 64 + [1] * 63, *drawn]


@pytest.mark.parametrize("slots", steps(), ids=len)
def test_tiles_cover_every_row_of_an_adapter_once_longest_segments_first(slots):
    rows = RowGroups.of_rows(np.array(slots, dtype=np.int64))
    lists, order = rows.tiles, rows.order
    counts = {slot: slots.count(slot) for slot in set(slots) - {-1}}
    for height, tiles, total, most in zip(HEIGHTS, lists.records, lists.totals, capacities(8, 200), strict=True):
        seen, lengths = [], []
        assert total == tiles.size <= most + 200
        for record in tiles.tolist():
            slot, start, length = fields(record)
            assert 1 <= length <= height
            assert {slots[row] for row in order[start : start + length]} == {slot}
            seen += order[start : start + length].tolist()
            lengths.append(counts[slot])
        assert sorted(seen) == [row for row, slot in enumerate(slots) if slot >= 0]
        assert lengths == sorted(lengths, reverse=True)


def test_the_shape_is_rounded_up_to_powers_of_two():
    rows = RowGroups.of_runs([5, 0, 1, 2, -1], [100, 64, 1, 2, 7])
    assert rows.tiles.shape == StepShape(adapters=4, longest=128)
    assert RowGroups.of_runs([], []).tiles.shape == StepShape(0, 0)
    assert StepShape.even(5, 64) == StepShape(8, 16)
    assert StepShape.even(64, 10) == StepShape(16, 1)
    assert StepShape.even(0, 10) == StepShape(0, 0)


def test_kernels_find_the_lists_of_every_step_at_fixed_addresses():
    batch = LoRABatch(256, 6)
    addresses = [tensor.data_ptr() for tensor in batch.tiles(0)[:-1]]
    for slots in ([0, 0, 3, -1, 5], [1] * 250, [-1]):
        rows = RowGroups.of_rows(np.array(slots))
        batch.fill(rows)
        for height in range(len(HEIGHTS)):
            order, tiles, totals, number = batch.tiles(height)
            expected = TileLists(*rows.present)
            assert totals.tolist() == expected.totals
            assert number == expected.totals[height]
            assert tiles[:number].tolist() == expected.records[height].tolist()
            assert order[: len(slots)].tolist() == rows.order.tolist()
    assert [tensor.data_ptr() for tensor in batch.tiles(0)[:-1]] == addresses


@pytest.mark.parametrize(
    ("rows", "slots", "counts"), [(64, 64, [1, 16, 64]), (64, 8, [1, 8]), (4, 64, [1, 4]), (1, 3, [1]), (0, 3, [])]
)
def test_few_graphs_are_worth_capturing(rows, slots, counts):
    assert captured_adapters(rows, slots) == counts
