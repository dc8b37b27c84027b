"""The attention of a GPU step, its kernels interpreted, against plain torch on the same cache."""

from types import SimpleNamespace

import pytest
import torch

from punica.engine.attention import KernelAttention, KVCache, PagedAttention, attention_for
from punica.ops.backbone import HeadNorms, PackedHeads
from punica.scheduling import Span
from tests.engine.test_attention import BLOCK, make_cache

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TABLES = [(3, 4, 5), (20, 9, 30), (12,), (33, 34)]


def caches(device: str, kv_heads: int, size: int, fp8: bool = False) -> list[KVCache]:
    """Two of the same noise."""
    made = [make_cache(kv_heads, size, fp8, device) for _ in range(2)]
    for mine, other in zip(*((*cache.keys, *cache.values) for cache in made), strict=True):
        other.copy_(mine.copy_(torch.randn(mine.shape)))
    return made


def packed(rows: int, heads: int, kv_heads: int, size: int, device: str, norms: bool) -> PackedHeads:
    angles = torch.rand(rows, 1, size // 2) * 6
    weights = HeadNorms(torch.rand(size).to(device), torch.rand(size).to(device), 1e-6) if norms else None
    qkv = torch.randn(rows, heads + 2 * kv_heads, size)
    return PackedHeads(qkv.to(device), kv_heads, angles.cos().to(device), angles.sin().to(device), weights)


STEPS = {
    "decodes": ([Span(0, 1, 11, TABLES[0]), Span(1, 1, 9, TABLES[1]), Span(2, 1, 1, TABLES[2])], 0),
    "padded": ([Span(0, 1, 11, TABLES[0]), Span(1, 1, 4, TABLES[2])], 2),
    "a prompt": ([Span(0, 7, 7, TABLES[3]), Span(7, 1, 11, TABLES[0]), Span(8, 1, 9, TABLES[1])], 0),
    "prompts, one of a token": (
        [Span(0, 1, 1, TABLES[2]), Span(1, 7, 7, TABLES[3]), Span(8, 9, 9, TABLES[1]), Span(17, 1, 12, TABLES[0])], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("step", "heads", "kv_heads", "size", "norms", "fp8", "splits"),
    [
        ("decodes", 4, 4, 16, False, False, 2), ("padded", 4, 2, 8, False, True, 2),
        ("a prompt", 4, 2, 8, True, False, 2), ("prompts, one of a token", 4, 2, 8, False, True, None),
    ],
)  # fmt: skip
@torch.inference_mode()
def test_equals_plain_torch_and_leaves_the_same_cache(step, heads, kv_heads, size, norms, fp8, splits, device) -> None:
    spans, padding = STEPS[step]
    mine, plain = caches(device, kv_heads, size, fp8)
    attention, reference = KernelAttention(mine, 8, 5, splits), PagedAttention(plain)
    rows = [row for span in spans for row in span.kv_rows(BLOCK)]
    given = packed(len(rows) + padding, heads, kv_heads, size, device, norms)
    real = PackedHeads(*(part[: len(rows)].clone() if isinstance(part, torch.Tensor) else part for part in given))
    reference.begin(spans, torch.tensor(rows, device=device))
    expected = reference.attend(1, real)
    attention.begin(spans, torch.tensor(rows + [-1] * padding, device=device))
    found = attention.attend(1, given)
    same = [
        row
        for span in spans
        for row in range(span.start, span.start + span.length)
        if not (fp8 and span.kv_length == 1)
    ]  # plain torch takes those for prompts, which read no cache
    torch.testing.assert_close(found[same], expected[same], atol=2e-5, rtol=2e-5)
    assert not found[len(rows) :].any()
    for held, expected in zip((*mine.keys, *mine.values), (*plain.keys, *plain.values), strict=True):
        step = 2**-3 if fp8 else 2e-6  # the last bit of FP8 may be rounded the other way
        torch.testing.assert_close(held.float(), expected.float(), atol=2e-6, rtol=step)
        assert (held.float() != expected.float()).float().mean() < 0.01 or not fp8


PIECES = [
    ([Span(0, 3, 9, TABLES[0]), Span(3, 1, 12, TABLES[1]), Span(4, 5, 5, TABLES[3]), Span(9, 1, 4, TABLES[2])], 9),
    ([Span(0, 2, 2, TABLES[2]), Span(2, 1, 11, TABLES[1]), Span(3, 1, 9, TABLES[0])], 2),
    ([Span(0, 1, 1, TABLES[2]), Span(1, 4, 12, TABLES[1])], 5),
]
"""Pieces of several rows and of one, a whole prompt between them; then a step without any, and other pieces."""
DECODES = [
    ([Span(0, 1, 9, TABLES[0]), Span(1, 1, 12, TABLES[1]), Span(2, 1, 3, TABLES[2])], None),
    ([Span(0, 1, 12, TABLES[1])], None),
    ([Span(0, 1, 17, (*TABLES[0], 7, 8)), Span(1, 1, 4, TABLES[2])], None),
    ([Span(0, 1, 9, TABLES[0])], None),
]
"""Fewer requests, other blocks in a row, a longer table: what the buffers held is never read."""


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("steps", "fp8"), [(PIECES, False), (PIECES, True), (DECODES, False)])
@torch.inference_mode()
def test_prompts_after_cached_tokens_and_steps_after_others(steps, fp8, device) -> None:
    mine, plain = caches(device, 2, 8, fp8)
    attention, reference = KernelAttention(mine, 8, 5, 2, cached_prompts=steps is PIECES), PagedAttention(plain)
    for spans, prompt_rows in steps:
        rows = torch.tensor([row for span in spans for row in span.kv_rows(BLOCK)], device=device)
        given = packed(len(rows), 4, 2, 8, device, norms=False)
        reference.begin(spans, rows, prompt_rows)
        expected = reference.attend(0, given._replace(heads=given.heads.clone()))
        attention.begin(spans, rows, prompt_rows)
        torch.testing.assert_close(attention.attend(0, given), expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("device", ["cpu", GPU])
@torch.inference_mode()
def test_pieces_cut_at_tiles_have_the_bits_of_the_whole_prompt(device) -> None:
    cache, rows, cut = make_cache(2, 8, False, device), 140, 128
    attention, table = KernelAttention(cache, 2, 35, 2, cached_prompts=True), tuple(range(35))
    given = packed(rows, 4, 2, 8, device, norms=False)
    parts = (given.heads, given.cos, given.sin)
    found = []
    for first, end in ((0, rows), (0, cut), (cut, rows)):
        span = Span(0, end - first, end, table)
        heads, cos, sin = (part[first:end].clone() for part in parts)
        attention.begin([span], torch.tensor(span.kv_rows(BLOCK), device=device), end - first)
        found.append(attention.attend(0, PackedHeads(heads, 2, cos, sin, None)))
    assert torch.equal(found[0], torch.cat(found[1:]))


@torch.inference_mode()
def test_the_longest_request_is_taken_first_and_what_pads_the_step_last(monkeypatch) -> None:
    taken = []
    monkeypatch.setattr("punica.ops.triton_ops.backbone.decode_attention", lambda *given: taken.append(given[4][1:3]))
    attention = KernelAttention(caches("cpu", 2, 8)[0], 8, 5)
    spans = [Span(0, 7, 7, TABLES[3]), *(Span(7 + i, 1, n, TABLES[0]) for i, n in enumerate((9, 3, 11, 9)))]
    attention.begin(spans, torch.full((13,), -1))  # two rows of padding
    attention.attend(0, packed(13, 4, 2, 8, "cpu", norms=False))
    ((lengths, order),) = taken
    assert sorted(order.tolist()) == list(range(6))
    assert lengths[order.long()].tolist() == [11, 9, 9, 3, 0, 0]


def test_heads_that_no_kernel_takes_are_plain_torch_s_on_a_gpu_too() -> None:
    def attention(size: int, is_cuda: bool = True, dtype: torch.dtype = torch.float16) -> type:
        keys = SimpleNamespace(is_cuda=is_cuda, shape=(40, 2, size), device=torch.device("cpu"))
        return type(attention_for(SimpleNamespace(keys=[keys], model_dtype=dtype), 2, 2))

    assert [attention(128), attention(256)] == [KernelAttention] * 2
    assert attention(264) == attention(128, is_cuda=False) == attention(128, dtype=torch.float64) == PagedAttention


@pytest.mark.gpu
@torch.inference_mode()
def test_wide_heads_on_a_gpu() -> None:
    mine, cache = caches("cuda", 1, 264)
    attention = attention_for(mine, 2, 5)
    given = packed(2, 2, 1, 264, "cuda", norms=False)
    rows = torch.tensor([41, 83], device="cuda")
    attention.begin([Span(0, 1, 10, TABLES[0]), Span(1, 1, 12, TABLES[1])], rows)
    found = attention.attend(0, given)
    q, k, v = given.rotated()
    cache.write(0, rows, k, v)
    for row, (table, length) in enumerate(((TABLES[0], 10), (TABLES[1], 12))):
        keys, values = (part.float() for part in cache.read(0, table, length))
        scores = (keys[0, 0] @ q[row].float().T / 264**0.5).softmax(0)
        torch.testing.assert_close(found[row].float(), scores.T @ values[0, 0], atol=2e-4, rtol=2e-4)


def test_attend_before_begin() -> None:
    cache = make_cache(1, 8)
    for attention in (KernelAttention(cache, 2, 2), PagedAttention(cache)):
        with pytest.raises(RuntimeError, match="call begin"):
            attention.attend(0, packed(1, 1, 1, 8, "cpu", norms=False))
