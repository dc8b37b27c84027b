"""`lora_shrink` against float64: forms, shapes, layouts, ranks, what it must not touch."""

import pytest
import torch
from triton_batches import SHRINKS, Batch, assert_shrunk, random_slots

from punica.ops.triton_ops import lora_shrink

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
GPU_SHAPES = [
    (257, 4096, (4096,), 64, 8, BF16),
    (128, 11008, (128,) * 3, 16, 2, FP16),
    (1024, 2049, (100,), 96, 8, FP16),
    (16, 2048, (16,) * 8, 256, 1, FP32),
]
SHAPES = [
    (1, 16, (16,), 1, 1, FP16),
    (3, 100, (16,), 20, 128, BF16),
    (16, 128, (33, 7), 8, 8, FP16),
    (33, 130, (16,), 24, 2, FP32),
    (17, 64, (16,) * 3, 96, 2, FP16),
] + (GPU_SHAPES if torch.cuda.is_available() else [])


@pytest.fixture(params=SHRINKS.values(), ids=tuple(SHRINKS))
def form(request, use_schedules) -> None:
    """Run the test in every form."""
    use_schedules(shrink=request.param)


def make(shape: tuple, device: str, **options: object) -> Batch:
    tokens, k, widths, rank, slot_count, dtype = shape
    return Batch(random_slots(tokens, slot_count), k, widths, rank, slot_count, dtype, device, **options)  # type: ignore[arg-type]


def output(batch: Batch, fill: float = float("nan"), dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.full((len(batch.widths), batch.tokens, batch.rank), fill, dtype=dtype, device=batch.device)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-K{s[1]}-n{len(s[2])}-r{s[3]}-L{s[4]}")
def test_overwrites_a_poisoned_buffer(shape, form, device):
    batch, out = (made := make(shape, device)), output(made)
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **batch.count)
    assert_shrunk(out, batch.shrunk())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-K{s[1]}-n{len(s[2])}-r{s[3]}-L{s[4]}")
def test_default_configuration(shape, device):
    batch = make(shape, device)
    out = output(batch)
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **batch.count)
    assert_shrunk(out, batch.shrunk())


def test_accumulates_and_leaves_bare_rows_alone(form, device):
    batch = Batch([1, -1, 0, 1, -1], 100, (16, 16), 20, 2, FP16, device)
    before = torch.randn(2, 5, 20).to(device)
    out = before.clone()
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **batch.count, accumulate=True)
    assert_shrunk(out, before.cpu().double() + batch.shrunk())
    bare = ~batch.has_adapter[:, 0]
    assert torch.equal(out[:, bare], before[:, bare])


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_16_bit_output(form, dtype, device):
    batch = Batch([0, 1, -1, 1], 128, (16,), 16, 2, dtype, device)
    out = output(batch, dtype=dtype)
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **batch.count)
    torch.testing.assert_close(out.cpu().double(), batch.shrunk(), rtol=1e-2, atol=1e-2)


def test_true_ranks_read_no_lane_beyond(form, device):
    ranks = [[8, 20, 64, 0], [64, 0, 8, 20]]
    batch = Batch([0, 1, 2, 3, -1, 2, 0], 100, (16, 16), 64, 4, FP16, device, ranks=ranks)
    for i, of_slice in enumerate(ranks):
        for slot, rank in enumerate(of_slice):
            batch.a[i][slot, :, rank:] = float("nan")
    out = output(batch)
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **batch.count, lora_ranks=batch.lora_ranks)
    assert_shrunk(out, batch.shrunk())


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_any_strides_of_x(layout, form, device):
    batch = Batch([0, 1, -1, 1, 0, 0, 1], 100, (16,), 20, 2, FP16, device)
    if layout == "transposed":
        view = batch.x.T.contiguous().T
    elif layout == "strided":
        view = torch.stack([batch.x, batch.x + 1], -1)[..., 0]
    else:
        view = batch.x[:1].expand(7, -1)
    out, expected = output(batch), output(batch)
    lora_shrink(view, batch.a, out, *batch.args, 0.5, **batch.count)
    lora_shrink(view.contiguous(), batch.a, expected, *batch.args, 0.5, **batch.count)
    assert torch.equal(out, expected)


