"""`lora_expand` against float64: forms, slices, offsets, layouts, ranks, what it must not touch."""

import pytest
import torch
from triton_batches import EXPANDS, Batch, assert_close, random_slots

from punica.ops.triton_ops import lora_expand

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
GPU_SHAPES = [
    (128, (4096, 1024, 1024), 64, 8, BF16),
    (257, (11008,), 16, 2, FP16),
    (33, (2049,), 256, 1, FP32),
    (1024, (128, 100), 96, 128, FP16),
]
SHAPES = [
    (1, (16,), 1, 1, FP16),
    (3, (7, 5, 3), 20, 128, BF16),
    (16, (100, 33), 8, 8, FP16),
    (17, (64,), 24, 2, FP32),
    (5, (33,) * 8, 4, 2, FP16),
    (20, (130,), 136, 2, BF16),
] + (GPU_SHAPES if torch.cuda.is_available() else [])
MARKER = 3.25


@pytest.fixture(params=EXPANDS.values(), ids=tuple(EXPANDS))
def form(request, use_schedules) -> None:
    """Run the test in every form."""
    use_schedules(expand=request.param)


def make(shape: tuple, device: str) -> Batch:
    tokens, widths, rank, slot_count, dtype = shape
    return Batch(random_slots(tokens, slot_count), 16, widths, rank, slot_count, dtype, device)


