"""Checks of the Triton ops' arguments: everything the host can see, before anything is written (spec table 3.2).

They look at shapes, strides, dtypes and devices alone, so an op runs them once per combination of those
(`launch.Plans`); an address is never part of that key, so freed and reused memory cannot bring back a stale answer.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from punica.ops.triton_ops.launch import INTERPRETED

__all__ = [
    "Weights",
    "active_segments",
    "check_expand_input",
    "check_expand_output",
    "check_host_arguments",
    "check_meta",
    "check_ranks",
    "check_runnable",
    "check_scaling",
    "check_shrink",
    "check_shrink_output",
    "describe_weights",
    "flag_is_set",
    "split_count",
    "verify_indices",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Weights(NamedTuple):
    """Form of the weights of all slices: A slices are ``[slots, rank, widths[0]]``, B slices ``[slots, widths[i],
    rank]``.
    """

    slots: int
    rank: int
    widths: tuple[int, ...]
    row_major: bool
    dtype: torch.dtype
    device: torch.device


def describe_weights(name: str, weights: Sequence[torch.Tensor], rank_dim: int) -> Weights:
    """Validated form of `weights`; ``rank_dim`` is the dimension of r: -2 for A ``[L, (1,) r, K]``, -1 for B ``[L, (1,)
    N, r]``.
    """
    if len(weights) == 0:
        raise ValueError(f"{name} is empty: pass one weight tensor per slice, at least one")
    first = weights[0]
    orders = []
    for i, weight in enumerate(weights):
        label = f"{name}[{i}]"
        if weight.dtype not in FLOATS:
            raise TypeError(f"{label} has dtype {weight.dtype}; float16, bfloat16 or float32 is needed")
        if weight.dtype != first.dtype:
            raise TypeError(
                f"{label} has dtype {weight.dtype}, but {name}[0] has {first.dtype}: slices share one dtype"
            )
        if weight.ndim not in (3, 4):
            raise ValueError(f"{label} must have 3 or 4 dimensions, got shape {tuple(weight.shape)}")
        if weight.ndim == 4 and weight.shape[1] != 1:
            raise ValueError(f"{label} has 4 dimensions, the second must be 1, got shape {tuple(weight.shape)}")
        if weight.device != first.device:
            raise ValueError(f"{label} is on {weight.device}, but {name}[0] on {first.device}: slices share one device")
        same = (weight.shape[0], weight.shape[rank_dim]) == (first.shape[0], first.shape[rank_dim])
        if not same or (rank_dim == -2 and weight.shape[-1] != first.shape[-1]):
            what = "slots, rank and hidden size" if rank_dim == -2 else "slots and rank"
            raise ValueError(
                f"{label} has shape {tuple(weight.shape)}, but {name}[0] {tuple(first.shape)}: slices share {what}"
            )
        orders.append(_order(label, weight))
    if len(set(orders)) > 1:
        raise ValueError(f"slices of {name} mix row-major and transposed storage: store all the same way")
    other_dim = -1 if rank_dim == -2 else -2
    widths = tuple(weight.shape[other_dim] for weight in weights)
    return Weights(first.shape[0], first.shape[rank_dim], widths, orders[0], first.dtype, first.device)


def _order(label: str, weight: torch.Tensor) -> bool:
    """True: row-major. False: the last two dimensions are stored transposed, and only those."""
    if weight.is_contiguous():
        return True
    if weight.transpose(-1, -2).is_contiguous():
        return False
    raise ValueError(
        f"{label} (shape {tuple(weight.shape)}, strides {weight.stride()}) is contiguous neither "
        "row-major nor with its last "
        f"two dimensions swapped: pass a contiguous tensor"
    )


def flag_is_set(no_lora_flag_cpu: Any) -> bool:
    """Value of the no-adapter flag; ValueError unless it is a bool tensor with one element on the CPU."""
    flag = no_lora_flag_cpu
    if not isinstance(flag, torch.Tensor) or flag.numel() != 1 or flag.dtype != torch.bool or flag.device.type != "cpu":
        what = f"{flag.dtype} {tuple(flag.shape)} on {flag.device}" if isinstance(flag, torch.Tensor) else repr(flag)
        raise ValueError(f"no_lora_flag_cpu must be a bool tensor with one element on the CPU, got {what}")
    return bool(flag)


def split_count(num_active_loras: Any) -> tuple[torch.Tensor | None, int]:
    """The active count as the ops take it: a CPU tensor stays data for graph tracers; a number, or -1 when it is
    absent.
    """
    if isinstance(num_active_loras, torch.Tensor):
        return num_active_loras, -1
    if num_active_loras is None:
        return None, -1
    if isinstance(num_active_loras, bool) or not isinstance(num_active_loras, int):
        raise TypeError(
            f"num_active_loras must be an int or an int CPU tensor with one element, got {num_active_loras!r}"
        )
    if num_active_loras < 0:
        raise ValueError(f"num_active_loras must not be negative, got {num_active_loras}")
    return None, num_active_loras


def check_host_arguments(no_lora_flag_cpu: Any, **weights: Any) -> None:
    """What torch's dispatcher would refuse in its own words: a flag that is no tensor, weights that are no sequence."""
    if not isinstance(no_lora_flag_cpu, torch.Tensor):
        flag_is_set(no_lora_flag_cpu)
    for name, value in weights.items():
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{name} must be a tuple or list of tensors, one per slice, got {type(value).__name__}")


