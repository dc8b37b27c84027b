"""What every LoRA layer is: a base layer, stacked adapter weights in slots, and one call to the PunicaWrapper.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn

from punica.layers.packing import LoRAFactor
from punica.layers.utils import check_count, check_lora_pair, check_slot_index, lora_device

if TYPE_CHECKING:
    from punica.config import LoRAConfig
    from punica.wrapper import PunicaWrapperABC

LoRAInput = Tensor | Sequence[LoRAFactor] | None


class BaseLayerWithLoRA(nn.Module):
    """The interface that the adapter manager drives; every method is implemented by a layer family."""

    punica_wrapper: PunicaWrapperABC | None = None

    def slice_lora_a(self, lora_a: Any) -> Any:
        """This rank's part of A; a tensor gives a tensor, a list a list, ``None`` entries stay ``None``."""
        raise NotImplementedError(f"{type(self).__name__}.slice_lora_a")

    def slice_lora_b(self, lora_b: Any) -> Any:
        """This rank's part of B; a tensor gives a tensor, a list a list, ``None`` entries stay ``None``."""
        raise NotImplementedError(f"{type(self).__name__}.slice_lora_b")

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """Allocate zeroed slots on the base layer's device. Called once."""
        raise NotImplementedError(f"{type(self).__name__}.create_lora_weights")

    def reset_lora(self, index: int) -> None:
        """Zero slot ``index`` in all buffers."""
        raise NotImplementedError(f"{type(self).__name__}.reset_lora")

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Replace the content of slot ``index`` by one adapter's full (unsharded) matrices."""
        raise NotImplementedError(f"{type(self).__name__}.set_lora")

    def set_mapping(self, punica_wrapper: PunicaWrapperABC) -> None:
        """Store the wrapper, shared by all layers of a model, that knows which row uses which slot."""
        self.punica_wrapper = punica_wrapper

    @classmethod
    def can_replace_layer(
        cls,
        *,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: Any = None,
    ) -> bool:
        """Whether this class wraps ``source_layer`` in this configuration (keyword arguments only).

        ``packed_modules_list``: names under which adapters know the matrices packed in the layer; empty if not packed.
        """
        raise NotImplementedError(f"{cls.__name__}.can_replace_layer")


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    """A linear base layer plus LoRA; with one slice unless a subclass says otherwise.

    Attributes:
        base_layer: the wrapped layer. ``weight`` and ``bias`` forward to it.
        input_size, output_size: widths of this rank's matmul.
        n_slices: matrices packed in the layer that have their own A and B.
        output_slices: this rank's width of every slice, in the order in which they lie in the output.
        full_input_size, full_output_sizes: the unsharded sizes that adapters must have; one output size per slice.
        tp_size, tp_rank, device: the base layer's.
        lora_a_stacked, lora_b_stacked: tuples with one tensor per slice, ``[L, 1, R, in]`` and ``[L, 1, out_i, R]``.
        lora_ranks: int32 ``[n_slices, L]`` on ``device``: the rank of each slot; 0 where reset or not adapted.
    """

    base_layer: Any

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base = base_layer
        self.device = lora_device(base_layer)
        self.tp_size: int = base.tp_size
        self.tp_rank: int = base.tp_rank
        self.input_size: int = base.input_size
        self.output_size: int = base.output_size
        self.n_slices = 1
        self.output_slices: tuple[int, ...] = (self.output_size,)
        self.full_input_size: int = base.input_size
        self.full_output_sizes: tuple[int, ...] = (base.output_size,)
        self.max_loras = 0
        self.lora_config: LoRAConfig | None = None
        self.lora_a_stacked: tuple[Tensor, ...] = ()
        self.lora_b_stacked: tuple[Tensor, ...] = ()
        self.lora_ranks: Tensor | None = None

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
        """Allocate ``max_loras`` zeroed slots of width ``lora_config.max_lora_rank`` in ``lora_config.lora_dtype``.

        ``TypeError`` for a ``lora_dtype`` that is not resolved yet, ``ValueError`` for sizes below 1, ``RuntimeError``
        when the slots exist already.
        """
        if self.lora_config is not None:
            raise RuntimeError(f"{type(self).__name__}: create_lora_weights was called before; build a new layer")
        check_count("max_loras", max_loras)
        check_count("max_lora_rank", lora_config.max_lora_rank)
        dtype = lora_config.lora_dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"lora_dtype must be a torch dtype by now, got {dtype!r}; call lora_config.verify_with_model_config"
            )
        a_shapes, b_shapes = self._slot_shapes(lora_config.max_lora_rank)
        self.lora_a_stacked = tuple(self._zeros((max_loras, 1, *shape), dtype) for shape in a_shapes)
        self.lora_b_stacked = tuple(self._zeros((max_loras, 1, *shape), dtype) for shape in b_shapes)
        self.lora_ranks = self._zeros((self.n_slices, max_loras), torch.int32)
        self.max_loras = max_loras
        self.lora_config = lora_config

    def _slot_shapes(self, max_rank: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Shape of one slot of A and of B, per slice."""
        return [(max_rank, self.input_size)] * self.n_slices, [(width, max_rank) for width in self.output_slices]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def reset_lora(self, index: int) -> None:
        """Zero slot ``index``. ``TypeError`` or ``ValueError``: bad index; ``RuntimeError``: no slots yet."""
        ranks = self._require_slots("reset_lora")
        check_slot_index(index, self.max_loras)
        for stacked in (*self.lora_a_stacked, *self.lora_b_stacked):
            stacked[index].zero_()
        ranks[:, index].zero_()

    def set_lora(self, index: int, lora_a: LoRAInput, lora_b: LoRAInput) -> None:
        """Replace slot ``index`` by full matrices A ``[r, in]`` and B ``[out, r]`` (lists of them for packed layers).

        Everything is checked before anything is written, so that after an exception the slot holds what it held. The
        copies are asynchronous where the source allows; they are ordered on the current stream with the kernels.
        """
        ranks = self._require_slots("set_lora")
        check_slot_index(index, self.max_loras)
        full_a, full_b = self.check_lora(lora_a, lora_b)
        self.reset_lora(index)
        for stacked, parts in (
            (self.lora_a_stacked, self.slice_lora_a(full_a)),
            (self.lora_b_stacked, self.slice_lora_b(full_b)),
        ):
            for slots, part in zip(stacked, parts, strict=True):
                if part is not None:
                    slots[index, 0, : part.shape[0], : part.shape[1]].copy_(part, non_blocking=True)
        for i, a in enumerate(full_a):
            if a is not None:
                ranks[i, index] = a.shape[0]

    def check_lora(self, lora_a: LoRAInput, lora_b: LoRAInput) -> tuple[list[LoRAFactor], list[LoRAFactor]]:
        """All that ``set_lora`` would object to, without touching a slot; returns one full A and B (or None) per slice.

        A manager calls this when an adapter is registered, so that activating it cannot fail half-way.
        """
        self._require_slots("check_lora")
        slices_a, slices_b = self._to_slices(lora_a, lora_b)
        for i, (a, b) in enumerate(zip(slices_a, slices_b, strict=True)):
            if a is None or b is None:
                continue
            if a.shape[1] != self.full_input_size:
                raise ValueError(f"slice {i}: lora_a must have {self.full_input_size} columns, got {a.shape[1]}")
            if b.shape[0] != self.full_output_sizes[i]:
                raise ValueError(f"slice {i}: lora_b must have {self.full_output_sizes[i]} rows, got {b.shape[0]}")
        return slices_a, slices_b

    def _to_slices(self, lora_a: LoRAInput, lora_b: LoRAInput) -> tuple[list[LoRAFactor], list[LoRAFactor]]:
        """The given factors, one pair per slice, each pair checked by itself. Here: one slice, one tensor."""
        for name, value in (("lora_a", lora_a), ("lora_b", lora_b)):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{name} must be one tensor for {type(self).__name__}, got {type(value).__name__}")
        self._check_pairs([lora_a], [lora_b])
        return [cast(LoRAFactor, lora_a)], [cast(LoRAFactor, lora_b)]

    def _check_pairs(self, lora_a: Sequence[object], lora_b: Sequence[object]) -> None:
        config = cast("LoRAConfig", self.lora_config)
        for i, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
            check_lora_pair(i, a, b, config.max_lora_rank)

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
        ranks = self._require_slots("forward")
        wrapper = self.punica_wrapper
        if wrapper is None:
            raise RuntimeError(f"{type(self).__name__}: forward needs a PunicaWrapper; call set_mapping first")
        output = self._base_output(x, bias)
        y = output.reshape(-1, output.shape[-1])
        rows = x.reshape(-1, x.shape[-1]).to(self.lora_a_stacked[0].dtype)
        returned = wrapper.add_lora_linear(
            y, rows, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices, lora_ranks=ranks
        )
        return (y if returned is None else returned).view(output.shape)

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

    def _require_slots(self, caller: str) -> Tensor:
        if self.lora_ranks is None:
            raise RuntimeError(f"{type(self).__name__}: {caller} needs slots; call create_lora_weights first")
        return self.lora_ranks
