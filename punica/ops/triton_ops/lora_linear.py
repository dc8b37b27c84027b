"""Shrink and expand as one op: what a LoRA layer adds to its base output, in two launches.

    y[t, o_i : o_i + N_i] (+)= scale * (x[t] @ A_i[slot(t)]^T) @ B_i[slot(t)]^T            o_0 = 0, o_{i+1} = o_i + N_i

Beyond `lora_shrink` followed by `lora_expand` it does two things that need both kernels in one hand. K may be split:
shrink leaves fp32 partials ``[splits, n, T, r]`` in a workspace and expand sums them as it reads. And with ``pdl``
(compute capability 9.0 and newer) expand starts while shrink still runs, its weights and the old y already fetched when
the partials are ready; shrink fetches A while its predecessor ends. That is safe because every kernel
here lets its successor start only after it has itself waited for its predecessor: what a kernel reads early was
complete two kernels ago. The exception is an expand whose shrink ran beside the base product, on another stream
(``aside``) or in its launch (``base``): the kernel in front of it wrote y, so that it fetches only weights early.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.checks import Names, Weights, check_input, check_pair, check_ranks, check_stored_output, describe_stored
from punica.ops.triton_ops.backbone.skinny_gemm import skinny_gemm
from punica.ops.triton_ops.configs import choose
from punica.ops.triton_ops.fp8_device import WIDE, Quant
from punica.ops.triton_ops.gemm_and_shrink import (
    BaseForm,
    GemmAndShrinkPlan,
    check_base,
    check_base_switches,
    describe_base,
    fused_config,
    plan_gemm_and_shrink,
)
from punica.ops.triton_ops.launch import on_device, supports_pdl
from punica.ops.triton_ops.lora_expand import plan_expand
from punica.ops.triton_ops.lora_shrink import partial_rank, plan_shrink
from punica.ops.triton_ops.op import Call, Options, Plans, call_flat, custom_op, is_traced, named
from punica.ops.triton_ops.plan import Batch, KernelPlan
from punica.ops.triton_ops.tensor_batch import TensorBatch

Aside = Callable[[], AbstractContextManager]
"""What puts the launches inside on another stream and joins that to the current one."""


class LinearPlan(NamedTuple):
    """Both launches and the shape of the partials between them; the first may make a base product, too."""

    shrink: KernelPlan | GemmAndShrinkPlan
    expand: KernelPlan
    partials: tuple[int, int, int, int]

    def run(
        self, x: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], y: Tensor, batch: Batch,
        lora_ranks: Tensor | None, aligned: bool, scale: float, aside: Aside | None, base: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Launch; ``aside`` and ``base`` as in `linear`."""
        with on_device(x.get_device()):
            if isinstance(self.shrink, GemmAndShrinkPlan):
                partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
                self.shrink.run(x, base, y, lora_a, partials, batch, lora_ranks, aligned, scale)
            else:
                if base:
                    skinny_gemm(y, x, *base)
                with _HERE if aside is None else aside():
                    partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
                    self.shrink.run(x, lora_a, partials, batch, lora_ranks, aligned, scale)
            self.expand.run(partials, lora_b, y, batch, lora_ranks, aligned)


def plan_linear(
    y: Tensor, x: Tensor, a: Weights, b: Weights,
    batch: Batch,
    shrink: dict[str, Any], expand: dict[str, Any],
    *, add_inputs: bool = True, has_ranks: bool = False, pdl: bool = False, pdl_shrink: bool | None = None,
    apart: bool = False, fused: BaseForm | None = None, quant: tuple[Quant, Quant] = (WIDE, WIDE),
) -> LinearPlan:  # fmt: skip
    """The two launches with the given configurations. ``pdl_shrink``: start shrink early too (None: as ``pdl``);
    ``apart``: they are not behind one another; ``fused``: the first makes this base product, too (``shrink`` is of
    `fused_config`); ``quant``: storage of A and B.
    """
    slices, tokens, rank, kind = len(a.widths), x.shape[0], a.rank, torch.float32
    partials = (shrink["split_k"], slices, tokens, partial_rank(rank))
    strides = (prod(partials[1:]), prod(partials[2:]), partials[3], 1)
    overlap, early = pdl and not apart, (pdl if pdl_shrink is None else pdl_shrink) and not apart
    first: KernelPlan | GemmAndShrinkPlan
    if fused is None:
        first = plan_shrink(
            x, a, kind, batch, shrink, has_ranks=has_ranks, direct=False, overlap=overlap, early=early, quant=quant[0]
        )
    else:
        first = plan_gemm_and_shrink(x, fused, y, a, shrink, has_ranks=has_ranks, pdl=pdl, quant=quant[0])
    second = plan_expand(
        partials, strides, kind, y, b, batch, expand,
        offset_start=0, add_inputs=add_inputs, has_ranks=has_ranks, pdl=pdl, late=apart or fused is not None,
        quant=quant[1],
    )  # fmt: skip
    return LinearPlan(first, second, partials)


Described = tuple[Weights, Weights, BaseForm | None]


