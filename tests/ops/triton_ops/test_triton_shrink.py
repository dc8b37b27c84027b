"""`lora_shrink` against float64: forms, shapes, layouts, ranks, what it must not touch."""

import pytest
import torch
from triton_batches import SHRINKS, Batch, assert_shrunk, random_slots

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(1, 16, (16,), 1, 1, FP16), (3, 100, (16,), 20, 128, BF16), (16, 128, (33, 7), 8, 8, FP16),
          (33, 130, (16,), 24, 2, FP32), (17, 64, (16,) * 3, 96, 2, FP16)]  # fmt: skip
if torch.cuda.is_available():
    SHAPES += [(257, 4096, (4096,), 64, 8, BF16), (128, 11008, (128,) * 3, 16, 2, FP16),
               (1024, 2049, (100,), 96, 8, FP16), (16, 2048, (16,) * 8, 256, 1, FP32)]  # fmt: skip


@pytest.fixture(params=SHRINKS)
def form(request, use_schedules) -> None:
    """Run the test in every form."""
    use_schedules(shrink=SHRINKS[request.param])


def output(batch: Batch, fill: float = float("nan"), dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.full((len(batch.widths), batch.tokens, batch.rank), fill, dtype=dtype, device=batch.device)


@pytest.mark.parametrize("chosen", [*SHRINKS, "by the estimate"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-K{s[1]}-n{len(s[2])}-r{s[3]}-L{s[4]}")
def test_overwrites_a_poisoned_buffer_and_reads_no_other_slot(shape, chosen, device, use_schedules):
    use_schedules(shrink=SHRINKS.get(chosen))
    tokens, k, widths, rank, slot_count, dtype = shape
    batch = Batch(random_slots(tokens, slot_count), k, widths, rank, slot_count, dtype, device)
    expected = batch.shrunk()
    batch.poison()
    assert_shrunk(batch.shrink(output(batch)), expected)


def test_accumulates_and_leaves_bare_rows_alone(form, device):
    batch = Batch([1, -1, 0, 1, -1], 100, (16, 16), 20, 2, FP16, device)
    before = torch.randn(2, 5, 20).to(device)
    out = batch.shrink(before.clone(), accumulate=True)
    assert_shrunk(out, before.cpu().double() + batch.shrunk())
    bare = ~batch.has_adapter[:, 0]
    assert torch.equal(out[:, bare], before[:, bare])


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_16_bit_output(form, dtype, device):
    batch = Batch([0, 1, -1, 1], 128, (16,), 16, 2, dtype, device)
    out = batch.shrink(output(batch, dtype=dtype))
    torch.testing.assert_close(out.cpu().double(), batch.shrunk(), rtol=1e-2, atol=1e-2)


def test_true_ranks_read_no_lane_beyond(form, device):
    ranks = [[8, 20, 64, 0], [64, 0, 8, 20]]
    batch = Batch([0, 1, 2, 3, -1, 2, 0], 100, (16, 16), 64, 4, FP16, device, ranks=ranks)
    batch.poison(ranks=True)
    assert_shrunk(batch.shrink(output(batch), lora_ranks=batch.lora_ranks), batch.shrunk())


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_any_strides_of_x(layout, form, device):
    batch = Batch([0, 1, -1, 1, 0, 0, 1], 100, (16,), 20, 2, FP16, device)
    view = {
        "transposed": batch.x.T.contiguous().T, "strided": torch.stack([batch.x, batch.x + 1], -1)[..., 0],
        "expanded": batch.x[:1].expand(7, -1),
    }[layout]  # fmt: skip
    assert torch.equal(batch.shrink(output(batch), view), batch.shrink(output(batch), view.contiguous()))


def test_weights_stored_rank_last(form, device):
    batch = Batch([0, 1, -1, 1], 100, (16, 16), 20, 2, FP16, device)
    transposed = tuple(a.transpose(-1, -2).contiguous().transpose(-1, -2) for a in batch.a)
    assert_shrunk(batch.shrink(output(batch), a=transposed), batch.shrunk())


def test_float32_products_are_ieee(form, device):
    batch = Batch([0] * 16, 2048 if device == "cuda" else 256, (16,), 16, 1, FP32, device, scaling=1.0)
    expected = batch.shrunk()
    error = (batch.shrink(output(batch)).cpu().double() - expected).norm() / expected.norm()
    assert error < 2e-6, f"relative error {error:.1e}: TF32 products leave about 3e-4"


def test_nothing_to_do(device):
    bare = Batch([-1, -1], 64, (16,), 16, 2, FP16, device)
    assert torch.equal(bare.shrink(output(bare, 7.0)), output(bare, 7.0))  # with the flag set nothing is written
    empty = Batch([], 64, (16,), 16, 2, FP16, device)
    empty.args = [*empty.args[:5], torch.tensor([False])]
    empty.shrink(output(empty), num_active_loras=0)
    batch = Batch([0, 1], 64, (16,), 16, 2, FP16, device)
    assert torch.equal(batch.shrink(output(batch), num_active_loras=0), output(batch, 0.0))


def test_stale_sorted_entries_are_ignored(form, device):
    """A captured graph covers more rows than a shorter step has; its further rows are at -1 and in no segment."""
    batch = Batch([0, 1, 1, 0, 1], 64, (16,), 16, 2, FP16, device)
    batch.meta.prepare_tensors(torch.tensor([1, -1, 1]))
    batch.args = batch.meta.meta_args(5)[:6]
    out = batch.shrink(output(batch))
    batch.slots = [1, -1, 1, -1, -1]
    assert_shrunk(out, batch.shrunk())