def test_weights_stored_rank_last(form, device):
    batch = Batch([0, 1, -1, 1], 100, (16, 16), 20, 2, FP16, device)
    transposed = tuple(a.transpose(-1, -2).contiguous().transpose(-1, -2) for a in batch.a)
    out = output(batch)
    lora_shrink(batch.x, transposed, out, *batch.args, 0.5, **batch.count)
    assert_shrunk(out, batch.shrunk())


def test_other_slots_are_never_read(form, device):
    batch = Batch([3, 3, 5, -1], 100, (16,), 20, 8, FP16, device)
    for slot in (0, 1, 2, 4, 6, 7):
        batch.a[0][slot] = float("nan")
    out = output(batch)
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **batch.count)
    assert torch.isfinite(out).all()
    assert_shrunk(out, batch.shrunk())


def test_float32_products_are_ieee(form, device):
    batch = Batch([0] * 16, 2048 if device == "cuda" else 256, (16,), 16, 1, FP32, device)
    out = output(batch)
    lora_shrink(batch.x, batch.a, out, *batch.args, 1.0, **batch.count)
    expected = batch.shrunk() * 2
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < 2e-6, f"relative error {error:.1e}: TF32 products leave about 3e-4"


@pytest.mark.parametrize(
    "slots", [[0, 1, 2, 3, 4, 5, 6, 7], [2] * 40, [1], [-1, -1, 3]], ids=["each", "one", "T1", "bare"]
)
def test_distributions(slots, form, device):
    batch = Batch(slots, 64, (16,), 16, 8, FP16, device)
    out = output(batch)
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **batch.count)
    assert_shrunk(out, batch.shrunk())


def test_flag_set_writes_nothing(device):
    batch = Batch([-1, -1], 64, (16,), 16, 2, FP16, device)
    out = output(batch, 7.0)
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **batch.count)
    assert torch.equal(out, output(batch, 7.0))


def test_no_tokens_and_no_active_adapters(device):
    empty = Batch([], 64, (16,), 16, 2, FP16, device)
    args = (*empty.args[:5], torch.tensor([False]))
    lora_shrink(empty.x, empty.a, output(empty), *args, 0.5, num_active_loras=0)
    batch = Batch([0, 1], 64, (16,), 16, 2, FP16, device)
    out = output(batch)
    lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, num_active_loras=0)
    assert torch.equal(out, torch.zeros_like(out))


def test_count_may_be_left_out(device):
    batch = Batch([0, 1, -1], 64, (16,), 16, 2, FP16, device)
    results = []
    for more in (
        {},
        batch.count,
        {"num_active_loras": 3},
        {"num_active_loras": torch.tensor([3]), "accumulate": False},
    ):
        out = output(batch)
        lora_shrink(batch.x, batch.a, out, *batch.args, 0.5, **more)
        results.append(out)
    out = output(batch)
    lora_shrink(batch.x, batch.a, out, *batch.args, scaling=0.5)
    results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_stale_sorted_entries_are_ignored(form, device):
    """A captured graph covers more rows than a shorter step has; its further rows are at -1 and in no segment."""
    batch = Batch([0, 1, 1, 0, 1], 64, (16,), 16, 2, FP16, device)
    batch.meta.prepare_tensors(torch.tensor([1, -1, 1]))
    out = output(batch)
    lora_shrink(batch.x, batch.a, out, *batch.meta.meta_args(5)[:6], 0.5, **batch.count)
    batch.slots = [1, -1, 1, -1, -1]
    assert_shrunk(out, batch.shrunk())
