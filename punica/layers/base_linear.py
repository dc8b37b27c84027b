"""A linear layer with LoRA: the base layer, stacked adapter weights in slots, one call to the PunicaWrapper.

For row ``t`` of a batch whose adapter sits in slot ``l``, a linear layer computes (paper, Section 2.2)

    y_t = W x_t + b + B_l (A_l x_t)            A_l: [r, in], B_l: [out, r], the LoRA scaling is in B_l

The first two terms are the base layer's, shared by all tenants in one matmul; the last is SGMV, also one batched
operation over all tenants, computed by ``punica_wrapper.add_lora_linear``. All adapters of a layer live in two stacked
buffers per slice, ``A [L, 1, R, in]`` and ``B [L, 1, out, R]``: ``L = max_loras`` slots of width ``R = max_lora_rank``.
An adapter of rank ``r < R`` fills the top-left corner of its slot; the rest stays zero and ``lora_ranks`` tells the
kernels not to read it.

Tensor parallelism: the base layer knows its place (``tp_rank``, ``tp_size``); ``set_lora`` takes full matrices and
keeps this rank's part. A column layer splits B by rows, a row layer splits A by columns; the other factor is
replicated. LoRA is added after the bias and before gather or reduction, so partial sums add up by themselves.

Inference only: where activations require gradients, run the model under ``torch.inference_mode`` or ``no_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from punica.layers.dual_stream import DualStream, dual_stream_for
from punica.layers.packing import LoRAFactor
from punica.layers.slots import SlotPart, SlottedLayer
from punica.layers.utils import has_no_lora

if TYPE_CHECKING:
    from punica.config import LoRAConfig
    from punica.wrapper import PunicaWrapperABC


class BaseLinearLayerWithLoRA(SlottedLayer):
    """A linear base layer plus LoRA; with one slice unless a subclass says otherwise.

    Attributes (besides those of :class:`SlottedLayer`; ``weight`` and ``bias`` forward to the base layer):
        input_size, output_size: widths of this rank's matmul.
        output_slices: this rank's width of every slice, in the order in which they lie in the output.
        lora_a_stacked, lora_b_stacked: tuples with one tensor per slice, ``[L, 1, R, in]`` and ``[L, 1, out_i, R]``.
    """

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
        for name in ("weight", "weight_packed", "qweight"):
            if hasattr(self.base_layer, name):
                return getattr(self.base_layer, name)
        raise ValueError(f"unsupported base layer {type(self.base_layer).__name__}: it has no weight")

    @property
    def bias(self) -> Tensor | None:
        """The base layer's bias, or ``None``."""
        return getattr(self.base_layer, "bias", None)

    # --- slots -------------------------------------------------------------------------------------------------------

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """See :meth:`SlottedLayer.create_lora_weights`; also sets up the second stream where the config asks for it."""
        streams = dual_stream_for(self, lora_config)
        super().create_lora_weights(max_loras, lora_config, model_config)
        self._streams = streams

    def _allocate(self, max_loras: int, max_rank: int, dtype: torch.dtype) -> None:
        a_shapes, b_shapes = self._slot_shapes(max_rank)
        self.lora_a_stacked = tuple(self._zeros((max_loras, 1, *shape), dtype) for shape in a_shapes)
        self.lora_b_stacked = tuple(self._zeros((max_loras, 1, *shape), dtype) for shape in b_shapes)

    def _slot_shapes(self, max_rank: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Shape of one slot of A and of B, per slice."""
        return [(max_rank, self.input_size)] * self.n_slices, [(width, max_rank) for width in self.output_slices]

    def _parts(self, full_a: Sequence[LoRAFactor], full_b: Sequence[LoRAFactor]) -> list[SlotPart]:
        live_a, live_b = self._live_ranks()
        parts = []
        for stacked, matrices, live, rank_dim in (
            (self.lora_a_stacked, self.slice_lora_a(full_a), live_a, 0),
            (self.lora_b_stacked, self.slice_lora_b(full_b), live_b, 1),
        ):
            for slots, matrix, ranks in zip(stacked, matrices, live, strict=True):
                rank = 0 if matrix is None else matrix.shape[rank_dim]
                parts.append(SlotPart(slots, matrix if rank else None, ranks, rank))
        return parts

    def _live_ranks(self) -> tuple[Tensor, Tensor]:
        """The rank of every slot as the shrink and as the expand of this rank must know it; int32 ``[n_slices, L]``."""
        ranks = self._require_slots("set_lora")
        return ranks, ranks

    # --- this rank's part --------------------------------------------------------------------------------------------

    @overload
    def slice_lora_a(self, lora_a: Tensor) -> Tensor: ...
    @overload
    def slice_lora_a(self, lora_a: Sequence[LoRAFactor]) -> list[LoRAFactor]: ...
    def slice_lora_a(self, lora_a: Any) -> Any:
        """This rank's part of A (a view where possible): of one tensor, or of a list with one entry per slice."""
        if isinstance(lora_a, Tensor):
            return self._slice_a(0, lora_a)
        return [None if a is None else self._slice_a(i, a) for i, a in enumerate(lora_a)]

    @overload
    def slice_lora_b(self, lora_b: Tensor) -> Tensor: ...
    @overload
    def slice_lora_b(self, lora_b: Sequence[LoRAFactor]) -> list[LoRAFactor]: ...
    def slice_lora_b(self, lora_b: Any) -> Any:
        """This rank's part of B (a view where possible): of one tensor, or of a list with one entry per slice."""
        if isinstance(lora_b, Tensor):
            return self._slice_b(0, lora_b)
        return [None if b is None else self._slice_b(i, b) for i, b in enumerate(lora_b)]

    def _slice_a(self, i: int, lora_a: Tensor) -> Tensor:
        """This rank's part of A of slice ``i``; a family that splits A overrides it."""
        return lora_a

    def _slice_b(self, i: int, lora_b: Tensor) -> Tensor:
        """This rank's part of B of slice ``i``; a family that splits B overrides it."""
        return lora_b

    # --- forward -----------------------------------------------------------------------------------------------------

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Base product of ``x [..., in]`` plus every row's LoRA term: ``[..., out]``, nothing gathered or reduced yet.

        The base output may have another dtype than the adapters (a router kept in fp32); ``x`` is cast to theirs.
        """
        self._require_slots("forward")
        wrapper = self._require_wrapper()
        rows = x.reshape(-1, x.shape[-1]).to(self.lora_a_stacked[0].dtype)
        if self._streams is not None and not has_no_lora(wrapper):
            return self._apply_on_two_streams(self._streams, wrapper, x, bias, rows)
        output = self._base_output(x, bias)
        y = output.reshape(-1, output.shape[-1])
        returned = self._add_lora(wrapper, y, rows)
        return (y if returned is None else returned).view(output.shape)

    def _apply_on_two_streams(
        self, streams: DualStream, wrapper: PunicaWrapperABC, x: Tensor, bias: Tensor | None, rows: Tensor
    ) -> Tensor:
        """:meth:`apply` with the LoRA term beside the base product, see :mod:`punica.layers.dual_stream`."""
        # float32, so that the sum is rounded once, as where the LoRA kernels add into y themselves
        term = torch.empty(rows.shape[0], sum(self.output_slices), dtype=torch.float32, device=rows.device)

        def beside() -> Tensor | None:
            return self._add_lora(wrapper, term.zero_(), rows, add_inputs=False)

        output, returned = streams.run(lambda: self._base_output(x, bias), beside)
        return output.add_((term if returned is None else returned).view(output.shape))

    def _add_lora(self, wrapper: PunicaWrapperABC, y: Tensor, rows: Tensor, **options: Any) -> Tensor | None:
        """Every row's LoRA term into ``y [T, out]``, in place, or returned by a wrapper that cannot."""
        return wrapper.add_lora_linear(
            y,
            rows,
            self.lora_a_stacked,
            self.lora_b_stacked,
            1.0,
            self.output_slices,
            lora_ranks=self.lora_ranks,
            **options,
        )

    def _base_output(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The base layer's product; ``quant_method`` knows how its weight is stored."""
        return self.base_layer.quant_method.apply(self.base_layer, x, bias)

    def _forward_base(self, x: Tensor) -> Tensor:
        """The output of the base layer's own ``forward``, for subclasses that compute or cast in their own way."""
        result = self.base_layer(x)
        return result[0] if isinstance(result, tuple) else result

    def _result(self, output: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        if not self.base_layer.return_bias:
            return output
        return output, self.bias if self.base_layer.skip_bias_add else None