def active_segments(count: torch.Tensor | None, number: int, entries: int) -> int:
    """The active count: from the CPU tensor `count`, else `number` (-1: not given, then all `entries` = M)."""
    if count is not None:
        if count.dtype.is_floating_point or count.dtype == torch.bool:
            raise TypeError(f"num_active_loras has dtype {count.dtype}; an integer is needed")
        if count.numel() != 1 or count.device.type != "cpu":
            raise ValueError(
                "num_active_loras must be an int or a CPU tensor with one element, got shape "
                f"{tuple(count.shape)} on {count.device}"
            )
        number = int(count)
    elif number == -1:
        number = entries
    if not 0 <= number <= entries:
        raise ValueError(
            f"num_active_loras is {number}; it must be in [0, {entries}], the number of entries of lora_ids"
        )
    return number


def check_meta(tokens: int, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
    """Mapping, sorted indices, counts, starts, ids: int32, contiguous, on `device`, of matching lengths."""
    names = ("token_lora_mapping", "token_indices_sorted_by_lora_ids", "num_tokens_per_lora", "lora_token_start_loc")
    entries = tensors[2].numel()
    wanted = (tokens, tokens, entries, entries + 1, entries)
    for tensor, length, name in zip(tensors, wanted, (*names, "lora_ids"), strict=True):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}; int32 is needed")
        if tensor.ndim != 1 or tensor.shape[0] != length:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; ({length},) is needed for this call")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the inputs on {device}: all must share one device")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has stride {tensor.stride()}; it must be contiguous")


def check_ranks(lora_ranks: torch.Tensor | None, slices: int, weights: Weights) -> None:
    """``lora_ranks`` is None or int32 [n, L] on the weights' device."""
    if lora_ranks is None:
        return
    if lora_ranks.dtype != torch.int32:
        raise TypeError(f"lora_ranks has dtype {lora_ranks.dtype}; int32 is needed")
    if lora_ranks.shape != (slices, weights.slots) or not lora_ranks.is_contiguous():
        raise ValueError(
            f"lora_ranks must be contiguous with shape [slices, slots] = ({slices}, {weights.slots}), got "
            f"shape {tuple(lora_ranks.shape)}, strides {lora_ranks.stride()}"
        )
    if lora_ranks.device != weights.device:
        raise ValueError(f"lora_ranks is on {lora_ranks.device}, the weights on {weights.device}")


def check_runnable(device: torch.device) -> None:
    """RuntimeError where no Triton kernel can run."""
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"the Triton ops need CUDA tensors, got {device}; on the CPU use punica.ops.torch_ops, or "
            "set TRITON_INTERPRET=1 "
            f"before punica is imported to run the kernels in Triton's interpreter"
        )


def check_scaling(scaling: float) -> None:
    """ValueError unless the factor is finite."""
    if not math.isfinite(scaling):
        raise ValueError(f"scaling must be finite, got {scaling}")


def check_shrink(x: torch.Tensor, weights: Weights) -> None:
    """x is [T, K] with the dtype and device of A."""
    if x.dtype not in FLOATS:
        raise TypeError(f"inputs has dtype {x.dtype}; float16, bfloat16 or float32 is needed")
    if x.dtype != weights.dtype:
        raise TypeError(f"inputs has dtype {x.dtype}, lora_a_weights {weights.dtype}: they must be equal")
    if x.ndim != 2:
        raise ValueError(f"inputs must be [tokens, hidden size], got shape {tuple(x.shape)}")
    if x.shape[1] != weights.widths[0]:
        raise ValueError(
            f"hidden size of inputs is {x.shape[1]} (shape {tuple(x.shape)}), but lora_a_weights have hidden size "
            f"{weights.widths[0]}"
        )
    if x.device != weights.device:
        raise ValueError(f"inputs is on {x.device}, lora_a_weights on {weights.device}: all must share one device")


