"""`ExpertMethods`: LoRA of experts in a wrapper, on a backend's alignment and fused op.

Alignment and kernels work through the list of the step's slots: launches grow with its adapters and rows, not with the
number of slots. A mapping that is not the wrapper's own (tokens gathered from other ranks) may name slots that no local
token uses: then every slot counts as in use, and a step without local adapters adds them nevertheless.

With FP8 weights and ``use_fp8_w8a8`` an x that is not FP8 is quantised per token; the intermediate stays real.
"""

from torch import Tensor

from punica.ops.expect import FLOATS
from punica.ops.experts import (
    Assignment,
    ExpertLoRAWeights,
    ExpertOps,
    Experts,
    Fp8Experts,
    check_mapping,
    check_routing,
)
from punica.wrapper.linear import LinearMethods


class ExpertMethods(LinearMethods):
    """A layer calls `assign_pairs` once for both products and `add_lora_experts` for each. Errors are those of the ops;
    NotImplementedError of a wrapper whose backend has none for experts.
    """

    _experts: ExpertOps | None = None

    def assign_pairs(
        self, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, weights: ExpertLoRAWeights,
        mapping: Tensor | None = None, *, every_slot: bool = False,
    ) -> Assignment:  # fmt: skip
        """Group the pairs of ``topk_ids [T, k]`` for both products of a layer, ``weights`` being the first one's.
        ``every_slot``: an alignment also of slots that the step does not use, for callers who pass it on.
        """
        ops = self._expert_ops("assign_pairs")
        tokens, top_k = topk_ids.shape
        mapping = self._slots_of_tokens(mapping, tokens)
        if self._is_idle(mapping):
            return Assignment(topk_weights, None, topk_ids.reshape(-1), None, mapping)
        check_routing(topk_ids, mapping, weights.enabled, weights.slots, expert_map)
        active = self._active(mapping, weights.slots)
        if expert_map is None and ops.use_naive_assignment(topk_ids.numel(), active, weights):
            return Assignment(topk_weights, None, topk_ids.contiguous().view(-1), None, mapping)
        sizes = (weights.experts, ops.block_size(tokens, top_k, active, weights), weights.slots)
        listed = None if every_slot else self._listed(mapping, weights.slots)
        aligned = self._aligned(topk_ids, mapping, weights.enabled, expert_map, sizes, listed=listed)
        return Assignment(topk_weights, *by_slot(weights.slots, *aligned), mapping)

    def add_lora_experts(self, y: Tensor, x: Tensor, weights: ExpertLoRAWeights, assignment: Assignment) -> None:
        """Add one product's LoRA to ``y [T, k, W]``; ``x [T, K]``, or ``[T*k, K]`` behind the activation."""
        ops = self._expert_ops("add_lora_experts")
        self._debug_check(weights.fp8)
        if not self._is_idle(assignment.mapping):
            given, active = self._operands(y, x, weights, assignment), self._active(assignment.mapping, weights.slots)
            ops.add(given, weights.lora_a[0].shape[-2], y.shape[1], weights.switches, None, active, weights.site)

    def _aligned(
        self, topk_ids: Tensor, mapping: Tensor, enabled: Tensor, expert_map: Tensor | None,
        sizes: tuple[int, int, int], pad: bool = True, listed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Flat sorted ids, experts of blocks and counts. ``sizes``: experts, rows of a block, slots (``listed``)."""
        experts, block_size, slots = sizes
        pairs, buckets = topk_ids.numel(), experts if expert_map is None else expert_map.numel()
        padded = pairs + buckets * (block_size - 1)
        if pad:
            padded = -(-padded // block_size) * block_size
        if pairs < buckets:
            padded = pairs * block_size
        lengths = (buckets, block_size, slots, padded, -(-padded // block_size))
        ops = self._expert_ops("moe_lora_align_block_size")
        return ops.align(topk_ids, mapping, lengths, enabled, expert_map, listed)

    def _operands(self, y: Tensor, x: Tensor, weights: ExpertLoRAWeights, assignment: Assignment) -> Experts:
        x, fp8 = self._quantized(x, weights.fp8)
        naive = assignment.ids is None
        listed = None if naive else self._listed(assignment.mapping, weights.slots)
        return Experts(
            y, x, weights.lora_a, weights.lora_b, *assignment, weights.enabled, listed, weights.lora_ranks, fp8
        )

    def _quantized(self, x: Tensor, fp8: Fp8Experts | None) -> tuple[Tensor, Fp8Experts | None]:
        if fp8 is None:
            return x, None
        if fp8.shrink.use_fp8_w8a8 != fp8.expand.use_fp8_w8a8:
            raise ValueError("use_fp8_w8a8 differs between shrink and expand; give it once for both")
        if not (fp8.shrink.use_fp8_w8a8 and isinstance(x, Tensor) and x.dtype in FLOATS):
            return x, fp8
        if fp8.x_scale is not None:
            raise ValueError(f"a_scale is given, but x has dtype {x.dtype}: it is quantised here, leave a_scale out")
        x, scale = self.ops.quantize(x, fp8.shrink.group_k)
        return x, fp8._replace(x_scale=scale)

    def _expert_ops(self, method: str) -> ExpertOps:
        if self._experts is None:
            raise NotImplementedError(f"{type(self).__name__} does not implement {method}")
        return self._experts

    def _slots_of_tokens(self, given: Tensor | None, num_tokens: int) -> Tensor:
        if given is not None:
            check_mapping(given, num_tokens)
            return given
        own = self._step().tensors[0]
        if not 0 <= num_tokens <= own.shape[0]:
            raise ValueError(f"num_tokens is {num_tokens}; the step has room for {own.shape[0]} tokens")
        return own[:num_tokens]

    def _is_idle(self, mapping: Tensor) -> bool:
        """Tell whether there is no token, or no token with an adapter."""
        return mapping.shape[0] == 0 or (self.no_lora and self._is_own(mapping))

    def _is_own(self, mapping: Tensor) -> bool:
        return mapping.untyped_storage().data_ptr() == self.batch.tensors[0].untyped_storage().data_ptr()

    def _listed(self, mapping: Tensor, slots: int) -> Tensor | None:
        """The step's slots, ascending behind -1, as many entries as its rows can fill; None: all slots. Lengths are
        powers of two, or all of the list: steps of similar sizes share their kernels.
        """
        if not self._is_own(mapping):
            return None
        rows = max(mapping.shape[0], self.batch.num_rows)
        return self.batch.tensors[-1][: min(1 << (rows - 1).bit_length(), slots + 1)]

    def _active(self, mapping: Tensor, slots: int) -> int:
        """Estimate the number of adapters that the tokens use, as far as the host knows."""
        return min(slots, max(1, self.batch.shape.adapters)) if self._is_own(mapping) else slots


def by_slot(
    slots: int, ids: Tensor | None, experts: Tensor, counts: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """View a flat alignment as ``[L, P]``, ``[L, B]``, ``[L]``."""
    if ids is None:
        return None, experts, counts
    if ids.numel() % slots or experts.numel() % slots:
        raise ValueError(f"{ids.numel()} sorted ids, {experts.numel()} expert_ids: must be multiples of {slots} slots")
    return ids.view(slots, -1), experts.view(slots, -1), counts
