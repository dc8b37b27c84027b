"""Attention of prompts equals causal SDPA of each prompt alone, wherever its rows are."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from test_decode_attention import TOLERANCE, in_pages

from punica.ops.triton_ops.backbone import Cached, prompt_attention


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    size: int
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    padding: int = 0

    def packed(self, device: str) -> torch.Tensor:
        """Queries, keys and values as a projection gives them; rows that pad a captured step are NaN."""
        rows = sum(self.lengths)
        heads = torch.randn(rows + self.padding, self.heads + 2 * self.kv_heads, self.size)
        heads[rows:] = torch.nan
        return heads.to(device, self.dtype)

    def starts(self, device: str) -> torch.Tensor:
        ends = torch.tensor(self.lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return F.pad(ends, (1, 0)).to(device)

    def run(self, packed: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        q, k, v = packed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        out = torch.full(q.shape, 7.0, dtype=q.dtype, device=q.device)
        prompt_attention(out, q, k, v, starts)
        return out

    def expected(self, packed: torch.Tensor) -> torch.Tensor:
        """In float64."""
        found = []
        for prompt in packed[: sum(self.lengths)].cpu().double().split(self.lengths):
            q, k, v = prompt.transpose(0, 1).split((self.heads, self.kv_heads, self.kv_heads))
            found.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
        return torch.cat(found)


CASES = [
    Case(2, 2, 64, (1,)),
    Case(2, 1, 64, (65,)),
    Case(2, 1, 64, (0, 130, 0, 1, 2), padding=59),
    Case(4, 2, 128, (150, 20), torch.float16, 22),
    Case(2, 1, 128, (129, 128, 1), torch.bfloat16),
    Case(3, 1, 40, (70, 3), torch.float16, 1),  # neither a power of two
    Case(2, 1, 80, (33, 100)),
    Case(1, 1, 256, (66,), torch.float16),
    Case(2, 1, 16, (3,) * 19, padding=7),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_causal_sdpa_of_each_prompt(case: Case, device: str) -> None:
    packed = case.packed(device)
    found, rows, tolerance = case.run(packed, case.starts(device)), sum(case.lengths), TOLERANCE[case.dtype]
    torch.testing.assert_close(found[:rows].cpu().double(), case.expected(packed), rtol=tolerance, atol=tolerance)
    assert bool((found[rows:] == 7.0).all())


def test_large_scores_that_rise_and_fall_between_blocks(device: str) -> None:
    case = Case(2, 2, 64, (140, 75))
    packed = case.packed(device)
    packed[:, :2] *= 6
    found = case.run(packed, case.starts(device))
    torch.testing.assert_close(found.cpu().double(), case.expected(packed), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_prompt_has_the_same_bits_beside_others(dtype: torch.dtype, device: str) -> None:
    case = Case(2, 1, 64, (37, 140, 9), dtype)
    packed = case.packed(device)
    whole, start = case.run(packed, case.starts(device)), 0
    for length in case.lengths:
        alone = Case(2, 1, 64, (length,), dtype)
        rows = slice(start, start + length)
        assert torch.equal(whole[rows], alone.run(packed[rows], alone.starts(device)))
        start += length


def test_rows_of_a_larger_output_and_nothing_else(device: str) -> None:
    case = Case(2, 2, 64, (20, 5))
    packed = case.packed(device)
    q, k, v = packed.split(2, dim=1)
    step = torch.full((30, 3, 64), 9.0, device=device)
    prompt_attention(step[2:27, :2], q, k, v, case.starts(device))
    torch.testing.assert_close(step[2:27, :2].cpu().double(), case.expected(packed), rtol=2e-5, atol=2e-5)
    step[2:27, :2] = 9.0
    assert bool((step == 9.0).all())


def test_no_rows_and_no_prompts(device: str) -> None:
    empty = torch.empty(0, 3, 64, device=device).split(1, dim=1)
    prompt_attention(empty[0].clone(), *empty, torch.zeros(2, dtype=torch.int32, device=device))
    case = Case(1, 1, 64, (4,))
    assert bool((case.run(case.packed(device), torch.zeros(1, dtype=torch.int32, device=device)) == 7.0).all())


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"k": torch.randn(4, 2, 32)}, ValueError, "k must be"),
        ({"v": torch.randn(4, 1, 64)}, ValueError, "v must be"),
        ({"out": torch.empty(4, 2, 64, dtype=torch.float16)}, TypeError, "out must be"),
        ({"k": torch.randn(4, 2, 64)}, ValueError, "as far apart"),
        ({"q": torch.randn(4, 64, 2).mT}, ValueError, "side by side"),
        ({"starts": torch.tensor([0, 4])}, TypeError, "starts must be torch.int32"),
        ({"starts": torch.empty(0, dtype=torch.int32)}, ValueError, r"starts must be \[N"),
        ({"q": torch.randn(4, 3, 64), "out": torch.empty(4, 3, 64)}, ValueError, "multiple"),
        (dict.fromkeys("kv", torch.randn(4, 0, 64)), ValueError, "multiple"),
    ],
)  # fmt: skip
def test_illegal_operands(device: str, changed: dict, error: type[Exception], words: str) -> None:
    q, k, v = torch.randn(4, 6, 64, device=device).split(2, dim=1)
    given = {"out": torch.empty(4, 2, 64), "starts": torch.tensor([0, 4], dtype=torch.int32)} | changed
    with pytest.raises(error, match=words):
        prompt_attention(**{"q": q, "k": k, "v": v} | {name: one.to(device) for name, one in given.items()})


@dataclass(frozen=True)
class OverCache(Case):
    """Prompts with tokens before their rows, in blocks of ``page`` tokens that are anywhere in the cache."""

    before: tuple[int, ...] = ()
    page: int = 16
    fp8: bool = False

    def cache(self, device: str) -> tuple[Cached, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Keys and values in blocks, and those of each prompt as it may read them."""
        dtype = torch.float8_e4m3fn if self.fp8 else self.dtype
        *parts, pairs = in_pages(self.before, self.kv_heads, self.size, self.page, dtype)
        lengths = torch.tensor(self.before, dtype=torch.int32, device=device)
        return Cached(*(part.to(device) for part in parts), lengths, self.page), pairs


