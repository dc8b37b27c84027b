"""Checks of fused MoE LoRA's operands, shared by the torch and the Triton ops. None reads a device.

TypeError for types and dtypes, ValueError for shapes, ranges and what is missing.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from punica.ops import collectives
from punica.ops.checks import FLOATS, Weights, check_bool, check_device, check_dtype, check_ranks
from punica.ops.experts import ExpertForm, Experts, Fp8Experts, Switches
from punica.ops.fp8_checks import Scheme
from punica.ops.quant import FP8_DTYPES

INTEGERS = (torch.int32, torch.int64)


# --- alignment -------------------------------------------------------------------------------------------------------


def check_routing(
    topk_ids: Any, mapping: Any, enabled: Any, max_loras: int, expert_map: Any, num_experts: int = 0
) -> None:
    """Check the inputs of an alignment: TypeError for dtypes, ValueError for shapes."""
    check_dtype("topk_ids", topk_ids, INTEGERS)
    if topk_ids.ndim != 2:
        raise ValueError(f"topk_ids has shape {tuple(topk_ids.shape)}; expected [T, k]")
    check_mapping(mapping, topk_ids.shape[0])
    check_enabled(enabled, max_loras)
    if expert_map is not None:
        check_dtype("expert_map", expert_map, (torch.int32,))
        if expert_map.ndim != 1:
            raise ValueError(f"expert_map has shape {tuple(expert_map.shape)}; expected one entry per global expert")
        if len(expert_map) < num_experts:
            raise ValueError(f"expert_map has {len(expert_map)} entries; {num_experts} are needed, one per expert "
                             "(num_experts)")  # fmt: skip
        _check_without_gaps(expert_map=expert_map)


def check_mapping(mapping: Any, tokens: int) -> None:
    """Check the slot of every token, ``[T]`` int32 without gaps."""
    check_dtype("token_lora_mapping", mapping, (torch.int32,))
    if tuple(mapping.shape) != (tokens,):
        raise ValueError(f"token_lora_mapping has shape {tuple(mapping.shape)}; ({tokens},) is needed, one per token")
    _check_without_gaps(token_lora_mapping=mapping)


def check_enabled(enabled: Any, max_loras: int) -> None:
    """Check the flags of slots with weights for this layer, ``[L+1]`` int32."""
    if not isinstance(enabled, Tensor):
        raise TypeError(f"adapter_enabled must be a tensor, got {type(enabled).__name__}")
    if enabled.dtype != torch.int32 or tuple(enabled.shape) != (max_loras + 1,):
        raise ValueError(
            f"adapter_enabled is {enabled.dtype} {tuple(enabled.shape)}; int32 ({max_loras + 1},) is needed, one entry "
            "per slot (max_loras) and one for no slot"
        )
    _check_without_gaps(adapter_enabled=enabled)


def _check_without_gaps(**tensors: Tensor) -> None:
    """ValueError for a tensor with gaps."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous, pass .contiguous()")


def check_block_size(block_size: Any, smallest: int) -> None:
    """ValueError unless a positive int; from 16 on (kernels) a power of two."""
    legal = isinstance(block_size, int) and not isinstance(block_size, bool) and block_size >= smallest
    if not legal or (smallest >= 16 and block_size & (block_size - 1)):
        wanted = "a power of two >= 16" if smallest >= 16 else f"an integer >= {smallest}"
        raise ValueError(f"block_size must be {wanted}, got {block_size!r}")


def check_padded(pairs: int, num_experts: int, block_size: int, padded: int, blocks: int) -> None:
    """ValueError where the worst distribution of one slot's pairs over experts would not fit into ``padded`` ids and
    ``blocks`` blocks.
    """
    groups = min(pairs, num_experts)
    needed = groups + (pairs - groups) // block_size if groups else 0
    if padded < needed * block_size or blocks < needed:
        raise ValueError(
            f"max_num_tokens_padded is {padded} and max_num_m_blocks {blocks}; {pairs} pairs of {num_experts} experts "
            f"in blocks of {block_size} can need {needed * block_size} and {needed}: pass at least these"
        )


