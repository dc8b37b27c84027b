"""`TritonExpertOps`: fused MoE LoRA on the Triton kernels, as `punica.ops.reference.fused_moe_lora` defines it.

Two launches (`moe_lora`): shrink leaves fp32 partial sums, expand adds them up. Fully sharded, a collective joins those
of all ranks in between. `moe_rules` chooses schedules, `moe_plan` makes launches. Nothing is added atomically; a pair's
result depends on its row and weights alone.
"""

from typing import Any

import torch
from torch import Tensor

from punica.ops import collectives
from punica.ops.experts import ExpertForm, ExpertLoRAWeights, Experts, Numbers, Switches
from punica.ops.scales import rounded
from punica.ops.triton_ops import moe_rules
from punica.ops.triton_ops.configs import Options, load_lora_op_config
from punica.ops.triton_ops.fp8_device import as_operand, operands
from punica.ops.triton_ops.launch import all_aligned, on_device
from punica.ops.triton_ops.moe_align import align_all
from punica.ops.triton_ops.moe_plan import How, MoEPlan, plan_experts, site_config
from punica.ops.triton_ops.op import untraced
from punica.ops.weights import kept, plans_of

_PLANS: dict[tuple, MoEPlan | None] = plans_of()


class TritonExpertOps:
    """Alignment and fused op on a GPU (`punica.ops.experts.ExpertOps`)."""

    smallest_block = 16
    align = staticmethod(align_all)

    def __init__(self, options: Options) -> None:
        self.options = options

    def use_naive_assignment(self, pairs: int, active: int, weights: ExpertLoRAWeights) -> bool:
        """Tell whether pairs of this w13 and its w2 are not aligned; numbers of a tuned file are for aligned ones."""
        folder = self.options.tuned_dir if weights.site is not None else None
        tuned = folder is not None and load_lora_op_config("fused_moe_lora_w13_shrink", None, folder) is not None
        if tuned or self.options.batch_invariant:
            return weights.prefers_naive(pairs)
        (_, experts, rank, hidden), width = weights.lora_a[0].shape, weights.lora_b[0].shape[-2]
        pair_bytes = (len(weights.lora_a) + 1) * rank * (hidden + width) * weights.lora_a[0].element_size()
        return pairs <= moe_rules.most_naive(active, experts, pair_bytes)

    def block_size(self, tokens: int, top_k: int, active: int, weights: ExpertLoRAWeights) -> int:
        """Rows of a block of the alignment: of the tuned file of the first product if there is one, else the rule's."""
        if weights.site is not None:
            (slots, experts, rank, hidden), width = weights.lora_a[0].shape, weights.lora_b[0].shape[-2]
            sizes = (tokens, top_k, len(weights.lora_a), slots, experts, rank, rank, hidden, width)
            found = site_config(weights.site, "shrink", ExpertForm(*sizes, factor=top_k, block_m=1), self.options)
            if found is not None:
                return found["block_m"]
        return moe_rules.block_size(tokens * top_k, active, weights.experts, self.options.batch_invariant)

    def add(
        self, given: Experts, max_lora_rank: int, top_k: int, switches: Switches,
        configs: tuple[Numbers, Numbers] | None, active: int, site: str | None,
    ) -> None:  # fmt: skip
        """Add one product. After the activation shrink may start early: alignment and weights are older than that."""
        early = switches.mul_routed_weight and configs is None
        fused(given, max_lora_rank, top_k, switches, How(configs, active, early, site, self.options))


@untraced
def fused(given: Experts, max_lora_rank: int, top_k: int, switches: Switches, how: How = How()) -> None:  # noqa: B008
    plan = planned(given, max_lora_rank, top_k, switches, how)
    if plan is None:
        return
    with on_device(given.x.get_device()):
        _run(plan, given, switches)


def planned(given: Experts, max_lora_rank: int, top_k: int, switches: Switches, how: How) -> MoEPlan | None:
    """Return the plan of a call, made once for all operands of the same forms. It keeps no operand alive."""
    key = (*map(_form, given), max_lora_rank, top_k, switches, how)
    if switches.fully_sharded:
        key += (collectives.current().world_size(), collectives.current().rank())
    if key in _PLANS:
        return _PLANS[key]
    return kept(_PLANS, key, plan_experts(given, max_lora_rank, top_k, switches, how))


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return tuple(map(_form, value)) if isinstance(value, (tuple, list)) else value


def index_tensors(given: Experts) -> tuple[Tensor, ...]:
    """sorted ids, experts, counts, mapping, enabled, slot ids, ranks; unused ones are filled with the mapping."""
    pairs = given.sorted_ids, given.expert_ids, given.counts, given.mapping
    of_slots = given.enabled, given.lora_ids, given.lora_ranks
    return tuple([given.mapping if one is None else one for one in (*pairs, *of_slots)])


def stored(given: Experts) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """x, and the operands of shrink and expand."""
    if given.fp8 is None:
        return given.x, tuple(given.lora_a), tuple(given.lora_b)
    fp8 = given.fp8.contiguous()
    a = operands(given.lora_a, fp8.a_scale, fp8.x_scale)
    return as_operand(given.x), a, operands(given.lora_b, fp8.b_scale, None)


def _run(plan: MoEPlan, given: Experts, switches: Switches) -> None:
    (x, a, b), pairs, fp8 = stored(given), index_tensors(given), given.fp8
    aligned = all_aligned(x, given.output, given.topk_weights, *a, *b)
    fill = torch.zeros if switches.fully_sharded else torch.empty  # what travels between ranks is defined everywhere
    partials = fill(plan.partials, dtype=torch.float32, device=given.x.device)
    plan.shrink(((x, partials), a, *pairs), plan.counts, aligned)
    if switches.fully_sharded:
        ranks = collectives.current()
        partials = ranks.all_reduce(partials) if plan.form.rank == plan.form.full_rank else ranks.all_gather(partials)
        partials = partials.contiguous()  # gathered from one rank of A each, a view of what arrived
    if fp8 is not None and fp8.h_scale is not None:
        partials = rounded(partials.sum(0, keepdim=True), fp8.h_scale, fp8.expand, given.lora_b[0].dtype)
    tensors = (partials, given.output, given.topk_weights)
    plan.expand((tensors, b, *pairs), plan.counts, aligned and all_aligned(partials))
