"""Norm with residual, RoPE with the cache write, its angles, SwiGLU and argmax compute what the parts of
`punica.models.llama` and `punica.engine.sampler` do.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from punica.ops.backbone import HeadNorms, rotate
from punica.ops.triton_ops.backbone import add_rms_norm, argmax, rotary_angles, rotate_and_store, swiglu
from punica.ops.triton_ops.launch import INTERPRETED

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Found in some dtype, expected in float64."""
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def rows_apart(
    tokens: int, width: int, dtype: torch.dtype, device: str, gap: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ``[tokens, width]`` with NaN between its rows, and all of that."""
    whole = torch.full((tokens, width + gap), torch.nan, dtype=dtype, device=device)
    whole[:, :width] = torch.randn(tokens, width)
    return whole[:, :width], whole


def full(*sizes: tuple) -> list[Any]:
    """Cases of these sizes of models, for numbers of tokens of a GPU."""
    return [pytest.param(tokens, *size, marks=pytest.mark.gpu) for tokens in (1, 32, 513) for size in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (3, 100), (5, 1024), *full((4096,), (5120,), (8192,))])
@pytest.mark.parametrize("has_delta", [False, True])
def test_norm_behind_a_residual(tokens: int, size: int, dtype: torch.dtype, has_delta: bool, device: str) -> None:
    x, whole_x = rows_apart(tokens, size, dtype, device)
    delta = rows_apart(tokens, size, dtype, device)[0] if has_delta else None
    out, whole_out = rows_apart(tokens, size, dtype, device)
    weight = (1 + torch.randn(size) / 4).to(device, dtype)
    for small in (x,) if delta is None else (x, delta):
        small[0] /= 256  # a row that eps matters to
    residual = x.clone() if delta is None else x + delta
    add_rms_norm(out, x, delta, weight, EPS)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter does not round to it as a GPU does
        check_close(x, residual.double())
    else:
        assert torch.equal(x, residual)
    check_close(out, F.rms_norm(x.cpu().double(), (size,), weight.cpu().double(), EPS))
    for whole in (whole_x, whole_out):
        assert bool(whole[:, size:].isnan().all())


class Rotation:
    """Tokens whose queries, keys and values lie packed, a cache, and what both hold afterwards; the last pads."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: str) -> None:
        packed, self.whole = rows_apart(tokens, (heads + 2 * kv_heads) * size, dtype, device)
        packed[0] /= 256  # a token that eps matters to
        self.qkv = packed.unflatten(1, (-1, size))
        positions = torch.randint(0, 4000, (tokens, 1, 1))
        angles = positions * 10000 ** (-torch.arange(0, size, 2) / size)
        self.cos, self.sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        rows = torch.randperm(tokens + 9)[:tokens]
        rows[-1] = -1
        self.rows = rows.to(device)
        self.keys, self.values = (torch.full((tokens + 9, kv_heads, size), 7.0).to(device, dtype) for _ in range(2))
        self.q, self.k, self.v = self.qkv.clone().cpu().split((heads, kv_heads, kv_heads), 1)

    def run(self, normalised: bool) -> None:
        weights = [(1 + torch.randn(self.q.shape[2]) / 4).to(self.qkv) for _ in range(2)]
        norms = HeadNorms(*weights, EPS) if normalised else None
        rotate_and_store(self.qkv, self.cos, self.sin, self.rows, self.keys, self.values, norms)
        before = [self.q.double(), self.k.double()]
        if normalised:
            before = [F.rms_norm(heads, weight.shape, weight.cpu().double(), EPS)
                      for heads, weight in zip(before, weights, strict=True)]  # fmt: skip
        self.check(*before)

    def check(self, before_q: torch.Tensor, before_k: torch.Tensor) -> None:
        cos, sin = self.cos.cpu().double(), self.sin.cpu().double()
        q, k, v = self.qkv.split((self.q.shape[1], self.k.shape[1], self.v.shape[1]), 1)
        check_close(q, rotate(before_q, cos, sin))
        check_close(k, rotate(before_k, cos, sin))
        assert torch.equal(v.cpu(), self.v)
        assert bool(self.whole[:, self.qkv[0].numel() :].isnan().all())
        for cache, source in ((self.keys, k), (self.values, v)):
            expected = torch.full_like(cache, 7.0)
            expected.index_copy_(0, self.rows[:-1], source[:-1])
            assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size"),
    [(1, 4, 4, 64), (3, 8, 2, 128), (5, 3, 1, 20), (2, 6, 6, 32), *full((32, 32, 128), (40, 40, 128), (64, 8, 128))],
)
def test_rope_with_the_cache_write(
    tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: str
) -> None:
    for normalised in (False, True):
        Rotation(tokens, heads, kv_heads, size, dtype, device).run(normalised)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (2, 100), (3, 1100), *full((11008,), (13824,), (14336,))])
