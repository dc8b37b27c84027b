"""`ExpertCalls`: what the wrapper of a GPU asks of the MoE kernels, with its options."""

from torch import Tensor

from punica.ops.moe_checks import ExpertForm, Experts, Switches
from punica.ops.triton_ops import moe_rules
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.fused_moe_lora import How, Numbers, fused, tuned_config
from punica.ops.triton_ops.moe_align import align_all


class ExpertCalls:
    """Alignment and fused op, as `punica.wrapper.experts` wants them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.align = align_all

    def block_size(
        self, pairs: int, active: int, experts: int, use_tuned_config: bool, x: Tensor, lora_b: tuple[Tensor, ...]
    ) -> int:
        """Rows of a block of the alignment: of the tuned file of the first product if there is one, else the rule's."""
        if use_tuned_config:
            slots, _, width, rank = lora_b[0].shape
            tokens, hidden = x.shape
            top_k = pairs // max(1, tokens)
            form = ExpertForm(
                tokens, top_k, len(lora_b), slots, experts, rank, rank, hidden, width, factor=top_k, block_m=1
            )
            found = tuned_config("w13", "shrink", form, self.options)
            if found is not None:
                return found["block_m"]
        return moe_rules.block_size(pairs, active, experts, self.options.batch_invariant)

    def add(
        self, given: Experts, max_lora_rank: int, top_k: int, switches: Switches,
        configs: tuple[Numbers, Numbers] | None, active: int, site: str | None,
    ) -> None:  # fmt: skip
        """The fused op. After the activation shrink may start early: alignment and weights are older than that."""
        early = switches.mul_routed_weight and configs is None
        fused(given, max_lora_rank, top_k, switches, How(configs, active, early, site, None, self.options))
