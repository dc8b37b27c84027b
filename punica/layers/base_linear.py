"""Linear layers with LoRA: the base layer, stacked adapter weights in slots, one call to the PunicaWrapper.

For row ``t`` of a batch whose adapter sits in slot ``l``, a linear layer computes (paper, Section 2.2)

    y_t = W x_t + b + B_l (A_l x_t)            A_l: [r, in], B_l: [out, r], the LoRA scaling is in B_l

The base layer's terms are one matmul for all tenants; the last is SGMV, also one batched operation. ``set_lora`` takes
full matrices and keeps this rank's part: a column layer splits B by rows, a row layer splits A by columns, the other
factor is replicated. LoRA is added after the bias and before gather or reduction, so partial sums add up.
"""

from typing import Any, cast

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.base import BaseLayerWithLoRA, Shapes
from punica.layers.dual_stream import DualStream, dual_stream_for
from punica.layers.utils import (
    _not_fully_sharded_can_replace,
    as_rows,
    base_weight,
    has_no_lora,
    is_exactly,
    is_kind_of,
)
from punica.ops.interface import ALONE, Beside
from punica.parallel.group import split_tensor_along_last_dim, tensor_model_parallel_all_reduce
from punica.parallel.linear import SKINNY_METHODS, LinearOutput, ReplicatedLinear, RowParallelLinear, check_last_dim
from punica.parallel.matmul import is_skinny


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    """A linear base layer plus LoRA; with one slice unless a subclass says otherwise.

    Attributes (besides those of :class:`BaseLayerWithLoRA`; ``weight`` and ``bias`` forward to the base layer):
        input_size, output_size: widths of this rank's matmul.
        output_slices: this rank's width of every slice, in the order of the output.
        lora_a_stacked, lora_b_stacked: tuples with one tensor per slice, ``[L, 1, R, in]`` and ``[L, 1, out_i, R]``.
    """

    _takes_mixtures = True
    _uses_base_forward = False  # the base product is the base layer's own forward: it may compute or cast in its way

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.input_size: int = base_layer.input_size
        self.output_size: int = base_layer.output_size
        self.output_slices: tuple[int, ...] = (self.output_size,)
        self.full_input_size = base_layer.input_size
        self.full_output_sizes = (base_layer.output_size,)
        self.lora_a_stacked: tuple[Tensor, ...] = ()
        self.lora_b_stacked: tuple[Tensor, ...] = ()
        self._streams: DualStream | None = None

    @property
    def weight(self) -> Tensor:
        return base_weight(self.base_layer)

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.base_layer, "bias", None)

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """Allocate slots as the base class, and set up the second stream where the config asks for it."""
        super().create_lora_weights(max_loras, lora_config, model_config)
        self.lora_a_stacked, self.lora_b_stacked = self._slots
        self._row_dtype = cast(torch.dtype, lora_config.lora_dtype)
        self._streams = dual_stream_for(self.device, lora_config)

    def _slot_shapes(self, max_rank: int) -> tuple[Shapes, Shapes]:
        return [(max_rank, self.input_size)] * self.n_slices, [(width, max_rank) for width in self.output_slices]

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Base product of ``x [..., in]`` plus every row's LoRA term: ``[..., out]``, nothing gathered or reduced yet.

        The base output may have another dtype than the adapters (a router kept in fp32); ``x`` is cast to theirs.
        ``ValueError`` for another width of ``x``; what else is wrong with it the op finds.
        """
        wrapper, rows, beside = self._ready_wrapper(x), self._adapter_rows(x), ALONE
        if self._streams is not None and self._inner.takes_aside and not has_no_lora(wrapper):
            aside = self._streams.begin(rows)
            if aside is not None:
                base = self.base_layer
                plain = not self._uses_base_forward and type(base.quant_method) in SKINNY_METHODS
                plain = plain and rows.dtype == x.dtype and is_skinny(x, self.weight)  # the op can make it as well
                beside = Beside(aside, base.quant_method.operands(base, bias) if plain else ())
        output = x.new_empty(x.shape[0], self.output_size) if beside.base else self._base_output(x, bias)
        y = as_rows(output)
        self._inner.add_linear(y, rows, self.lora_weights, True, beside)
        return y if y.ndim == output.ndim else y.view(output.shape)

    def _adapter_rows(self, x: Tensor) -> Tensor:
        """``x [..., in]``, its width checked, as rows ``[T, in]`` in the dtype that adapters are for."""
        check_last_dim(x, self.input_size, type(self).__name__)
        rows, dtype = as_rows(x), self._row_dtype
        return rows if rows.dtype == dtype else rows.to(dtype)

    def _base_output(self, x: Tensor, bias: Tensor | None) -> Tensor:
        base = self.base_layer
        if self._uses_base_forward:
            result = base(x)
            return result[0] if isinstance(result, tuple) else result
        return base.quant_method.apply(base, x, bias)


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    """``ReplicatedLinear`` and its subclasses (routers, gates), sharded configuration or not."""

    _uses_base_forward = True

    def forward(self, input_: Tensor) -> LinearOutput:
        """``[..., in] -> [..., out]``; the bias is the base layer's own business."""
        return self.base_layer._result(self.apply(input_))

    @classmethod
    def can_replace_layer(cls, *, source_layer: Any, lora_config: Any, **_: Any) -> bool:
        return is_kind_of(source_layer, ReplicatedLinear)


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """``RowParallelLinear`` (o_proj, down_proj): rank ``p`` keeps columns ``[p*i, (p+1)*i)`` of A, ``i = in/tp``.

    It computes ``W_p x_p + B (A_p x_p)``, both linear in the partial input: the all-reduce that the base layer needs
    anyway also completes the LoRA term. Where A is block-diagonal, a rank keeps only the ranks of its own blocks.
    """

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.input_size = self.base_layer.input_size_per_partition

    def _slice_a(self, i: int, lora_a: Tensor) -> Tensor:
        return lora_a.narrow(1, self.tp_rank * self.input_size, self.input_size)

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
        return is_exactly(source_layer, RowParallelLinear)