def rank_vectors(batch: Batch, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Inputs of expand that its first rounding (to the weights' dtype) leaves as they are."""
    h = torch.randn(len(batch.widths), batch.tokens, batch.rank).to(batch.dtype)
    return h.to(dtype or FP32).to(batch.device)


def wide_output(batch: Batch, before: int = 17, after: int = 5) -> torch.Tensor:
    return torch.randn(batch.tokens, before + sum(batch.widths) + after).to(batch.dtype).to(batch.device)


def expected(batch: Batch, h: torch.Tensor, old: torch.Tensor, offset: int, add: bool) -> torch.Tensor:
    want = old.cpu().double()
    columns = slice(offset, offset + sum(batch.widths))
    new = batch.expanded(h) + (want[:, columns] if add else 0)
    want[:, columns] = torch.where(batch.has_adapter, new, want[:, columns])
    return want


@pytest.mark.parametrize("add", [True, False], ids=["add", "overwrite"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-N{'+'.join(map(str, s[1][:3]))}-r{s[2]}-L{s[3]}")
def test_expand(shape, form, add, device):
    batch = make(shape, device)
    h, y = rank_vectors(batch), wide_output(batch)
    old = y.clone()
    lora_expand(h, batch.b, y, *batch.args, **batch.count, offset_start=17, add_inputs=add)
    assert_close(y, expected(batch, h, old, 17, add), batch.dtype)
    assert torch.equal(y[:, :17], old[:, :17])
    assert torch.equal(y[:, -5:], old[:, -5:])
    bare = ~batch.has_adapter[:, 0]
    assert torch.equal(y[bare], old[bare])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-N{'+'.join(map(str, s[1][:3]))}-r{s[2]}-L{s[3]}")
def test_default_configuration(shape, device):
    batch = make(shape, device)
    h, y = rank_vectors(batch), wide_output(batch)
    old = y.clone()
    lora_expand(h, batch.b, y, *batch.args, **batch.count, offset_start=17, add_inputs=True)
    assert_close(y, expected(batch, h, old, 17, True), batch.dtype)


@pytest.mark.parametrize("offsets", [(0, 17), (17, 0)], ids=str)
def test_one_weight_set_at_two_offsets(offsets, device):
    batch = Batch([0, 1, -1], 16, (33,), 8, 2, FP16, device)
    h = rank_vectors(batch)
    for offset in offsets:
        y = wide_output(batch, 17, 0)
        old = y.clone()
        lora_expand(h, batch.b, y, *batch.args, **batch.count, offset_start=offset, add_inputs=True)
        assert_close(y, expected(batch, h, old, offset, True), FP16)


@pytest.mark.parametrize("out_dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("in_dtype", [FP32, BF16], ids=str)
def test_dtypes(in_dtype, out_dtype, form, device):
    batch = Batch([0, 1, -1, 1], 16, (40,), 16, 2, BF16, device)
    h = rank_vectors(batch, in_dtype)
    y = torch.randn(4, 40).to(out_dtype).to(device)
    old = y.clone()
    lora_expand(h, batch.b, y, *batch.args, **batch.count, add_inputs=True)
    assert_close(y, expected(batch, h, old, 0, True), out_dtype if out_dtype != FP32 else BF16)


def test_true_ranks_read_no_lane_beyond(form, device):
    ranks = [[8, 20, 64, 0], [64, 0, 8, 20]]
    batch = Batch([0, 1, 2, 3, -1, 2, 0], 16, (40, 70), 64, 4, FP16, device, ranks=ranks)
    h, y = rank_vectors(batch), wide_output(batch, 0, 0)
    for i, of_slice in enumerate(ranks):
        for slot, rank in enumerate(of_slice):
            batch.b[i][slot, ..., rank:] = float("nan")
        for t, slot in enumerate(batch.slots):
            if slot >= 0:
                h[i, t, of_slice[slot] :] = float("nan")
    old = y.clone()
    lora_expand(h, batch.b, y, *batch.args, **batch.count, add_inputs=True, lora_ranks=batch.lora_ranks)
    assert_close(y, expected(batch, h, old, 0, True), FP16)


def test_rank_zero_overwrites_with_zeros(form, device):
    batch = Batch([0, -1, 1], 16, (40,), 64, 2, FP16, device, ranks=[[0, 64]])
    y = torch.full((3, 40), MARKER, dtype=FP16, device=device)
    lora_expand(rank_vectors(batch), batch.b, y, *batch.args, **batch.count, lora_ranks=batch.lora_ranks)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert torch.equal(y[1], torch.full_like(y[1], MARKER))


def test_column_view_of_y_and_strided_input(form, device):
    batch = Batch([0, 1, -1, 1, 0], 16, (33,), 20, 2, FP16, device)
    whole = torch.randn(5, 60).half().to(device)
    old = whole.clone()
    h = rank_vectors(batch)
    strided = h.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    lora_expand(strided, batch.b, whole[:, 10:43], *batch.args, **batch.count, add_inputs=True)
    assert_close(whole, expected(batch, h, old, 10, True), FP16)


@pytest.mark.parametrize("widths", [(33, 40), (33, 1), (1, 1)], ids=str)
def test_weights_stored_rank_major(form, widths, device):
    """A slice of width 1 lies in memory either way, and goes with any other."""
    batch = Batch([0, 1, -1, 1], 16, widths, 20, 2, FP16, device)
    rank_major = tuple(b.transpose(-1, -2).contiguous().transpose(-1, -2) for b in batch.b)
    h, y = rank_vectors(batch), wide_output(batch)
    old = y.clone()
    lora_expand(h, rank_major, y, *batch.args, **batch.count, offset_start=17, add_inputs=True)
    assert_close(y, expected(batch, h, old, 17, True), FP16)


def test_other_slots_are_never_read(form, device):
    batch = Batch([3, 3, 5, -1], 16, (33,), 20, 8, FP16, device)
    for slot in (0, 1, 2, 4, 6, 7):
        batch.b[0][slot] = float("nan")
    h, y = rank_vectors(batch), wide_output(batch)
    lora_expand(h, batch.b, y, *batch.args, **batch.count, add_inputs=True)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize(
    "slots", [[0, 1, 2, 3, 4, 5, 6, 7], [2] * 40, [1], [-1, -1, 3]], ids=["each", "one", "T1", "bare"]
)
def test_distributions(slots, form, device):
    batch = Batch(slots, 16, (40,), 16, 8, FP16, device)
    h, y = rank_vectors(batch), wide_output(batch)
    old = y.clone()
    lora_expand(h, batch.b, y, *batch.args, **batch.count, offset_start=17, add_inputs=True)
    assert_close(y, expected(batch, h, old, 17, True), FP16)


def test_nothing_to_do_writes_nothing(device):
    bare = Batch([-1, -1], 16, (40,), 16, 2, FP16, device)
    y = wide_output(bare)
    old = y.clone()
    lora_expand(rank_vectors(bare), bare.b, y, *bare.args, **bare.count, add_inputs=False)
    assert torch.equal(y, old)
    batch = Batch([0, 1], 16, (40,), 16, 2, FP16, device)
    lora_expand(rank_vectors(batch), batch.b, y, *batch.args, num_active_loras=0, add_inputs=False)
    assert torch.equal(y, old)
    empty = Batch([], 16, (40,), 16, 2, FP16, device)
    lora_expand(rank_vectors(empty), empty.b, wide_output(empty), *empty.args[:5], torch.tensor([False]))


def test_count_may_be_left_out(device):
    batch = Batch([0, 1, -1], 16, (40,), 16, 2, FP16, device)
    h, old, results = rank_vectors(batch), wide_output(batch), []
    for count in (
        {},
        batch.count,
        {"num_active_loras": 3},
    ):
        y = old.clone()
        lora_expand(h, batch.b, y, *batch.args, offset_start=17, add_inputs=True, **count)
        results.append(y)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
