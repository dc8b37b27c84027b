"""Fused MoE LoRA with weights in FP8: the operands that come with it, what they must be, and the second product's
activations.

Scales lie as in `punica.ops.fp8_checks`, for every (slot, expert) ``[l, e]`` apart:

    per tensor  A and B [L, E]       per channel  A [L, E, R], B [L, E, N] (a 1 may follow)
    block-wise  A [L, E, ceil(R/group_n), ceil(K/group_k)], B [L, E, ceil(N/group_n), ceil(R/group_k)]

Activations x are real (weight-only), or FP8 with scales of their own (w8a8): one element, one per row, or block-wise
one per row and group of ``group_k`` columns. What lies between the two products is real, unless scales are given to
round it to FP8 by. Block sizes may be any, and a block may cross those of a kernel.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.ops.checks import check_dtype
from punica.ops.fp8_checks import Scheme
from punica.ops.quant import FP8_DTYPES, FP8_MAX, upcast


class Fp8Experts(NamedTuple):
    """Scales of both products. ``x_scale``: of an x that is FP8; ``h_scale``: by which what lies between the products
    is rounded to the format of B, ``[T*k]`` rows that all slices share (None: it is not).
    """

    a_scale: Sequence[Tensor]
    b_scale: Sequence[Tensor]
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None
    shrink: Scheme = Scheme()
    expand: Scheme = Scheme()

    def contiguous(self) -> "Fp8Experts":
        """The same with scales as kernels read them, one after the other."""
        a, b = (tuple([one.contiguous() for one in each]) for each in (self.a_scale, self.b_scale))
        return self._replace(a_scale=a, b_scale=b, x_scale=None if self.x_scale is None else self.x_scale.contiguous())


def check_fp8(fp8: Fp8Experts, x: Tensor, weights: tuple[Sequence[Tensor], Sequence[Tensor]], pairs: int) -> None:
    """Checked weights ``[L, E, N, K]`` of one FP8 dtype, their scales, and the activations: TypeError for dtypes,
    ValueError for what is missing or of another shape.
    """
    for scheme in (fp8.shrink, fp8.expand):
        scheme.check()
    lora_a, lora_b = weights
    _check_scales("lora_a_scale", fp8.a_scale, lora_a, fp8.shrink)
    _check_scales("lora_b_scale", fp8.b_scale, lora_b, fp8.expand)
    if fp8.shrink.use_fp8_w8a8 and x.dtype not in FP8_DTYPES:
        raise TypeError(f"qcurr_hidden_states has dtype {x.dtype}; use_fp8_w8a8 needs float8 with its scales")
    if not fp8.shrink.use_fp8_w8a8 and x.dtype in FP8_DTYPES:
        raise TypeError(f"qcurr_hidden_states has dtype {x.dtype}; float8 activations need use_fp8_w8a8=True")
    if x.dtype in FP8_DTYPES:
        if fp8.x_scale is None:
            raise ValueError(f"a scale is required for fp8 activations: qcurr_hidden_states has dtype {x.dtype}")
        _check_row_scales("the activations' scale", fp8.x_scale, x.shape[0], x.shape[1], fp8.shrink, x)
    elif fp8.x_scale is not None:
        raise ValueError(f"an activation scale is given, but qcurr_hidden_states has dtype {x.dtype}; leave it out")
    if fp8.h_scale is not None:
        _check_row_scales("expand_act_scale", fp8.h_scale, pairs, lora_b[0].shape[-1], fp8.expand, x)


def _check_scales(name: str, scales: Any, weights: Sequence[Tensor], scheme: Scheme) -> None:
    if scales is not None and not isinstance(scales, (tuple, list)):
        raise TypeError(f"{name} must be a list of tensors, one per slice, got {type(scales).__name__}")
    if not scales:
        missing = f"{name} is missing: weights of {weights[0].dtype} need one tensor of scales per slice"
        raise ValueError(missing) if scheme.use_fp8_w8a8 else TypeError(missing)
    if len(scales) != len(weights):
        raise ValueError(f"{name} has {len(scales)} tensors, the weights have {len(weights)} slices; must be equal")
    for i, (scale, weight) in enumerate(zip(scales, weights, strict=True)):
        check_dtype(f"{name}[{i}]", scale, (torch.float32,))
        slots, experts, rows, k = weight.shape
        shape: tuple[int, ...] = (slots, experts)
        if scheme.block_wise:
            shape += (-(-rows // scheme.group_n), -(-k // scheme.group_k))
        elif scheme.per_channel_quant:
            shape += (rows,)
        if tuple(scale.shape) not in (shape, (*shape, 1)):
            raise ValueError(f"{name}[{i}] has shape {tuple(scale.shape)}, slice {i} needs {shape} with {scheme}")
        if scale.device != weight.device:
            raise ValueError(f"{name}[{i}] is on {scale.device}, the weights are on {weight.device}; move one of them")


def _check_row_scales(name: str, scale: Any, rows: int, k: int, scheme: Scheme, x: Tensor) -> None:
    check_dtype(name, scale, (torch.float32,))
    groups = -(-k // scheme.group_k) if scheme.block_wise else 1
    legal = [(rows,), (rows, 1), *([(rows, groups)] if groups > 1 else [])]
    if math.prod(scale.shape) != 1 and tuple(scale.shape) not in legal:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; expected one element or one of {legal}")
    if scale.device != x.device:
        raise ValueError(f"{name} is on {scale.device}, the activations are on {x.device}; move one of them")


def real_weight(stored: Tensor, scale: Tensor, slot: int, expert: int, scheme: Scheme) -> Tensor:
    """``[N, K]`` float32 of an expert of an adapter."""
    weight, own = upcast(stored[slot, expert]), scale[slot, expert]
    if scheme.block_wise:
        own = own.reshape(own.shape[:2]).repeat_interleave(scheme.group_n, 0)[: weight.shape[0]]
        return weight * own.repeat_interleave(scheme.group_k, 1)[:, : weight.shape[1]]
    return weight * own.reshape(-1, 1)


def over_columns(scale: Tensor, k: int, scheme: Scheme) -> Tensor:
    """Scales of rows as what may multiply ``[..., rows, k]``."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.ndim == 1 or scale.shape[1] == 1:
        return scale.reshape(-1, 1)
    return scale.repeat_interleave(scheme.group_k, 1)[:, :k]


def rounded(low: Tensor, scale: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """``low [..., T*k, R]`` as the FP8 ``dtype`` holds it by these scales, float32 again."""
    factor, limit = over_columns(scale, low.shape[-1], scheme), FP8_MAX[dtype]
    return (low / factor).clamp(-limit, limit).to(dtype).float() * factor
