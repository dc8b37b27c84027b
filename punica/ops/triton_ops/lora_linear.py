"""Shrink and expand as one op: what a LoRA layer adds to its base output, in two launches.

    y[t, o_i : o_i + N_i] (+)= scaling * (x[t] @ A_i[slot(t)]^T) @ B_i[slot(t)]^T          o_0 = 0, o_{i+1} = o_i + N_i

Beyond `lora_shrink` followed by `lora_expand` it does two things that need both kernels in one hand. K may be split:
shrink leaves fp32 planes ``[splits, n, T, r]`` in a workspace and expand sums them as it reads. And with ``pdl``
(compute capability 9.0 and newer) expand starts while shrink still runs, its weights and the old y already fetched when
the planes are ready; shrink likewise fetches A while the kernel in front of it ends. That is safe because every kernel
here lets its successor start only after it has itself waited for its predecessor: what a kernel reads early was
complete two kernels ago.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from punica.ops.triton_ops.checks import (
    Weights,
    active_segments,
    check_expand_output,
    check_host_arguments,
    check_meta,
    check_ranks,
    check_runnable,
    check_scaling,
    check_shrink,
    describe_weights,
    flag_is_set,
    split_count,
)
from punica.ops.triton_ops.configs import get_config
from punica.ops.triton_ops.launch import LIBRARY, Plans, all_aligned, forms, on_device, supports_pdl
from punica.ops.triton_ops.lora_expand import ExpandPlan, plan_expand
from punica.ops.triton_ops.lora_shrink import ShrinkPlan, plan_shrink

__all__ = ["lora_linear", "plan_linear"]


class LinearPlan(NamedTuple):
    """Both launches and the shape of the planes between them."""

    shrink: ShrinkPlan
    expand: ExpandPlan
    planes: tuple[int, int, int, int]


_PLANS = Plans()


def _lora_linear(
    output_tensor: torch.Tensor,
    inputs: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    active_count: torch.Tensor | None,
    count: int,
    scaling: float,
    add_inputs: bool,
    lora_ranks: torch.Tensor | None,
    batch_invariant: bool,
    pdl: bool,
    tuned_dir: str | None,
) -> None:
    if flag_is_set(no_lora_flag_cpu):
        return
    meta = (token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids)
    segments = active_segments(active_count, count, lora_ids.numel())
    tensors = (inputs, output_tensor, *lora_a_weights, *lora_b_weights, *meta)
    ranks_form = None if lora_ranks is None else forms(lora_ranks)
    switches = (segments, len(lora_a_weights), add_inputs, batch_invariant, pdl, tuned_dir, ranks_form)
    key = (*switches, *forms(*tensors))
    plan = _PLANS.get(key, _PLANS)
    if plan is _PLANS:
        plan = _make_plan(
            output_tensor, inputs, lora_a_weights, lora_b_weights, meta, segments, add_inputs, lora_ranks,
            batch_invariant, pdl, tuned_dir,
        )  # fmt: skip
        _PLANS.keep(key, plan)
    check_scaling(scaling)
    if plan is None:
        return
    with on_device(inputs.get_device()):
        planes = torch.empty(plan.planes, dtype=torch.float32, device=inputs.device)
        aligned = all_aligned(inputs, output_tensor, *lora_a_weights, *lora_b_weights)
        plan.shrink.run(inputs, lora_a_weights, planes, meta, lora_ranks, scaling, aligned)
        plan.expand.run(planes, lora_b_weights, output_tensor, meta, lora_ranks, aligned)


def _make_plan(
    output_tensor: torch.Tensor,
    inputs: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    segments: int,
    add_inputs: bool,
    lora_ranks: torch.Tensor | None,
    batch_invariant: bool,
    pdl: bool,
    tuned_dir: str | None,
) -> LinearPlan | None:
    """Every check, then the plan; None when there is nothing to add."""
    a = describe_weights("lora_a_weights", lora_a_weights, -2)
    b = describe_weights("lora_b_weights", lora_b_weights, -1)
    check_shrink(inputs, a)
    slices = len(lora_a_weights)
    if (slices, a.slots, a.rank, a.device, a.dtype) != (len(lora_b_weights), b.slots, b.rank, b.device, b.dtype):
        raise ValueError(
            f"lora_a_weights ({slices} slices, {a.slots} slots, rank {a.rank}, {a.dtype}, {a.device}) "
            "and lora_b_weights "
            f"({len(lora_b_weights)} slices, {b.slots} slots, rank {b.rank}, {b.dtype}, {b.device}) "
            "must agree; weights whose "
            f"rank is sharded differently take lora_shrink, a collective and lora_expand"
        )
    tokens, k = inputs.shape
    check_expand_output(output_tensor, tokens, b, 0)
    check_meta(tokens, inputs.device, meta)
    check_ranks(lora_ranks, slices, a)
    check_runnable(inputs.device)
    width, entries = max(b.widths), meta[4].numel()
    if 0 in (tokens, k, a.rank, segments, width):
        return None
    shrink = get_config("shrink", segments, tokens, k, a.rank, slices, None, None, tuned_dir, batch_invariant)
    expand = get_config("expand", segments, tokens, width, a.rank, slices, add_inputs, None, tuned_dir, batch_invariant)
    return plan_linear(
        output_tensor, inputs, a, b, segments, entries, shrink, expand,
        add_inputs=add_inputs, has_ranks=lora_ranks is not None, pdl=pdl and supports_pdl(inputs.device),
    )  # fmt: skip


def plan_linear(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Weights,
    b: Weights,
    segments: int,
    entries: int,
    shrink: dict[str, Any],
    expand: dict[str, Any],
    *,
    add_inputs: bool = True,
    has_ranks: bool = False,
    pdl: bool = False,
    pdl_shrink: bool | None = None,
) -> LinearPlan:
    """The two launches with the given configurations. ``pdl_shrink``: start shrink early too (None: as ``pdl``)."""
    slices, tokens, rank = len(a.widths), x.shape[0], a.rank
    planes = (shrink["split_k"], slices, tokens, rank)
    strides = (slices * tokens * rank, tokens * rank, rank, 1)
    early = pdl if pdl_shrink is None else pdl_shrink
    first = plan_shrink(x, a, segments, entries, shrink, has_ranks=has_ranks, direct=False, overlap=pdl, early=early)
    second = plan_expand(
        planes, strides, y, b, segments, entries, expand,
        offset_start=0, add_inputs=add_inputs, has_ranks=has_ranks, pdl=pdl,
    )  # fmt: skip
    return LinearPlan(first, second, planes)


def _lora_linear_fake(*arguments: Any) -> None:
    """Shape function of the op: it only writes `output_tensor`."""


LIBRARY.define(
    "lora_linear(Tensor(a!) output_tensor, Tensor inputs, Tensor[] lora_a_weights, Tensor[] lora_b_weights, "
    "Tensor token_lora_mapping, Tensor token_indices_sorted_by_lora_ids, Tensor num_tokens_per_lora, "
    "Tensor lora_token_start_loc, Tensor lora_ids, Tensor no_lora_flag_cpu, Tensor? active_count, int count, "
    "float scaling, bool add_inputs, Tensor? lora_ranks, bool batch_invariant, bool pdl, str? tuned_dir) -> ()"
)
LIBRARY.impl("lora_linear", _lora_linear, "CompositeExplicitAutograd")
torch.library.register_fake("punica::lora_linear", _lora_linear_fake, lib=LIBRARY)


def lora_linear(
    output_tensor: torch.Tensor,
    inputs: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: int | torch.Tensor | None,
    scaling: float,
    add_inputs: bool = True,
    *,
    lora_ranks: torch.Tensor | None = None,
    batch_invariant: bool = False,
    pdl: bool = True,
    tuned_dir: str | None = None,
) -> None:
    """``output_tensor[t] (+)= scaling * (inputs[t] @ A[slot(t)]^T) @ B[slot(t)]^T``, slice by slice, in place.

    ``output_tensor`` [T, W] (last stride 1), ``inputs`` [T, K], ``lora_a_weights`` n x [L, (1,) r, K],
    ``lora_b_weights`` n x [L, (1,) N_i, r], then the seven of `LoRAKernelMeta.meta_args`. The other arguments, the
    treatment of rows at slot -1 and the errors are those of `lora_shrink` and `lora_expand`; ``pdl=False`` starts the
    kernels one after the other.
    """
    active_count, count = split_count(num_active_loras)
    check_host_arguments(no_lora_flag_cpu, lora_a_weights=lora_a_weights, lora_b_weights=lora_b_weights)
    torch.ops.punica.lora_linear.default(
        output_tensor,
        inputs,
        lora_a_weights,
        lora_b_weights,
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        no_lora_flag_cpu,
        active_count,
        count,
        scaling,
        add_inputs,
        lora_ranks,
        batch_invariant,
        pdl,
        tuned_dir,
    )
