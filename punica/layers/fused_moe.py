"""LoRA over a mixture-of-experts layer: every token's own adapter, in every expert that the token is routed to.

    y = sum_j p_j * (W2 + B2_l A2_l)[e_j] act((W13 + B13_l A13_l)[e_j] x)        l: the token's slot

An adapter has an A and a B per expert and projection (gate w1, down w2, up w3). Slots are stacked over adapters and
experts, ``[L, E, rows, cols]``. The delta is added to the product of each (token, expert) pair: to the first before the
activation, to the second before the sum over k. The experts make the two calls, see `punica.layers.moe_context`.

Tensor parallelism shards B of w1 and w3 by rows and A of w2 by columns, like the experts themselves; fully sharded also
A of w1 and w3 along the rank and B of w2 by rows. With expert parallelism a rank holds the slots of its own experts.

Slots: `punica.layers.expert_slots`. Adapters that store gate and up as one matrix: `punica.layers.fused_moe_3d`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.base import LoRAInput
from punica.layers.expert_slots import Cut, ExpertSlots, Stacks
from punica.layers.moe_context import MoELoRAContext
from punica.layers.packing import LoRAFactor, Slices
from punica.layers.utils import ADAPTER_DTYPES, is_kind_of
from punica.ops.quant import Fp8Matrix
from punica.parallel.moe import FusedMoE
from punica.wrapper import PunicaWrapperABC

SUPPORTED_BACKEND = "allgather_reducescatter"


class FusedMoEWithLoRA(ExpertSlots):
    """LoRA over experts, with w1, w2 and w3 per expert.

    ``n_slices``: pairs of A and B in an adapter, over all experts.

    ValueError for a base layer that cannot take LoRA: experts whose implementation does not support it, a monolithic
    method, or expert parallelism over another backend than all-gather and reduce-scatter, or with sequence parallelism.
    """

    names: tuple[str, ...] = ("w1", "w2", "w3")

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.moe_config = base_layer.moe_config
        self._shared_experts = base_layer._shared_experts
        self._ep_check()
        if getattr(base_layer.quant_method, "is_monolithic", False):
            raise ValueError(
                f"{type(base_layer.quant_method).__name__} is monolithic: one kernel routes and multiplies, so LoRA "
                "cannot be applied inside the expert computation; choose a modular method"
            )
        experts = base_layer.routed_experts
        if not getattr(experts, "supports_lora", lambda: False)():
            raise ValueError(
                f"{type(experts).__name__} does not support LoRA; build the layer with experts whose supports_lora() "
                "is true, such as punica.parallel.moe.RoutedExperts"
            )
        place = self.moe_config.moe_parallel_config
        self.tp_size, self.tp_rank = place.tp_size, place.tp_rank
        self._w13_slices = 2 if self.moe_config.is_act_and_mul else 1
        self.n_slices = self.local_num_experts * (self._w13_slices + 1)
        self.full_input_size = self.hidden_size
        self.fully_sharded = False

    # --- sizes of the base layer -------------------------------------------------------------------------------------

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.moe_config.hidden_dim

    @property
    def intermediate_size_per_partition(self) -> int:
        """I, on this rank."""
        return self.moe_config.intermediate_size_per_partition

    @property
    def local_num_experts(self) -> int:
        """E, on this rank."""
        return self.moe_config.num_local_experts

    @property
    def global_num_experts(self) -> int:
        """E_g, on all ranks."""
        return self.moe_config.num_experts

    @property
    def use_ep(self) -> bool:
        """True with expert parallelism."""
        return self.moe_config.moe_parallel_config.use_ep

    @property
    def ep_rank(self) -> int:
        """This rank in the expert-parallel group."""
        return self.moe_config.moe_parallel_config.ep_rank

    @property
    def local_experts(self) -> list[int]:
        """Global numbers of this rank's experts, in local order."""
        return self.base_layer.local_experts

    @property
    def quant_method(self) -> Any:
        """The base layer's."""
        return self.base_layer.quant_method

    @property
    def runner(self) -> Any:
        """The base layer's."""
        return self.base_layer.runner

    @property
    def is_internal_router(self) -> bool:
        """True if the base layer computes the router's logits itself."""
        return self.base_layer.is_internal_router

    def _ep_check(self) -> None:
        place = self.moe_config.moe_parallel_config
        if place.use_ep and place.all2all_backend != SUPPORTED_BACKEND:
            raise ValueError(
                f"expert-parallel LoRA supports only the all2all backend {SUPPORTED_BACKEND!r}, got "
                f"{place.all2all_backend!r}"
            )
        if place.use_ep and place.is_sequence_parallel:
            raise ValueError("expert-parallel LoRA does not support is_sequence_parallel=True; turn it off")

    # --- allocation --------------------------------------------------------------------------------------------------

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """Allocate slots as the base class.

        ValueError: expert parallelism with fully sharded adapters; another ``max_loras`` than the config's; a rank or
        hidden size that does not divide over the ranks; separate gate and up over experts that interleave them.
        """
        self._check_new_slots(max_loras, lora_config)
        self._verify_ep_fs(lora_config)
        if max_loras != lora_config.max_loras:
            raise ValueError(f"max_loras is {max_loras}, lora_config.max_loras {lora_config.max_loras}; must be equal")
        self._check_sharding(lora_config)
        self._check_layout(model_config)
        self.fully_sharded = lora_config.fully_sharded_loras and self.tp_size > 1
        self._create_slots(max_loras, lora_config)
        self.max_loras, self.lora_config = max_loras, lora_config

    def _verify_ep_fs(self, lora_config: LoRAConfig) -> None:
        if self.use_ep and lora_config.fully_sharded_loras:
            raise ValueError(
                "expert parallelism and fully_sharded_loras both partition the same group of ranks; disable one of them"
            )

    def _check_sharding(self, lora_config: LoRAConfig) -> None:
        if not lora_config.fully_sharded_loras:
            return
        for name, size in (("max_lora_rank", lora_config.max_lora_rank), ("the hidden size", self.hidden_size)):
            if size % self.tp_size:
                raise ValueError(f"{name} {size} must be divisible by tp_size {self.tp_size} with fully_sharded_loras")

    def _check_layout(self, model_config: Any) -> None:
        if getattr(self.base_layer, "w13_layout", "concatenated") == "interleaved":
            raise ValueError(
                "separate gate and up adapters need experts whose first product is concatenated (gate, then up); this "
                "base layer's w13_layout is 'interleaved': use FusedMoE3DWithLoRA"
            )

    def _create_lora_a_weights(self, max_loras: int, lora_config: LoRAConfig) -> tuple[Stacks, Stacks]:
        rank, lead = lora_config.max_lora_rank, (max_loras, self.local_num_experts)
        rows = rank // self.tp_size if self.fully_sharded else rank
        w13 = tuple(self._stack(lora_config, *lead, rows, self.hidden_size) for _ in range(self._w13_slices))
        return w13, (self._stack(lora_config, *lead, rank, self.intermediate_size_per_partition),)

    def _create_lora_b_weights(self, max_loras: int, lora_config: LoRAConfig) -> tuple[Stacks, Stacks]:
        rank, lead = lora_config.max_lora_rank, (max_loras, self.local_num_experts)
        hidden = self.hidden_size // self.tp_size if self.fully_sharded else self.hidden_size
        w13 = tuple(self._stack(lora_config, *lead, self._w13_rows, rank) for _ in range(self._w13_slices))
        return w13, (self._stack(lora_config, *lead, hidden, rank),)

    @property
    def _w13_rows(self) -> int:
        """Rows of B of one slice of the first product, on this rank."""
        return self.intermediate_size_per_partition

    # --- this rank's part --------------------------------------------------------------------------------------------

    @property
    def _cuts(self) -> tuple[list[Cut], list[Cut]]:
        cuts_a: list[Cut] = [self._slice_w13_a] * self._w13_slices
        cuts_b: list[Cut] = [self._slice_w13_b] * self._w13_slices
        return [*cuts_a, self._slice_w2_a], [*cuts_b, self._slice_w2_b]

    def _slice_w13_a(self, a: Tensor) -> Tensor:
        """``[E, r, H]``: fully sharded, this rank's ranks."""
        if not self.fully_sharded:
            return a
        width = cast(LoRAConfig, self.lora_config).max_lora_rank // self.tp_size
        return a[:, self.tp_rank * width : (self.tp_rank + 1) * width]

    def _slice_w13_b(self, b: Tensor) -> Tensor:
        """``[E, I*tp, r]``: this rank's rows."""
        return b.narrow(1, self.tp_rank * self._w13_rows, self._w13_rows)

    def _slice_w2_a(self, a: Tensor) -> Tensor:
        """``[E, r, I*tp]``: this rank's columns."""
        inner = self.intermediate_size_per_partition
        return a.narrow(2, self.tp_rank * inner, inner)

    def _slice_w2_b(self, b: Tensor) -> Tensor:
        """``[E, H, r]``: fully sharded, this rank's rows."""
        if not self.fully_sharded:
            return b
        rows = self.hidden_size // self.tp_size
        return b.narrow(1, self.tp_rank * rows, rows)

    # --- adapters into slots -----------------------------------------------------------------------------------------

    def check_slices(self, groups: Slices) -> Slices:
        """Check one entry per name in ``names`` as the base class. Without a gate w3 is ignored."""
        self._require_slots("check_lora")
        slices, sizes = self.to_slices(groups), self._full_sizes()
        if len(slices) != len(self.names):
            raise ValueError(f"expected a pair each for {list(self.names)}, got {len(slices)} slices")
        for name, (a, b) in zip(self.names, slices, strict=True):
            self._check_factor_pair(name, a, b, *sizes[name])
        return slices

    def to_slices(self, groups: Slices) -> Slices:
        """Leave out w3 where there is no gate."""
        has_gate = self.moe_config.is_act_and_mul or len(self.names) < 3
        return groups if has_gate else [*groups[:2], (None, None)]

    def _as_groups(self, lora_a: LoRAInput, lora_b: LoRAInput) -> Slices:
        for name, value in (("lora_a", lora_a), ("lora_b", lora_b)):
            if not isinstance(value, (list, tuple)):
                raise TypeError(f"{name} must be a list {list(self.names)}, got {type(value).__name__}")
            if len(value) != len(self.names):
                raise ValueError(f"{name} must have {len(self.names)} entries {list(self.names)}, got {len(value)}")
        pairs = zip(cast(Sequence[LoRAFactor], lora_a), cast(Sequence[LoRAFactor], lora_b), strict=True)
        return list(pairs)

    def _full_sizes(self) -> dict[str, tuple[int, int]]:
        """Unsharded ``(in, out)`` by name."""
        inner = self.intermediate_size_per_partition * self.tp_size
        return {"w1": (self.hidden_size, inner), "w2": (inner, self.hidden_size), "w3": (self.hidden_size, inner)}

    def _check_factor_pair(self, name: str, a: LoRAFactor, b: LoRAFactor, width: int, height: int) -> None:
        if a is None and b is None:
            return
        if a is None or b is None:
            raise ValueError(f"{name}: {'lora_a' if a is None else 'lora_b'} is None but its partner is not")
        for side, tensor in (("lora_a", a), ("lora_b", b)):
            if not isinstance(tensor, (Tensor, Fp8Matrix)):
                raise TypeError(f"{name}: {side} must be a tensor or None, got {type(tensor).__name__}")
            if isinstance(tensor, Tensor) and tensor.dtype not in ADAPTER_DTYPES:
                raise TypeError(
                    f"{name}: {side} must be float16, bfloat16, float32 or float64, got {tensor.dtype}; give float8 "
                    "with its scales (punica.ops.quant.Fp8Matrix)"
                )
            if tensor.ndim != 3 or tensor.shape[0] != self.local_num_experts:
                raise ValueError(
                    f"{name}: {side} has shape {tuple(tensor.shape)}, this rank has {self.local_num_experts} experts; "
                    "expected [experts, rows, cols], restrict to local experts first"
                )
        config = cast(LoRAConfig, self.lora_config)
        rank = a.shape[1]
        if rank != b.shape[2]:
            raise ValueError(f"{name}: lora_a has rank {rank}, lora_b has rank {b.shape[2]}; they must be equal")
        if rank > config.max_lora_rank:
            raise ValueError(f"{name}: rank {rank} exceeds max_lora_rank {config.max_lora_rank}")
        if self.fully_sharded and rank % self.tp_size:
            raise ValueError(
                f"{name}: rank {rank} must be divisible by tp_size {self.tp_size} with fully_sharded_loras"
            )
        if a.shape[2] != width or b.shape[1] != height:
            raise ValueError(
                f"{name}: lora_a has {a.shape[2]} columns and lora_b {b.shape[1]} rows; the full sizes are {width} and "
                f"{height}"
            )

    @property
    def _num_entries(self) -> int:
        return len(self.names)

    def _by_stack(self, factors: Sequence[LoRAFactor]) -> list[LoRAFactor]:
        """Order w1, w3 if gated, w2."""
        w1, w2, w3 = factors
        return [w1, w3, w2] if self._w13_slices == 2 else [w1, w2]

    def zero_slices(self, rank: int, dtype: torch.dtype) -> Slices:
        """Return zeros as the base class, for this rank's experts."""
        experts = self.local_num_experts
        return [
            (
                torch.zeros(experts, rank, width, dtype=dtype, device="cpu"),
                torch.zeros(experts, height, rank, dtype=dtype, device="cpu"),
            )
            for width, height in (self._full_sizes()[name] for name in self.names)
        ]

    # --- into a model ------------------------------------------------------------------------------------------------

    def set_mapping(self, punica_wrapper: PunicaWrapperABC) -> None:
        """Store the wrapper, and tell the experts what to add."""
        self._require_slots("set_mapping")
        super().set_mapping(punica_wrapper)
        self.base_layer.routed_experts.set_lora_context(self._build_lora_context())

    def _build_lora_context(self) -> MoELoRAContext:
        config = cast(LoRAConfig, self.lora_config)
        w13, w2 = self._weights()
        return MoELoRAContext(
            w13, w2, self.w13_lora_a_stacked, self.w13_lora_b_stacked, self.w2_lora_a_stacked, self.w2_lora_b_stacked,
            self.adapter_enabled, self.max_loras, self.moe_config.experts_per_token, self._w13_slices,
            self.fully_sharded, self.tp_rank, self.tp_size, self.local_num_experts, self.punica_wrapper,
            use_tuned_config=config.tuned_dir is not None, lora_dtype=cast(torch.dtype, config.lora_dtype),
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the base layer, whose experts add the adapters."""
        self._ready_wrapper(*(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)))
        return self.base_layer(*args, **kwargs)

    @classmethod
    def can_replace_layer(
        cls, *, source_layer: Any, lora_config: LoRAConfig, packed_modules_list: list[str], **_: Any
    ) -> bool:
        """A `FusedMoE` whose adapters have w1 and w3 apart."""
        return is_kind_of(source_layer, FusedMoE) and len(packed_modules_list) == 2
