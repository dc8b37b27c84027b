"""LoRA over a row-parallel layer: x and A are split along the input, every rank's term is a partial sum.

Rank ``p`` computes ``W_p x_p + B (A_p x_p)``. Both terms are linear in the partial input, so the all-reduce that the
base layer needs anyway also completes the LoRA term: no extra communication. Where A is block-diagonal, a rank keeps
only the ranks of its own blocks in A and B.
"""

from typing import Any

from torch import Tensor

from punica.layers.base_linear import BaseLinearLayerWithLoRA
from punica.layers.packing import Blocks, LoRAFactor, ranks_of_blocks
from punica.layers.utils import _not_fully_sharded_can_replace, is_exactly
from punica.parallel.group import split_tensor_along_last_dim, tensor_model_parallel_all_reduce
from punica.parallel.linear import LinearOutput, RowParallelLinear, check_last_dim


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """``RowParallelLinear`` (o_proj, down_proj): rank ``p`` keeps columns ``[p*i, (p+1)*i)`` of A, ``i = in/tp``."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.input_size = self.base_layer.input_size_per_partition

    def _slice_a(self, i: int, lora_a: Tensor) -> Tensor:
        return lora_a.narrow(1, self.tp_rank * self.input_size, self.input_size)

    def own_ranks(self, i: int, pair: tuple[LoRAFactor, LoRAFactor], blocks: Blocks) -> tuple[LoRAFactor, LoRAFactor]:
        """Cut out the ranks of the blocks of A with this rank's inputs."""
        return ranks_of_blocks(pair, blocks.a, self.tp_rank, self.tp_size)

    def forward(self, input_: Tensor) -> LinearOutput:
        """``[..., in/tp]`` (``[..., in]`` unless ``input_is_parallel``) to ``[..., out]``, reduced if the base does."""
        base = self.base_layer
        if not base.input_is_parallel:
            check_last_dim(input_, self.full_input_size, type(self).__name__)
            input_ = split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank].contiguous()
        output = self.apply(input_, None if base.skip_bias_add or self.tp_rank > 0 else base.bias)
        if base.reduce_results and self.tp_size > 1:
            output = tensor_model_parallel_all_reduce(output)
        return base._result(output)

    @classmethod
    @_not_fully_sharded_can_replace
    def can_replace_layer(cls, *, source_layer: Any, **_: Any) -> bool:
        """Exactly ``RowParallelLinear``."""
        return is_exactly(source_layer, RowParallelLinear)