def check_lora_ids(lora_ids: Any) -> None:
    """Check listed slots: int32, any number of them."""
    check_dtype("lora_ids", lora_ids, (torch.int32,))
    if lora_ids.ndim != 1:
        raise ValueError(f"lora_ids has shape {tuple(lora_ids.shape)}; expected a list of slots")
    _check_without_gaps(lora_ids=lora_ids)


def check_alignment(
    topk_ids: Any, mapping: Any, enabled: Any, lora_ids: Any, expert_map: Any, sizes: tuple[int, int, int, int, int],
    outputs: tuple[Any, Any, Any], smallest: int,
) -> None:  # fmt: skip
    """Check a call of `moe_lora_align_block_size`. ``sizes``: its five numbers; ``smallest``: least block size."""
    num_experts, block_size, slots, padded, blocks = sizes
    check_routing(topk_ids, mapping, enabled, slots, expert_map, num_experts)
    check_block_size(block_size, smallest)
    names, lengths = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad"), (slots * padded, slots * blocks, slots)
    for name, tensor, length in zip(names, outputs, lengths, strict=True):
        check_dtype(name, tensor, (torch.int32,))
        if tensor.numel() != length or not tensor.is_contiguous():
            raise ValueError(f"{name} has {tensor.numel()} elements; {length} contiguous ones are needed")
    check_padded(topk_ids.numel(), num_experts, block_size, padded, blocks)
    if lora_ids is not None:
        check_lora_ids(lora_ids)


# --- the fused op ----------------------------------------------------------------------------------------------------


def check_experts(
    given: Experts, max_lora_rank: Any, top_k: Any, switches: Switches, block_m: int | None = None
) -> ExpertForm:
    """Check a call on the host; return its sizes. ``block_m``: of the alignment; None: P / B, where that is whole."""
    check_bool("mul_routed_weight", switches.mul_routed_weight)
    check_bool("add_inputs", switches.add_inputs)
    slots, experts, rank, full_rank, hidden, width = _check_weights(given)
    slices = len(given.lora_a)
    if max_lora_rank != rank:
        raise ValueError(f"max_lora_rank is {max_lora_rank}, the rank dimension of lora_a_stacked is {rank}")
    _check_ranks(rank, full_rank, switches)
    check_dtype("topk_weights", given.topk_weights, FLOATS)
    if given.topk_weights.ndim != 2 or not given.topk_weights.is_contiguous():
        raise ValueError(f"topk_weights has shape {tuple(given.topk_weights.shape)}; expected contiguous [T, k]")
    tokens, k = given.topk_weights.shape
    if top_k != k:
        raise ValueError(f"top_k_num is {top_k}, topk_weights has {k} experts per token")
    check_mapping(given.mapping, tokens)
    check_enabled(given.enabled, slots)
    rows = tokens * k if switches.mul_routed_weight else tokens
    if tuple(given.x.shape) != (rows, hidden):
        which = "T * k" if switches.mul_routed_weight else "T"
        raise ValueError(
            f"qcurr_hidden_states has shape {tuple(given.x.shape)}; ({rows}, {hidden}) is needed: {which} rows of the "
            "hidden size of lora_a_stacked"
        )
    _check_moe_output(given.output, (tokens, k), slices * width, switches.offset)
    block_m = _check_alignment(given, slots, tokens * k, block_m)
    first = given.lora_a[0]
    check_ranks(given.lora_ranks, Weights(slots, rank, (hidden,) * slices, first.dtype, first.device))
    if given.fp8 is not None:
        check_fp8(given.fp8, given.x, (given.lora_a, given.lora_b), tokens * k)
    for name, tensor in (("qcurr_hidden_states", given.x), ("output", given.output), ("mapping", given.mapping)):
        check_device(name, tensor, first.device)
    factor = 1 if switches.mul_routed_weight else k
    return ExpertForm(tokens, k, slices, slots, experts, rank, full_rank, hidden, width, factor, block_m)


