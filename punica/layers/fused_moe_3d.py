"""LoRA over a mixture-of-experts layer whose adapters store gate and up as one matrix."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.fused_moe import FusedMoEWithLoRA
from punica.layers.packing import LoRAFactor
from punica.layers.utils import is_kind_of
from punica.ops.quant import Fp8Matrix
from punica.parallel.moe import FusedMoE


class FusedMoE3DWithLoRA(FusedMoEWithLoRA):
    """LoRA over experts, with gate and up as one matrix w13, ``B [E, 2*I*tp, r]``, and w2; w13 is one slice.

    Rows of that B are ordered as the base layer's: gate above up, or interleaved (gpt-oss).
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
            raise TypeError("FusedMoE3DWithLoRA needs model_config, whose architectures say how gate and up lie")
        architectures = getattr(model_config, "architectures", None)
        if not architectures:
            raise ValueError(f"model_config.architectures is {architectures!r}; the model's class name is needed")
        super().create_lora_weights(max_loras, lora_config, model_config)
        self._base_model = architectures[0]

    def _check_layout(self, model_config: Any) -> None:
        """Support both w13 layouts."""

    @property
    def _interleaved(self) -> bool:
        layout = getattr(self.base_layer, "w13_layout", "concatenated")
        return self._base_model == "GptOssForCausalLM" or layout == "interleaved"

    @property
    def _w13_rows(self) -> int:
        return self._rows_per_inner * self.intermediate_size_per_partition

    @property
    def w13_input_size(self) -> int:
        """Full width of A of the first product."""
        return self.w13_lora_a_stacked[0].shape[-1]

    @property
    def w13_output_size(self) -> int:
        """Full height of B of the first product."""
        return self.w13_lora_b_stacked[0].shape[-2] * self.tp_size

    @property
    def w2_input_size(self) -> int:
        """Full width of A of the second product."""
        return self.w2_lora_a_stacked[0].shape[-1] * self.tp_size

    @property
    def w2_output_size(self) -> int:
        """Full height of B of the second product."""
        return self.hidden_size

    def _full_sizes(self) -> dict[str, tuple[int, int]]:
        inner = self.intermediate_size_per_partition * self.tp_size
        return {"w13": (self.hidden_size, self._rows_per_inner * inner), "w2": (inner, self.hidden_size)}

    def _check_factor_pair(self, name: str, a: LoRAFactor, b: LoRAFactor, width: int, height: int) -> None:
        gated = name == "w13" and self._rows_per_inner == 2
        if gated and isinstance(b, (Tensor, Fp8Matrix)) and b.ndim == 3 and b.shape[1] % 2:
            raise ValueError(f"w13: lora_b has {b.shape[1]} rows; gate and up need an even number")
        super()._check_factor_pair(name, a, b, width, height)

    def _by_stack(self, factors: Sequence[LoRAFactor]) -> list[LoRAFactor]:
        return list(factors)

    def _slice_w13_b(self, b: Tensor) -> Tensor:
        if self.tp_size == 1 or self._rows_per_inner == 1:
            return super()._slice_w13_b(b)
        inner = self.intermediate_size_per_partition
        experts, rows, rank = b.shape
        pairs = b.view(experts, rows // 2, 2, rank) if self._interleaved else b.view(experts, 2, rows // 2, rank)
        own = pairs.narrow(1 if self._interleaved else 2, self.tp_rank * inner, inner)
        return own.reshape(experts, 2 * inner, rank)

    @classmethod
    def can_replace_layer(
        cls, *, source_layer: Any, lora_config: LoRAConfig, packed_modules_list: list[str], **_: Any
    ) -> bool:
        """A `FusedMoE` whose adapters have gate and up as one."""
        return is_kind_of(source_layer, FusedMoE) and len(packed_modules_list) == 1
