"""Paged decode attention equals SDPA on gathered keys and values, whatever the lengths, splits and blocks are."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from punica.ops.triton_ops.backbone import Pages, choose_splits, decode_attention
from tests.ops.helpers import captured

PAGE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    size: int
    lengths: tuple[int, ...]
    splits: int | None = None
    dtype: torch.dtype = torch.float32
    page: int = PAGE
    fp8: bool = False


def in_pages(
    lengths: tuple[int, ...], heads: int, size: int, page: int, dtype: torch.dtype, width: int | None = None
) -> tuple[Any, ...]:
    """Keys and values in blocks that lie in random order, the blocks of each request, and its keys and values by
    themselves; what no request owns, and the rest of the last blocks, is NaN.
    """
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 3)
    caches = [torch.full((len(order) * page, heads, size), torch.nan).to(dtype) for _ in "kv"]
    table = torch.full((len(counts), width or max(*counts, 1) + 1), 2**31 - 1, dtype=torch.int32)
    pairs = []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[i, :count], order = order[:count], order[count:]
        rows = (table[i, :count, None] * page + torch.arange(page)).flatten()[:length]
        pairs.append([torch.randn(length, heads, size).to(dtype) for _ in "kv"])
        for cache, new in zip(caches, pairs[-1], strict=True):
            bits = torch.uint8 if dtype.itemsize == 1 else dtype  # values of one byte have no indexed write
            cache.view(bits)[rows] = new.view(bits)
    return *caches, table, pairs


class World:
    """Queries of a case, as a projection gives them: rows are apart; and its cache."""

    def __init__(self, case: Case, device: str, width: int | None = None) -> None:
        self.case, cached = case, torch.float8_e4m3fn if case.fp8 else case.dtype
        *parts, self.contexts = in_pages(case.lengths, case.kv_heads, case.size, case.page, cached, width)
        self.keys, self.values, self.table = (part.to(device) for part in parts)
        qkv = torch.randn(len(case.lengths), case.heads + 2 * case.kv_heads, case.size)
        self.q = qkv.to(device, case.dtype)[:, : case.heads]
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self.order = torch.randperm(len(case.lengths)).to(device, torch.int32)

    def run(self, splits: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full_like(self.q, torch.nan, memory_format=torch.contiguous_format) if out is None else out
        pages = Pages(self.table, self.lengths, self.order, self.case.page)
        decode_attention(out, self.q, self.keys, self.values, pages, splits or self.case.splits)
        return out

    def expected(self) -> torch.Tensor:
        """In float64; zeros without tokens."""
        rows = []
        for q, (keys, values) in zip(self.q.cpu().double(), self.contexts, strict=True):
            if len(keys) == 0:
                rows.append(torch.zeros_like(q))
                continue
            keys, values = keys.double().transpose(0, 1), values.double().transpose(0, 1)
            rows.append(F.scaled_dot_product_attention(q.unsqueeze(1)[None], keys[None], values[None], enable_gqa=True)
                        [0, :, 0])  # fmt: skip
        return torch.stack(rows)

    def check(self, found: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.case.dtype]
        torch.testing.assert_close(found.cpu().double(), self.expected(), rtol=tolerance, atol=tolerance)


CASES = [
    Case(4, 4, 64, (1,)),
    Case(4, 4, 64, (1,), 4),
    Case(4, 2, 64, (16, 17), 1),
    Case(4, 2, 64, (15, 33, 1), 2, torch.float16),
    Case(8, 2, 128, (70, 3, 64, 65, 16), 2, torch.bfloat16),
    Case(4, 1, 128, (129, 0, 40), 4, torch.float16),
    Case(32, 1, 64, (35,), 1),  # more queries than the smallest tile has rows
    Case(3, 1, 40, (50, 7), 2),  # neither a power of two
    Case(2, 2, 64, (0, 0), 1),
    Case(2, 2, 64, (0, 0), 2),
    Case(2, 1, 64, (100, 20), 32, torch.bfloat16),
    Case(2, 1, 64, (23, 41), 2, page=7),
    Case(2, 1, 64, (23, 41), 1, page=256),
    Case(4, 2, 64, (140, 5)),
    Case(4, 2, 64, (140, 5, 0), fp8=True),
    Case(8, 2, 128, (70, 3, 64), 2, torch.float16, fp8=True),
    Case(4, 4, 40, (33, 1), 1, torch.bfloat16, fp8=True),
    Case(4, 4, 80, (33, 1, 150), 2, torch.bfloat16, fp8=True),
    Case(2, 1, 66, (20, 3), 1, torch.float16, fp8=True),
    Case(2, 2, 128, (65, 2), fp8=True),
]


FULL = [
    Case(heads, kv_heads, size, lengths, splits, dtype)
    for heads, kv_heads, size in ((32, 32, 128), (40, 40, 128), (64, 8, 128), (32, 8, 64))
    for lengths in ((1,), (2048, 1, 513, 777, 0, 16, 17), (4096,))
    for splits, dtype in (
        (None, torch.float16), (1, torch.float16), (8, torch.float16), (None, torch.bfloat16), (None, torch.float32)
    )
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.gpu) for case in FULL)], ids=str)
def test_equals_sdpa_on_gathered_tokens(case: Case, device: str) -> None:
    world = World(case, device)
    world.check(found := world.run())
    assert device == "cpu" or torch.equal(found, world.run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_large_scores_that_rise_and_fall_between_tiles(splits: int, dtype: torch.dtype, device: str) -> None:
    """What was added up before a larger score came is scaled down, by as much as it takes."""
    world = World(Case(4, 2, 64, (300, 140), splits, dtype), device)
    world.q *= 6
    world.check(world.run())


def test_writes_rows_of_a_larger_output_and_nothing_else(device: str) -> None:
    world = World(Case(4, 2, 64, (20, 5)), device)
    for splits in (1, 2):
        step = torch.full((5, 6, 64), 9.0, device=device)
        world.run(splits, step[1:3, :4])
        world.check(step[1:3, :4])
        step[1:3, :4] = 9.0
        assert bool((step == 9.0).all())


@pytest.mark.parametrize("splits", [1, 4])
def test_with_fixed_splits_a_row_does_not_depend_on_the_batch(splits: int, device: str) -> None:
    world = World(Case(4, 2, 64, (90, 3, 40), dtype=torch.float16), device)
    whole = world.run(splits)
    assert torch.equal(whole, world.run(splits))
    for row in range(3):
        alone = torch.empty_like(whole[:1])
        at = slice(row, row + 1)
        pages = Pages(world.table[at], world.lengths[at], torch.zeros_like(world.order[at]), PAGE)
        decode_attention(alone, world.q[at], world.keys, world.values, pages, splits)
        assert torch.equal(alone[0], whole[row])


def test_splits_follow_the_batch_and_not_the_lengths() -> None:
    device = torch.device("cpu")
    small = [choose_splits(requests, 8, 32 << 10, device) for requests in (1, 2, 8, 32, 256)]
    assert small == [32, 32, 8, 2, 1]
    large = [choose_splits(requests, 32, 64 << 10, device) for requests in (1, 2, 8, 32)]
    assert large == [8, 4, 1, 1]  # two programs fit a multiprocessor: more would wait


def test_bad_operands_are_refused(device: str) -> None:
    world = World(Case(4, 2, 64, (20, 5)), device)
    good: dict[str, Any] = {
        "out": torch.zeros(2, 4, 64, device=device), "q": world.q, "keys": world.keys, "values": world.values,
    }  # fmt: skip
    pages = Pages(world.table, world.lengths, world.order, PAGE)
    wide = torch.zeros(2, 1, 260, device=device)
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "splits must be a power of two", {"splits": 3}),
        (ValueError, "splits must be a power of two", {"splits": 64}),
        (ValueError, "multiple of the cache's 2", {"q": world.q[:, :3], "out": good["out"][:, :3]}),
        (ValueError, "out must be", {"out": good["out"][:1]}),
        (ValueError, "lengths must be", {"pages": pages._replace(lengths=world.lengths[:1])}),
        (ValueError, "heads side by side", {"q": world.q.transpose(1, 2).contiguous().transpose(1, 2)}),
        (ValueError, "at most 256 elements, got 260", dict.fromkeys(("out", "q", "keys", "values"), wide)),
        (ValueError, "block_size must divide", {"pages": pages._replace(block_size=11)}),
        (ValueError, "values must be", {"values": world.values[:16]}),
        (TypeError, "lengths must be torch.int32", {"pages": pages._replace(lengths=world.lengths.long())}),
        (ValueError, "order must be", {"pages": pages._replace(order=world.order[:1])}),
        (TypeError, "order must be torch.int32", {"pages": pages._replace(order=world.order.long())}),
        (TypeError, "keys must be torch.float32", {"keys": world.keys.half()}),
    ]
    for kind, message, changes in bad:
        with pytest.raises(kind, match=message):
            decode_attention(**{"pages": pages} | good | changes)
    assert not good["out"].any()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 8])
def test_a_captured_graph_follows_lengths_and_tables(splits: int) -> None:
    """The graph of short contexts, replayed on long ones, on others and on padding, with the bits of a launch."""
    worlds = [World(Case(32, 8, 128, lengths, splits, torch.float16), "cuda", width=64)
              for lengths in ((1, 2, 3, 4), (1000, 1, 64, 65), (700, 0, 0, 0))]  # fmt: skip
    most = max(world.keys.shape[0] for world in worlds)
    fixed = worlds[0]
    keys, values = (torch.zeros(most, 8, 128, dtype=torch.float16, device="cuda") for _ in range(2))
    q, table, lengths, order = (given.clone() for given in (fixed.q, fixed.table, fixed.lengths, fixed.order))
    out = torch.empty_like(q)
    call = (out, q, keys, values, Pages(table, lengths, order, PAGE), splits)
    lengths.zero_()
    graph, _ = captured(lambda: decode_attention(*call))
    for world in worlds:
        for target, source in ((q, world.q), (table, world.table), (lengths, world.lengths)):
            target.copy_(source)
        for target, source in ((keys, world.keys), (values, world.values)):
            target[: len(source)] = source
        graph.replay()
        assert torch.equal(out, world.run())
        world.check(out)
