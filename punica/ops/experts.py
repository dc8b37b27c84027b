"""Operands of LoRA on experts: a layer's weights, a step's assignment of pairs, and both as one call of an op.

T tokens, k experts per token, pair ``i = t * k + j``, L slots, E experts on this rank, n slices of N columns. R is the
rank of this rank's A and R' that of B (the full rank where a collective gathers).

Scales of FP8 weights and activations are as in `punica.ops.scales`, those of weights with a dimension for the experts.
Block sizes may be any, and a block may cross those of a kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from punica.checks import check_bool
from punica.ops import collectives
from punica.ops.expect import FLOATS, INT32, Sizes, check_columns, expect, expect_slices
from punica.ops.quant import FP8_DTYPES, WITH_FP8, validate_scales
from punica.ops.scales import Scheme, check_activation, check_row_scales, check_scales

NAIVE_SHARE = 8
"""Naive assignment (one block per pair) where pairs x this are at most experts x slots. On a GPU only for
batch-invariant and tuned calls, else `punica.ops.triton_ops.moe_rules.most_naive`.
"""


class Fp8Experts(NamedTuple):
    """Scales of both products; of an x in FP8 ``x_scale``, of the intermediate ``h_scale``, ``[T*k]`` rows."""

    a_scale: Sequence[Tensor]
    b_scale: Sequence[Tensor]
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None
    shrink: Scheme = Scheme()
    expand: Scheme = Scheme()

    def contiguous(self) -> "Fp8Experts":
        """Make the scales contiguous, as kernels read them."""
        a, b = (tuple([one.contiguous() for one in each]) for each in (self.a_scale, self.b_scale))
        return self._replace(a_scale=a, b_scale=b, x_scale=None if self.x_scale is None else self.x_scale.contiguous())

    def validate(self) -> None:
        """For debugging: ValueError unless all scales are finite and >= 0. Waits for the device."""
        validate_scales(self.a_scale, "lora_a_scale")
        validate_scales(self.b_scale, "lora_b_scale")
        if self.x_scale is not None:
            validate_scales(self.x_scale, "a_scale")


class Switches(NamedTuple):
    """Scalar options of `fused_moe_lora`."""

    mul_routed_weight: bool = False
    fully_sharded: bool = False
    offset: int = 0
    add_inputs: bool = True


@dataclass(frozen=True, eq=False)
class ExpertLoRAWeights:
    """LoRA weights of one product of a layer of experts, in all slots; references, made once by the layer.

    ``lora_a``, ``lora_b``: n x ``[L, E, R, K]`` and n x ``[L, E, N, R']``. ``enabled``: int32 ``[L+1]``, slots with
    weights here. ``lora_ranks``: true ranks, int32 ``[n, L]`` (None: all of R). ``site``: "w13" or "w2" of the tuned
    files; None: these are not looked up.
    """

    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]
    enabled: Tensor
    lora_ranks: Tensor | None = None
    fp8: Fp8Experts | None = None
    switches: Switches = field(default_factory=Switches)
    site: str | None = None

    @property
    def slots(self) -> int:
        return self.lora_a[0].shape[0]

    @property
    def experts(self) -> int:
        return self.lora_a[0].shape[1]

    def prefers_naive(self, pairs: int) -> bool:
        return pairs * NAIVE_SHARE <= self.experts * self.slots


class Assignment(NamedTuple):
    """Pairs of a step by slot and expert, for both products of a layer. ``mapping``: slot of every token, ``[T]``.

    ``ids``, ``experts``, ``counts``: of `moe_lora_align_block_size`, viewed ``[L, P]``, ``[L, B]`` and ``[L]``; naive:
    None, the expert of every pair ``[T*k]``, None. Rows of slots outside the step's own list may be undefined.
    """

    topk_weights: Tensor
    ids: Tensor | None
    experts: Tensor
    counts: Tensor | None
    mapping: Tensor


class Experts(NamedTuple):
    """Operands of one fused MoE LoRA call, as `fused_moe_lora` takes them.

    ``sorted_ids``, ``expert_ids``, ``counts``, ``mapping``: as in `Assignment`. ``lora_ids``: slots in use, at most
    ``[L+1]``, -1: none (None: all). ``lora_ranks``: true rank of every slice and slot, int32 ``[n, L]``, not divided
    over a group; A and B are not read beyond (None: they are). ``fp8``: scales of weights in FP8.
    """

    output: Tensor
    x: Tensor
    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]
    topk_weights: Tensor
    sorted_ids: Tensor | None
    expert_ids: Tensor
    counts: Tensor | None
    mapping: Tensor
    enabled: Tensor
    lora_ids: Tensor | None
    lora_ranks: Tensor | None = None
    fp8: Fp8Experts | None = None

    @property
    def wide(self) -> torch.dtype:
        """Compute dtype of the products."""
        return self.x.dtype if self.fp8 is None or self.x.dtype in FLOATS else self.output.dtype


class ExpertForm(NamedTuple):
    """Sizes of a checked call. ``factor``: pairs per row of x; ``block_m``: of the alignment (1: naive)."""

    tokens: int
    top_k: int
    slices: int
    slots: int
    experts: int
    rank: int
    full_rank: int
    hidden: int
    width: int
    factor: int
    block_m: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k


Numbers = tuple[int, ...]


class ExpertOps(Protocol):
    """A backend's operations on experts. ``smallest_block``: fewest rows of a block of an alignment."""

    smallest_block: int

    def align(
        self, topk_ids: Tensor, mapping: Tensor, sizes: tuple[int, int, int, int, int], enabled: Tensor,
        expert_map: Tensor | None, lora_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return new flat outputs of `moe_lora_align_block_size` for the slots ``lora_ids`` (None: all)."""

    def use_naive_assignment(self, pairs: int, active: int, weights: ExpertLoRAWeights) -> bool:
        """Tell whether pairs are not aligned, for both products of a layer."""

    def block_size(self, tokens: int, top_k: int, active: int, weights: ExpertLoRAWeights) -> int:
        """Rows of a block of the alignment."""

    def add(
        self, given: Experts, max_lora_rank: int, top_k: int, switches: Switches,
        configs: tuple[Numbers, Numbers] | None, active: int, site: str | None,
    ) -> None:  # fmt: skip
        """Add one product. ``configs``: the seven numbers each of shrink and expand; None: the backend chooses.
        ``active``: adapters in use. ``site``: "w13" or "w2" of the tuned files; None: these are not looked up.
        """


INTEGERS = (torch.int32, torch.int64)


def check_routing(
    topk_ids: Any, mapping: Any, enabled: Any, max_loras: int, expert_map: Any, num_experts: int = 0
) -> None:
    expect("topk_ids", topk_ids, "T k", dtype=INTEGERS)
    check_mapping(mapping, topk_ids.shape[0])
    check_enabled(enabled, max_loras)
    if expert_map is not None:
        expect("expert_map", expert_map, "*", dtype=INT32, contiguous=True)
        if len(expert_map) < num_experts:
            raise ValueError(f"expert_map has {len(expert_map)} entries; {num_experts} are needed, one per expert")


def check_mapping(mapping: Any, tokens: int) -> None:
    expect("token_lora_mapping", mapping, "T", dtype=INT32, sizes={"T": tokens, "of T k": "topk_ids"}, contiguous=True)


def check_enabled(enabled: Any, max_loras: int) -> None:
    expect("adapter_enabled", enabled, contiguous=True)
    if enabled.dtype != torch.int32 or tuple(enabled.shape) != (max_loras + 1,):
        raise ValueError(f"adapter_enabled is {enabled.dtype} {tuple(enabled.shape)}, must be int32 ({max_loras + 1},)")


def check_block_size(block_size: Any, smallest: int) -> None:
    """Raise ValueError unless a positive int; from 16 on (kernels) a power of two."""
    legal = isinstance(block_size, int) and not isinstance(block_size, bool) and block_size >= smallest
    if not legal or (smallest >= 16 and block_size & (block_size - 1)):
        wanted = "a power of two >= 16" if smallest >= 16 else f"an integer >= {smallest}"
        raise ValueError(f"block_size must be {wanted}, got {block_size!r}")


def check_alignment(
    topk_ids: Any, mapping: Any, enabled: Any, lora_ids: Any, expert_map: Any, sizes: tuple[int, int, int, int, int],
    outputs: tuple[Any, Any, Any], smallest: int,
) -> None:  # fmt: skip
    """``sizes``: the five numbers of `moe_lora_align_block_size`; ``smallest``: least block size."""
    num_experts, block_size, slots, padded, blocks = sizes
    check_routing(topk_ids, mapping, enabled, slots, expert_map, num_experts)
    check_block_size(block_size, smallest)
    names, lengths = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad"), (slots * padded, slots * blocks, slots)
    for name, tensor, length in zip(names, outputs, lengths, strict=True):
        expect(name, tensor, dtype=INT32, contiguous=True)
        if tensor.numel() != length:
            raise ValueError(f"{name} has {tensor.numel()} elements; {length} are needed")
    pairs = topk_ids.numel()
    groups = min(pairs, num_experts)
    # the worst distribution of one slot's pairs over experts
    needed = groups + (pairs - groups) // block_size if groups else 0
    if padded < needed * block_size or blocks < needed:
        raise ValueError(
            f"max_num_tokens_padded is {padded} and max_num_m_blocks {blocks}; {pairs} pairs of {num_experts} experts "
            f"in blocks of {block_size} can need {needed * block_size} and {needed}: pass at least these"
        )
    if lora_ids is not None:
        expect("lora_ids", lora_ids, "*", dtype=INT32, contiguous=True)


_sizes_of_weights = itemgetter("L", "E", "r", "R", "K", "N")


def check_experts(
    given: Experts, max_lora_rank: Any, top_k: Any, switches: Switches, block_m: int | None = None
) -> ExpertForm:
    """Check a call on the host; return its sizes. ``block_m``: of the alignment; None: P / B, where that is whole."""
    check_bool("mul_routed_weight", switches.mul_routed_weight)
    check_bool("add_inputs", switches.add_inputs)
    sizes = _check_weights(given)
    slots, experts, rank, full_rank, hidden, width = _sizes_of_weights(sizes)
    first, slices = given.lora_a[0], len(given.lora_a)
    if max_lora_rank != rank:
        raise ValueError(f"max_lora_rank is {max_lora_rank}, the rank dimension of lora_a_stacked is {rank}")
    _check_ranks(rank, full_rank, switches)
    expect("topk_weights", given.topk_weights, "T k", dtype=FLOATS, sizes=sizes, contiguous=True)
    tokens, k = given.topk_weights.shape
    if top_k != k:
        raise ValueError(f"top_k_num is {top_k}, topk_weights has {k} experts per token")
    mapping, device = given.mapping, first.device
    expect("token_lora_mapping", mapping, "T", dtype=INT32, device=device, sizes=sizes, contiguous=True)
    check_enabled(given.enabled, slots)
    sizes["pairs"], sizes["of pairs"] = tokens * k, "topk_weights"
    allowed = WITH_FP8 if given.fp8 else (first.dtype,)
    dims = "pairs K" if switches.mul_routed_weight else "T K"
    expect("qcurr_hidden_states", given.x, dims, dtype=allowed, device=device, sizes=sizes)
    _check_moe_output(given.output, slices * width, switches.offset, device, sizes)
    block_m = _check_aligned(given, block_m, sizes)
    if given.lora_ranks is not None:
        sizes["n"], sizes["of n"] = slices, "lora_a_stacked"
        expect("lora_ranks", given.lora_ranks, "n L", dtype=INT32, device=device, sizes=sizes, contiguous=True)
    if given.fp8 is not None:
        _check_fp8(given.fp8, given, tokens * k)
    factor = 1 if switches.mul_routed_weight else k
    return ExpertForm(tokens, k, slices, slots, experts, rank, full_rank, hidden, width, factor, block_m)


def _check_weights(given: Experts) -> Sizes:
    x, sizes = given.x, Sizes()
    if given.fp8 is None and getattr(x, "dtype", None) in FP8_DTYPES:
        raise TypeError(f"qcurr_hidden_states has dtype {x.dtype}; quantised activations are for fused_moe_lora_fp8")
    allowed = FLOATS if given.fp8 is None else FP8_DTYPES
    expect_slices("lora_a_stacked", given.lora_a, "L E r K", dtype=allowed, sizes=sizes, contiguous=True)
    allowed, count = (given.lora_a[0].dtype,), len(given.lora_a)
    expect_slices("lora_b_stacked", given.lora_b, "L E N R", dtype=allowed, sizes=sizes, count=count, contiguous=True)
    return sizes


def _check_ranks(rank: int, full_rank: int, switches: Switches) -> None:
    world = collectives.current().world_size() if switches.fully_sharded else 1
    if full_rank not in (rank, rank * world):
        raise ValueError(
            f"lora_b_stacked has rank {full_rank}, lora_a_stacked {rank}; B must have {rank}, or, fully sharded over "
            f"{world} ranks, {rank * world}"
        )
    if switches.fully_sharded and not switches.add_inputs:
        raise ValueError("fully_sharded with add_inputs=False: every rank has only its part to write; pass True")


def _check_moe_output(output: Tensor, columns: int, offset: Any, device: torch.device, sizes: Sizes) -> None:
    expect("output", output, "T k *", dtype=FLOATS, device=device, sizes=sizes)
    check_columns("output", output, "offset", offset, (columns,))
    rows, row, column = output.stride()
    if (column != 1 and output.shape[2] > 1) or (output.shape[0] > 1 and rows != output.shape[1] * row):
        raise ValueError(f"output has strides {output.stride()}; needed are 1 last, and stride(0) == k * stride(1)")


def _check_aligned(given: Experts, block_m: int | None, sizes: Sizes) -> int:
    """Check the alignment and return its block size, 1 without one."""
    ids, experts, counts = given.sorted_ids, given.expert_ids, given.counts
    if (ids is None) != (counts is None):
        raise ValueError("one of sorted_token_ids and num_tokens_post_padded is None: pass both, or neither (naive)")
    if ids is None or counts is None:
        expect("expert_ids", experts, "pairs", dtype=INTEGERS, sizes=sizes, contiguous=True)
        return 1
    expect("num_tokens_post_padded", counts, "L", dtype=INT32, sizes=sizes, contiguous=True)
    expect("sorted_token_ids", ids, "L P", dtype=INT32, sizes=sizes, contiguous=True)
    expect("expert_ids", experts, "L B", dtype=INT32, sizes=sizes, contiguous=True)
    if given.lora_ids is not None:
        expect("lora_ids", given.lora_ids, "*", dtype=INT32, contiguous=True)
        most = sizes["L"] + 1
        if len(given.lora_ids) > most:
            raise ValueError(f"lora_ids has {len(given.lora_ids)} entries; at most {most} fit: every slot and -1")
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


def _check_fp8(fp8: Fp8Experts, given: Experts, pairs: int) -> None:
    fp8.shrink.check()
    fp8.expand.check()
    check_scales("lora_a_scale", fp8.a_scale, given.lora_a, fp8.shrink, of_experts=True)
    check_scales("lora_b_scale", fp8.b_scale, given.lora_b, fp8.expand, of_experts=True)
    x, a, b = given.x, given.lora_a[0], given.lora_b[0]
    check_activation("qcurr_hidden_states", x, fp8.x_scale, x.shape[1], fp8.shrink, a, "the activations' scale")
    if fp8.h_scale is not None:
        check_row_scales("expand_act_scale", fp8.h_scale, pairs, b.shape[-1], fp8.expand, b.device)
