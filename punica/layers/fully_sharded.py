"""Fully sharded LoRA: A and B are both sharded over tensor-parallel ranks, without repeated work or weights.

The plain classes replicate one factor, which at 8 ranks dominates the cost. S-LoRA (Sheng et al., 2023, Section 6)
shards it too and communicates the intermediate, which is only ``rank`` wide, in float32:

    column     h_p = x A_p^T            A_p: rows [p*R/tp, (p+1)*R/tp) of A, "rank-sharded"; x is whole on every rank
               h   = all-gather(h_p)    [n, T, R/tp] -> [n, T, R]
               y_p += h B_p^T           B_p: this rank's rows of B, as in the plain class

    row        h   = all-reduce(x_p A_p^T)                     A_p: this rank's columns of A, as in the plain class
               y_p[:, p*out/tp : (p+1)*out/tp] += h B_p^T      B_p: rows [p*out/tp, (p+1)*out/tp) of B

In the row layer ``y_p`` is a partial sum; the base layer's all-reduce completes base and LoRA at once. An adapter of
rank ``r < R`` fills the first ranks' parts of A: rank ``p`` holds and shrinks ``min(max(r - p*R/tp, 0), R/tp)`` rows,
while the expand reads all ``r``. A step without any adapter skips it all, on all ranks: they see the same mapping.
"""

from typing import Any

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers import column_parallel_linear as column
from punica.layers.base import Shapes
from punica.layers.base_linear import BaseLinearLayerWithLoRA, RowParallelLinearWithLoRA
from punica.layers.utils import _fully_sharded_can_replace, as_rows, has_no_lora
from punica.parallel.group import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce


class _FullySharded(BaseLinearLayerWithLoRA):
    """Shrink, a collective, expand, instead of one call. Replaces what the parent class does, where configured."""

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Compute the parent's result with a collective on the intermediate, never on a second stream."""
        if self.tp_size == 1:
            return super().apply(x, bias)
        wrapper, rows = self._ready_wrapper(x), self._adapter_rows(x)
        output = self._base_output(x, bias)
        if has_no_lora(wrapper) or rows.shape[0] == 0:
            return output
        shape = (self.n_slices, rows.shape[0], self.lora_a_stacked[0].shape[-2])
        h = torch.zeros(shape, dtype=torch.float32, device=rows.device)
        self._inner.add_shrunk(h, rows, self.stack_a)
        y = as_rows(output)
        self._inner.add_expanded(y, self._join(h), self.stack_b, self._first_column())
        return y.view(output.shape)

    @property
    def mixes(self) -> bool:
        return self.tp_size == 1 and super().mixes

    def _join(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def _first_column(self) -> int:
        return 0

    @classmethod
    @_fully_sharded_can_replace
    def can_replace_layer(cls, **layer: Any) -> bool:
        """Apply the parent's rule, for ``fully_sharded_loras``."""
        return super().can_replace_layer(**layer, decorate=False)  # type: ignore[call-arg]


class _RankSharded(_FullySharded):
    """Column layers: rank ``p`` has rows ``[p*R/tp, (p+1)*R/tp)`` of A, int32 ``lora_a_ranks [n, L]`` of them live."""

    lora_a_ranks: Tensor | None = None

    def _slot_shapes(self, max_rank: int) -> tuple[Shapes, Shapes]:
        if max_rank % self.tp_size:
            raise ValueError(
                f"max_lora_rank {max_rank} must be divisible by tp_size {self.tp_size}, fully_sharded_loras cuts A "
                "along the rank; round LoRAConfig.max_lora_rank up to a multiple"
            )
        a_shapes, b_shapes = super()._slot_shapes(max_rank)
        return [(rank // self.tp_size, width) for rank, width in a_shapes], b_shapes

    def _allocate(self, max_loras: int, lora_config: LoRAConfig) -> None:
        super()._allocate(max_loras, lora_config)
        self.lora_a_ranks = self._zeros((self.n_slices, max_loras), torch.int32)
        self._live_ranks = self.lora_a_ranks, self._live_ranks[1]

    def _slice_a(self, i: int, lora_a: Tensor) -> Tensor:
        if self.tp_size == 1:
            return lora_a
        self._require_slots("slice_lora_a")
        width = self.lora_a_stacked[i].shape[-2]
        return lora_a[self.tp_rank * width : (self.tp_rank + 1) * width]

    def _join(self, h: Tensor) -> Tensor:
        is_cut = self.lora_a_stacked[0].shape[-2] != self.lora_b_stacked[0].shape[-1]  # a subclass may keep A whole
        return tensor_model_parallel_all_gather(h) if is_cut else h


class ColumnParallelLinearWithShardedLoRA(_RankSharded, column.ColumnParallelLinearWithLoRA):
    """:class:`ColumnParallelLinearWithLoRA` with A cut along the rank."""


class MergedColumnParallelLinearWithShardedLoRA(_RankSharded, column.MergedColumnParallelLinearWithLoRA):
    """:class:`MergedColumnParallelLinearWithLoRA` with every slice's A cut along the rank; one gather for all."""

    @classmethod
    def can_replace_layer(cls, **layer: Any) -> bool:
        """The parent's rule on more than one rank; on one rank the parent itself serves, sharded or not."""
        return super().can_replace_layer(**layer) and layer["source_layer"].tp_size > 1


class QKVParallelLinearWithShardedLoRA(_RankSharded, column.QKVParallelLinearWithLoRA):
    """:class:`QKVParallelLinearWithLoRA` with A cut along the rank."""


class MergedQKVParallelLinearWithShardedLoRA(_RankSharded, column.MergedQKVParallelLinearWithLoRA):
    """:class:`MergedQKVParallelLinearWithLoRA` with every slice's A cut along the rank; one gather for all."""


class RowParallelLinearWithShardedLoRA(_FullySharded, RowParallelLinearWithLoRA):
    """:class:`RowParallelLinearWithLoRA` with B cut by rows too: rank ``p`` keeps ``[p*out/tp, (p+1)*out/tp)``.

    The output is a partial sum until the layer's all-reduce: with ``reduce_results=False`` the caller must reduce.
    """

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.output_slices = (self.output_size // self.tp_size,)

    def _slot_shapes(self, max_rank: int) -> tuple[Shapes, Shapes]:
        if self.output_size % self.tp_size:
            raise ValueError(
                f"output size {self.output_size} must be divisible by tp_size {self.tp_size}, fully_sharded_loras cuts "
                "B of a row-parallel layer by rows; use LoRAConfig(fully_sharded_loras=False)"
            )
        return super()._slot_shapes(max_rank)

    def _slice_b(self, i: int, lora_b: Tensor) -> Tensor:
        return lora_b.narrow(0, self._first_column(), self.output_slices[0])

    def _first_column(self) -> int:
        return self.tp_rank * self.output_slices[0]

    def _join(self, h: Tensor) -> Tensor:
        return tensor_model_parallel_all_reduce(h)