def check_shrink_output(out: torch.Tensor, x: torch.Tensor, weights: Weights) -> None:
    """out is contiguous [n, T, r] on the device of x."""
    if out.dtype not in FLOATS:
        raise TypeError(f"output_tensor has dtype {out.dtype}; float16, bfloat16 or float32 is needed")
    shape = (len(weights.widths), x.shape[0], weights.rank)
    if tuple(out.shape) != shape:
        raise ValueError(f"output_tensor must have shape [slices, tokens, rank] = {shape}, got {tuple(out.shape)}")
    if not out.is_contiguous():
        raise ValueError(f"output_tensor must be contiguous, got shape {tuple(out.shape)} with strides {out.stride()}")
    if out.device != x.device:
        raise ValueError(f"output_tensor is on {out.device}, inputs on {x.device}: all must share one device")


def check_expand_input(h: torch.Tensor, weights: Weights) -> None:
    """h is [n, T, r], float32 or the dtype of B."""
    if h.dtype not in (torch.float32, weights.dtype):
        raise TypeError(f"inputs has dtype {h.dtype}; float32 or the weights' {weights.dtype} is needed")
    if h.ndim != 3 or h.shape[0] != len(weights.widths):
        raise ValueError(
            f"inputs must be [slices, tokens, rank] with {len(weights.widths)} slices, one per "
            f"weight, got {tuple(h.shape)}"
        )
    if h.shape[2] != weights.rank:
        raise ValueError(
            f"rank of inputs is {h.shape[2]} (shape {tuple(h.shape)}), but lora_b_weights have rank {weights.rank}"
        )
    if h.device != weights.device:
        raise ValueError(f"inputs is on {h.device}, lora_b_weights on {weights.device}: all must share one device")


def check_expand_output(y: torch.Tensor, tokens: int, weights: Weights, offset_start: int) -> None:
    """y is [T, W] with unit column stride, and the slices' columns fit into W."""
    if y.dtype not in FLOATS:
        raise TypeError(f"output_tensor has dtype {y.dtype}; float16, bfloat16 or float32 is needed")
    if y.ndim != 2:
        raise ValueError(f"output_tensor must be [tokens, width], got shape {tuple(y.shape)}")
    if y.shape[0] != tokens:
        raise ValueError(f"output_tensor has {y.shape[0]} rows, inputs {tokens} tokens: they must be equal")
    if y.stride(1) != 1 and y.shape[1] > 1:
        raise ValueError(f"output_tensor needs stride 1 along its last dimension, got strides {y.stride()}")
    total = sum(weights.widths)
    if offset_start < 0 or offset_start + total > y.shape[1]:
        raise ValueError(
            f"offset_start {offset_start} with slices of {total} columns does not fit into the {y.shape[1]} columns of "
            f"output_tensor (offset_start >= 0, offset_start + columns <= {y.shape[1]})"
        )
    if y.device != weights.device:
        raise ValueError(
            f"output_tensor is on {y.device}, lora_b_weights on {weights.device}: all must share one device"
        )


def verify_indices(meta: Sequence[torch.Tensor], slots: int) -> None:
    """For debugging: the metadata's values on the device. Waits for the device. ValueError names the first bad value.

    ``meta``: mapping, sorted indices, counts, starts, ids, as `LoRAKernelMeta.meta_args` gives them.
    """
    mapping, order, counts, starts, ids = (tensor.cpu() for tensor in meta)
    tokens = mapping.shape[0]
    limits = [("token_lora_mapping", mapping, -1, slots - 1), ("lora_ids", ids, -1, slots - 1)]
    limits += [("num_tokens_per_lora", counts, 0, tokens), ("lora_token_start_loc", starts, 0, tokens)]
    for name, values, low, high in (*limits, ("token_indices_sorted_by_lora_ids", order, 0, tokens - 1)):
        bad = ((values < low) | (values > high)).nonzero().flatten()
        if bad.numel():
            position = int(bad[0])
            raise ValueError(f"{name}[{position}] is {int(values[position])}; it must be in [{low}, {high}]")
    for entry, slot in enumerate(ids.tolist()):
        first, count = int(starts[entry]), int(counts[entry])
        rows = order[first : first + count].long()
        if slot >= 0 and (rows.numel() != count or bool((mapping[rows] != slot).any())):
            raise ValueError(
                f"segment {entry} of lora_ids (slot {slot}, sorted positions {first} to {first + count}) holds rows of "
                f"another slot: the metadata tensors are not of one step"
            )
