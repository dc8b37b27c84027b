"""`lora_linear` (both kernels with partial sums): every pair of forms, splits, determinism and batch invariance."""

import itertools

import pytest
import torch
from triton_batches import EXPANDS, SHRINKS, TOLERANCE, Batch, assert_close, random_slots

from punica.ops.triton_ops import lora_expand, lora_linear, lora_shrink

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def expected(batch: Batch, old: torch.Tensor, add: bool = True) -> torch.Tensor:
    delta = batch.expanded(batch.shrunk())
    before = old.cpu().double()
    return torch.where(batch.has_adapter, delta + (before if add else 0), before)


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize(("shrink", "expand"), list(itertools.product(SHRINKS, EXPANDS)))
def test_every_pair_of_forms(shrink, expand, split_k, device, use_schedules):
    use_schedules(shrink=SHRINKS[shrink]._replace(block_k=32, split_k=split_k), expand=EXPANDS[expand])
    batch = Batch(random_slots(19, 3), 200, (40, 33), 20, 3, FP16, device)
    y = batch.y.clone()
    lora_linear(y, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count)
    assert_close(y, expected(batch, batch.y), FP16)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("add", [True, False], ids=["add", "overwrite"])
def test_dtypes_with_default_configuration(dtype, add, device):
    batch = Batch(random_slots(9, 3), 130, (40, 24), 16, 3, dtype, device)
    y = batch.y.clone()
    lora_linear(y, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count, add_inputs=add)
    assert_close(y, expected(batch, batch.y, add), dtype)


@pytest.mark.parametrize(
    ("shrink", "expand"), [("rows", "rows"), ("tiles", "tiles"), ("rows", "walk"), ("tiles", "deep")]
)
def test_true_ranks_and_poisoned_lanes(shrink, expand, device, use_schedules):
    use_schedules(shrink=SHRINKS[shrink]._replace(split_k=2), expand=EXPANDS[expand])
    ranks = [[8, 20, 64, 0], [64, 0, 8, 20]]
    batch = Batch([0, 1, 2, 3, -1, 2, 0], 300, (40, 70), 64, 4, FP16, device, ranks=ranks)
    for i, of_slice in enumerate(ranks):
        for slot, rank in enumerate(of_slice):
            batch.a[i][slot, :, rank:] = float("nan")
            batch.b[i][slot, ..., rank:] = float("nan")
    y = batch.y.clone()
    lora_linear(y, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count, lora_ranks=batch.lora_ranks)
    assert_close(y, expected(batch, batch.y), FP16)