def _check_weights(given: Experts) -> tuple[int, int, int, int, int, int]:
    for name, weights in (("lora_a_stacked", given.lora_a), ("lora_b_stacked", given.lora_b)):
        if not isinstance(weights, (tuple, list)):
            raise TypeError(f"{name} must be a tuple of tensors, one per slice, got {type(weights).__name__}")
    if not given.lora_a or len(given.lora_a) != len(given.lora_b):
        raise ValueError(f"lora_a_stacked has {len(given.lora_a)} slices, lora_b_stacked {len(given.lora_b)}; as many "
                         "of both are needed, at least one")  # fmt: skip
    for name, tensor in (("qcurr_hidden_states", given.x), ("output", given.output)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if given.x.dtype not in FLOATS and given.fp8 is None:
        hint = "; quantised activations are for fused_moe_lora_fp8" if given.x.dtype.itemsize == 1 else ""
        raise TypeError(f"qcurr_hidden_states has dtype {given.x.dtype}, expected one of {FLOATS}{hint}")
    allowed: tuple[torch.dtype, ...] = (given.x.dtype,)
    if given.fp8 is not None:
        check_dtype("lora_a_stacked[0]", given.lora_a[0], FP8_DTYPES)
        check_dtype("qcurr_hidden_states", given.x, (*FLOATS, *FP8_DTYPES))
        allowed = (given.lora_a[0].dtype,)
    for name, weights in (("lora_a_stacked", given.lora_a), ("lora_b_stacked", given.lora_b)):
        for i, weight in enumerate(weights):
            check_dtype(f"{name}[{i}]", weight, allowed)
            if weight.ndim != 4:
                raise ValueError(f"{name}[{i}] has shape {tuple(weight.shape)}; expected [slots, experts, out, in]")
            if weight.shape != weights[0].shape:
                raise ValueError(f"{name}[{i}] has shape {tuple(weight.shape)}, {name}[0] {tuple(weights[0].shape)}; "
                                 "slices must have one shape")  # fmt: skip
            if not weight.is_contiguous():
                raise ValueError(f"{name}[{i}] has strides {weight.stride()}; it must be contiguous")
    a, b = given.lora_a[0].shape, given.lora_b[0].shape
    if a[:2] != b[:2]:
        raise ValueError(f"lora_a_stacked has {tuple(a[:2])} slots and experts, lora_b_stacked {tuple(b[:2])}")
    return a[0], a[1], a[2], b[3], a[3], b[2]


def _check_ranks(rank: int, full_rank: int, switches: Switches) -> None:
    if not switches.fully_sharded:
        if full_rank != rank:
            raise ValueError(f"lora_b_stacked has rank {full_rank}, lora_a_stacked {rank}; only fully sharded may they "
                             "differ")  # fmt: skip
        return
    world = collectives.current().world_size()
    if full_rank not in (rank, rank * world):
        raise ValueError(
            f"lora_b_stacked has rank {full_rank}; fully sharded over {world} ranks, with {rank} of "
            f"lora_a_stacked, it must be {rank} or {rank * world}"
        )
    if not switches.add_inputs:
        raise ValueError("fully_sharded with add_inputs=False: every rank has only its part to write; pass True")


def _check_moe_output(output: Tensor, pairs: tuple[int, int], columns: int, offset: Any) -> None:
    check_dtype("output", output, FLOATS)
    if output.ndim != 3 or tuple(output.shape[:2]) != pairs:
        raise ValueError(f"output has shape {tuple(output.shape)}; expected {[*pairs, 'W']}, the shape of topk_weights")
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"offset must be an int, got {type(offset).__name__} {offset!r}")
    if offset < 0 or offset + columns > output.shape[2]:
        raise ValueError(f"offset {offset} + {columns} columns of the slices end outside of output with "
                         f"{output.shape[2]} columns")  # fmt: skip
    rows, row, column = output.stride()
    if (column != 1 and output.shape[2] > 1) or (pairs[0] > 1 and rows != pairs[1] * row):
        raise ValueError(f"output has strides {output.stride()}; rows without gaps are needed: last stride 1, and "
                         "stride(0) == k * stride(1)")  # fmt: skip


