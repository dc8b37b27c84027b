"""`ExpertMethods`: LoRA of experts in a wrapper, on a backend's alignment and fused op.

A layer calls `assign_pairs`, which groups the (token, expert) pairs by adapter and expert once for both products, and
`add_lora_experts` for each of them. The methods with long signatures are a front that makes the two objects of these.

A ``token_lora_mapping`` that is not the wrapper's own (tokens gathered from other ranks) may name slots that no local
token uses: then every slot counts as in use, and a step without local adapters adds them nevertheless.

With FP8 weights and ``use_fp8_w8a8`` an x that is not FP8 is quantised per token; the intermediate stays real.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from punica.metadata import LoRABatch
from punica.ops.checks import FLOATS, check_keywords
from punica.ops.experts import Assignment, ExpertLoRAWeights, Experts, Fp8Experts, Switches
from punica.ops.moe_checks import check_block_size, check_mapping, check_routing
from punica.ops.moe_configs import positional_config
from punica.wrapper.fp8 import FP8_KEYWORDS, Fp8Keywords
from punica.wrapper.moe import MoEMethods

Alignment = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class ExpertMethods(MoEMethods):
    """Checks and errors are those of the ops. ``_experts``: the backend, `ExpertOps` of `punica.ops.moe_torch` or of
    `punica.ops.triton_ops.moe_ops`.
    """

    batch: LoRABatch
    no_lora: bool
    device: torch.device
    _experts: Any

    # --- what layers call --------------------------------------------------------------------------------------------

    def assign_pairs(
        self, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, weights: ExpertLoRAWeights,
        mapping: Tensor | None = None,
    ) -> Assignment:  # fmt: skip
        """As in the base class."""
        tokens, top_k = topk_ids.shape
        mapping = self._slots_of_tokens(mapping, tokens)
        if self._is_idle(mapping):
            return Assignment(topk_weights, None, topk_ids.reshape(-1), None, mapping)
        active = self._active(mapping, weights.slots)
        naive = expert_map is None and self._experts.use_naive_assignment(topk_ids.numel(), active, weights)
        block_m = self._experts.block_size(tokens, top_k, active, weights)
        _, ids, experts, counts = self.moe_lora_align_block_size(
            topk_ids, tokens, block_m, weights.experts, weights.slots, weights.enabled, expert_map, True, naive, mapping
        )
        return Assignment(topk_weights, *_by_slot(weights.slots, ids, experts, counts), mapping)

    def add_lora_experts(self, y: Tensor, x: Tensor, weights: ExpertLoRAWeights, assignment: Assignment) -> None:
        """As in the base class."""
        if weights.fp8 is not None:
            a_scale, b_scale, x_scale, _, shrink, expand = weights.fp8
            self._look_at(Fp8Keywords(a_scale, b_scale, x_scale, shrink, expand))  # type: ignore[attr-defined]
        if not self._is_idle(assignment.mapping):
            self._add(y, x, weights, assignment)

    def _add(self, y: Tensor, x: Tensor, weights: ExpertLoRAWeights, assignment: Assignment) -> None:
        given, rank, top_k = self._operands(y, x, weights, assignment), weights.lora_a[0].shape[-2], y.shape[1]
        active = self._active(assignment.mapping, weights.slots)
        self._experts.add(given, rank, top_k, weights.switches, None, active, weights.site)

    def _operands(self, y: Tensor, x: Tensor, weights: ExpertLoRAWeights, assignment: Assignment) -> Experts:
        x, fp8 = self._quantized(x, weights.fp8)
        return Experts(
            y, x, weights.lora_a, weights.lora_b, *assignment, weights.enabled, None, weights.lora_ranks, fp8
        )

    # --- the interface with long signatures --------------------------------------------------------------------------

    def moe_lora_align_block_size(
        self, topk_ids: Tensor,
        num_tokens: int, block_size: int, num_experts: int, max_loras: int,
        adapter_enabled: Tensor,
        expert_map: Tensor | None = None, pad_sorted_ids: bool = False, naive_block_assignment: bool = False,
        token_lora_mapping: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """As in the base class. Flat outputs, int32: ids ``[L * P]`` with the sentinel ``T * k`` where there is no
        pair, experts ``[L * B]`` with -1 where there is no block, counts ``[L]``. Naive: no ids, every pair's expert,
        no counts.
        """
        check_block_size(block_size, self._experts.smallest_block)
        mapping = self._slots_of_tokens(token_lora_mapping, num_tokens)
        check_routing(topk_ids, mapping, adapter_enabled, max_loras, expert_map)
        if topk_ids.shape[0] != num_tokens:
            raise ValueError(f"num_tokens is {num_tokens}, topk_ids has {topk_ids.shape[0]} rows; they must be equal")
        if naive_block_assignment:
            if expert_map is not None:
                raise ValueError("naive_block_assignment with an expert_map: experts would be global numbers; pass one "
                                 "of the two")  # fmt: skip
            return mapping, None, topk_ids.contiguous().view(-1), None
        pairs, buckets = topk_ids.numel(), num_experts if expert_map is None else expert_map.numel()
        padded = pairs + buckets * (block_size - 1)
        if pad_sorted_ids:
            padded = -(-padded // block_size) * block_size
        if pairs < buckets:
            padded = pairs * block_size
        sizes = (buckets, block_size, max_loras, padded, -(-padded // block_size))
        return mapping, *self._experts.align(topk_ids, mapping, sizes, adapter_enabled, expert_map)

    def add_lora_fused_moe(
        self, y: Tensor, x: Tensor, lora_a_stacked: tuple[Tensor, ...], lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor, sorted_token_ids: Tensor | None, expert_ids: Tensor,
        num_tokens_post_padded: Tensor | None,
        max_lora_rank: int, top_k_num: int,
        shrink_config: Mapping[str, Any], expand_config: Mapping[str, Any], adapter_enabled: Tensor,
        mul_routed_weight: bool = False, fully_sharded: bool = False, offset: int = 0,
        token_lora_mapping: Tensor | None = None, add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """``y[t, j, offset + s*N : ...] (+)= w * (x @ A_s[l, e]^T) @ B_s[l, e]^T``, see
        `punica.ops.reference.fused_moe_lora`. The configs hold `punica.ops.moe_configs.DEFAULTS`, or some of them.
        """
        switches = Switches(mul_routed_weight, fully_sharded, offset, add_inputs)
        weights = self._weights("add_lora_fused_moe", lora_a_stacked, lora_b_stacked, adapter_enabled, switches, kwargs)
        configs = (positional_config("shrink_config", shrink_config), positional_config("expand_config", expand_config))
        mapping = self._slots_of_tokens(token_lora_mapping, topk_weights.shape[0])
        if self.no_lora and self._is_own(mapping):
            return
        slots = weights.slots if weights.lora_a else 1
        aligned = _by_slot(slots, sorted_token_ids, expert_ids, num_tokens_post_padded)
        given = self._operands(y, x, weights, Assignment(topk_weights, *aligned, mapping))
        self._experts.add(given, max_lora_rank, top_k_num, switches, configs, self._active(mapping, slots), None)

    def add_lora_w13(
        self, y: Tensor, x: Tensor, lora_a_stacked: tuple[Tensor, ...], lora_b_stacked: tuple[Tensor, ...],
        topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, w1: Tensor, w2: Tensor,
        num_tokens: int, top_k_num: int, max_loras: int,
        adapter_enabled: Tensor,
        local_num_experts: int, top_k: int, num_slices: int, fully_sharded: bool, use_tuned_config: bool,
        token_lora_mapping: Tensor | None = None, add_inputs: bool = True,
        **kwargs: Any,
    ) -> Alignment:  # fmt: skip
        """As in the base class. y: ``[T, k, n*N]`` or ``[T*k, n*N]``; x: ``[T, hidden]``."""
        switches, site = Switches(False, fully_sharded, 0, add_inputs), "w13" if use_tuned_config else None
        weights = self._weights("add_lora_w13", lora_a_stacked, lora_b_stacked, adapter_enabled, switches, kwargs, site)
        _check_counts(topk_ids, num_tokens, (top_k_num, top_k), len(lora_a_stacked), num_slices)
        assignment = self.assign_pairs(topk_ids, topk_weights, expert_map, weights, token_lora_mapping)
        _, ids, experts, counts, mapping = assignment
        if not self._is_idle(mapping):
            self._add(y.view(num_tokens, top_k, -1), x, weights, assignment)
        return None if ids is None else ids.view(-1), experts.view(-1), counts, mapping

    def add_lora_w2(
        self, y: Tensor, x: Tensor, lora_a_stacked: tuple[Tensor, ...], lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor,
        sorted_token_ids_lora: Tensor | None, expert_ids_lora: Tensor | None,
        num_tokens_post_padded_lora: Tensor | None, token_lora_mapping: Tensor | None,
        num_tokens: int,
        w1: Tensor, w2: Tensor,
        top_k_num: int, max_loras: int,
        adapter_enabled: Tensor,
        top_k: int, fully_sharded: bool, tp_rank: int, use_tuned_config: bool,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """As in the base class. y: ``[T, k, hidden]``, weighted already; x: ``[T*k, intermediate]``."""
        offset = tp_rank * lora_b_stacked[0].shape[-2] if fully_sharded else 0
        switches, site = Switches(True, fully_sharded, offset, add_inputs), "w2" if use_tuned_config else None
        weights = self._weights("add_lora_w2", lora_a_stacked, lora_b_stacked, adapter_enabled, switches, kwargs, site)
        _check_counts(topk_weights, num_tokens, (top_k_num, top_k), 1, 1)
        if num_tokens == 0:
            return
        mapping = self._slots_of_tokens(token_lora_mapping, num_tokens)
        if self._is_idle(mapping):
            return
        if expert_ids_lora is None:
            raise ValueError("expert_ids_lora is None; pass on what add_lora_w13 returned for these tokens")
        aligned = _by_slot(weights.slots, sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora)
        self._add(y.view(num_tokens, top_k, -1), x, weights, Assignment(topk_weights, *aligned, mapping))

    def _weights(
        self, method: str, lora_a: tuple[Tensor, ...], lora_b: tuple[Tensor, ...], enabled: Tensor, switches: Switches,
        kwargs: Mapping[str, Any], site: str | None = None,
    ) -> ExpertLoRAWeights:  # fmt: skip
        """The operands of a call and its keywords as one object."""
        check_keywords(method, kwargs, ("lora_ranks", *FP8_KEYWORDS))
        given, fp8 = Fp8Keywords.of(kwargs), None
        if given is not None:
            self._look_at(given)  # type: ignore[attr-defined]
            scales = (given.lora_a_scale or (), given.lora_b_scale or (), given.a_scale, None)
            fp8 = Fp8Experts(*scales, given.shrink, given.expand)
        return ExpertLoRAWeights(lora_a, lora_b, enabled, kwargs.get("lora_ranks"), fp8, switches, site)

    # --- the step ----------------------------------------------------------------------------------------------------

    def _quantized(self, x: Tensor, fp8: Fp8Experts | None) -> tuple[Tensor, Fp8Experts | None]:
        """x quantised where w8a8 needs it, with its scales beside the weights'."""
        if fp8 is None:
            return x, None
        if fp8.shrink.use_fp8_w8a8 != fp8.expand.use_fp8_w8a8:
            raise ValueError("use_fp8_w8a8 differs between shrink and expand; give it once for both")
        if not (fp8.shrink.use_fp8_w8a8 and isinstance(x, Tensor) and x.dtype in FLOATS):
            return x, fp8
        if fp8.x_scale is not None:
            raise ValueError(f"a_scale is given, but x has dtype {x.dtype}: it is quantised here, leave a_scale out")
        x, scale = self._experts.quantize(x, fp8.shrink.group_k)
        return x, fp8._replace(x_scale=scale)

    def _slots_of_tokens(self, given: Tensor | None, num_tokens: int) -> Tensor:
        """The override, or the step's own mapping with -1 past its tokens."""
        if given is not None:
            check_mapping(given, num_tokens)
            return given
        self._step()  # type: ignore[attr-defined]
        own = self.batch.tensors[0]
        if not 0 <= num_tokens <= own.shape[0]:
            raise ValueError(f"num_tokens is {num_tokens}; the step has room for {own.shape[0]} tokens")
        return own[:num_tokens]

    def _is_idle(self, mapping: Tensor) -> bool:
        """Tell whether there is no token, or no token with an adapter."""
        return mapping.shape[0] == 0 or (self.no_lora and self._is_own(mapping))

    def _is_own(self, mapping: Tensor) -> bool:
        """Tell whether it is a view of the step's mapping. A tracer's stand-in has no address: all slots count then."""
        if type(mapping) is not Tensor and is_fake(mapping):
            return False
        return mapping.untyped_storage().data_ptr() == self.batch.tensors[0].untyped_storage().data_ptr()

    def _active(self, mapping: Tensor, slots: int) -> int:
        """Estimate the number of adapters that the tokens use, as far as the host knows."""
        return min(slots, max(1, self.batch.shape.adapters)) if self._is_own(mapping) else slots


def _by_slot(
    slots: int, ids: Tensor | None, experts: Tensor, counts: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """A flat alignment viewed ``[L, P]``, ``[L, B]``, ``[L]``."""
    if ids is None:
        return None, experts, counts
    if ids.numel() % slots or experts.numel() % slots:
        raise ValueError(f"sorted_token_ids has {ids.numel()} and expert_ids {experts.numel()} elements; they must be "
                         f"multiples of the {slots} slots of lora_a_stacked")  # fmt: skip
    return ids.view(slots, -1), experts.view(slots, -1), counts


def _check_counts(routing: Tensor, num_tokens: int, top_k: tuple[int, int], slices: int, num_slices: int) -> None:
    wanted = (num_tokens, top_k[0])
    if routing.ndim != 2 or tuple(routing.shape) != wanted or top_k[0] != top_k[1]:
        raise ValueError(
            f"num_tokens, top_k_num and top_k are {num_tokens}, {top_k[0]} and {top_k[1]}; the routing has shape "
            f"{tuple(routing.shape)}"
        )
    if slices != num_slices:
        raise ValueError(f"num_slices is {num_slices}, lora_a_stacked has {slices} tensors")
