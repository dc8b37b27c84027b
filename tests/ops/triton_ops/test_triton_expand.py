"""`lora_expand` against float64: forms, slices, offsets, layouts, ranks, what it must not touch."""

import pytest
import torch
from triton_batches import EXPANDS, Batch, assert_close, random_slots

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(1, (16,), 1, 1, FP16), (3, (7, 5, 3), 20, 128, BF16), (16, (100, 33), 8, 8, FP16), (17, (64,), 24, 2, FP32),
          (5, (33,) * 8, 4, 2, FP16), (20, (130,), 136, 2, BF16)]  # fmt: skip
if torch.cuda.is_available():
    SHAPES += [(128, (4096, 1024, 1024), 64, 8, BF16), (257, (11008,), 16, 2, FP16), (33, (2049,), 256, 1, FP32),
               (1024, (128, 100), 96, 128, FP16)]  # fmt: skip
MARKER = 3.25


@pytest.fixture(params=EXPANDS)
def form(request, use_schedules) -> None:
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
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-N{'+'.join(map(str, s[1][:3]))}-r{s[2]}-L{s[3]}")
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
def test_dtypes(in_dtype, out_dtype, form, device):
    batch = Batch([0, 1, -1, 1], 16, (40,), 16, 2, BF16, device)
    h, old = rank_vectors(batch, in_dtype), torch.randn(4, 40).to(out_dtype).to(device)
    y = batch.expand(h, old.clone(), add_inputs=True)
    assert_close(y, expected(batch, h, old, 0), out_dtype if out_dtype != FP32 else BF16)


def test_true_ranks_read_no_lane_beyond(form, device):
    ranks = [[8, 20, 64, 0], [64, 0, 8, 20]]
    batch = Batch([0, 1, 2, 3, -1, 2, 0], 16, (40, 70), 64, 4, FP16, device, ranks=ranks)
    h, old = rank_vectors(batch), wide_output(batch, 0, 0)
    batch.poison(ranks=True)
    for (i, of_slice), (t, slot) in ((a, b) for a in enumerate(ranks) for b in enumerate(batch.slots) if b[1] >= 0):
        h[i, t, of_slice[slot] :] = float("nan")
    y = batch.expand(h, old.clone(), add_inputs=True, lora_ranks=batch.lora_ranks)
    assert_close(y, expected(batch, h, old, 0), FP16)


def test_rank_zero_overwrites_with_zeros(form, device):
    batch = Batch([0, -1, 1], 16, (40,), 64, 2, FP16, device, ranks=[[0, 64]])
    y = torch.full((3, 40), MARKER, dtype=FP16, device=device)
    batch.expand(rank_vectors(batch), y, lora_ranks=batch.lora_ranks)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert torch.equal(y[1], torch.full_like(y[1], MARKER))


def test_column_view_of_y_and_strided_input(form, device):
    batch = Batch([0, 1, -1, 1, 0], 16, (33,), 20, 2, FP16, device)
    whole, h = torch.randn(5, 60).half().to(device), rank_vectors(batch)
    old, strided = whole.clone(), h.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    batch.expand(strided, whole[:, 10:43], add_inputs=True)
    assert_close(whole, expected(batch, h, old, 10), FP16)


@pytest.mark.parametrize("widths", [(33, 40), (33, 1), (1, 1)], ids=str)
def test_weights_stored_rank_major(form, widths, device):
    """A slice of width 1 has the strides of either storage, and goes with any other."""
    batch = Batch([0, 1, -1, 1], 16, widths, 20, 2, FP16, device)
    check(batch, b=tuple(b.transpose(-1, -2).contiguous().transpose(-1, -2) for b in batch.b))


def test_nothing_to_do_writes_nothing(device):
    bare, batch, empty = (Batch(slots, 16, (40,), 16, 2, FP16, device) for slots in ([-1, -1], [0, 1], []))
    empty.args = [*empty.args[:5], torch.tensor([False])]
    for one, count in ((bare, bare.count["num_active_loras"]), (batch, 0), (empty, None)):
        old = wide_output(one)
        y = one.expand(rank_vectors(one), old.clone(), add_inputs=False, num_active_loras=count)
        assert torch.equal(y, old)