def test_swiglu(tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    gate_up, _ = rows_apart(tokens, 2 * size, dtype, device)
    gate_up[0, : min(3, size)] = torch.tensor([-200.0, 200.0, 0.0], dtype=dtype)[:size]  # where exp has no room
    out, whole = rows_apart(tokens, size, dtype, device)
    swiglu(out, gate_up)
    gate, up = gate_up.cpu().double().chunk(2, dim=-1)
    check_close(out, F.silu(gate) * up)
    assert bool(whole[:, size:].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(("tokens", "half"), [(1, 64), (5, 40), (3, 10), *full((64,))])
def test_angles_of_rope(tokens: int, half: int, factor: float, dtype: torch.dtype, device: str) -> None:
    positions = torch.randint(0, 2**18, (tokens,))
    positions[0] = 0
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    cos, sin = (torch.full((tokens, 1, half), torch.nan, dtype=dtype, device=device) for _ in range(2))
    rotary_angles(cos, sin, positions.to(device), frequencies.to(device), factor)
    angles = (positions[:, None, None].float() * frequencies).double()  # the product is rounded to float32
    check_close(cos, factor * angles.cos())
    check_close(sin, factor * angles.sin())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 1), (4, 100), (7, 8192), (5, 50_001), *full((32_000,), (128_256,), (151_936,))]
)
def test_the_highest_of_each_row(rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Rows of random numbers, of which the last three, where there are so many, are special."""
    logits, whole = rows_apart(rows, vocab, dtype, device)
    whole[:, vocab:] = torch.inf  # what lies between rows would win
    whole[::2, vocab:] = torch.nan
    ties = torch.randint(0, vocab, (2,)).tolist()
    for row, change in ((rows - 1, torch.nan), (rows - 2, -torch.inf), (rows - 3, torch.inf)):
        if row > 0:
            logits[row] = change if change == -torch.inf else logits[row]
            logits[row, ties] = change
    expected = logits.cpu().float().argmax(dim=-1)  # of equal ones the first
    expected[logits.cpu().isnan().any(dim=-1)] = -7
    out = torch.full((rows,), 99, dtype=torch.int64, device=device)
    argmax(out, logits, -7)
    assert out.tolist() == expected.tolist()


def test_no_tokens_are_no_launch(device: str) -> None:
    nothing, heads = torch.empty(0, 8, device=device), torch.ones(4, 1, 4, device=device)
    add_rms_norm(nothing, nothing, None, torch.ones(8, device=device), EPS)
    swiglu(nothing, torch.empty(0, 16, device=device))
    angles, rows = torch.empty(0, 1, 2, device=device), torch.empty(0, dtype=torch.int64, device=device)
    rotate_and_store(torch.empty(0, 3, 4, device=device), angles, angles, rows, heads, heads)
    rotary_angles(angles, angles, rows, torch.ones(2, device=device), 1.0)
    argmax(rows, torch.empty(0, 5, device=device), -1)
    assert bool((heads == 1).all())


def test_bad_operands_are_refused(device: str) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    turned = torch.zeros(8, 2, device=device).t()
    good = SimpleNamespace(
        qkv=torch.zeros(2, 4, 8, device=device), cos=torch.ones(2, 1, 4, device=device),
        sin=torch.ones(2, 1, 4, device=device), kv_rows=torch.zeros(2, dtype=torch.int64, device=device),
        keys=torch.zeros(4, 1, 8, device=device), values=torch.zeros(4, 1, 8, device=device),
    )  # fmt: skip

    def rotated(**changes: Any) -> None:
        rotate_and_store(**vars(good) | changes)

    def angles(**changes: Any) -> None:
        given = {"cos": good.cos, "sin": good.sin, "positions": good.kv_rows, "frequencies": weight[:4], "factor": 1.0}
        rotary_angles(**given | changes)

    for kind, message, call in (
        (ValueError, r"weight must be \[8\]", lambda: add_rms_norm(x, x, None, weight[:4], EPS)),
        (ValueError, "out must have a last stride of 1", lambda: add_rms_norm(turned, x, None, weight, EPS)),
        (TypeError, "dtype must be one of", lambda: add_rms_norm(x.double(), x.double(), None, weight.double(), EPS)),
        (ValueError, r"gate_up must be \[2, 16\]", lambda: swiglu(x, x)),
        (ValueError, "more than 2 heads", lambda: rotated(qkv=good.qkv[:, :2])),
        (ValueError, "even size", lambda: rotated(qkv=good.qkv[..., :7], keys=torch.zeros(4, 1, 7, device=device),
                                                  values=torch.zeros(4, 1, 7, device=device))),
        (ValueError, r"cos must be \[2, 1, 4\]", lambda: rotated(cos=good.cos[:, 0])),
        (TypeError, "kv_rows must be torch.int64", lambda: rotated(kv_rows=good.kv_rows.int())),
        (ValueError, "k_weight must be", lambda: rotated(norms=HeadNorms(weight, weight[:4], EPS))),
        (ValueError, r"frequencies must be \[4\]", lambda: angles(frequencies=weight)),
        (TypeError, "frequencies must be torch.float32", lambda: angles(frequencies=weight[:4].double())),
        (ValueError, "cos must be contiguous", lambda: angles(cos=torch.ones(2, 1, 8, device=device)[..., ::2])),
        (TypeError, "out must be torch.int64", lambda: argmax(good.kv_rows.int(), x, -1)),
        (ValueError, "at least one column", lambda: argmax(good.kv_rows, x[:, :0], -1)),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            call()
