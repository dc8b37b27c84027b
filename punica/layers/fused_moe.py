"""LoRA over a mixture-of-experts layer: every token's own adapter, in every expert that the token is routed to.

    y = sum_j p_j * (W2 + B2_l A2_l)[e_j] act((W13 + B13_l A13_l)[e_j] x)        l: the token's slot

An adapter has an A and a B per expert and projection (gate w1, down w2, up w3). The delta is added to the product of
each (token, expert) pair: to the first before the activation, to the second before the sum over k. The base layer makes
the two calls, see `punica.layers.moe_context`.

Slots are stacked over adapters and experts, in four families: A and B of the first product (w13) and of the second
(w2), each ``[L, E, rows, cols]``. An adapter fills the first rows of A and the first columns of B.

Tensor parallelism shards B of w1 and w3 by rows and A of w2 by columns, like the experts themselves; fully sharded also
A of w1 and w3 along the rank and B of w2 by rows. With expert parallelism a rank holds the slots of its own experts.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.base import BaseLayerWithLoRA, LoRAInput, dtype_of_slots
from punica.layers.moe_context import MoELoRAContext
from punica.layers.packing import LoRAFactor, Slices
from punica.layers.utils import is_kind_of, listed_groups
from punica.ops.experts import ExpertLoRAWeights, Fp8Experts, Switches
from punica.ops.scales import PER_CHANNEL
from punica.parallel.moe import FusedMoE

SUPPORTED_BACKEND = "allgather_reducescatter"
Stacks = tuple[Tensor, ...]


class FusedMoEWithLoRA(BaseLayerWithLoRA):
    """LoRA over experts, with w1, w2 and w3 per expert.

    Attributes:
        n_slices: pairs of A and B in an adapter, over all experts.
        w13_lora_a_stacked, w13_lora_b_stacked: gate and up (non-gated: up), ``[L, E, R, H]`` and ``[L, E, I, R]``.
        w2_lora_a_stacked, w2_lora_b_stacked: ``[L, E, R, I]`` and ``[L, E, H, R]``, tuples of one.
        lora_a_scale, lora_b_scale: of FP8 slots, w13 then w2, float32 ``[L, E, R]`` and ``[L, E, rows]``; else empty.
        adapter_enabled: int32 ``[L+1]``: 1 where a slot holds weights for this layer; the last entry stays 0.
        lora_ranks: int32 ``[slices of w13 + 1, L]``: of the whole adapter, also where A is cut along the rank.
        hidden_size, intermediate_size_per_partition, local_num_experts, global_num_experts: H, I of this rank, E, E_g.

    ValueError for a base layer that cannot take LoRA: experts whose implementation does not support it, a monolithic
    method, or expert parallelism over another backend than all-gather and reduce-scatter, or with sequence parallelism.
    """

    names: tuple[str, ...] = ("w1", "w2", "w3")
    adapter_enabled: Tensor
    _slots: tuple[Stacks, Stacks] = ((), ())

    w13_lora_a_stacked = property(lambda self: self._slots[0][:-1])
    w13_lora_b_stacked = property(lambda self: self._slots[1][:-1])
    w2_lora_a_stacked = property(lambda self: self._slots[0][-1:])
    w2_lora_b_stacked = property(lambda self: self._slots[1][-1:])
    hidden_size = property(attrgetter("moe_config.hidden_dim"))
    intermediate_size_per_partition = property(attrgetter("moe_config.intermediate_size_per_partition"))
    local_num_experts = property(attrgetter("moe_config.num_local_experts"))
    global_num_experts = property(attrgetter("moe_config.num_experts"))
    use_ep = property(attrgetter("moe_config.moe_parallel_config.use_ep"))
    ep_rank = property(attrgetter("moe_config.moe_parallel_config.ep_rank"))
    local_experts = property(attrgetter("base_layer.local_experts"))
    quant_method = property(attrgetter("base_layer.quant_method"))
    runner = property(attrgetter("base_layer.runner"))
    is_internal_router = property(attrgetter("base_layer.is_internal_router"))

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.moe_config = base_layer.moe_config
        self._shared_experts = base_layer._shared_experts
        place = self.moe_config.moe_parallel_config
        if place.use_ep and place.all2all_backend != SUPPORTED_BACKEND:
            raise ValueError(f"all2all backend must be {SUPPORTED_BACKEND!r} for LoRA, got {place.all2all_backend!r}")
        if place.use_ep and place.is_sequence_parallel:
            raise ValueError("expert-parallel LoRA does not support is_sequence_parallel=True; turn it off")
        if getattr(base_layer.quant_method, "is_monolithic", False):
            raise ValueError(f"{type(base_layer.quant_method).__name__} is monolithic: LoRA needs a modular method")
        experts = base_layer.routed_experts
        if not getattr(experts, "supports_lora", lambda: False)():
            raise ValueError(f"{type(experts).__name__} does not support LoRA; use punica.parallel.moe.RoutedExperts")
        self.tp_size, self.tp_rank = place.tp_size, place.tp_rank
        self._w13_slices = 2 if self.moe_config.is_act_and_mul else 1
        self.n_slices = self.local_num_experts * (self._w13_slices + 1)
        self.full_input_size = self.hidden_size
        self.fully_sharded = False

    def _check_new_slots(self, max_loras: int, lora_config: LoRAConfig, model_config: Any) -> None:
        super()._check_new_slots(max_loras, lora_config, model_config)
        if self.use_ep and lora_config.fully_sharded_loras:
            raise ValueError("expert parallelism and fully_sharded_loras both partition one group; disable one of them")
        if max_loras != lora_config.max_loras:
            raise ValueError(f"max_loras is {max_loras}, lora_config.max_loras {lora_config.max_loras}; must be equal")
        for name, size in (("max_lora_rank", lora_config.max_lora_rank), ("the hidden size", self.hidden_size)):
            if lora_config.fully_sharded_loras and size % self.tp_size:
                raise ValueError(f"{name} {size} must be divisible by tp_size {self.tp_size} with fully_sharded_loras")
        self._check_layout(model_config)

    def _check_layout(self, model_config: Any) -> None:
        if getattr(self.base_layer, "w13_layout", "concatenated") == "interleaved":
            raise ValueError(
                "separate gate and up adapters need experts whose first product is concatenated (gate, then up); this "
                "base layer's w13_layout is 'interleaved': use FusedMoE3DWithLoRA"
            )

    def _allocate(self, max_loras: int, lora_config: LoRAConfig) -> None:
        self.fully_sharded = lora_config.fully_sharded_loras and self.tp_size > 1
        rank, inner, lead = lora_config.max_lora_rank, self.intermediate_size_per_partition, self._lead
        cut = self.tp_size if self.fully_sharded else 1
        shapes_a = [(rank // cut, self.hidden_size)] * self._w13_slices + [(rank, inner)]
        shapes_b = [(self._w13_rows, rank)] * self._w13_slices + [(self.hidden_size // cut, rank)]
        self._slots = tuple(
            tuple(self._zeros((max_loras, *lead, *shape), dtype_of_slots(lora_config)) for shape in shapes)
            for shapes in (shapes_a, shapes_b)
        )  # type: ignore[assignment]  # two
        self.adapter_enabled = self._zeros((max_loras + 1,), torch.int32)
        self.lora_ranks = self._zeros((self._w13_slices + 1, max_loras), torch.int32)

    @property
    def _w13_rows(self) -> int:
        return self.intermediate_size_per_partition

    def _refer_to_slots(self) -> None:
        """Nothing: slots are looked up in `set_mapping`."""

    def _weights(self, site: str) -> ExpertLoRAWeights:
        is_w2 = site == "w2"
        own = slice(-1, None) if is_w2 else slice(-1)
        a, b = self._slots[0][own], self._slots[1][own]
        a_scale, b_scale = self.lora_a_scale[own], self.lora_b_scale[own]
        fp8 = Fp8Experts(a_scale, b_scale, None, None, PER_CHANNEL, PER_CHANNEL) if a_scale else None
        offset = self.tp_rank * b[0].shape[-2] if self.fully_sharded and is_w2 else 0
        tuned = site if cast(LoRAConfig, self.lora_config).tuned_dir is not None else None
        return ExpertLoRAWeights(
            a, b, self.adapter_enabled, cast(Tensor, self.lora_ranks)[own], fp8,
            Switches(is_w2, self.fully_sharded, offset), tuned,
        )  # fmt: skip

    def _slice_a(self, i: int, lora_a: Tensor) -> Tensor:
        """``[E, r, H]`` of w13: fully sharded, this rank's ranks. ``[E, r, I*tp]`` of w2: this rank's columns."""
        if i == self._w13_slices:
            return lora_a[..., self._own(self.intermediate_size_per_partition)]
        width = cast(LoRAConfig, self.lora_config).max_lora_rank // self.tp_size
        return lora_a[:, self._own(width)] if self.fully_sharded else lora_a

    def _slice_b(self, i: int, lora_b: Tensor) -> Tensor:
        """``[E, I*tp, r]`` of w13: this rank's rows. ``[E, H, r]`` of w2: fully sharded, this rank's rows."""
        if i < self._w13_slices:
            return self._slice_w13_b(lora_b)
        return lora_b[:, self._own(self.hidden_size // self.tp_size)] if self.fully_sharded else lora_b

    def _slice_w13_b(self, b: Tensor) -> Tensor:
        return b[:, self._own(self._w13_rows)]

    def _own(self, width: int) -> slice:
        return slice(self.tp_rank * width, (self.tp_rank + 1) * width)

    @property
    def _lead(self) -> tuple[int, ...]:
        return (self.local_num_experts,)

    def _full_sizes(self) -> list[tuple[str, int, int]]:
        inner = self.intermediate_size_per_partition * self.tp_size
        return [("w1", self.hidden_size, inner), ("w2", inner, self.hidden_size), ("w3", self.hidden_size, inner)]

    def _as_groups(self, lora_a: LoRAInput, lora_b: LoRAInput) -> Slices:
        return listed_groups(lora_a, lora_b)

    def check_slices(self, groups: Slices) -> Slices:
        """Check one entry per name in ``names`` as the base class. Without a gate w3 is ignored."""
        return super().check_slices(self.to_slices(groups))

    def to_slices(self, groups: Slices) -> Slices:
        """Leave out w3 where there is no gate."""
        has_gate = self.moe_config.is_act_and_mul or len(groups) < 3
        return groups if has_gate else [*groups[:2], (None, None)]

    def _by_stack(self, factors: Sequence[LoRAFactor]) -> Sequence[LoRAFactor]:
        w1, w2, w3 = factors
        return [w1, w3, w2] if self._w13_slices == 2 else [w1, w2]

    def _live(self, side: int, i: int, factor: LoRAFactor, own: LoRAFactor, filled: bool) -> tuple[Tensor, int]:
        """The rank of the whole adapter for A, the slot's flag for B."""
        if side == 1:
            return self.adapter_enabled[: self.max_loras], int(filled)
        return cast(Tensor, self.lora_ranks)[i], 0 if factor is None else factor.shape[1]

    def _as_matrices(self, side: int, slots: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A row per expert of A, a row per output of B."""
        rows = 1 - side
        viewed = slots.unsqueeze(1).flatten(rows + 2, rows + 3)
        return viewed, None if part is None else part.flatten(rows, rows + 1)

    def _as_columns(self, slots: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return slots.unsqueeze(1), part

    @property
    def lora_a_stacked(self) -> list[Tensor]:
        """A of every slot, expert and projection (w1, w2, w3 if gated), in this order; views."""
        return self._flat(self._slots[0])

    @property
    def lora_b_stacked(self) -> list[Tensor]:
        """B, as `lora_a_stacked`."""
        return self._flat(self._slots[1])

    def _flat(self, stacks: Stacks) -> list[Tensor]:
        first, *third, second = stacks
        places = [(slot, expert) for slot in range(self.max_loras) for expert in range(self.local_num_experts)]
        return [stack[slot, expert] for slot, expert in places for stack in (first, second, *third)]

    def set_mapping(self, punica_wrapper: Any) -> None:
        self._require_slots("set_mapping")
        super().set_mapping(punica_wrapper)
        config = cast(LoRAConfig, self.lora_config)
        w13, w2 = self._weights("w13"), self._weights("w2")
        context = MoELoRAContext(
            w13, w2, w13.lora_a, w13.lora_b, w2.lora_a, w2.lora_b,
            self.adapter_enabled, self.max_loras, self.moe_config.experts_per_token, self._w13_slices,
            self.fully_sharded, self.tp_rank, self.tp_size, self.local_num_experts, self.punica_wrapper,
            use_tuned_config=config.tuned_dir is not None, lora_dtype=cast(torch.dtype, config.lora_dtype),
        )  # fmt: skip
        self.base_layer.routed_experts.set_lora_context(context)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the base layer, whose experts add the adapters."""
        self._ready_wrapper(*(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)))
        return self.base_layer(*args, **kwargs)

    @classmethod
    def can_replace_layer(
        cls, *, source_layer: Any, lora_config: Any, packed_modules_list: list[str], **_: Any
    ) -> bool:
        """Experts whose first product is packed from as many modules as `names` has for it."""
        return is_kind_of(source_layer, FusedMoE) and len(packed_modules_list) == len(cls.names) - 1


