"""LoRA over column-parallel layers: plain, merged (gate/up) and QKV, with one adapter or one per packed matrix.

A is replicated and B is sharded by rows like the base weight; where B is block-diagonal, a rank keeps only the ranks of
its own blocks in both. Packed matrices share one A (an adapter trained on the packed matrix), or have one each.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from punica.layers.base import LoRAInput
from punica.layers.base_linear import BaseLinearLayerWithLoRA
from punica.layers.packing import LoRAFactor, Slices, expand_groups
from punica.layers.utils import _not_fully_sharded_can_replace, is_exactly, is_kind_of, listed_groups
from punica.ops.quant import Fp8Matrix
from punica.parallel.group import tensor_model_parallel_all_gather
from punica.parallel.linear import ColumnParallelLinear, LinearOutput, MergedColumnParallelLinear, QKVParallelLinear


class ColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One A and one B over ``ColumnParallelLinear``, or over a merged layer as one matrix.

    Rank ``p`` keeps rows ``[p*o, (p+1)*o)`` of B, ``o`` the output width per rank. Over a merged base
    (``is_merged_col_linear``) B has ``sum(output_sizes)`` rows and the rank keeps its piece of every matrix, in order.
    """

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.is_merged_col_linear = is_kind_of(base_layer, MergedColumnParallelLinear)
        # On one rank a subclass of a merged layer may compute in a forward of its own: that is then the base output.
        self._uses_base_forward = (
            self.tp_size == 1
            and self.is_merged_col_linear
            and type(base_layer).forward is not MergedColumnParallelLinear.forward
        )
        self.output_size = base_layer.output_size_per_partition
        self.output_slices = (self.output_size,)
        # the matrices stacked in the base layer's weight, with this rank's rows of each
        self._matrices = list(base_layer.output_shards().values())
        self.full_output_sizes = (sum(matrix.full for matrix in self._matrices),)

    def _slice_b(self, i: int, lora_b: Tensor) -> Tensor:
        if self.tp_size == 1:
            return lora_b
        parts = lora_b.split([matrix.full for matrix in self._matrices])
        own = [matrix.rows_of(part) for matrix, part in zip(self._matrices, parts, strict=True)]
        return own[0] if len(own) == 1 else torch.cat(own)

    def forward(self, input_: Tensor) -> LinearOutput:
        """``[..., in] -> [..., out/tp]``, or ``[..., out]`` when the base layer gathers."""
        base = self.base_layer
        output = self.apply(input_, None if base.skip_bias_add else base.bias)
        if base.gather_output and self.tp_size > 1:
            output = tensor_model_parallel_all_gather(output)
        return base._result(output)

    @classmethod
    @_not_fully_sharded_can_replace
    def can_replace_layer(cls, *, source_layer: Any, packed_modules_list: list[str], **_: Any) -> bool:
        """Exactly ``ColumnParallelLinear``, or a merged layer of at most two matrices adapted as one."""
        if is_exactly(source_layer, ColumnParallelLinear):
            return True
        merged = is_kind_of(source_layer, MergedColumnParallelLinear)
        return merged and len(source_layer.output_sizes) <= 2 and len(packed_modules_list) == 1


class MergedColumnParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    """One A and B per matrix of a merged layer, e.g. gate and up.

    ``output_sizes`` are the full widths; rank ``p`` keeps rows ``[s*o_i, (s+1)*o_i)`` of slice ``i``, where
    ``o_i = output_slices[i]`` and ``s = output_ids[i]`` is the shard that this rank holds (``p`` here).
    """

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.n_slices = len(self._matrices)
        self.output_sizes = self.full_output_sizes = tuple(matrix.full for matrix in self._matrices)
        self.output_slices = tuple(matrix.rows for matrix in self._matrices)
        self.output_ids = tuple(matrix.index for matrix in self._matrices)

    def _slice_b(self, i: int, lora_b: Tensor) -> Tensor:
        return self._matrices[i].rows_of(lora_b)

    def _as_groups(self, lora_a: LoRAInput, lora_b: LoRAInput) -> Slices:
        return listed_groups(lora_a, lora_b)

    def to_slices(self, groups: Slices) -> Slices:
        if len(groups) == self.n_slices:
            return groups
        return list(zip(*self.expand_packed_lora(*zip(*groups, strict=True)), strict=True))

    def expand_packed_lora(
        self, lora_a: Sequence[LoRAFactor], lora_b: Sequence[LoRAFactor]
    ) -> tuple[list[LoRAFactor], list[LoRAFactor]]:
        """One pair per slice from fewer groups, by :func:`punica.layers.packing.expand_groups`."""
        return expand_groups(lora_a, lora_b, self.output_sizes)

    @classmethod
    def can_replace_layer(
        cls, *, source_layer: Any, lora_config: Any, packed_modules_list: list[str], decorate: bool = True, **_: Any
    ) -> bool:
        """A merged layer adapted as two matrices; on one rank fully sharded or not is the same, subclasses welcome."""
        if not is_kind_of(source_layer, MergedColumnParallelLinear) or len(packed_modules_list) != 2:
            return False
        if getattr(source_layer, "tp_size", 1) == 1:
            return True
        sharded = decorate and lora_config.fully_sharded_loras
        return is_exactly(source_layer, MergedColumnParallelLinear) and not sharded


