"""FP8 values as the kernels read them, exactly: every code of both formats in every wide type, one by one and by words;
rows and tiles in words, of widths that fill words and widths that do not.
"""

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
import triton
import triton.language as tl
from fp8_case import FP16, Case
from triton_batches import EXPANDS, SHRINKS, assert_close, linear

from punica.ops.scales import PER_CHANNEL
from punica.ops.triton_ops import Options
from punica.ops.triton_ops.fp8_device import TYPES, as_operand, dtype_named, fp8_format, upcast
from punica.ops.triton_ops.fp8_words import upcast_words
from punica.ops.triton_ops.launch import INTERPRETED
from punica.ops.triton_ops.schedules import Schedule
from punica.ops.weights import forget_plans
from punica.vllm.ops.dense import TensorBatch
from tests.ops.helpers import E4M3, E5M2, MODES, Fp8Stack, products, step

SLOTS = [0, 1, 0, -1, 2, 1, 0, 2]


@triton.jit
def _widen(stored_ptr, wide_ptr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    tl.store(wide_ptr + offs, upcast(tl.load(stored_ptr + offs), FORMAT, DTYPE))


@pytest.mark.parametrize("as_bytes", [False, True], ids=["as it comes", "by its bits"])
@pytest.mark.parametrize("wide", TYPES, ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_every_code(fp8, wide, as_bytes, device):
    codes = torch.arange(256, dtype=torch.uint8).view(fp8)
    stored, found = codes.to(device), torch.empty(256, dtype=wide, device=device)
    operand = stored.view(torch.uint8) if as_bytes else as_operand(stored)
    _widen[(1,)](operand, found, fp8_format(fp8), dtype_named(TYPES[wide]), 256)
    expected = codes.float()
    assert torch.equal(found.cpu().isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(found.cpu().float()[finite], expected[finite])
    assert torch.equal(found.cpu()[finite].signbit(), expected[finite].signbit())


@triton.jit
def _four_tensors(words_ptr, values_ptr, FORMAT: tl.constexpr, NATIVE: tl.constexpr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    a, b, c, d = upcast_words(tl.load(words_ptr + offs), FORMAT, NATIVE, values_ptr.dtype.element_ty)
    tl.store(values_ptr + offs * 4, a)
    tl.store(values_ptr + offs * 4 + 1, b)
    tl.store(values_ptr + offs * 4 + 2, c)
    tl.store(values_ptr + offs * 4 + 3, d)


@pytest.mark.parametrize("native", [False, True], ids=["by their bits", "by instructions"])
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_code_in_every_place(dtype, fp8, native, device):
    if native and (INTERPRETED or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("only GPUs of compute capability 8.9 and newer have these instructions")
    codes = torch.arange(256, dtype=torch.uint8)
    places = torch.stack([codes.roll(shift) for shift in (0, 1, 7, 100)], 1).contiguous()
    found = torch.empty(256, 4, dtype=dtype, device=device)
    _four_tensors[(1,)](places.view(torch.int32).flatten().to(device), found, fp8_format(fp8), native, 256)
    expected, found = places.view(fp8).to(dtype), found.cpu()
    finite = ~expected.isnan()
    assert torch.equal(found.isnan(), ~finite)
    assert torch.equal(found[finite], expected[finite])
    assert torch.equal(found[finite].signbit(), expected[finite].signbit())


def spread(*sizes):
    """Slots of so many rows of each adapter (the first: of none), where no adapter's rows lie together."""
    slots = [-1] * sizes[0] + [slot for slot, rows in enumerate(sizes[1:]) for _ in range(rows)]
    return slots[1::2] + slots[::2]


@pytest.mark.parametrize(
    ("fp8", "widths", "lanes"),
    [(E4M3, (152,), 8), (E4M3, (96, 40, 4), 16), (E4M3, (33, 96), 32), (E5M2, (152,), 32), (E5M2, (33, 96), 8)],
    ids=str,
)
def test_rows_with_true_ranks_and_poison(fp8, widths, lanes, device, use_schedules):
    """Neither slots that are not asked for, nor ranks beyond an adapter's own, nor their scales are read, whether a
    program takes all ranks at once or block by block.
    """
    use_schedules(shrink=SHRINKS["rows"], expand=EXPANDS["rows"]._replace(block_k=lanes))
    case = Case(SLOTS, widths, 24, [5, 24, 0], device, fp8, k=100)
    case.check(case.run(batch=step(SLOTS, device)))


@pytest.mark.parametrize("rank", [16, 100])
def test_a_prompt_beside_rows_as_it_is_chosen(rank, device):
    case = Case([2] * 70 + [0, 1] * 5, (520,), rank, [rank - 3, 7, rank], device)
    case.check(case.run())


TILES = EXPANDS["tiles"]._replace(block_n=128)
"""Tiles that read words: 16 rows of 32 words, or as a test has it."""


@pytest.fixture
def reads_words(monkeypatch):
    """Called after a step: whether its expand read tiles (or ``rows``) in words."""
    module, seen = import_module("punica.ops.triton_ops.lora_linear"), []
    plain = module.plan_linear

    def note(*arguments, **given):
        seen.append(plain(*arguments, **given))
        return seen[-1]

    def reads(rows: bool = False) -> bool:
        shape, tile = seen[-1].expand.launch.tail[-2:]
        return shape.quant.words if rows else tile.words

    monkeypatch.setattr(module, "plan_linear", note)
    forget_plans()
    return reads


@pytest.mark.parametrize(
    "blocks",
    [(16, 128, 1, 1), (16, 128, 3, 2), (32, 256, 1, 3), (32, 256, 2, 3), (16, 64, 2, 4)],
    ids=["one block", "three of 128", "one of 256", "two of 256", "as many words as rows"],
)
@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_tiles_with_true_ranks_and_poison(fp8, dtype, blocks, device, use_schedules, reads_words):
    """Tiles full and short, of which neither the unused slot nor ranks beyond an adapter's own are read; slices whose
    last blocks reach beyond their columns.
    """
    block_m, block_n, tiles_n, stages = blocks
    expand = Schedule(block_m, block_n, 64, num_stages=stages, tiles_n=tiles_n)
    use_schedules(shrink=SHRINKS["tiles"], expand=expand)
    case = Case(spread(3, 37, 16, 9), (300, 68), 24, [5, 24, 0], device, fp8, dtype)
    case.check(case.run())
    assert reads_words()


@pytest.mark.parametrize("rank", [18, 50, 64])
@pytest.mark.parametrize("calls", [1, 0], ids=["added", "overwritten"])
def test_tiles_of_whole_blocks(calls, rank, device, use_schedules, reads_words):
    use_schedules(shrink=SHRINKS["tiles"]._replace(split_k=2, block_k=16), expand=TILES._replace(tiles_n=2))
    case = Case(spread(0, 32, 48), (256, 512), rank, [rank, rank // 2], device)
    case.check(case.run(add_inputs=calls > 0), calls)
    assert reads_words()


@pytest.mark.parametrize(
    ("dtype", "rank", "changes", "mode", "words"),
    [
        (FP16, 16, {}, "channel", True),
        (FP16, 16, {}, "tensor", True),
        (FP16, 136, {"block_k": 256}, "channel", True),
        (torch.float32, 16, {}, "channel", False),
        (FP16, 136, {}, "channel", False),
        (FP16, 16, {"swap_ab": True}, "channel", False),
        (FP16, 16, {"block_n": 32}, "channel", False),
    ],
    ids=["words", "a scale per slot", "wide", "float32", "ranks in a loop", "swapped operands", "few columns"],
)
def test_which_tiles_go_by_words(dtype, rank, changes, mode, words, device, use_schedules, reads_words):
    """With a rank of 0 among them, which must not be read; one step comes as tensors."""
    use_schedules(shrink=SHRINKS["tiles"], expand=TILES._replace(**changes))
    case = Case(spread(1, 18, 5), (132,), rank, [rank, 0], device, dtype=dtype, mode=mode)
    batch = step(case.slots, device, rows=len(case.slots))
    if mode == "tensor":
        batch = TensorBatch.given(*batch.tensors, flag=torch.tensor([False]), count=None)
    case.check(case.run(batch=batch))
    assert reads_words() == words


def test_tiles_as_they_are_chosen(device, reads_words):
    case = Case(spread(2, 160, 100), (8192,), 16, [16, 7], device)
    case.check(case.run())
    assert reads_words()


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("rank", [10, 21, 64])
def test_planes_are_written_as_far_as_expand_reads(rank, swap_ab, device, use_schedules, monkeypatch):
    """To the end of the vector of four in which the true rank ends: neither beyond, nor of rows without an adapter."""
    use_schedules(shrink=SHRINKS["tiles"]._replace(block_n=64, split_k=2, swap_ab=swap_ab), expand=TILES)
    empty, made = torch.empty, []

    def poisoned(*size, **given):
        made.append(empty(*size, **given))
        return made[-1].fill_(float("nan")) if made[-1].is_floating_point() else made[-1]

    case = Case(spread(5, 30, 37, 3), (68, 132), rank, [3, rank, 0], device, k=128)
    monkeypatch.setattr(torch, "empty", poisoned)
    case.check(case.run())
    (partials,) = [tensor for tensor in made if tensor.ndim == 4]
    loose = swap_ab and rank > 32
    for row, slot in enumerate(case.slots):
        live = case.ranks[0][slot] if slot >= 0 else 0
        end = -(-live // 4) * 4
        assert partials[:, :, row, end:].isnan().all()
        assert partials[:, :, row, : min(end, rank) if loose else live].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [16, 32, 64])
@pytest.mark.parametrize("sizes", [(3, 300, 212), (0, 1500, 548), (5, 4100, 17, 30)], ids=str)
def test_prefills_of_full_size(sizes, rank, dtype):
    """As they are chosen: y is read before the kernel in front has ended, which the calls in front have written."""
    for widths in ((1024,), (640, 64, 64)):
        case = Case(spread(*sizes), widths, rank, [rank, 7, 5][: len(sizes) - 1], "cuda", dtype=dtype)
        y, batch = case.y.clone(), step(case.slots, "cuda", rows=len(case.slots))
        for _ in range(4):
            case.run(y, batch)
        case.check(y, 4)
        case.check(case.run(options=Options(pdl=False)))
        case.check(case.run(aside=nullcontext))
        case.check(case.run(add_inputs=False), 0)


def test_a_scale_per_slot_and_overwriting(device, use_schedules):
    use_schedules(shrink=SHRINKS["rows"], expand=EXPANDS["rows"])
    case = Case(SLOTS, (72,), 16, [16, 16, 16], device, mode="tensor")
    case.check(case.run(add_inputs=False), 0)


@pytest.mark.parametrize(("width", "offset", "words"), [(64, 0, True), (66, 0, False), (64, 1, False)])
def test_what_goes_by_words(width, offset, words, device, reads_words):
    """A B that does not fill its words, or does not begin with one, is read byte by byte: no word reaches into the next
    rank or across two.
    """
    a, b = (Fp8Stack.random(3, *shape, MODES["channel"], E4M3, device) for shape in ((16, 48), (width, 16)))
    room = torch.zeros(offset + b.stored.numel(), dtype=torch.uint8, device=device)
    view = room[offset:].view(E4M3).view(3, 1, 16, width)
    view.copy_(b.stored.mT)
    x, y = torch.randn(len(SLOTS), 48).half().to(device), torch.zeros(len(SLOTS), width, dtype=FP16, device=device)
    linear(
        y, x, [a.stored], [view.mT], step(SLOTS, device), 1.0, lora_a_scale=[a.scale], lora_b_scale=[b.scale],
        shrink=PER_CHANNEL, expand=PER_CHANNEL,
    )  # fmt: skip
    assert reads_words(rows=True) == words
    expected = products(products(x, a.real(), SLOTS), b.real(), SLOTS)
    assert_close(y, expected, FP16)
