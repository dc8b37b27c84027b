"""The library's attention of several prompts that lie behind one another, told on the device where each begins.

:func:`torch.nn.attention.varlen.varlen_attn` (torch 2.11 and newer) is FlashAttention: 16-bit elements, heads of up to
256.
Where prompts begin is read on the device, so that a captured CUDA graph serves prompts of every length that it has rows
for.
"""

import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor

MAX_HEAD_SIZE = 256


@functools.cache
def _parameters() -> frozenset[str]:
    """Of the library's function; empty where torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def is_supported(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether it takes heads ``[T, H, size]`` of this dtype on this device."""
    half = dtype in (torch.float16, torch.bfloat16)
    return device.type == "cuda" and half and size <= MAX_HEAD_SIZE and size % 8 == 0 and "window_size" in _parameters()


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Causal attention within each prompt: ``q [T, H, D]``, ``k`` and ``v`` ``[T, Hkv, D]`` to ``[T, H, D]``.

    ``starts``: int32 ``[N + 1]``, prompt i is rows ``[starts[i], starts[i + 1])``; what comes out for rows of no prompt
    is not defined.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _parameters():
            options["enable_gqa"] = True
        else:
            k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
    rows = q.shape[0]
    return cast(Tensor, varlen_attn(q, k, v, starts, starts, rows, rows, window_size=(-1, 0), **options))