class MergedColumnParallelLinearVariableSliceWithLoRA(MergedColumnParallelLinearWithLoRA):
    """A merged layer of three or more matrices, adapted one by one, in groups, or as one matrix: ``set_lora`` also
    takes a single A (shared by all slices) and a single B (``sum(output_sizes)`` rows).
    """

    def _as_groups(self, lora_a: LoRAInput, lora_b: LoRAInput) -> Slices:
        if isinstance(lora_b, (Tensor, Fp8Matrix)):
            if lora_b.ndim != 2 or lora_b.shape[0] != sum(self.output_sizes):
                raise ValueError(f"a single lora_b must have {sum(self.output_sizes)} rows, got {tuple(lora_b.shape)}")
            lora_b = list(lora_b.split(list(self.output_sizes)))
        if isinstance(lora_a, (Tensor, Fp8Matrix)) and isinstance(lora_b, (list, tuple)):
            lora_a = [None if b is None else lora_a for b in lora_b]
        return super()._as_groups(lora_a, lora_b)

    @classmethod
    @_not_fully_sharded_can_replace
    def can_replace_layer(cls, *, source_layer: Any, packed_modules_list: list[str], **_: Any) -> bool:
        """A merged layer packed from three or more modules, or of three or more matrices adapted as one."""
        merged, packed = is_kind_of(source_layer, MergedColumnParallelLinear), len(packed_modules_list)
        return merged and (packed >= 3 or (packed < 2 and len(source_layer.output_sizes) >= 3))


class _OverQKV(ColumnParallelLinearWithLoRA):
    """Rows of q, k and v on a rank when query heads share kv heads, and kv heads are replicated over ranks.

    Rank ``p`` holds q shard ``q_shard_id = p`` of ``q_proj_shard_size`` rows, and k and v shard
    ``kv_shard_id = p // num_kv_head_replicas`` of ``kv_proj_shard_size`` rows each. The full sizes are those of the
    checkpoint, replicas not counted.
    """

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        q, kv, _ = self._matrices
        self.q_proj_total_size, self.q_shard_id, self.q_proj_shard_size = q.full, q.index, q.rows
        self.kv_proj_total_size, self.kv_shard_id, self.kv_proj_shard_size = kv.full, kv.index, kv.rows


class QKVParallelLinearWithLoRA(_OverQKV):
    """One A and one B over the fused QKV layer: B is ``[q; k; v]``, and a rank keeps its rows of each part."""

    @classmethod
    @_not_fully_sharded_can_replace
    def can_replace_layer(cls, *, source_layer: Any, packed_modules_list: list[str], **_: Any) -> bool:
        """Exactly ``QKVParallelLinear``, adapted as one matrix."""
        return is_exactly(source_layer, QKVParallelLinear) and len(packed_modules_list) == 1


class MergedQKVParallelLinearWithLoRA(_OverQKV, MergedColumnParallelLinearWithLoRA):
    """One A and B each for q, k and v."""

    @classmethod
    @_not_fully_sharded_can_replace
    def can_replace_layer(cls, *, source_layer: Any, packed_modules_list: list[str], **_: Any) -> bool:
        """Exactly ``QKVParallelLinear``, adapted as three matrices."""
        return is_exactly(source_layer, QKVParallelLinear) and len(packed_modules_list) == 3
