"""Slots of adapters on experts: their memory layout, and a rank's part of an adapter in each.

A layer has four families of stacks, A and B of the first product (w13) and of the second (w2), each ``[L, E, rows,
cols]``. An adapter fills the first rows of A and the first columns of B. Beside the stacks there are

* ``lora_ranks [n, L]``: true rank of a slot in each slice of w13 and, last, in w2; 0 without such a matrix;
* ``adapter_enabled [L+1]``: 1 where a slot holds weights for this layer;
* in FP8 the scales of every stack, one per row: ``[L, E, rows]``.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.base import BaseLayerWithLoRA, SlotPart
from punica.layers.packing import LoRAFactor, Slices
from punica.ops.experts import ExpertLoRAWeights, Fp8Experts, Switches
from punica.ops.quant import Fp8Matrix
from punica.ops.scales import PER_CHANNEL

Stacks = tuple[Tensor, ...]
Cut = Callable[[Tensor], Tensor]


class ExpertSlots(BaseLayerWithLoRA):
    """Slots of a layer of experts; subclasses define the experts, and this rank's part of an adapter.

    Attributes:
        w13_lora_a_stacked, w13_lora_b_stacked: gate and up (non-gated: up), ``[L, E, R, H]`` and ``[L, E, I, R]``.
        w2_lora_a_stacked, w2_lora_b_stacked: ``[L, E, R, I]`` and ``[L, E, H, R]``, tuples of one.
        w13_lora_a_scale, w13_lora_b_scale, w2_lora_a_scale, w2_lora_b_scale: of FP8 slots float32 ``[L, E, R]`` and
            ``[L, E, rows]``; else empty.
        adapter_enabled: int32 ``[L+1]``: 1 where a slot holds weights for this layer; the last entry stays 0.
        lora_ranks: int32 ``[slices of w13 + 1, L]``: of the whole adapter, also where A is cut along the rank.
    """

    fully_sharded: bool
    tp_rank: int

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.w13_lora_a_stacked: Stacks = ()
        self.w13_lora_b_stacked: Stacks = ()
        self.w2_lora_a_stacked: Stacks = ()
        self.w2_lora_b_stacked: Stacks = ()
        self.w13_lora_a_scale: Stacks = ()
        self.w13_lora_b_scale: Stacks = ()
        self.w2_lora_a_scale: Stacks = ()
        self.w2_lora_b_scale: Stacks = ()
        self.adapter_enabled: Tensor = torch.zeros(0, dtype=torch.int32)

    def _create_slots(self, max_loras: int, lora_config: LoRAConfig) -> None:
        self.adapter_enabled = self._zeros((max_loras + 1,), torch.int32)
        self.w13_lora_a_stacked, self.w2_lora_a_stacked = self._create_lora_a_weights(max_loras, lora_config)
        self.w13_lora_b_stacked, self.w2_lora_b_stacked = self._create_lora_b_weights(max_loras, lora_config)
        if lora_config.fp8 is not None:
            self.w13_lora_a_scale, self.w13_lora_b_scale, self.w2_lora_a_scale, self.w2_lora_b_scale = (
                tuple(self._zeros(tuple(stack.shape[:3]), torch.float32) for stack in stacks)
                for stacks in (self.w13_lora_a_stacked, self.w13_lora_b_stacked, self.w2_lora_a_stacked,
                               self.w2_lora_b_stacked)
            )  # fmt: skip
        self.lora_ranks = self._zeros((len(self.w13_lora_a_stacked) + 1, max_loras), torch.int32)

    def _create_lora_a_weights(self, max_loras: int, lora_config: LoRAConfig) -> tuple[Stacks, Stacks]:
        """Allocate A of w13 and of w2."""
        raise NotImplementedError

    def _create_lora_b_weights(self, max_loras: int, lora_config: LoRAConfig) -> tuple[Stacks, Stacks]:
        """Allocate B of w13 and of w2."""
        raise NotImplementedError

    def _stack(self, lora_config: LoRAConfig, *shape: int) -> Tensor:
        return self._zeros(shape, cast(torch.dtype, lora_config.fp8 or lora_config.lora_dtype))

    def _weights(self) -> tuple[ExpertLoRAWeights, ExpertLoRAWeights]:
        """Return references to the weights of w13 and of w2, as the wrapper takes them."""
        ranks, tuned = cast(Tensor, self.lora_ranks), cast(LoRAConfig, self.lora_config).tuned_dir is not None
        fp8: tuple[Fp8Experts | None, Fp8Experts | None] = (None, None)
        if self.w2_lora_a_scale:
            scales = ((self.w13_lora_a_scale, self.w13_lora_b_scale), (self.w2_lora_a_scale, self.w2_lora_b_scale))
            w13_fp8, w2_fp8 = (Fp8Experts(*each, None, None, PER_CHANNEL, PER_CHANNEL) for each in scales)
            fp8 = w13_fp8, w2_fp8
        sharded = self.fully_sharded
        offset = self.tp_rank * self.w2_lora_b_stacked[0].shape[-2] if sharded else 0
        w13 = ExpertLoRAWeights(
            self.w13_lora_a_stacked, self.w13_lora_b_stacked, self.adapter_enabled, ranks[:-1], fp8[0],
            Switches(False, sharded), "w13" if tuned else None,
        )  # fmt: skip
        w2 = ExpertLoRAWeights(
            self.w2_lora_a_stacked, self.w2_lora_b_stacked, self.adapter_enabled, ranks[-1:], fp8[1],
            Switches(True, sharded, offset), "w2" if tuned else None,
        )  # fmt: skip
        return w13, w2

    # --- adapters into slots -----------------------------------------------------------------------------------------

    def _parts(self, slices: Slices) -> list[SlotPart]:
        """A of w13 and w2, then B, then in FP8 their scales in the same order. Parts of A carry the ranks, those of B
        the flag.
        """
        a, b = (self._held(self._by_stack(factors)) for factors in zip(*slices, strict=True))
        filled = any(factor is not None for factor in (*a, *b))
        cuts_a, cuts_b = self._cuts
        flags = self.adapter_enabled[: self.max_loras]
        live = list(zip(cast(Tensor, self.lora_ranks), [0 if f is None else f.shape[1] for f in a], strict=True))
        parts, scales = [], []
        for stacks, of_scales, factors, cuts, ranks in (
            ((*self.w13_lora_a_stacked, *self.w2_lora_a_stacked), (*self.w13_lora_a_scale, *self.w2_lora_a_scale),
             a, cuts_a, live),
            ((*self.w13_lora_b_stacked, *self.w2_lora_b_stacked), (*self.w13_lora_b_scale, *self.w2_lora_b_scale),
             b, cuts_b, [(flags, int(filled))] * len(b)),
        ):  # fmt: skip
            of_a = ranks is live
            for i, (stack, factor, cut, rank) in enumerate(zip(stacks, factors, cuts, ranks, strict=True)):
                own = None if factor is None else factor.cut(cut) if isinstance(factor, Fp8Matrix) else cut(factor)
                values = own.values if isinstance(own, Fp8Matrix) else own
                parts.append(SlotPart(_as_slots(stack, of_a), _as_part(values, of_a), *rank, fp8=bool(of_scales)))
                if of_scales:
                    scale = own.scale if isinstance(own, Fp8Matrix) else None
                    scales.append(SlotPart(of_scales[i].unsqueeze(1), scale, *rank, fp8=True))
        return parts + scales

    @property
    def _cuts(self) -> tuple[list[Cut], list[Cut]]:
        """Functions that cut this rank's part from every A and every B."""
        raise NotImplementedError

    def _by_stack(self, factors: Sequence[LoRAFactor]) -> list[LoRAFactor]:
        """Order an adapter's entries as the stacks."""
        raise NotImplementedError

    # --- views -------------------------------------------------------------------------------------------------------

    @property
    def lora_a_stacked(self) -> list[Tensor]:
        """A of every slot, expert and projection (w1, w2, w3 if gated), in this order; views."""
        return self._flat(self.w13_lora_a_stacked, self.w2_lora_a_stacked)

    @property
    def lora_b_stacked(self) -> list[Tensor]:
        """B, as `lora_a_stacked`."""
        return self._flat(self.w13_lora_b_stacked, self.w2_lora_b_stacked)

    def _flat(self, w13: Stacks, w2: Stacks) -> list[Tensor]:
        stacks = [w13[0], w2[0], *w13[1:]]
        places = [(slot, expert) for slot in range(self.max_loras) for expert in range(w2[0].shape[1])]
        return [stack[slot, expert] for slot, expert in places for stack in stacks]


def _as_slots(stack: Tensor, of_a: bool) -> Tensor:
    """View the stack as matrices whose top-left corner an adapter of lower rank fills: a row per expert of A, a row
    per output of B.
    """
    slots, experts, rows, cols = stack.shape
    return stack.view(slots, 1, experts, rows * cols) if of_a else stack.view(slots, 1, experts * rows, cols)


def _as_part(own: Tensor | None, of_a: bool) -> Tensor | None:
    """View ``[E, r, in]`` or ``[E, out, r]`` as such a corner."""
    if own is None:
        return None
    experts, rows, cols = own.shape
    return own.reshape(experts, rows * cols) if of_a else own.reshape(experts * rows, cols)
