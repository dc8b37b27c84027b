"""`ExpertMethods`: fused MoE LoRA of a wrapper, on top of a backend's alignment and fused op.

One layer calls `add_lora_w13`, which groups the (token, expert) pairs by adapter and expert, and after its activation
`add_lora_w2` with what that returned: the alignment is made once per layer. A backend supplies `_align` and
`_add_experts`.

A ``token_lora_mapping`` that is not the wrapper's own (tokens gathered from other ranks) may name slots that no local
token uses, so then every slot is looked at, and a step without local adapters is no reason to leave.

With FP8 weights and ``use_fp8_w8a8`` an x that is not FP8 is quantised per token; what lies between the two products
stays real.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from punica.metadata import LoRABatch
from punica.ops.checks import FLOATS, check_keywords
from punica.ops.fp8_experts import Fp8Experts
from punica.ops.moe_checks import Experts, Switches, check_block_size, check_mapping, check_routing
from punica.ops.moe_configs import positional_config
from punica.ops.quant import quantize_per_token
from punica.wrapper.fp8 import FP8_KEYWORDS, Fp8Keywords
from punica.wrapper.moe import MoEMethods

Aligned = tuple[Tensor, Tensor, Tensor]
Alignment = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

NAIVE_SHARE = 8
"""Naive assignment (every pair by itself) where pairs x this are at most experts x slots; a GPU has its own rule
(`punica.ops.triton_ops.moe_rules.most_alone`) but for batch-invariant and tuned calls.
"""


class ExpertMethods(MoEMethods):
    """The four methods; checks and errors are those of the ops."""

    batch: LoRABatch
    no_lora: bool
    device: torch.device
    _smallest_block = 1  # rows of a block that the backend's op can take

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
        check_block_size(block_size, self._smallest_block)
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
        return mapping, *self._align(topk_ids, mapping, *sizes, adapter_enabled, expert_map)

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
        fp8 = self._fp8_of("add_lora_fused_moe", kwargs)
        configs = (positional_config("shrink_config", shrink_config), positional_config("expand_config", expand_config))
        mapping = self._slots_of_tokens(token_lora_mapping, topk_weights.shape[0])
        if self.no_lora and self._is_own(mapping):
            return
        aligned = _by_slot(lora_a_stacked, sorted_token_ids, expert_ids, num_tokens_post_padded)
        given = Experts(
            y, x, lora_a_stacked, lora_b_stacked, topk_weights, *aligned, mapping, adapter_enabled, None,
            kwargs.get("lora_ranks"),
        )  # fmt: skip
        given = given if fp8 is None else self._with_scales(given, fp8)
        switches = Switches(mul_routed_weight, fully_sharded, offset, add_inputs)
        self._add_experts(given, max_lora_rank, top_k_num, switches, configs)

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
        fp8 = self._fp8_of("add_lora_w13", kwargs)
        _check_counts(topk_ids, num_tokens, (top_k_num, top_k), len(lora_a_stacked), num_slices)
        mapping = self._slots_of_tokens(token_lora_mapping, num_tokens)
        idle = num_tokens == 0 or (self.no_lora and self._is_own(mapping))
        if idle:
            return None, topk_ids.reshape(-1), None, mapping
        naive = expert_map is None and self._stand_alone(
            topk_ids.numel(), mapping, local_num_experts, max_loras, use_tuned_config, lora_a_stacked, lora_b_stacked
        )
        block_m = self._block_size(topk_ids.numel(), mapping, local_num_experts, use_tuned_config, x, lora_b_stacked)
        _, ids, experts, counts = self.moe_lora_align_block_size(
            topk_ids, num_tokens, block_m, local_num_experts, max_loras, adapter_enabled, expert_map, True, naive,
            mapping,
        )  # fmt: skip
        given = Experts(
            y.view(num_tokens, top_k, -1), x, lora_a_stacked, lora_b_stacked, topk_weights,
            *_by_slot(lora_a_stacked, ids, experts, counts), mapping, adapter_enabled, None, kwargs.get("lora_ranks"),
        )  # fmt: skip
        given = given if fp8 is None else self._with_scales(given, fp8)
        switches = Switches(False, fully_sharded, 0, add_inputs)
        tuned = "w13" if use_tuned_config else None
        self._add_experts(given, lora_a_stacked[0].shape[-2], top_k, switches, None, tuned=tuned)
        return ids, experts, counts, mapping

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
        fp8 = self._fp8_of("add_lora_w2", kwargs)
        _check_counts(topk_weights, num_tokens, (top_k_num, top_k), 1, 1)
        if num_tokens == 0:
            return
        mapping = self._slots_of_tokens(token_lora_mapping, num_tokens)
        if self.no_lora and self._is_own(mapping):
            return
        if expert_ids_lora is None:
            raise ValueError("expert_ids_lora is None; pass on what add_lora_w13 returned for these tokens")
        offset = tp_rank * lora_b_stacked[0].shape[-2] if fully_sharded else 0
        aligned = _by_slot(lora_a_stacked, sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora)
        given = Experts(
            y.view(num_tokens, top_k, -1), x, lora_a_stacked, lora_b_stacked, topk_weights, *aligned, mapping,
            adapter_enabled, None, kwargs.get("lora_ranks"),
        )  # fmt: skip
        given = given if fp8 is None else self._with_scales(given, fp8)
        switches = Switches(True, fully_sharded, offset, add_inputs)
        tuned = "w2" if use_tuned_config else None
        self._add_experts(given, lora_a_stacked[0].shape[-2], top_k, switches, None, tuned=tuned)

    def _fp8_of(self, method: str, kwargs: Mapping[str, Any]) -> Fp8Keywords | None:
        """What the keywords of a call ask of FP8, if anything."""
        check_keywords(method, kwargs, ("lora_ranks", *FP8_KEYWORDS))
        fp8 = Fp8Keywords.of(kwargs)
        if fp8 is not None:
            self._look_at(fp8)  # type: ignore[attr-defined]
        return fp8

    # --- the mapping -------------------------------------------------------------------------------------------------

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

    def _with_scales(self, given: Experts, fp8: Fp8Keywords) -> Experts:
        """The operands with the scales of FP8 weights, and x quantised where it is to be and is not."""
        if fp8.shrink.use_fp8_w8a8 != fp8.expand.use_fp8_w8a8:
            raise ValueError("use_fp8_w8a8 differs between shrink and expand; give it once for both")
        x, x_scale = given.x, fp8.a_scale
        if fp8.shrink.use_fp8_w8a8 and isinstance(x, Tensor) and x.dtype in FLOATS:
            if x_scale is not None:
                raise ValueError(
                    f"a_scale is given, but x has dtype {x.dtype}: it is quantised here, leave a_scale out"
                )
            x, x_scale = self._quantize(x, fp8.shrink.group_k)
        scales = Fp8Experts(fp8.lora_a_scale or (), fp8.lora_b_scale or (), x_scale, None, fp8.shrink, fp8.expand)
        return given._replace(x=x, fp8=scales)

    def _is_own(self, mapping: Tensor) -> bool:
        """Whether it is a view of the step's mapping. A tracer's stand-in has no address: then every slot counts."""
        if type(mapping) is not Tensor and is_fake(mapping):
            return False
        return mapping.untyped_storage().data_ptr() == self.batch.tensors[0].untyped_storage().data_ptr()

    def _active(self, mapping: Tensor, slots: int) -> int:
        """About how many adapters the tokens use, as far as the host knows."""
        return min(slots, max(1, self.batch.shape.adapters)) if self._is_own(mapping) else slots

    # --- the backend -------------------------------------------------------------------------------------------------

    def _stand_alone(
        self, pairs: int, mapping: Tensor, experts: int, slots: int, use_tuned_config: bool,
        lora_a: tuple[Tensor, ...], lora_b: tuple[Tensor, ...],
    ) -> bool:  # fmt: skip
        """Backend: whether every pair goes by itself, without alignment. Unless it knows better, where they are few."""
        return pairs * NAIVE_SHARE <= experts * slots

    def _quantize(self, x: Tensor, group_k: int) -> tuple[Tensor, Tensor]:
        """Backend: `punica.ops.quant.quantize_per_token` without its check."""
        return quantize_per_token(x, group_k, check=False)

    def _align(
        self, topk_ids: Tensor, mapping: Tensor,
        buckets: int, block_size: int, max_loras: int, padded: int, blocks: int,
        adapter_enabled: Tensor, expert_map: Tensor | None,
    ) -> Aligned:  # fmt: skip
        """Backend: the outputs of `punica.ops.moe_torch.moe_lora_align_block_size`, new and flat, for all slots."""
        self._no_moe("moe_lora_align_block_size")

    def _block_size(
        self, pairs: int, mapping: Tensor, experts: int, use_tuned_config: bool, x: Tensor, lora_b: tuple[Tensor, ...]
    ) -> int:
        """Backend: rows of a block of the alignment."""
        self._no_moe("add_lora_w13")

    def _add_experts(
        self, given: Experts, max_lora_rank: int, top_k: int, switches: Switches,
        configs: tuple[tuple[int, ...], tuple[int, ...]] | None,
        tuned: str | None = None,
    ) -> None:  # fmt: skip
        """Backend: the fused op. ``configs`` None: its own choice, from the tuned files of site ``tuned`` if given."""
        self._no_moe("add_lora_fused_moe")


def _by_slot(
    lora_a: tuple[Tensor, ...], ids: Tensor | None, experts: Tensor, counts: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """A flat alignment viewed ``[L, P]``, ``[L, B]``, ``[L]``."""
    if ids is None:
        return None, experts, counts
    slots = lora_a[0].shape[0]
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
