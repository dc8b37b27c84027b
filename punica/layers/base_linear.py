"""A linear layer with LoRA: the base layer, stacked adapter weights in slots, one call to the PunicaWrapper.

For row ``t`` of a batch whose adapter sits in slot ``l``, a linear layer computes (paper, Section 2.2)

    y_t = W x_t + b + B_l (A_l x_t)            A_l: [r, in], B_l: [out, r], the LoRA scaling is in B_l

The first two terms are the base layer's, shared by all tenants in one matmul; the last is SGMV, also one batched
operation over all tenants, computed by ``punica_wrapper.add_linear``. All adapters of a layer live in two stacked
buffers per slice, ``A [L, 1, R, in]`` and ``B [L, 1, out, R]``: ``L = max_loras`` slots of width ``R = max_lora_rank``.
An adapter of rank ``r < R`` fills the top-left corner of its slot; the rest stays zero and ``lora_ranks`` tells the
kernels not to read it. In memory both are stored rank after rank: B is a view of ``[L, 1, R, out]``.

Tensor parallelism: the base layer knows its place (``tp_rank``, ``tp_size``); ``set_lora`` takes full matrices and
keeps this rank's part. A column layer splits B by rows, a row layer splits A by columns; the other factor is
replicated. LoRA is added after the bias and before gather or reduction, so partial sums add up.

Inference only: where activations require gradients, run the model under ``torch.inference_mode`` or ``no_grad``.
"""

from typing import Any, cast

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.base import BaseLayerWithLoRA, Shapes
from punica.layers.dual_stream import DualStream, dual_stream_for
from punica.layers.utils import as_rows, base_weight, has_no_lora
from punica.ops.interface import ALONE, Beside
from punica.parallel.linear import UnquantizedLinearMethod, check_last_dim
from punica.parallel.matmul import is_skinny
from punica.wrapper.inner import inner_form


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    """A linear base layer plus LoRA; with one slice unless a subclass says otherwise.

    Attributes (besides those of :class:`BaseLayerWithLoRA`; ``weight`` and ``bias`` forward to the base layer):
        input_size, output_size: widths of this rank's matmul.
        output_slices: this rank's width of every slice, in the order of the output.
        lora_a_stacked, lora_b_stacked: tuples with one tensor per slice, ``[L, 1, R, in]`` and ``[L, 1, out_i, R]``.
    """

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
        """The base layer's weight (or packed weight)."""
        return base_weight(self.base_layer)

    @property
    def bias(self) -> Tensor | None:
        """The base layer's bias, or ``None``."""
        return getattr(self.base_layer, "bias", None)

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """See :meth:`BaseLayerWithLoRA.create_lora_weights`; also sets up the second stream where the config asks."""
        super().create_lora_weights(max_loras, lora_config, model_config)
        self.lora_a_stacked, self.lora_b_stacked = self._slots
        self._row_dtype = cast(torch.dtype, lora_config.lora_dtype)
        self._streams = dual_stream_for(self, lora_config)

    def _slot_shapes(self, max_rank: int) -> tuple[Shapes, Shapes]:
        return [(max_rank, self.input_size)] * self.n_slices, [(width, max_rank) for width in self.output_slices]

    # --- forward -----------------------------------------------------------------------------------------------------

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Base product of ``x [..., in]`` plus every row's LoRA term: ``[..., out]``, nothing gathered or reduced yet.

        The base output may have another dtype than the adapters (a router kept in fp32); ``x`` is cast to theirs.
        ``ValueError`` for another width of ``x``; what else is wrong with it the op finds.
        """
        wrapper, rows, beside = self._ready_wrapper(x), self._adapter_rows(x), ALONE
        form = inner_form(wrapper, "add_lora_linear")
        takes_aside = form is wrapper and getattr(wrapper, "takes_aside", False)  # the contract's method has no base
        if self._streams is not None and takes_aside and not has_no_lora(wrapper):
            aside = self._streams.begin(rows)
            if aside is not None:
                plain = (self.weight,) if bias is None else (self.weight, bias)
                beside = Beside(aside, plain if self._has_plain_product(x, rows) else ())
        output = x.new_empty(x.shape[0], self.output_size) if beside.base else self._base_output(x, bias)
        y = as_rows(output)
        returned = form.add_linear(y, rows, self.lora_weights, True, beside)
        y = y if returned is None else returned
        return y if y.ndim == output.ndim else y.view(output.shape)

    def _adapter_rows(self, x: Tensor) -> Tensor:
        """``x [..., in]``, its width checked, as rows ``[T, in]`` in the dtype that adapters are for."""
        check_last_dim(x, self.input_size, type(self).__name__)
        rows, dtype = as_rows(x), self._row_dtype
        return rows if rows.dtype == dtype else rows.to(dtype)

    def _has_plain_product(self, x: Tensor, rows: Tensor) -> bool:
        """True where the base product is one that the op of the LoRA term can make as well: that of `is_skinny`."""
        plain = not self._uses_base_forward and type(self.base_layer.quant_method) is UnquantizedLinearMethod
        return plain and rows.dtype == x.dtype and is_skinny(x, self.weight)

    def _base_output(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The base layer's product; ``quant_method`` knows how its weight is stored."""
        base = self.base_layer
        if self._uses_base_forward:
            result = base(x)
            return result[0] if isinstance(result, tuple) else result
        return base.quant_method.apply(base, x, bias)