class FusedMoE3DWithLoRA(FusedMoEWithLoRA):
    """LoRA over experts, with gate and up as one matrix w13 and one slice, ``B [E, 2*I*tp, r]``, and w2. Rows of that B
    are ordered as the base layer's: gate above up, or interleaved (gpt-oss).
    """

    names = ("w13", "w2")

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self._rows_per_inner = self._w13_slices  # gate and up, or up alone
        self._w13_slices = 1
        self.n_slices = self.local_num_experts * 2
        self._base_model = ""

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """Allocate slots. TypeError without a ``model_config``, ValueError if it names no architecture."""
        if model_config is None:
            raise TypeError("FusedMoE3DWithLoRA needs model_config, whose architectures tell the layout of gate and up")
        architectures = getattr(model_config, "architectures", None)
        if not architectures:
            raise ValueError(f"model_config.architectures is {architectures!r}; the model's class name is needed")
        super().create_lora_weights(max_loras, lora_config, model_config)
        self._base_model = architectures[0]

    def _check_layout(self, model_config: Any) -> None:
        """Support both w13 layouts."""

    @property
    def _w13_rows(self) -> int:
        return self._rows_per_inner * self.intermediate_size_per_partition

    w13_input_size = property(lambda self: self.w13_lora_a_stacked[0].shape[-1], doc="Full width of A of w13.")
    w13_output_size = property(
        lambda self: self.w13_lora_b_stacked[0].shape[-2] * self.tp_size, doc="Full height of B of w13."
    )
    w2_input_size = property(
        lambda self: self.w2_lora_a_stacked[0].shape[-1] * self.tp_size, doc="Full width of A of w2."
    )
    w2_output_size = property(attrgetter("hidden_size"), doc="Full height of B of w2.")

    def _full_sizes(self) -> list[tuple[str, int, int]]:
        inner = self.intermediate_size_per_partition * self.tp_size
        return [("w13", self.hidden_size, self._rows_per_inner * inner), ("w2", inner, self.hidden_size)]

    def _by_stack(self, factors: Sequence[LoRAFactor]) -> Sequence[LoRAFactor]:
        return factors

    def _slice_w13_b(self, b: Tensor) -> Tensor:
        if self.tp_size == 1 or self._rows_per_inner == 1:
            return super()._slice_w13_b(b)
        inner = self.intermediate_size_per_partition
        experts, rows, rank = b.shape
        layout = getattr(self.base_layer, "w13_layout", "concatenated")
        if self._base_model == "GptOssForCausalLM" or layout == "interleaved":
            own = b.view(experts, rows // 2, 2, rank)[:, self._own(inner)]
        else:
            own = b.view(experts, 2, rows // 2, rank)[:, :, self._own(inner)]
        return own.reshape(experts, 2 * inner, rank)
