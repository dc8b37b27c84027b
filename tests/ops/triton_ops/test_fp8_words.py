"""FP8 weights read as words, of rows and of tiles: every code, both formats, widths that fill words and widths that do
not.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton_batches import EXPANDS, SHRINKS, assert_close

sys.path.insert(0, str(Path(__file__).parents[1]))

from fp8_batches import E4M3, E5M2, MODES, Stack, by_ranks, product, step

from punica.metadata import StepShape
from punica.ops.fp8_checks import PER_CHANNEL, Scheme
from punica.ops.triton_ops import Options, linear_fp8
from punica.ops.triton_ops.configs import choose
from punica.ops.triton_ops.fp8_device import fp8_format
from punica.ops.triton_ops.fp8_rules import expand_in_fp8
from punica.ops.triton_ops.fp8_words import _unpacked, _wide_words
from punica.ops.triton_ops.launch import INTERPRETED

FP16 = torch.float16
SLOTS = [0, 1, 0, -1, 2, 1, 0, 2]


@triton.jit
def _four_tensors(words_ptr, wide_ptr, FORMAT: tl.constexpr, NATIVE: tl.constexpr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    a, b, c, d = _wide_words(tl.load(words_ptr + offs)[:, None], FORMAT, NATIVE)
    lanes = tl.arange(0, 1)[None, :]
    tl.store(wide_ptr + offs[:, None] * 4 + lanes, a)
    tl.store(wide_ptr + offs[:, None] * 4 + lanes + 1, b)
    tl.store(wide_ptr + offs[:, None] * 4 + lanes + 2, c)
    tl.store(wide_ptr + offs[:, None] * 4 + lanes + 3, d)


@pytest.mark.parametrize("native", [False, True], ids=["by their bits", "by instructions"])
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_every_code_in_every_place(fp8, native, device):
    if native and (INTERPRETED or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("only GPUs of compute capability 8.9 and newer have these instructions")
    codes = torch.arange(256, dtype=torch.uint8)
    places = torch.stack([codes.roll(shift) for shift in (0, 1, 7, 100)], 1).contiguous()
    found = torch.empty(256, 4, device=device)
    _four_tensors[(1,)](places.view(torch.int32).flatten().to(device), found, fp8_format(fp8), native, 256)
    expected, found = places.view(fp8).float(), found.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(found[finite], expected[finite])
    assert torch.equal(found[finite].signbit(), expected[finite].signbit())


@triton.jit
def _unpack_in_pairs(words_ptr, wide_ptr, FORMAT: tl.constexpr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    a, b, c, d = _unpacked(tl.load(words_ptr + offs), FORMAT)
    tl.store(wide_ptr + offs * 4, a)
    tl.store(wide_ptr + offs * 4 + 1, b)
    tl.store(wide_ptr + offs * 4 + 2, c)
    tl.store(wide_ptr + offs * 4 + 3, d)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_every_code_of_two_words_at_a_time(fp8, device):
    if INTERPRETED or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("only GPUs of compute capability 8.9 and newer have these instructions")
    codes = torch.arange(256, dtype=torch.uint8)
    places = torch.stack([codes.roll(shift) for shift in (0, 1, 7, 100)], 1).contiguous()
    found = torch.empty(256, 4, dtype=FP16, device=device)
    _unpack_in_pairs[(1,)](places.view(torch.int32).flatten().to(device), found, fp8_format(fp8), 256)
    expected, found = places.view(fp8).half(), found.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(found[finite].view(torch.int16), expected[finite].view(torch.int16))


@pytest.fixture
def as_configured(monkeypatch, use_config):
    """`use_config`, past the rule for FP8, which has blocks of its own."""
    module = import_module("punica.ops.triton_ops.lora_linear_fp8")
    for name in ("shrink_in_fp8", "expand_in_fp8"):
        monkeypatch.setattr(module, name, lambda config, *_: config)
    return use_config


@pytest.mark.parametrize("ahead", [False, True], ids=["by rank", "ahead"])
@pytest.mark.parametrize("lanes", [8, 16, 32])
@pytest.mark.parametrize("widths", [(152,), (96, 40, 4), (33, 96)], ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_rows_with_true_ranks_and_poison(fp8, widths, lanes, ahead, device, as_configured):
    """Neither slots that are not asked for, nor ranks beyond an adapter's own, nor their scales are read, whether a
    program takes all ranks at once or block by block.
    """
    as_configured(shrink=SHRINKS["rows"], expand=EXPANDS["rows"] | {"block_k": lanes, "ahead": ahead})
    rank, ranks = 24, [5, 24, 0]
    mode = MODES["channel"]
    a, b = ([Stack.random(3, *shape, mode, fp8, device) for shape in shapes]
            for shapes in ([(rank, 100)] * len(widths), [(width, rank) for width in widths]))  # fmt: skip
    real = [(first.real(), second.real()) for first, second in zip(a, b, strict=True)]
    for slot, live in enumerate(ranks):
        for first, second in zip(a, b, strict=True):
            first.stored[slot, :, live:] = second.stored[slot, :, :, live:] = float("nan")
            first.scale[slot, live:] = float("nan")
    x, total = torch.randn(len(SLOTS), 100).half().to(device), sum(widths)
    before = torch.randn(len(SLOTS), total).half().to(device)
    y = before.clone()
    linear_fp8(
        y, x, [s.stored for s in a], [by_ranks(s.stored) for s in b], step(SLOTS, device), 0.5,
        lora_a_scale=[s.scale for s in a], lora_b_scale=[s.scale for s in b], shrink=PER_CHANNEL, expand=PER_CHANNEL,
        lora_ranks=torch.tensor([ranks] * len(widths), dtype=torch.int32, device=device),
    )  # fmt: skip
    deltas = []
    for a_real, b_real in real:
        h = 0.5 * product(x.cpu().double(), a_real, SLOTS, ranks, True)
        deltas.append(product(h, b_real, SLOTS, ranks, False))
    assert_close(y, before.cpu().double() + torch.cat(deltas, 1), FP16)
    bare = torch.tensor(SLOTS) < 0
    assert torch.equal(y[bare], before[bare])


@pytest.mark.parametrize("rank", [16, 100])
def test_a_prompt_beside_rows_as_the_rule_has_it(rank, device):
    """Rows of a mixed step take fewer ranks at once, at rank 16 ahead of the true rank, which poison stands behind."""
    slots, ranks = [2] * 70 + [0, 1] * 5, [rank - 3, 7, rank]
    a, b = (Stack.random(3, *shape, MODES["channel"], E4M3, device) for shape in ((rank, 64), (520, rank)))
    a_real, b_real = a.real(), b.real()
    for slot, live in enumerate(ranks):
        a.stored[slot, :, live:] = b.stored[slot, :, :, live:] = float("nan")
        a.scale[slot, live:] = float("nan")
    x, y = torch.randn(len(slots), 64).half().to(device), torch.zeros(len(slots), 520, dtype=FP16, device=device)
    linear_fp8(
        y, x, [a.stored], [by_ranks(b.stored)], step(slots, device, rows=len(slots)), 0.5,
        lora_a_scale=[a.scale], lora_b_scale=[b.scale],
        shrink=PER_CHANNEL, expand=PER_CHANNEL, lora_ranks=torch.tensor([ranks], dtype=torch.int32, device=device),
    )  # fmt: skip
    h = 0.5 * product(x.cpu().double(), a_real, slots, ranks, True)
    assert_close(y, product(h, b_real, slots, ranks, False), FP16)


TILES = EXPANDS["tiles"] | {"in_words": True, "block_n": 128}
"""Tiles that read words: 16 rows of 32 words, or as a test has it."""


def _checked_tiles(sizes, widths, rank, ranks, fp8, dtype, device, add_inputs=True, calls=1, **options):
    """A step of so many rows of each adapter (the first: of none) on weights whose ranks beyond ``ranks`` are NaN, some
    calls behind one another.
    """
    slots = [-1] * sizes[0] + [slot for slot, rows in enumerate(sizes[1:]) for _ in range(rows)]
    slots = slots[1::2] + slots[::2]  # so that an adapter's rows do not lie together
    a, b = ([Stack.random(len(ranks), *shape, MODES["channel"], fp8, device) for shape in shapes]
            for shapes in ([(rank, 64)] * len(widths), [(width, rank) for width in widths]))  # fmt: skip
    real = [(first.real(), second.real()) for first, second in zip(a, b, strict=True)]
    for slot, live in enumerate(ranks):
        for first, second in zip(a, b, strict=True):
            first.stored[slot, :, live:] = second.stored[slot, :, :, live:] = float("nan")
            first.scale[slot, live:] = float("nan")
    x, before = (torch.randn(len(slots), size).to(dtype).to(device) for size in (64, sum(widths)))
    y, batch = before.clone(), step(slots, device, rows=len(slots))
    stored = [s.stored for s in a], [by_ranks(s.stored) for s in b]
    true = torch.tensor([ranks] * len(widths), dtype=torch.int32, device=device)
    for _ in range(calls):
        linear_fp8(
            y, x, *stored, batch, 0.5, lora_a_scale=[s.scale for s in a], lora_b_scale=[s.scale for s in b],
            shrink=PER_CHANNEL, expand=PER_CHANNEL, lora_ranks=true, add_inputs=add_inputs, **options,
        )  # fmt: skip
    deltas = []
    for a_real, b_real in real:
        h = 0.5 * product(x.cpu().double(), a_real, slots, ranks, True)
        deltas.append(product(h, b_real, slots, ranks, False))
    bare = torch.tensor(slots) < 0
    expected = calls * torch.cat(deltas, 1) + before.cpu().double() if add_inputs else torch.cat(deltas, 1)
    assert_close(y[~bare], expected[~bare], dtype)
    assert torch.equal(y[bare], before[bare])


@pytest.mark.parametrize(
    "blocks",
    [(16, 128, 1, 1), (16, 128, 3, 2), (32, 256, 1, 3), (32, 256, 2, 3), (16, 64, 2, 4)],
    ids=["one block", "three of 128", "one of 256", "two of 256", "as many words as rows"],
)
@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_tiles_with_true_ranks_and_poison(fp8, dtype, blocks, device, as_configured):
    """Tiles full and short, of which neither other slots nor ranks beyond an adapter's own are read; slices whose last
    blocks reach beyond their columns.
    """
    block_m, block_n, tiles_n, stages = blocks
    config = {"block_m": block_m, "block_n": block_n, "tiles_n": tiles_n, "num_stages": stages}
    as_configured(shrink=SHRINKS["tiles"], expand=TILES | config)
    _checked_tiles([3, 37, 16, 9], (300, 68), 24, [5, 24, 0], fp8, dtype, device)


@pytest.mark.parametrize("add_inputs", [True, False], ids=["added", "overwritten"])
def test_tiles_of_whole_blocks(add_inputs, device, as_configured):
    as_configured(shrink=SHRINKS["tiles"] | {"split_k": 2, "block_k": 16}, expand=TILES | {"tiles_n": 2})
    _checked_tiles([0, 32, 48], (256, 512), 64, [64, 30], E4M3, FP16, device, add_inputs)


def test_tiles_as_the_rule_has_them(device):
    _checked_tiles([2, 160, 100], (192,), 16, [16, 7], E4M3, FP16, device)


@pytest.mark.parametrize("rows", [260, 1000, 1500, 5000])
@pytest.mark.parametrize("rank", [16, 17, 64])
def test_how_the_rule_reads_prefills(rows, rank):
    """In words wherever tiles have more of them than rows, which is what sets warps side by side."""
    for widths in ((64,), (4096,), (11008, 11008), (4096, 128, 128)):
        shape = StepShape(2, 0, rows // 2)
        config = choose("expand", shape, rows, max(widths), rank, len(widths), Options(), True, 2, False)
        config = expand_in_fp8(config, shape, rows, widths, rank)
        assert config.get("in_words", False) == (rows >= 4096 or (rows < 1024) == (rank <= 32))
        if config.get("in_words"):
            assert config["block_n"] // 4 > config["block_m"]
            assert not config["ahead"]
            assert not config["weights_left"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [16, 32, 64])
@pytest.mark.parametrize("sizes", [(3, 300, 212), (0, 1500, 548), (5, 4100, 17, 30)], ids=str)
def test_prefills_of_full_size(sizes, rank, dtype):
    """As the rule has them: y is read before the kernel in front has ended, which the calls in front have written."""
    ranks = [rank, 7, 5][: len(sizes) - 1]
    for widths in ((1024,), (640, 64, 64)):
        _checked_tiles(sizes, widths, rank, ranks, E4M3, dtype, "cuda", calls=4)
    _checked_tiles(sizes, (1024,), rank, ranks, E5M2, dtype, "cuda", calls=2, options=Options(pdl=False))
    _checked_tiles(sizes, (1024,), rank, ranks, E4M3, dtype, "cuda", aside=nullcontext)


def test_a_scale_per_slot_and_overwriting(device, as_configured):
    as_configured(shrink=SHRINKS["rows"], expand=EXPANDS["rows"])
    mode = MODES["tensor"]
    a, b = Stack.random(3, 16, 64, mode, E4M3, device), Stack.random(3, 72, 16, mode, E4M3, device)
    x, y = torch.randn(len(SLOTS), 64).half().to(device), torch.full((len(SLOTS), 72), 7.0, dtype=FP16, device=device)
    linear_fp8(
        y, x, [a.stored], [by_ranks(b.stored)], step(SLOTS, device), 1.0, lora_a_scale=[a.scale],
        lora_b_scale=[b.scale], shrink=Scheme(), expand=Scheme(), add_inputs=False,
    )  # fmt: skip
    expected = product(product(x.cpu().double(), a.real(), SLOTS, None, True), b.real(), SLOTS, None, False)
    bare = torch.tensor(SLOTS) < 0
    assert_close(y[~bare], expected[~bare], FP16)
    assert torch.equal(y[bare], torch.full((1, 72), 7.0, dtype=FP16, device=device))


@pytest.mark.parametrize(("width", "offset", "kernels"), [(64, 0, "words"), (66, 0, "own"), (64, 1, "own")])
def test_what_goes_by_words(width, offset, kernels, device, monkeypatch):
    """What does not fill its words, or does not begin with one, takes FP8's own kernels: no word reaches into the next
    rank or lies across two.
    """
    module = import_module("punica.ops.triton_ops.lora_linear_fp8")
    seen = []
    plain, own = module.plan_linear, module.plan_expand_fp8
    monkeypatch.setattr(module, "plan_linear", lambda *args, **given: seen.append("words") or plain(*args, **given))
    monkeypatch.setattr(module, "plan_expand_fp8", lambda *args, **given: seen.append("own") or own(*args, **given))
    a, b = (Stack.random(3, *shape, MODES["channel"], E4M3, device) for shape in ((16, 48), (width, 16)))
    room = torch.zeros(offset + b.stored.numel(), dtype=torch.uint8, device=device)
    view = room[offset:].view(E4M3).view(3, 1, 16, width)
    view.copy_(b.stored.mT)
    x, y = torch.randn(len(SLOTS), 48).half().to(device), torch.zeros(len(SLOTS), width, dtype=FP16, device=device)
    linear_fp8(
        y, x, [a.stored], [view.mT], step(SLOTS, device), 1.0, lora_a_scale=[a.scale], lora_b_scale=[b.scale],
        shrink=PER_CHANNEL, expand=PER_CHANNEL,
    )  # fmt: skip
    assert seen == [kernels]
    expected = product(product(x.cpu().double(), a.real(), SLOTS, None, True), b.real(), SLOTS, None, False)
    assert_close(y, expected, FP16)
