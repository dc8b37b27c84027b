"""`ExpertCalls`: what the wrapper of a GPU asks of the MoE kernels, with its options."""

from collections.abc import Sequence

from torch import Tensor

from punica.ops.experts import ExpertForm, ExpertLoRAWeights, Experts, Fp8Experts, Switches
from punica.ops.fp8_checks import Scheme
from punica.ops.triton_ops import moe_rules
from punica.ops.triton_ops.configs import Options, load_lora_op_config
from punica.ops.triton_ops.fused_moe_lora import fused
from punica.ops.triton_ops.moe_align import align_all
from punica.ops.triton_ops.moe_plan import How, Numbers, tuned_config
from punica.ops.triton_ops.op import custom_op, is_traced
from punica.ops.triton_ops.quantize_rows import quantized_rows


class ExpertCalls:
    """Alignment and fused op as `punica.wrapper.experts` calls them."""

    smallest_block = 16
    quantize = staticmethod(quantized_rows)
    align = staticmethod(align_all)

    def __init__(self, options: Options) -> None:
        self.options = options

    def use_naive_assignment(self, pairs: int, active: int, weights: ExpertLoRAWeights) -> bool:
        """Tell whether pairs are not aligned, through w13 of these weights and w2 behind it. A tuned file's numbers are
        for aligned pairs.
        """
        folder = self.options.tuned_dir if weights.site is not None else None
        tuned = folder is not None and load_lora_op_config("fused_moe_lora_w13_shrink", None, folder) is not None
        if tuned or self.options.batch_invariant:
            return weights.outnumber(pairs)
        (_, experts, rank, hidden), width = weights.lora_a[0].shape, weights.lora_b[0].shape[-2]
        pair_bytes = (len(weights.lora_a) + 1) * rank * (hidden + width) * weights.lora_a[0].element_size()
        return pairs <= moe_rules.most_alone(int(active), int(experts), int(pair_bytes))  # symbols cannot be remembered

    def block_size(self, tokens: int, top_k: int, active: int, weights: ExpertLoRAWeights) -> int:
        """Rows of a block of the alignment: of the tuned file of the first product if there is one, else the rule's."""
        if weights.site is not None:
            (slots, experts, rank, hidden), width = weights.lora_a[0].shape, weights.lora_b[0].shape[-2]
            sizes = (tokens, top_k, len(weights.lora_a), slots, experts, rank, rank, hidden, width)
            found = tuned_config(weights.site, "shrink", ExpertForm(*sizes, factor=top_k, block_m=1), self.options)
            if found is not None:
                return found["block_m"]
        return moe_rules.block_size(tokens * top_k, active, weights.experts, self.options.batch_invariant)

    def add(
        self, given: Experts, max_lora_rank: int, top_k: int, switches: Switches,
        configs: tuple[Numbers, Numbers] | None, active: int, site: str | None,
    ) -> None:  # fmt: skip
        """The fused op. After the activation shrink may start early: alignment and weights are older than that."""
        early = switches.mul_routed_weight and configs is None
        how = How(configs, active, early, site, self.options)
        if not is_traced():
            fused(given, max_lora_rank, top_k, switches, how)
            return
        fp8, numbers = given.fp8 or Fp8Experts((), ()), [] if configs is None else [*configs[0], *configs[1]]
        schemes = [int(field) for field in (*fp8.shrink, *fp8.expand)]
        fused_moe_lora_step(
            *given[:10], max_lora_rank, top_k, given.lora_ranks, fp8.a_scale, fp8.b_scale, fp8.x_scale, schemes,
            *switches, numbers, active, early, site, *self.options,
        )  # fmt: skip


@custom_op(mutates="output")
def fused_moe_lora_step(
    output: Tensor, x: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], topk_weights: Tensor,
    sorted_ids: Tensor | None, expert_ids: Tensor, counts: Tensor | None, mapping: Tensor, enabled: Tensor,
    max_lora_rank: int, top_k: int, lora_ranks: Tensor | None,
    a_scale: Sequence[Tensor], b_scale: Sequence[Tensor], x_scale: Tensor | None, schemes: Sequence[int],
    mul_routed_weight: bool, fully_sharded: bool, offset: int, add_inputs: bool,
    configs: Sequence[int], active: int, early: bool, site: str | None,
    batch_invariant: bool, pdl: bool, tuned_dir: str | None,
) -> None:  # fmt: skip
    """`ExpertCalls.add` as one node of a trace: everything by its own name. ``schemes``: the fields of both schemes,
    looked at where there are scales; ``configs``: the fourteen numbers, or none.
    """
    fp8 = None
    if a_scale or b_scale:
        shrink, expand = (Scheme(k, n, bool(w8a8), bool(channel)) for k, n, w8a8, channel in (schemes[:4], schemes[4:]))
        fp8 = Fp8Experts(a_scale, b_scale, x_scale, None, shrink, expand)
    given = Experts(
        output, x, lora_a, lora_b, topk_weights, sorted_ids, expert_ids, counts, mapping, enabled, None, lora_ranks, fp8
    )
    switches = Switches(mul_routed_weight, fully_sharded, offset, add_inputs)
    numbers = (tuple(configs[:7]), tuple(configs[7:])) if configs else None
    how = How(numbers, active, early, site, Options(batch_invariant, pdl, tuned_dir))
    fused(given, max_lora_rank, top_k, switches, how)