@pytest.mark.parametrize(("splits", "most_rows"), [(1, None), (4, None), (1, 5), (None, 16)])
@pytest.mark.parametrize(
    "case",
    [
        OverCache(2, 1, 64, (1,), before=(1,)),
        OverCache(2, 2, 64, (70,), before=(130,), page=1),
        OverCache(4, 2, 64, (3, 0, 65, 5), padding=7, before=(64, 9, 0, 100)),
        OverCache(4, 2, 128, (20, 33), torch.float16, before=(40, 17), page=12),
        OverCache(3, 1, 40, (70, 3), torch.bfloat16, before=(5, 77)),
        OverCache(2, 1, 64, (9, 66), torch.float16, before=(90, 31), fp8=True),
    ],
    ids=str,
)
def test_rows_attend_to_cached_tokens_and_to_their_own(
    case: OverCache, splits: int | None, most_rows: int | None, device: str
) -> None:
    """Also where a prompt has more rows than its caller said."""
    packed, (cached, pairs) = case.packed(device), case.cache(device)
    q, k, v = packed.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    out = torch.full(q.shape, 7.0, dtype=q.dtype, device=q.device)
    prompt_attention(out, q, k, v, case.starts(device), cached, splits, most_rows)
    found, rows = [], sum(case.lengths)
    for prompt, pair in zip(packed[:rows].cpu().double().split(case.lengths), pairs, strict=True):
        q, *own = prompt.transpose(0, 1).split((case.heads, case.kv_heads, case.kv_heads))
        k, v = (torch.cat([c.double().transpose(0, 1), o], 1) for c, o in zip(pair, own, strict=True))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        found.append(F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(0, 1))
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out[:rows].cpu().double(), torch.cat(found), rtol=tolerance, atol=tolerance)
    assert splits != 1 or bool((out[rows:] == 7.0).all())