def _describe(
    names: Names, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], base: Sequence[Tensor] = ()
) -> Described:
    a, b = describe_stored(names.a, lora_a, -2), describe_stored(names.b, lora_b, -1)
    check_pair(a, b, names)
    return a, b, describe_base(base)


def _plan(call: Call, forms: Described) -> LinearPlan | None:
    """The remaining checks, then both launches; None when there is nothing to add."""
    names, x, y, lora_ranks, batch, switches = call
    a, b, base = forms
    add_inputs, options, apart = switches
    check_input(names.input, x, a, names.a)
    check_stored_output(names.output, y, b, 0)
    tokens, k = x.shape
    if y.shape[0] != tokens:
        raise ValueError(f"{names.input} has {tokens} rows and {names.output} has {y.shape[0]}; they must be equal")
    if base is not None:
        check_base(base, x, y)
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, a)
    width, slices, shape = max(b.widths), len(a.widths), batch.shape
    if 0 in (tokens, k, a.rank, batch.max_segments, width):
        return None
    shrink = choose("shrink", shape, tokens, k, a.rank, slices, options, listed=batch.listed)
    fused = None if base is None or options.tuned_dir is not None else fused_config(shrink, x, base, a.rank)
    shrink = fused or shrink
    expand = choose("expand", shape, tokens, width, a.rank, slices, options, add_inputs, shrink["split_k"], b.row_major)
    return plan_linear(
        y, x, a, b, batch, shrink, expand,
        add_inputs=add_inputs, has_ranks=lora_ranks is not None,
        pdl=options.pdl and supports_pdl(x.device), apart=apart or base is not None, fused=base if fused else None,
    )  # fmt: skip


_PLANS = Plans(_describe, _plan)
_HERE = nullcontext()


@named("lora_linear")
def linear(
    y: Tensor, x: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor], batch: Batch,
    scale: float = 1.0, *, add_inputs: bool = True, lora_ranks: Tensor | None = None, options: Options = Options(),
    aside: Aside | None = None, base: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """`lora_linear` on a step: ``y[t, o_i : ...] (+)= scale * (x[t] @ A_i^T) @ B_i^T``, arguments as there.

    ``aside``: shrink is launched in this context, which puts it on another stream and joins that to the current one.
    ``base``: ``weight [N, K]`` and perhaps ``bias [N]`` of up to 64 rows' base product (`skinny_gemm`), which y gets
    first (it may be uninitialised, and is not ``x``; add_inputs is True); the shrink is made beside it, aside or in the
    same launch. Under a graph tracer the product is one launch and the op another.
    """
    check_base_switches(base, add_inputs)
    if batch.no_lora:
        if base:
            skinny_gemm(y, x, *base)
        return
    if isinstance(batch, LoRABatch) and is_traced():
        if base:
            skinny_gemm(y, x, *base)
        given = {"scaling": scale, "add_inputs": add_inputs, "lora_ranks": lora_ranks, **options._asdict()}
        call_flat(lora_linear, (y, x, lora_a_stacked, lora_b_stacked), batch, x.shape[0], **given)
        return
    switches = (add_inputs, options, aside is not None)
    weights = (lora_a_stacked, lora_b_stacked, base) if base else (lora_a_stacked, lora_b_stacked)
    plan, aligned = _PLANS.find(x, y, weights, lora_ranks, batch, switches, scale)
    if plan is not None:
        operands = (x, lora_a_stacked, lora_b_stacked, y, batch, lora_ranks)
        plan.run(*operands, aligned, float(scale), aside, base)
    elif base:
        skinny_gemm(y, x, *base)


@custom_op(mutates="output_tensor")
def lora_linear(
    output_tensor: Tensor, inputs: Tensor, lora_a_weights: Sequence[Tensor], lora_b_weights: Sequence[Tensor],
    token_lora_mapping: Tensor, token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor, lora_ids: Tensor, no_lora_flag_cpu: Tensor,
    scaling: float,
    *, num_active_loras: int | Tensor | None = None, add_inputs: bool = True, lora_ranks: Tensor | None = None,
    batch_invariant: bool = False, pdl: bool = True, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """``output_tensor[t] (+)= scaling * (inputs[t] @ A[slot(t)]^T) @ B[slot(t)]^T``, slice by slice, in place.

    Args:
        output_tensor: [T, W] with last stride 1.
        inputs: [T, K], any strides.
        lora_a_weights, lora_b_weights: n x [L, (1,) r, K] and n x [L, (1,) N_i, r].
        token_lora_mapping, ..., no_lora_flag_cpu: the first six of `LoRAKernelMeta.meta_args`.
        scaling: finite factor.
        pdl: let the kernels start early where the GPU can; ``False`` starts them one after the other.

    The other arguments, the treatment of rows at slot -1 and the errors are those of `lora_shrink` and `lora_expand`.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    options = Options(batch_invariant, pdl, tuned_dir)
    linear(
        output_tensor, inputs, lora_a_weights, lora_b_weights, batch, scaling,
        add_inputs=add_inputs, lora_ranks=lora_ranks, options=options,
    )  # fmt: skip