def _check_alignment(given: Experts, slots: int, pairs: int, block_m: int | None) -> int:
    ids, experts, counts = given.sorted_ids, given.expert_ids, given.counts
    check_dtype("expert_ids", experts, INTEGERS if ids is None else (torch.int32,))
    if ids is None:
        if counts is not None:
            raise ValueError("num_tokens_post_padded without sorted_token_ids: pass both, or None for both (naive)")
        if tuple(experts.shape) != (pairs,):
            raise ValueError(f"expert_ids has shape {tuple(experts.shape)}; without sorted_token_ids one expert per "
                             f"pair is needed, ({pairs},)")  # fmt: skip
        _check_without_gaps(expert_ids=experts)
        return 1
    if counts is None:
        raise ValueError("sorted_token_ids without num_tokens_post_padded: pass both")
    check_dtype("sorted_token_ids", ids, (torch.int32,))
    check_dtype("num_tokens_post_padded", counts, (torch.int32,))
    if ids.ndim != 2 or experts.ndim != 2 or counts.ndim != 1 or not ids.shape[0] == experts.shape[0] == len(counts):
        shapes = tuple(ids.shape), tuple(experts.shape), tuple(counts.shape)
        raise ValueError(f"sorted_token_ids, expert_ids, num_tokens_post_padded have shapes {shapes}; expected [L, P], "
                         "[L, B], [L]")  # fmt: skip
    if len(counts) != slots:
        raise ValueError(f"the alignment has {len(counts)} slots, the weights have {slots}")
    if given.lora_ids is not None:
        check_lora_ids(given.lora_ids)
        if len(given.lora_ids) > slots + 1:
            raise ValueError(f"lora_ids has {len(given.lora_ids)} entries; at most {slots + 1} fit: every slot and -1")
    _check_without_gaps(sorted_token_ids=ids, expert_ids=experts, num_tokens_post_padded=counts)
    padded, blocks = ids.shape[1], experts.shape[1]
    if block_m is None and padded % max(1, blocks) == 0:
        return padded // max(1, blocks) or 16
    if block_m is None or -(-padded // block_m) != blocks:
        size = "whole blocks" if block_m is None else f"blocks of {block_m}"
        raise ValueError(
            f"sorted_token_ids with {padded} ids per slot and expert_ids with {blocks} blocks are not an alignment in "
            f"{size}: the block size of shrink and expand must be equal to the alignment's"
        )
    return block_m


# --- scales ----------------------------------------------------------------------------------------------------------


def check_fp8(fp8: Fp8Experts, x: Tensor, weights: tuple[Sequence[Tensor], Sequence[Tensor]], pairs: int) -> None:
    """Check scales and activations of FP8 weights ``[L, E, N, K]``: TypeError for dtypes, ValueError for missing
    scales and other shapes.
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
        check_device(f"{name}[{i}]", scale, weight.device)


def _check_row_scales(name: str, scale: Any, rows: int, k: int, scheme: Scheme, x: Tensor) -> None:
    check_dtype(name, scale, (torch.float32,))
    groups = -(-k // scheme.group_k) if scheme.block_wise else 1
    legal = [(rows,), (rows, 1), *([(rows, groups)] if groups > 1 else [])]
    if math.prod(scale.shape) != 1 and tuple(scale.shape) not in legal:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; expected one element or one of {legal}")
    if scale.device != x.device:
        raise ValueError(f"{name} is on {scale.device}, the activations are on {x.device}; move one of them")
