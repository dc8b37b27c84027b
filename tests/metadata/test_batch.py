"""`LoRABatch`: one step in all its forms, filled once, at fixed addresses; its tile lists and shape."""

import numpy as np
import pytest
import torch

from punica.metadata import HEIGHTS, LoRABatch, LoRAKernelMeta, RowGroups, StepShape, captured_adapters
from punica.metadata.rows import TileLists, capacities

SLOTS = [2, 2, -1, 0, 0, 2, 1]


def rows(*slots: int) -> RowGroups:
    return RowGroups.of_rows(np.array(slots))


@pytest.mark.parametrize("seed", range(8))
def test_groups_of_rows_and_of_runs_agree_with_a_slow_definition(seed: int) -> None:
    generator = np.random.default_rng(seed)
    runs, lengths = generator.integers(-1, 4, 9), generator.integers(0, 4, 9)  # empty runs and equal neighbours too
    slots = [int(slot) for slot, length in zip(runs, lengths, strict=True) for _ in range(length)]
    for groups in (RowGroups.of_runs(runs.tolist(), lengths.tolist()), rows(*slots)):
        assert groups.num_rows == len(slots)
        assert groups.row_slots.tolist() == slots
        assert (groups.slots[1:] != groups.slots[:-1]).all()
        assert (groups.lengths > 0).all()
        assert groups.starts.tolist() == [0, *np.cumsum(groups.lengths)][: groups.lengths.size]
        assert groups.order.tolist() == sorted(range(len(slots)), key=lambda t: slots[t])
        present, counts = groups.present
        assert present.tolist() == sorted(set(slots))
        assert counts.tolist() == [slots.count(slot) for slot in sorted(set(slots))]
        assert groups.no_lora == (max(slots, default=-1) < 0)


def test_every_form_of_a_step_says_the_same() -> None:
    batch = LoRABatch(16, 3)
    batch.fill(rows(*SLOTS), rows(2, 0))
    assert (batch.num_rows, batch.no_lora, batch.sampled.num_rows) == (7, False, 2)
    assert batch.kernel_meta.token_lora_mapping.tolist() == SLOTS + [-1] * 9
    assert batch.sampled.kernel_meta.token_lora_mapping[:3].tolist() == [2, 0, -1]
    assert batch.tensors[4].tolist() == [-1, 0, 1, 2]
    assert sum(run.segments * run.length for run in batch.plan.runs) == 6
    assert batch.sampled.plan.num_tokens == 2
    alone = LoRAKernelMeta.make(3, 16, "cpu")
    alone.prepare_tensors(torch.tensor(SLOTS))
    for name in ("active_lora_ids", "num_tokens_per_lora", "lora_token_start_loc", "num_active_loras_cpu"):
        assert getattr(batch.kernel_meta, name).tolist() == getattr(alone, name).tolist()


def test_kernel_tensors_stay_where_they_are_and_follow_every_step() -> None:
    batch = LoRABatch(8, 4)
    with torch.inference_mode():
        batch.fill(rows(3, 3), rows(3))  # before they are first asked for
        addresses = [tensor.data_ptr() for one in (batch, batch.sampled) for tensor in one.tensors]
    assert batch.kernel_meta.token_lora_mapping[:3].tolist() == [3, 3, -1]
    for step in range(40):
        slots = np.random.default_rng(step).integers(-1, 4, step % 9)
        with torch.inference_mode(step % 2 == 1):
            batch.fill(RowGroups.of_rows(slots))
        for one in (batch, batch.sampled):
            assert one.kernel_meta.token_lora_mapping[: slots.size].tolist() == slots.tolist()
            assert one.plan.num_tokens == slots.size
    assert [tensor.data_ptr() for one in (batch, batch.sampled) for tensor in one.tensors] == addresses


def test_one_of_two_metadata_refilled_by_hand_leaves_the_other_alone() -> None:
    batch, slots = LoRABatch(8, 4), torch.tensor([3, 0, 2, 1])
    batch.fill(rows(3, 3), rows(1))
    batch.kernel_meta.prepare_tensors(slots)
    slots.fill_(1)  # the caller may reuse it
    assert batch.sampled.kernel_meta.token_lora_mapping[:2].tolist() == [1, -1]
    batch.sampled.kernel_meta.prepare_tensors(slots)  # sends both again
    assert batch.kernel_meta.token_lora_mapping[:5].tolist() == [3, 0, 2, 1, -1]


def test_launches_cover_all_slots_or_those_that_are_there_and_decode_is_planned_once() -> None:
    everything, specialised = LoRABatch(8, 6), LoRABatch(8, 6, specialize_active_lora=True)
    for batch in (everything, specialised):
        batch.fill(rows(0, 1, 5, 1))
        assert batch.sampled.plan is batch.plan
    assert (everything.max_segments, specialised.max_segments) == (7, 4)  # 3 are there, 4 are captured


@pytest.mark.parametrize(
    ("slots", "sampled", "message"),
    [
        ([0] * 9, [0], "9 tokens.*=8"),
        ([0], [0] * 9, "9 sampled rows.*=8"),
        ([4], [0], "tokens .* 4.*=4"),
        ([0], [1, 4], "sampled rows .* 4"),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(slots: list[int], sampled: list[int], message: str) -> None:
    batch = LoRABatch(8, 4)
    batch.fill(rows(3, 3), rows(1))
    with pytest.raises(ValueError, match=message):
        batch.fill(rows(*slots), rows(*sampled))
    assert batch.kernel_meta.token_lora_mapping[:3].tolist() == [3, 3, -1]
    assert batch.rows.row_slots.tolist() == [3, 3]
    assert batch.sampled.rows.row_slots.tolist() == [1]


def test_tensors_must_hold_the_rows_of_the_step() -> None:
    batch = LoRABatch(8, 4)
    batch.fill(rows(3, 3))
    for given in (1, 9):
        with pytest.raises(ValueError, match=rf"{given} rows.* 2 tokens.*=8"):
            batch.check_rows(given)
    batch.check_rows(8)
    batch.check_rows(0)


def test_one_step_from_slots() -> None:
    batch = LoRABatch.of_slots(torch.tensor([1, -1]))
    assert (batch.num_rows, batch.plan.max_slot) == (2, 1)
    batch.check_rows(10_000)  # no bound
    with pytest.raises(TypeError, match="max_loras"):
        _ = batch.kernel_meta


@pytest.mark.parametrize(("slots", "lengths"), [([-2], [1]), ([0, 1], [3, -1]), ([0], [-3])])
def test_runs_that_cannot_be_are_refused(slots: list[int], lengths: list[int]) -> None:
    batch = LoRABatch(8, 4)
    batch.fill(rows(3))
    with pytest.raises(ValueError, match=r"slot -2|is -"):
        batch.fill(RowGroups.of_runs(slots, lengths))
    assert batch.rows.row_slots.tolist() == [3]
    with pytest.raises(RuntimeError):  # filled with their step
        batch.sampled.fill(rows(0))


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