def test_true_ranks_share_programs(device, use_schedules, monkeypatch):
    """With enough rows one program takes several rank blocks, and wide adapters their columns in several steps."""
    from importlib import import_module

    shrink, expand = (import_module(f"punica.ops.triton_ops.{name}") for name in ("lora_shrink", "lora_expand"))
    assert shrink._rank_programs(32, 2, 64, 32) == 8
    assert shrink._rank_programs(32, 2, 64, 64) == 16
    assert shrink._rank_programs(32, 2, 1, 64) == 32
    assert expand._lane_blocks(64, 256, True, lambda n: 4096 // n * 64) == ((16, 32, 64), (1, 1, 2), 512)
    assert expand._lane_blocks(64, 64, True, lambda n: 11008 // n * 64) == ((16, 32, 64), (1, 2, 4), 256)
    assert expand._lane_blocks(64, 64, False, lambda n: 1) == ((64,), (1,), 64)
    monkeypatch.setattr(shrink, "_rank_programs", lambda blocks, block_r, others, rank: 2)
    monkeypatch.setattr(expand, "_lane_blocks", lambda rank, n, has_ranks, programs: ((16, 32, 64), (1, 2, 4), 64))
    use_schedules(shrink=SHRINKS["rows"]._replace(block_n=4, block_k=64), expand=EXPANDS["rows"])
    batch = Batch([0, 1, 2, 3, -1], 100, (150, 40), 64, 4, FP16, device, ranks=[[8, 20, 64, 0], [64, 33, 3, 20]])
    y = batch.y.clone()
    lora_linear(y, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count, lora_ranks=batch.lora_ranks)
    assert_close(y, expected(batch, batch.y), FP16)


def test_agrees_with_shrink_then_expand(device):
    batch = Batch(random_slots(12, 3), 128, (40,), 16, 3, FP16, device)
    fused, apart = batch.y.clone(), batch.y.clone()
    lora_linear(fused, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count)
    h = torch.empty(1, 12, 16, device=device)
    lora_shrink(batch.x, batch.a, h, *batch.args, 0.5, **batch.count)
    lora_expand(h, batch.b, apart, *batch.args, **batch.count, offset_start=0, add_inputs=True)
    rtol, atol = TOLERANCE[FP16]
    torch.testing.assert_close(fused, apart, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("shrink", "expand"), [("rows", "rows"), ("tiles", "tiles"), ("tiles", "walk")])
def test_the_same_bits_every_run(shrink, expand, device, use_schedules):
    use_schedules(shrink=SHRINKS[shrink]._replace(block_k=32, split_k=4), expand=EXPANDS[expand])
    batch = Batch(random_slots(40, 3), 256, (48,), 16, 3, FP16, device)
    results = []
    for _ in range(10 if device == "cuda" else 3):
        y = batch.y.clone()
        lora_linear(y, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count)
        results.append(y)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("rank", [16, 64])
def test_batch_invariance(rank, device):
    """One row's bits, alone, among 7, 33 and many rows of other adapters, at another place in the batch each time."""
    many = 1024 if device == "cuda" else 140
    k, width = (4096, 2048) if device == "cuda" else (128, 48)
    slots = random_slots(many, 4, seed=1)
    slots[20] = 2
    whole = Batch(slots, k, (width,), rank, 4, BF16, device)
    outcomes = []
    for rows in ([20], [3, 20, 7, 0, 1, 30, 31], list(range(33)), list(range(many))):
        part = Batch([slots[t] for t in rows], k, (width,), rank, 4, BF16, device)
        part.a, part.b = whole.a, whole.b
        y = whole.y[rows].clone()
        lora_linear(y, whole.x[rows], part.a, part.b, *part.args, 0.5, **part.count, batch_invariant=True)
        h = torch.empty(1, len(rows), rank, device=device)
        lora_shrink(whole.x[rows], part.a, h, *part.args, 0.5, **part.count, batch_invariant=True)
        outcomes.append((y[rows.index(20)], h[0, rows.index(20)]))
    for y, h in outcomes[1:]:
        assert torch.equal(y, outcomes[0][0])
        assert torch.equal(h, outcomes[0][1])


def test_freed_weights_with_another_shape_at_the_same_address(device):
    """Plans depend on shapes and strides, never on an address."""
    storage = torch.empty(3 * 2 * 32 * 128, dtype=FP16, device=device)
    for rank, k in ((32, 128), (16, 256), (64, 64), (8, 128)):
        batch = Batch([0, 1, -1, 1], k, (40,), rank, 2, FP16, device)
        a = storage[: batch.a[0].numel()].view(batch.a[0].shape).copy_(batch.a[0])
        y = batch.y.clone()
        lora_linear(y, batch.x, (a,), batch.b, *batch.args, 0.5, **batch.count)
        assert_close(y, expected(batch, batch.y), FP16)


def test_unaligned_views(device):
    """Addresses that are no multiple of 16 bytes take another way to the kernel."""
    batch = Batch([0, 1, -1, 1], 128, (40,), 16, 2, FP16, device)
    for _ in range(2):
        x = torch.empty(4 * 128 + 1, dtype=FP16, device=device)[1:].view(4, 128).copy_(batch.x)
        y = torch.empty(4 * 40 + 1, dtype=FP16, device=device)[1:].view(4, 40).copy_(batch.y)
        lora_linear(y, x, batch.a, batch.b, *batch.args, 0.5, **batch.count)
        assert_close(y, expected(batch, batch.y), FP16)
        aligned = batch.y.clone()
        lora_linear(aligned, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count)
        assert_close(aligned, expected(batch, batch.y), FP16)


def test_more_adapters_than_tokens_and_one_adapter(device):
    for slots in ([127, 0, 64], [5] * 20):
        batch = Batch(slots, 64, (24,), 8, 128, FP16, device)
        y = batch.y.clone()
        lora_linear(y, batch.x, batch.a, batch.b, *batch.args, 0.5, **batch.count)
        assert_close(y, expected(batch, batch.y), FP16)
