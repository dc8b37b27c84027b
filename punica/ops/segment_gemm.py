"""One run of segments through the fastest matmul this processor has for its layout and dtype.

``out[s, N] = beta * out + alpha * x[s, K] @ w[N, K]^T`` for one segment, the same with a leading dimension for a run;
summed in float32 (float64 for float64) and rounded once into the dtype of ``out``. Three forms, chosen by measurement
(torch 2.13, 2 cores, h1 4096, h2 11008, r 16):

* **direct**: x, w and out all have the arithmetic dtype. One segment is an ``addmm_``, several are a ``baddbmm_`` on
  views; 64 segments of one row take 1.3 ms for shrink and expand together, a loop of matmuls 2.5 ms or more.
* **convert**: 16-bit weights become float32 tile by tile in a scratch buffer that stays in the cache. Most processors
  lack 16-bit matmul instructions and torch then multiplies 16-bit numbers one by one: expand of one segment of 64
  rows takes 6.0 ms directly, 0.45 ms converted (AVX2). Converting 0.35 MB of B costs 0.01 ms.
* **native**: where oneDNN has bfloat16 matmuls (AVX512-bf16, AMX), one in place matmul beats converting for a large
  weight and several rows (0.07 against 0.20 ms for 64 rows). It takes bfloat16 operands, so a float32 intermediate is
  rounded to bfloat16 first, as the Triton expand does; sums stay in float32. Many segments of one row convert there
  too: the batched float32 product is faster than oneDNN's (1.8 against 2.6 ms for 64). Small weights always convert.

Scratch buffers are kept per thread: a fresh temporary of over 128 KiB is mapped and faulted in by the kernel at every
call, which costs more than the product (0.25 ms for 1.4 MB).
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

# Elements of one converted weight tile plus its product: 2 MiB in float32, near the size of a core's L2 cache.
_TILE = 1 << 19
# Rows converted together: enough to use a weight tile well, few enough that their product fits beside it.
_TILE_ROWS = 64
# A native 16-bit matmul beats converting from this many weight elements on, and for one-row segments up to this count.
_NATIVE_WEIGHT = 1 << 16
_NATIVE_ROWS = 16
# Elements from which a fresh temporary costs page faults.
_MAPPED = 1 << 15


class _Scratch(threading.local):
    """The reused buffers of one thread, by use and dtype; the largest of each kind is kept."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}


_scratch = _Scratch()


def _buffer(name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised contiguous tensor of the shape of ``like``; a large one is cut from a buffer that this thread
    reuses."""
    size = like.numel()
    if size < _MAPPED or like.device.type != "cpu":
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    kept = _scratch.buffers.get((name, dtype))
    if kept is None or kept.numel() < size:
        kept = torch.empty(size, dtype=dtype)
        _scratch.buffers[name, dtype] = kept
    return kept[:size].view(like.shape)


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else _buffer(name, tensor, dtype).copy_(tensor)


@functools.cache
def _onednn_multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _native_applies(out: Tensor, w: Tensor, one_row_segments: int) -> bool:
    return (
        w.dtype == torch.bfloat16
        and out.dtype == torch.bfloat16
        and one_row_segments <= _NATIVE_ROWS
        and w.shape[-1] * w.shape[-2] >= _NATIVE_WEIGHT
        and _onednn_multiplies_bfloat16()
        and bool(torch.backends.mkldnn.enabled)
        and out.device.type == "cpu"
    )


def _arithmetic(out: Tensor, x: Tensor, w: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (out.dtype, x.dtype, w.dtype) else torch.float32


def _direct(out: Tensor, x: Tensor, w: Tensor, alpha: float, beta: float) -> None:
    """All of one dtype: the library call that updates ``out`` in place."""
    if out.dim() == 2:
        out.addmm_(x, w.t(), beta=beta, alpha=alpha)
    else:
        out.baddbmm_(x, w.mT, beta=beta, alpha=alpha)


def _convert(out: Tensor, x: Tensor, w: Tensor, alpha: float, beta: float, dtype: torch.dtype) -> None:
    """A tile that fits the cache: convert the operands, form the sum in ``dtype``, round it once."""
    x, w = _converted("inputs", x, dtype), _converted("weights", w, dtype)
    if out.dtype == dtype:
        _direct(out, x, w, alpha, beta)
        return
    total = _buffer("total", out, dtype)
    if beta:
        total.copy_(out)
    _direct(total, x, w, alpha, beta)
    out.copy_(total)


def multiply_segment(out: Tensor, x: Tensor, w: Tensor, alpha: float, beta: float) -> None:
    """``out = beta * out + alpha * x @ w^T`` in place for one segment.

    Args:
        out: ``[length, N]`` view of the output rows; not read when ``beta`` is 0.
        x: ``[length, K]`` view of the input rows.
        w: ``[N, K]`` weight of the adapter.
        alpha, beta: factors; ``beta`` is 0 (overwrite) or 1 (add).
    """
    if out.dtype == x.dtype == w.dtype and w.dtype in (torch.float32, torch.float64):
        _direct(out, x, w, alpha, beta)
        return
    (length, width), inner = out.shape, w.shape[1]
    if _native_applies(out, w, 1):
        _direct(out, x.to(w.dtype), w, alpha, beta)
        return
    dtype = _arithmetic(out, x, w)
    if width * (inner + length) <= _TILE and length <= _TILE_ROWS:
        _convert(out, x, w, alpha, beta, dtype)
        return
    rows = min(length, _TILE_ROWS)
    columns = max(1, _TILE // max(1, inner + rows))
    for column in range(0, width, columns):
        tile = _converted("weights", w[column : column + columns], dtype)
        for row in range(0, length, rows):
            _convert(out[row : row + rows, column : column + columns], x[row : row + rows], tile, alpha, beta, dtype)


def multiply_run(out: Tensor, x: Tensor, w: Tensor, alpha: float, beta: float) -> None:
    """:func:`multiply_segment` for a run: ``out [count, length, N]``, ``x [count, length, K]``, ``w [count, N, K]``."""
    if out.dtype == x.dtype == w.dtype and w.dtype in (torch.float32, torch.float64):
        _direct(out, x, w, alpha, beta)
        return
    count, length, width = out.shape
    if _native_applies(out, w, count if length == 1 else 1):
        _direct(out, x.to(w.dtype), w, alpha, beta)
        return
    group = _TILE // max(1, width * (w.shape[2] + length))
    if group < 2:
        for i in range(count):
            multiply_segment(out[i], x[i], w[i], alpha, beta)
        return
    dtype = _arithmetic(out, x, w)
    for i in range(0, count, group):
        tile = slice(i, i + group)
        _convert(out[tile], x[tile], w[tile], alpha, beta, dtype)
