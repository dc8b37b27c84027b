"""The base of every LoRA layer: a base layer, slots with stacked adapter weights, and the PunicaWrapper.

A layer has ``L = max_loras`` slots. A slot holds, for every slice of the layer, this rank's part of one adapter's A and
B in the top-left corner of a matrix as wide as the largest rank; the rest of the matrix is zero, and ``lora_ranks``
tells the kernels not to read it. Code that fills slots (``set_lora``, and the asynchronous writer of
:mod:`punica.adapters`) knows nothing about the layer but its :class:`SlotPart`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from punica import wrapper
from punica.checks import check_count
from punica.config import LoRAConfig
from punica.layers.packing import LoRAFactor, Slices
from punica.layers.utils import base_weight, check_has_data, check_lora_pair, check_slot_index
from punica.ops.quant import Fp8Matrix
from punica.ops.scales import PER_CHANNEL, PLAIN
from punica.ops.weights import LoRAWeights, Stack

LoRAInput = Tensor | Fp8Matrix | Sequence[LoRAFactor] | None
Shapes = list[tuple[int, int]]


class SlotPart(NamedTuple):
    """One matrix of one slot, and this rank's content of it.

    ``slots``: the stacked buffer ``[L, 1, rows, cols]`` (A ``[R, in]``, B ``[out, R]``), contiguous or with its last
    two dimensions swapped.
    ``part``: the matrix ``[r, c]`` for its top-left corner, ``None`` where the adapter has none.
    ``ranks``: int32 ``[L]``, a view; ``rank``: the value for ``ranks[index]``, 0 without a part. (B of experts has the
    slot's flag here, 1 where it is filled.)
    ``fp8``: values of a slot in FP8, or its scales (``rows`` of them, ``cols`` 1).
    """

    slots: Tensor
    part: Tensor | None
    ranks: Tensor
    rank: int
    fp8: bool = False

    @property
    def row_major(self) -> bool:
        return self.slots.is_contiguous()

    def stored(self) -> "SlotPart":
        """Return views in memory order: ``slots`` contiguous, ``part`` transposed like them; of FP8 slots as bytes."""
        slots, part = self.slots, self.part
        if not self.row_major:
            slots, part = slots.mT, None if part is None else part.T
        if self.fp8:
            slots, part = slots.view(torch.uint8), None if part is None else part.view(torch.uint8)
        return self._replace(slots=slots, part=part)

    def matrix(self, index: int) -> Tensor:
        return self.slots[index, 0]

    def write(self, index: int) -> None:
        """Replace the content of slot ``index``, on the current stream."""
        target = self.matrix(index)
        if self.part is None or self.part.shape != target.shape:
            target.zero_()
        if self.part is not None:
            # detached: a slot filled from a parameter in training must not become part of its graph
            target[: self.part.shape[0], : self.part.shape[1]].copy_(self.part.detach(), non_blocking=True)
        self.ranks[index].fill_(self.rank)


class BaseLayerWithLoRA(nn.Module):
    """A base layer with slots, as the adapter manager drives it; subclasses define the forward.

    Attributes:
        n_slices: matrices packed in the layer that have their own A and B.
        full_input_size, full_output_sizes: the unsharded sizes that adapters must have; one output size per slice.
        a_row_major: A is stored as ``[R, in]``, else as ``[in, R]``; B is stored as ``[R, out]`` in all layers.
        max_loras, lora_config: what ``create_lora_weights`` was given; 0 and ``None`` before.
        lora_ranks: int32 ``[n_slices, L]`` on ``device``: the rank of each slot; 0 where reset or not adapted.
        lora_a_scale, lora_b_scale: of FP8 slots float32 ``[L, 1, R]`` and ``[L, 1, out]`` per slice; else empty.
        stack_a, stack_b, lora_weights: the slots as the wrapper's methods take them, and A and B as a pair.
        skips_when_empty: a forward skips LoRA while ``filled_slots`` (of the host) is empty, as few adapters touch
            embeddings and logits.
    """

    base_layer: Any
    punica_wrapper: Any = None
    a_row_major = True
    _takes_mixtures = False
    skips_when_empty = False
    full_input_size: int
    full_output_sizes: tuple[int, ...]
    stack_a: Stack
    stack_b: Stack
    lora_weights: LoRAWeights
    _slots: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # the stacked buffers of A and of B, one per slice
    _live_ranks: tuple[Tensor, Tensor]  # lora_ranks as this rank's shrink and as its expand must know them
    _inner: Any  # `LinearMethods` of the wrapper `_inner_of`
    _inner_of: Any = None

    def __init__(self, base_layer: Any, device: torch.device | None = None) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.device = base_weight(base_layer).device if device is None else device
        self.tp_size: int = getattr(base_layer, "tp_size", 1)
        self.tp_rank: int = getattr(base_layer, "tp_rank", 0)
        self.n_slices = 1
        self.max_loras = 0
        self.lora_config: LoRAConfig | None = None
        self.lora_ranks: Tensor | None = None
        self.lora_a_scale: tuple[Tensor, ...] = ()
        self.lora_b_scale: tuple[Tensor, ...] = ()
        self.filled_slots: set[int] = set()

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """Allocate ``max_loras`` zeroed slots of width ``lora_config.max_lora_rank``. ``TypeError``: a ``lora_dtype``
        that is not resolved; ``ValueError``: sizes below 1 or not divisible; ``RuntimeError``: slots exist already.
        """
        self._check_new_slots(max_loras, lora_config, model_config)
        self._allocate(max_loras, lora_config)
        if lora_config.fp8 is not None:
            self.lora_a_scale, self.lora_b_scale = (
                tuple(self._zeros(tuple(slots.shape[:3]), torch.float32) for slots in side) for side in self._slots
            )
        self.max_loras, self.lora_config = max_loras, lora_config
        self._refer_to_slots()

    def _check_new_slots(self, max_loras: int, lora_config: LoRAConfig, model_config: Any) -> None:
        if self.lora_config is not None:
            raise RuntimeError(f"{type(self).__name__}: create_lora_weights was called before; build a new layer")
        check_count("max_loras", max_loras)
        if not isinstance(lora_config.lora_dtype, torch.dtype):
            hint = "call lora_config.verify_with_model_config"
            raise TypeError(f"lora_dtype must be a torch dtype by now, got {lora_config.lora_dtype!r}; {hint}")

    def _slot_shapes(self, max_rank: int) -> tuple[Shapes, Shapes]:
        shapes_b = [(width, max_rank) for width in self.full_output_sizes]
        return [(max_rank, self.full_input_size)] * self.n_slices, shapes_b

    def _allocate(self, max_loras: int, lora_config: LoRAConfig) -> None:
        """Create the stacked buffers ``[L, 1, rows, cols]`` and ``lora_ranks``, zeroed.

        B ``[out, R]`` is a view of memory ``[L, 1, R, out]``, rank after rank like A. Row-major, rank 8 in a slot of 64
        would cost as much as rank 32, as a GPU moves memory by 64 bytes. A CPU too multiplies a few rows faster by it.
        """
        shapes_a, shapes_b = self._slot_shapes(lora_config.max_lora_rank)
        dtype = dtype_of_slots(lora_config)
        whole = [(max_loras, 1, *(shape if self.a_row_major else shape[::-1])) for shape in shapes_a]
        slots_a = tuple(self._zeros(shape, dtype) for shape in whole)
        self._slots = (
            slots_a if self.a_row_major else tuple(slots.mT for slots in slots_a),
            tuple(self._zeros((max_loras, 1, cols, rows), dtype).mT for rows, cols in shapes_b),
        )
        self.lora_ranks = self._zeros((self.n_slices, max_loras), torch.int32)
        self._live_ranks = self.lora_ranks, self.lora_ranks

    def _refer_to_slots(self) -> None:
        scheme = PLAIN if cast(LoRAConfig, self.lora_config).fp8 is None else PER_CHANNEL
        self.stack_a = Stack.of_a(self._slots[0], self._live_ranks[0], self.lora_a_scale, scheme)
        self.stack_b = Stack.of_b(self._slots[1], self._live_ranks[1], self.lora_b_scale, scheme)
        if self.stack_a.form.stored.rank == self.stack_b.form.stored.rank:  # else A is cut along the rank
            self.lora_weights = LoRAWeights(self.stack_a, self.stack_b)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def reset_lora(self, index: int) -> None:
        """Zero slot ``index``. ``TypeError`` or ``ValueError``: bad index; ``RuntimeError``: no slots yet."""
        self._require_slots("reset_lora")
        check_slot_index(index, self.max_loras)
        self.fill_slot(index, None)

    def set_lora(self, index: int, lora_a: LoRAInput, lora_b: LoRAInput) -> None:
        """Replace slot ``index`` by full A ``[r, in]`` and B ``[out, r]`` (lists for packed layers), asynchronously on
        the current stream. After an exception the slot holds what it held.
        """
        self._require_slots("set_lora")
        check_slot_index(index, self.max_loras)
        self.fill_slot(index, self.check_lora(lora_a, lora_b))

    def fill_slot(self, index: int, slices: Slices | None) -> None:
        """Replace slot ``index`` by slices that :meth:`check_slices` has accepted, unchecked here; ``None``: zeros."""
        parts = self.slot_parts(slices)
        for part in parts:
            part.write(index)
        self.mark_slot(index, any(part.part is not None for part in parts))

    @property
    def mixes(self) -> bool:
        """Rows may have a mixture of several adapters: linear layers and head, in 16 or 32 bits."""
        return self._takes_mixtures and not self.lora_a_scale and self._inner is self.punica_wrapper

    def mark_slot(self, index: int, filled: bool) -> None:
        """Note on the host whether slot ``index`` holds an adapter; asynchronous writers call it."""
        (self.filled_slots.add if filled else self.filled_slots.discard)(index)

    def slot_parts(self, slices: Slices | None = None) -> list[SlotPart]:
        """All matrices of a slot (A of every slice, then B, then the scales of both in FP8) and this rank's part of
        ``slices`` in each, which :meth:`check_slices` has accepted. ``None``: an empty slot.
        """
        self._require_slots("slot_parts")
        slices = slices or [(None, None)] * len(self._full_sizes())
        filled = any(a is not None for a, _ in slices)
        sides = (self.slice_lora_a, self.lora_a_scale), (self.slice_lora_b, self.lora_b_scale)
        parts: list[SlotPart] = []
        scales: list[SlotPart] = []
        for side, (own_parts, of_scales) in enumerate(sides):
            whole = self._held(self._by_stack([pair[side] for pair in slices]))
            for i, (factor, own) in enumerate(zip(whole, own_parts(whole), strict=True)):
                ranks, rank = self._live(side, i, factor, own, filled)
                held = own if rank else None
                values = held.values if isinstance(held, Fp8Matrix) else held
                slots, part = self._as_matrices(side, self._slots[side][i], values)
                parts.append(SlotPart(slots, part, ranks, rank, fp8=bool(of_scales)))
                if of_scales:
                    slots, part = self._as_columns(of_scales[i], None if held is None else held.scale)
                    scales.append(SlotPart(slots, part, ranks, rank, fp8=True))
        return parts + scales

    def _live(self, side: int, i: int, factor: LoRAFactor, own: LoRAFactor, filled: bool) -> tuple[Tensor, int]:
        """The live ranks of slice ``i`` of A (``side`` 0) or B, ``[L]``, and their value for a slot with ``own``."""
        return self._live_ranks[side][i], 0 if own is None else own.shape[side]

    def _as_matrices(self, side: int, slots: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """View slots and a part as matrices with the part in the top-left corner."""
        return slots, part

    def _as_columns(self, slots: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return slots[..., None], None if part is None else part[:, None]

    def _by_stack(self, factors: Sequence[LoRAFactor]) -> Sequence[LoRAFactor]:
        return factors

    def _held(self, matrices: Sequence[LoRAFactor]) -> list[LoRAFactor]:
        """Convert full matrices to the format of the slots; quantised whole, so that all ranks have the same bits."""
        fp8 = cast(torch.dtype | None, cast(LoRAConfig, self.lora_config).fp8)
        if fp8 is not None:
            return [None if matrix is None else Fp8Matrix.of(matrix, fp8, check=False) for matrix in matrices]
        return [matrix.real() if isinstance(matrix, Fp8Matrix) else matrix for matrix in matrices]

    @property
    def slot_bytes(self) -> int:
        """Device memory of one slot, in bytes: its matrices at full width."""
        return sum(part.slots[0].nbytes for part in self.slot_parts())

    def zero_slices(self, rank: int, dtype: torch.dtype) -> Slices:
        """Slices of ``rank`` that change nothing, in host memory."""
        lead, zeros = self._lead, partial(torch.zeros, dtype=dtype, device="cpu")
        return [(zeros(*lead, rank, width), zeros(*lead, height, rank)) for _, width, height in self._full_sizes()]

    def slice_lora_a(self, lora_a: Any) -> Any:
        """Return this rank's part of A (a view where possible): of one tensor, or of a list with one per stack."""
        return _of_every_slice(self._slice_a, lora_a)

    def slice_lora_b(self, lora_b: Any) -> Any:
        """Return this rank's part of B, as :meth:`slice_lora_a`."""
        return _of_every_slice(self._slice_b, lora_b)

    def _slice_a(self, i: int, lora_a: Tensor) -> Tensor:
        return lora_a

    def _slice_b(self, i: int, lora_b: Tensor) -> Tensor:
        return lora_b

    def check_lora(self, lora_a: LoRAInput, lora_b: LoRAInput) -> Slices:
        """Check the arguments of ``set_lora`` and return the slices, without touching a slot."""
        groups = self._as_groups(lora_a, lora_b)
        check_has_data(groups)
        return self.check_slices(groups)

    def check_slices(self, groups: Slices) -> Slices:
        """Check types, ranks and sizes of one pair per slice, or of the groups of a packed layer; meta tensors will do.
        Returns the slices, which :meth:`slot_parts` and :meth:`fill_slot` take unchecked.
        """
        self._require_slots("check_lora")
        sizes, most = self._full_sizes(), cast(LoRAConfig, self.lora_config).max_lora_rank
        for i, (a, b) in enumerate(groups):
            name = sizes[i][0] if len(groups) == len(sizes) else f"group {i}"
            check_lora_pair(name, a, b, most, self._lead)
        slices = self.to_slices(groups)
        if len(slices) != len(sizes):
            raise ValueError(f"{type(self).__name__} takes {len(sizes)} slices, got {len(slices)}; give one pair each")
        for (name, width, height), (a, b) in zip(sizes, slices, strict=True):
            if a is not None and a.shape[-1] != width:
                raise ValueError(f"{name}: lora_a must have {width} columns, got {a.shape[-1]}")
            if b is not None and b.shape[-2] != height:
                raise ValueError(f"{name}: lora_b must have {height} rows, got {b.shape[-2]}")
        return slices

    @property
    def _lead(self) -> tuple[int, ...]:
        return ()

    def _full_sizes(self) -> list[tuple[str, int, int]]:
        """Name, and unsharded input and output size, of every slice."""
        return [(f"slice {i}", self.full_input_size, rows) for i, rows in enumerate(self.full_output_sizes)]

    def to_slices(self, groups: Slices) -> Slices:
        """Split the groups of a packed layer into slices; a layer of one slice has one group."""
        return groups

    def _as_groups(self, lora_a: LoRAInput, lora_b: LoRAInput) -> Slices:
        for name, value in (("lora_a", lora_a), ("lora_b", lora_b)):
            if value is not None and not isinstance(value, (Tensor, Fp8Matrix)):
                raise TypeError(f"{name} must be one tensor for {type(self).__name__}, got {type(value).__name__}")
        return [(cast(LoRAFactor, lora_a), cast(LoRAFactor, lora_b))]

    def _require_slots(self, caller: str) -> None:
        if self.lora_ranks is None:
            raise RuntimeError(f"{type(self).__name__}: {caller} needs slots; call create_lora_weights first")

    def set_mapping(self, punica_wrapper: Any) -> None:
        """Store the wrapper, shared by all layers of a model, that knows which row uses which slot."""
        self.punica_wrapper = self._inner_of = punica_wrapper
        self._inner = wrapper.inner_form(punica_wrapper)

    def _ready_wrapper(self, *inputs: Tensor) -> Any:
        """Return the wrapper for a forward; ``RuntimeError``: no slots, no wrapper, or a gradient would be needed."""
        self._require_slots("forward")
        if torch.is_grad_enabled() and any(one.requires_grad for one in (*inputs, *self.parameters())):
            raise RuntimeError(
                f"{type(self).__name__} is for inference, and its input or weights require gradients: call it under "
                "torch.no_grad() or inference_mode(), or model.requires_grad_(False) before; TrainableLinear trains"
            )
        if self.punica_wrapper is None:
            raise RuntimeError(f"{type(self).__name__}: forward needs a PunicaWrapper; call set_mapping first")
        if self._inner_of is not self.punica_wrapper:
            self.set_mapping(self.punica_wrapper)  # assigned, not set
        return self.punica_wrapper

    @classmethod
    def can_replace_layer(
        cls, *, source_layer: nn.Module, lora_config: LoRAConfig, packed_modules_list: list[str],
        model_config: Any = None,
    ) -> bool:  # fmt: skip
        """Tell if this class wraps ``source_layer``. ``packed_modules_list``: names under which adapters know the
        matrices packed in the layer. A class names the keywords that it uses and lets the others pass.
        """
        raise NotImplementedError(f"{cls.__name__}.can_replace_layer")


def dtype_of_slots(lora_config: LoRAConfig) -> torch.dtype:
    return cast(torch.dtype, lora_config.fp8 or lora_config.lora_dtype)


def _of_every_slice(cut: Callable[[int, Tensor], Tensor], given: Any) -> Any:
    """``cut(0, tensor)``, or of a list ``cut(i, tensor)`` for every entry that is not ``None``."""
    own = [
        factor.cut(partial(cut, i)) if isinstance(factor, Fp8Matrix) else None if factor is None else cut(i, factor)
        for i, factor in enumerate(given if isinstance(given, (list, tuple)) else [given])
    ]
    return own if isinstance(given, (list, tuple)) else own[0]


class UnsplitLayer(BaseLayerWithLoRA):
    """Base of embeddings and logits: one slice, A and B whole on every rank; the stacks are tensors."""

    skips_when_empty = True
    lora_a_stacked: Tensor
    lora_b_stacked: Tensor

    def _allocate(self, max_loras: int, lora_config: LoRAConfig) -> None:
        super()._allocate(max_loras, lora_config)
        (self.lora_a_stacked,), (self.lora_b_stacked,) = self._slots
