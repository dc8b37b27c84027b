"""The LoRA operators on FP8 weights in plain torch: their meaning, and the path of the CPU.

`shrink_fp8`, `expand_fp8` and `linear_fp8` take the step and all slices of a layer, as `punica.ops.torch_ops` does.
Weights are dequantised slot by slot, only those in use and only up to their true rank, and multiplied in float32. What
the scales mean is said in `punica.ops.fp8_checks`; any block size is legal here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops import torch_ops
from punica.ops.checks import (
    FLOATS,
    STEP,
    Names,
    Weights,
    check_input,
    check_low_rank,
    check_output,
    check_pair,
    check_ranks,
    check_scale,
    weights_3d,
)
from punica.ops.fp8_checks import (
    Scheme,
    check_activation,
    check_plain,
    check_scales,
    describe_fp8,
    form_of,
    forms_of,
    is_plain,
)
from punica.ops.quant import FP8_DTYPES, quantize_per_token, upcast


def shrink_fp8(
    x: Tensor, lora_a_stacked: Sequence[Tensor], y: Tensor, batch: LoRABatch, scale: float = 1.0,
    *, b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None, scheme: Scheme = Scheme(),
    accumulate: bool = False, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """Hidden size to rank: ``y[i, t] (+)= scale * acc_i[t]`` of `punica.ops.fp8_checks`, N the rank, in place.

    Args:
        x: ``[T', K]`` float16, bfloat16 or float32 (weight-only), or float8 with ``a_scale`` (w8a8).
        lora_a_stacked: n tensors ``[L, (1,) r, K]``, all float8_e4m3fn or all float8_e5m2; without ``b_scale`` weights
            as `punica.ops.torch_ops.shrink` takes them, and its result.
        y: ``[n, T', r]`` float32, float16 or bfloat16.
        b_scale: n float32 tensors; a_scale: float32, one element, ``[T']``, ``[T', 1]`` or ``[T', ceil(K/group_k)]``.
        scheme: how the scales lie.

    The other arguments, rows without adapter and errors: as in `punica.ops.torch_ops.shrink`.
    """
    if is_plain(lora_a_stacked, b_scale):
        check_plain(STEP.input, x, a_scale, scheme)
        torch_ops.shrink(x, lora_a_stacked, y, batch, scale, accumulate=accumulate, lora_ranks=lora_ranks)
        return
    form = _check_shrink(x, lora_a_stacked, y, batch, b_scale, a_scale, scheme, lora_ranks)
    check_scale(STEP.scale, scale)
    if not accumulate:
        y.zero_()
    real = _real_rows(x, a_scale, scheme)
    for slot, rows in _segments(batch, y.device):
        for i, (stacked, scales) in enumerate(zip(lora_a_stacked, b_scale or (), strict=True)):
            rank = _rank(lora_ranks, i, slot, form)
            weight = _real_weight(stacked, scales, slot, scheme)[:rank]
            sums = scale * (real[rows] @ weight.t())
            if accumulate:
                sums += y[i, rows, :rank].float()
            y[i, rows, :rank] = sums.to(y.dtype)


def expand_fp8(
    x: Tensor, lora_b_stacked: Sequence[Tensor], y: Tensor, batch: LoRABatch,
    offset_start: int = 0, add_inputs: bool = True,
    *, b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None, scheme: Scheme = Scheme(),
    lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """Rank to hidden size: ``y[t, o_i : o_i + N_i] (+)= acc_i[t]`` of `punica.ops.fp8_checks`, K the rank, in place.

    x: ``[n, T', r]`` float16, bfloat16 or float32, or float8 with ``a_scale``, whose scales all slices of a row share;
    lora_b_stacked: n tensors ``[L, (1,) N_i, r]``; y: ``[T', W]``. Else as `shrink_fp8` and
    `punica.ops.torch_ops.expand`.
    """
    if is_plain(lora_b_stacked, b_scale):
        check_plain(STEP.input, x, a_scale, scheme)
        torch_ops.expand(x, lora_b_stacked, y, batch, offset_start, add_inputs, lora_ranks=lora_ranks)
        return
    form = _check_expand(x, lora_b_stacked, y, batch, offset_start, b_scale, a_scale, scheme, lora_ranks)
    real = _real_rows(x, a_scale, scheme)
    for slot, rows in _segments(batch, y.device):
        column = offset_start
        for i, (stacked, scales) in enumerate(zip(lora_b_stacked, b_scale or (), strict=True)):
            rank, width = _rank(lora_ranks, i, slot, form), form.widths[i]
            weight = _real_weight(stacked, scales, slot, scheme)[:, :rank]
            sums = real[i, rows, :rank] @ weight.t()
            if add_inputs:
                sums += y[rows, column : column + width].float()
            y[rows, column : column + width] = sums.to(y.dtype)
            column += width


def linear_fp8(
    y: Tensor, x: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor], batch: LoRABatch,
    scale: float = 1.0,
    *, lora_a_scale: Sequence[Tensor] | None, lora_b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None,
    shrink: Scheme = Scheme(), expand: Scheme = Scheme(), add_inputs: bool = True, lora_ranks: Tensor | None = None,
    buffer: Tensor | None = None,
) -> None:  # fmt: skip
    """`shrink_fp8` into float32 ``[n, T', r]`` (``buffer``, if given), then `expand_fp8`.

    With ``use_fp8_w8a8`` an x that is not float8 is quantised per token, and so is the intermediate.
    """
    check_linear_fp8(
        y, x, lora_a_stacked, lora_b_stacked, batch, lora_a_scale, lora_b_scale, a_scale, shrink, expand, lora_ranks
    )
    run_linear(
        _TORCH, y, x, lora_a_stacked, lora_b_stacked, batch, scale, lora_a_scale, lora_b_scale, a_scale, shrink, expand,
        add_inputs, lora_ranks, buffer,
    )  # fmt: skip


class Parts(NamedTuple):
    """What a linear consists of: the two products, and how activations are quantised per token."""

    shrink: Callable[..., None]
    expand: Callable[..., None]
    quantize: Callable[[Tensor, int], tuple[Tensor, Tensor]]


_TORCH = Parts(shrink_fp8, expand_fp8, partial(quantize_per_token, check=False))


def run_linear(
    parts: Parts,
    y: Tensor, x: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], batch: Any, scale: float,
    lora_a_scale: Sequence[Tensor] | None, lora_b_scale: Sequence[Tensor] | None, a_scale: Tensor | None,
    shrink: Scheme, expand: Scheme, add_inputs: bool, lora_ranks: Tensor | None, buffer: Tensor | None = None,
    aside: Callable[[], AbstractContextManager] = nullcontext,
) -> None:  # fmt: skip
    """`linear_fp8` of checked operands by the given parts; the first product in the context ``aside``."""
    if not x.shape[0]:
        return
    with aside():
        if shrink.use_fp8_w8a8 and x.dtype not in FP8_DTYPES:
            x, a_scale = parts.quantize(x, shrink.group_k)
        low = buffer
        if low is None:
            shape = (len(lora_a), x.shape[0], lora_a[0].shape[-2])
            low = torch.empty(shape, dtype=torch.float32, device=x.device)
        given = {"b_scale": lora_a_scale, "a_scale": a_scale, "scheme": shrink, "lora_ranks": lora_ranks}
        parts.shrink(x, lora_a, low, batch, scale, **given)
    h, h_scale = low, None
    if expand.use_fp8_w8a8:
        h, h_scale = parts.quantize(low, expand.group_k)
    parts.expand(
        h, lora_b, y, batch, 0, add_inputs, b_scale=lora_b_scale, a_scale=h_scale, scheme=expand, lora_ranks=lora_ranks
    )


def check_linear_fp8(
    y: Tensor, x: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], batch: Any,
    lora_a_scale: Sequence[Tensor] | None, lora_b_scale: Sequence[Tensor] | None, a_scale: Tensor | None,
    shrink: Scheme, expand: Scheme, lora_ranks: Tensor | None, names: Names = STEP,
) -> None:  # fmt: skip
    """All that `linear_fp8` objects to, before anything is written."""
    shrink.check()
    expand.check()
    a, b = describe_fp8(names, lora_a, -2), describe_fp8(names, lora_b, -1)
    check_pair(a, b, names)
    if shrink.use_fp8_w8a8 != expand.use_fp8_w8a8:
        raise ValueError("use_fp8_w8a8 differs between shrink and expand; quantise the activations of both or neither")
    check_scales("lora_a_scale", forms_of("lora_a_scale", lora_a_scale), a, True, shrink)
    check_scales("lora_b_scale", forms_of("lora_b_scale", lora_b_scale), b, False, expand)
    quantised_here = shrink.use_fp8_w8a8 and isinstance(x, Tensor) and x.dtype in FLOATS
    if quantised_here and a_scale is not None:
        raise ValueError(f"a_scale is given, but x has dtype {x.dtype}: it is quantised here, leave a_scale out")
    a_form = None if a_scale is None else form_of("a_scale", a_scale)
    if not quantised_here:
        check_activation(names.input, x, a_form, a.widths[0], shrink, a)
    check_input(names.input, x, a._replace(dtype=x.dtype), names.a)
    check_output(names.output, y, b, 0)
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"{names.input} has {x.shape[0]} rows and {names.output} has {y.shape[0]}; must be equal")
    batch.check_rows(x.shape[0])
    check_ranks(lora_ranks, a)


def _check_shrink(
    x: Tensor, lora_a: Sequence[Tensor], y: Tensor, batch: LoRABatch, b_scale: Sequence[Tensor] | None,
    a_scale: Tensor | None, scheme: Scheme, lora_ranks: Tensor | None,
) -> Weights:  # fmt: skip
    scheme.check()
    form = describe_fp8(STEP, lora_a, -2)
    check_scales("b_scale", forms_of("b_scale", b_scale), form, True, scheme)
    a_form = None if a_scale is None else form_of("a_scale", a_scale)
    check_activation(STEP.input, x, a_form, form.widths[0], scheme, form)
    check_input(STEP.input, x, form._replace(dtype=x.dtype), STEP.a)
    check_low_rank(STEP.output, y, form, x.shape[0], FLOATS)
    batch.check_rows(x.shape[0])
    _check_slots(batch, form)
    check_ranks(lora_ranks, form)
    return form


def _check_expand(
    x: Tensor, lora_b: Sequence[Tensor], y: Tensor, batch: LoRABatch, offset_start: int,
    b_scale: Sequence[Tensor] | None, a_scale: Tensor | None, scheme: Scheme, lora_ranks: Tensor | None,
) -> Weights:  # fmt: skip
    scheme.check()
    form = describe_fp8(STEP, lora_b, -1)
    check_scales("b_scale", forms_of("b_scale", b_scale), form, False, scheme)
    a_form = None if a_scale is None else form_of("a_scale", a_scale)
    check_activation(STEP.input, x, a_form, form.rank, scheme, form)
    check_output(STEP.output, y, form, offset_start)
    check_low_rank(STEP.input, x, form, y.shape[0], (x.dtype,))
    batch.check_rows(y.shape[0])
    _check_slots(batch, form)
    check_ranks(lora_ranks, form)
    return form


def _check_slots(batch: LoRABatch, form: Weights) -> None:
    highest = int(batch.rows.slots.max(initial=-1))
    if highest >= form.slots:
        raise ValueError(f"the step uses slot {highest}; the weights have slots 0 to {form.slots - 1}")


def _segments(batch: LoRABatch, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Every slot in use and the rows that use it."""
    slots, counts = batch.rows.present
    order, start = torch.from_numpy(batch.rows.order), 0
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            yield slot, order[start : start + count].to(device)
        start += count


def _rank(lora_ranks: Tensor | None, i: int, slot: int, form: Weights) -> int:
    rank = form.rank if lora_ranks is None else int(lora_ranks[i, slot])
    if not 0 <= rank <= form.rank:
        raise ValueError(f"lora_ranks holds {rank} for slot {slot}; expected 0 to {form.rank}")
    return rank


def _real_rows(x: Tensor, a_scale: Tensor | None, scheme: Scheme) -> Tensor:
    """The activations as float32, ``[..., T, K]``."""
    real = x.float()
    if a_scale is None:
        return real
    if a_scale.numel() == 1:
        return real * a_scale.reshape(())
    if a_scale.ndim == 1 or a_scale.shape[1] == 1:
        return real * a_scale.reshape(-1, 1)
    return real * a_scale.repeat_interleave(scheme.group_k, 1)[:, : x.shape[-1]]


def _real_weight(stacked: Tensor, scales: Tensor, slot: int, scheme: Scheme) -> Tensor:
    """Slot ``slot`` of the weights as float32 ``[N, K]``."""
    weight, scale = upcast(weights_3d(stacked, "weights")[slot]), scales[slot]
    if scheme.block_wise:
        scale = scale.reshape(scale.shape[-2:])
        scale = scale.repeat_interleave(scheme.group_n, 0)[: weight.shape[0]]
        return weight * scale.repeat_interleave(scheme.group_k, 1)[:, : weight.shape[1]]
    return weight * scale.reshape(-1, 1)
