"""`lora_shrink` and `lora_expand` against float64: forms, shapes, layouts, offsets, ranks, what they must not touch."""

import pytest
import torch
from triton_batches import EXPANDS, SHRINKS, Batch, assert_close, assert_shrunk, random_slots

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SHRINK_SHAPES = [
    (1, 16, (16,), 1, 1, FP16), (3, 100, (16,), 20, 128, BF16), (16, 128, (33, 7), 8, 8, FP16),
    (33, 130, (16,), 24, 2, FP32), (17, 64, (16,) * 3, 96, 2, FP16),
]  # fmt: skip
if torch.cuda.is_available():
    SHRINK_SHAPES += [
        (257, 4096, (4096,), 64, 8, BF16), (128, 11008, (128,) * 3, 16, 2, FP16), (1024, 2049, (100,), 96, 8, FP16),
        (16, 2048, (16,) * 8, 256, 1, FP32),
    ]  # fmt: skip


@pytest.fixture(params=SHRINKS)
def shrink_form(request, use_schedules) -> None:
    """Run the test in every form."""
    use_schedules(shrink=SHRINKS[request.param])


def output(batch: Batch, fill: float = float("nan"), dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.full((len(batch.widths), batch.tokens, batch.rank), fill, dtype=dtype, device=batch.device)


@pytest.mark.parametrize("chosen", [*SHRINKS, "by the estimate"])
@pytest.mark.parametrize("shape", SHRINK_SHAPES, ids=lambda s: f"T{s[0]}-K{s[1]}-n{len(s[2])}-r{s[3]}-L{s[4]}")
def test_overwrites_a_poisoned_buffer_and_reads_no_other_slot(shape, chosen, device, use_schedules):
    use_schedules(shrink=SHRINKS.get(chosen))
    tokens, k, widths, rank, slot_count, dtype = shape
    batch = Batch(random_slots(tokens, slot_count), k, widths, rank, slot_count, dtype, device)
    expected = batch.shrunk()
    batch.poison()
    assert_shrunk(batch.shrink(output(batch)), expected)


def test_accumulates_and_leaves_bare_rows_alone(shrink_form, device):
    batch = Batch([1, -1, 0, 1, -1], 100, (16, 16), 20, 2, FP16, device)
    before = torch.randn(2, 5, 20).to(device)
    out = batch.shrink(before.clone(), accumulate=True)
    assert_shrunk(out, before.cpu().double() + batch.shrunk())
    bare = ~batch.has_adapter[:, 0]
    assert torch.equal(out[:, bare], before[:, bare])


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_16_bit_output(shrink_form, dtype, device):
    batch = Batch([0, 1, -1, 1], 128, (16,), 16, 2, dtype, device)
    out = batch.shrink(output(batch, dtype=dtype))
    torch.testing.assert_close(out.cpu().double(), batch.shrunk(), rtol=1e-2, atol=1e-2)


def test_shrink_reads_no_lane_beyond_true_ranks(shrink_form, device):
    ranks = [[8, 20, 64, 0], [64, 0, 8, 20]]
    batch = Batch([0, 1, 2, 3, -1, 2, 0], 100, (16, 16), 64, 4, FP16, device, ranks=ranks)
    batch.poison(ranks=True)
    assert_shrunk(batch.shrink(output(batch), lora_ranks=batch.lora_ranks), batch.shrunk())


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_any_strides_of_x(layout, shrink_form, device):
    batch = Batch([0, 1, -1, 1, 0, 0, 1], 100, (16,), 20, 2, FP16, device)
    view = {
        "transposed": batch.x.T.contiguous().T, "strided": torch.stack([batch.x, batch.x + 1], -1)[..., 0],
        "expanded": batch.x[:1].expand(7, -1),
    }[layout]  # fmt: skip
    assert torch.equal(batch.shrink(output(batch), view), batch.shrink(output(batch), view.contiguous()))


def test_weights_stored_rank_last(shrink_form, device):
    batch = Batch([0, 1, -1, 1], 100, (16, 16), 20, 2, FP16, device)
    transposed = tuple(a.transpose(-1, -2).contiguous().transpose(-1, -2) for a in batch.a)
    assert_shrunk(batch.shrink(output(batch), a=transposed), batch.shrunk())


def test_float32_products_are_ieee(shrink_form, device):
    batch = Batch([0] * 16, 2048 if device == "cuda" else 256, (16,), 16, 1, FP32, device, scaling=1.0)
    expected = batch.shrunk()
    error = (batch.shrink(output(batch)).cpu().double() - expected).norm() / expected.norm()
    assert error < 2e-6, f"relative error {error:.1e}: TF32 products leave about 3e-4"


def test_nothing_to_shrink(device):
    bare = Batch([-1, -1], 64, (16,), 16, 2, FP16, device)
    assert torch.equal(bare.shrink(output(bare, 7.0)), output(bare, 7.0))  # with the flag set nothing is written
    empty = Batch([], 64, (16,), 16, 2, FP16, device)
    empty.args = [*empty.args[:5], torch.tensor([False])]
    empty.shrink(output(empty), num_active_loras=0)
    batch = Batch([0, 1], 64, (16,), 16, 2, FP16, device)
    assert torch.equal(batch.shrink(output(batch), num_active_loras=0), output(batch, 0.0))


def test_stale_sorted_entries_are_ignored(shrink_form, device):
    """A captured graph covers more rows than a shorter step has; its further rows are at -1 and in no segment."""
    batch = Batch([0, 1, 1, 0, 1], 64, (16,), 16, 2, FP16, device)
    batch.meta.prepare_tensors(torch.tensor([1, -1, 1]))
    batch.args = batch.meta.meta_args(5)[:6]
    out = batch.shrink(output(batch))
    batch.slots = [1, -1, 1, -1, -1]
    assert_shrunk(out, batch.shrunk())


EXPAND_SHAPES = [
    (1, (16,), 1, 1, FP16), (3, (7, 5, 3), 20, 128, BF16), (16, (100, 33), 8, 8, FP16), (17, (64,), 24, 2, FP32),
    (5, (33,) * 8, 4, 2, FP16), (20, (130,), 136, 2, BF16),
]  # fmt: skip
if torch.cuda.is_available():
    EXPAND_SHAPES += [
        (128, (4096, 1024, 1024), 64, 8, BF16), (257, (11008,), 16, 2, FP16), (33, (2049,), 256, 1, FP32),
        (1024, (128, 100), 96, 128, FP16),
    ]  # fmt: skip
MARKER = 3.25


@pytest.fixture(params=EXPANDS)
def expand_form(request, use_schedules) -> None:
    """Run the test in every form."""
    use_schedules(expand=EXPANDS[request.param])


def rank_vectors(batch: Batch, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Inputs of expand that its first rounding (to the weights' dtype) leaves as they are."""
    h = torch.randn(len(batch.widths), batch.tokens, batch.rank).to(batch.dtype)
    return h.to(dtype or FP32).to(batch.device)


def wide_output(batch: Batch, before: int = 17, after: int = 5) -> torch.Tensor:
    return torch.randn(batch.tokens, before + sum(batch.widths) + after).to(batch.dtype).to(batch.device)


def expected(batch: Batch, h: torch.Tensor, old: torch.Tensor, offset: int, add: bool = True) -> torch.Tensor:
    want = old.cpu().double()
    columns = slice(offset, offset + sum(batch.widths))
    new = batch.expanded(h) + (want[:, columns] if add else 0)
    want[:, columns] = torch.where(batch.has_adapter, new, want[:, columns])
    return want


def check(batch: Batch, add: bool = True, offset: int = 17, after: int = 5, b=None) -> None:
    """The columns behind ``offset`` of rows with adapter hold the sum, or the product alone; all else is as it was."""
    h, old = rank_vectors(batch), wide_output(batch, 17, after)
    want = expected(batch, h, old, offset, add)
    y = batch.expand(h, old.clone(), b, offset_start=offset, add_inputs=add)
    assert_close(y, want, batch.dtype)
    bare, end = ~batch.has_adapter[:, 0], offset + sum(batch.widths)
    for kept in (lambda t: t[:, :offset], lambda t: t[:, end:], lambda t: t[bare]):
        assert torch.equal(kept(y), kept(old))


@pytest.mark.parametrize("chosen", [*EXPANDS, "by the estimate"])
@pytest.mark.parametrize("add", [True, False], ids=["add", "overwrite"])
@pytest.mark.parametrize("shape", EXPAND_SHAPES, ids=lambda s: f"T{s[0]}-N{s[1][0]}-n{len(s[1])}-r{s[2]}-L{s[3]}")
def test_expand(shape, add, chosen, device, use_schedules):
    use_schedules(expand=EXPANDS.get(chosen))
    tokens, widths, rank, slot_count, dtype = shape
    batch = Batch(random_slots(tokens, slot_count), 16, widths, rank, slot_count, dtype, device)
    batch.poison()
    check(batch, add)


@pytest.mark.parametrize("offsets", [(0, 17), (17, 0)], ids=str)
def test_one_weight_set_at_two_offsets(offsets, device):
    batch = Batch([0, 1, -1], 16, (33,), 8, 2, FP16, device)
    for offset in offsets:
        check(batch, offset=offset, after=0)


@pytest.mark.parametrize(("in_dtype", "out_dtype"), [(FP32, FP16), (FP32, BF16), (BF16, BF16), (BF16, FP32)], ids=str)
def test_dtypes_of_expand(in_dtype, out_dtype, expand_form, device):
    batch = Batch([0, 1, -1, 1], 16, (40,), 16, 2, BF16, device)
    h, old = rank_vectors(batch, in_dtype), torch.randn(4, 40).to(out_dtype).to(device)
    y = batch.expand(h, old.clone(), add_inputs=True)
    assert_close(y, expected(batch, h, old, 0), out_dtype if out_dtype != FP32 else BF16)


def test_expand_reads_no_lane_beyond_true_ranks(expand_form, device):
    ranks = [[8, 20, 64, 0], [64, 0, 8, 20]]
    batch = Batch([0, 1, 2, 3, -1, 2, 0], 16, (40, 70), 64, 4, FP16, device, ranks=ranks)
    h, old = rank_vectors(batch), wide_output(batch, 0, 0)
    batch.poison(ranks=True)
    for (i, of_slice), (t, slot) in ((a, b) for a in enumerate(ranks) for b in enumerate(batch.slots) if b[1] >= 0):
        h[i, t, of_slice[slot] :] = float("nan")
    y = batch.expand(h, old.clone(), add_inputs=True, lora_ranks=batch.lora_ranks)
    assert_close(y, expected(batch, h, old, 0), FP16)


def test_rank_zero_overwrites_with_zeros(expand_form, device):
    batch = Batch([0, -1, 1], 16, (40,), 64, 2, FP16, device, ranks=[[0, 64]])
    y = torch.full((3, 40), MARKER, dtype=FP16, device=device)
    batch.expand(rank_vectors(batch), y, lora_ranks=batch.lora_ranks)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert torch.equal(y[1], torch.full_like(y[1], MARKER))


def test_column_view_of_y_and_strided_input(expand_form, device):
    batch = Batch([0, 1, -1, 1, 0], 16, (33,), 20, 2, FP16, device)
    whole, h = torch.randn(5, 60).half().to(device), rank_vectors(batch)
    old, strided = whole.clone(), h.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    batch.expand(strided, whole[:, 10:43], add_inputs=True)
    assert_close(whole, expected(batch, h, old, 10), FP16)


@pytest.mark.parametrize("widths", [(33, 40), (33, 1), (1, 1)], ids=str)
def test_weights_stored_rank_major(expand_form, widths, device):
    """A slice of width 1 has the strides of either storage, and goes with any other."""
    batch = Batch([0, 1, -1, 1], 16, widths, 20, 2, FP16, device)
    check(batch, b=tuple(b.transpose(-1, -2).contiguous().transpose(-1, -2) for b in batch.b))


def test_nothing_to_expand(device):
    bare, batch, empty = (Batch(slots, 16, (40,), 16, 2, FP16, device) for slots in ([-1, -1], [0, 1], []))
    empty.args = [*empty.args[:5], torch.tensor([False])]
    for one, count in ((bare, bare.count["num_active_loras"]), (batch, 0), (empty, None)):
        old = wide_output(one)
        y = one.expand(rank_vectors(one), old.clone(), add_inputs=False, num_active_loras=count)
        assert torch.equal(y, old)
