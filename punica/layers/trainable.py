"""A frozen linear layer with adapters that train in one batch."""

from typing import Any

import torch
from torch import Tensor, nn

from punica.checks import check_count
from punica.layers.utils import as_rows, check_slot_index
from punica.metadata import LoRABatch
from punica.ops.expect import WITH_DOUBLE, check_scale
from punica.ops.gradients import lora_linear
from punica.ops.weights import LoRAWeights
from punica.parallel.linear import check_last_dim


class TrainableLinear(nn.Module):
    """``x W^T + bias + s_l (x A_l^T) B_l^T`` for a row in slot ``l`` of the wrapper's step, with a gradient in x, A, B.

    Slot 0 has parameters ``lora_a["0"] [r, K]`` and ``lora_b["0"] [N, r]``, views of what kernels read. Those of slots
    without rows get no gradient (None), so that optimizers leave them alone.

    Args:
        base_layer: ``nn.Linear``, or another of ``x W^T + bias``, with ``weight [N, K]`` not quantised; frozen here.
        wrapper: of all layers of a model (`punica.wrapper.get_punica_wrapper`), with ``max_loras``.
        max_loras, max_rank: slots and their width; dtype: of A and B (None: the base's).
    """

    base_layer: Any
    slots_a: Tensor
    slots_b: Tensor
    lora_ranks: Tensor

    def __init__(
        self, base_layer: nn.Module, wrapper: Any, max_loras: int, max_rank: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        weight: Any = getattr(base_layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype not in WITH_DOUBLE:
            raise TypeError(f"{type(base_layer).__name__} has no weight [N, K] of 16 to 64 bits; wrap a linear layer")
        slots, width = check_count("max_loras", max_loras), check_count("max_rank", max_rank)
        self.base_layer, self.punica_wrapper = base_layer.requires_grad_(False), wrapper
        for name, size in (("slots_a", weight.shape[1]), ("slots_b", weight.shape[0])):
            zeros = torch.zeros(slots, width, size, dtype=dtype or weight.dtype, device=weight.device)
            self.register_buffer(name, zeros, persistent=False)
        self.register_buffer("lora_ranks", torch.zeros(1, slots, dtype=torch.int32, device=weight.device), False)
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        self.scalings: dict[int, float] = {}
        self._in_slots: dict[tuple[int, int], Tensor] = {}  # by dimension of the rank and slot

    def add_adapter(self, slot: int, rank: int, scaling: float = 1.0) -> tuple[nn.Parameter, nn.Parameter]:
        """Begin an adapter as PEFT does and return A and B; ``scaling``: ``lora_alpha / rank``. One that was there
        leaves the slot, and its parameters keep their values. ValueError: a slot or rank beyond the layer's.
        """
        slots, width, _ = self.slots_a.shape
        check_slot_index(slot, slots)
        check_scale("scaling", scaling)
        if check_count("rank", rank) > width:
            raise ValueError(f"rank is {rank}, above max_rank={width} of this layer; build it with a larger max_rank")
        name = str(slot)
        for factors, held, dim in self._sides():
            self._free(dim, slot)
            factors[name] = self._in_slots[dim, slot] = nn.Parameter(held.data[slot].narrow(dim, 0, rank).zero_())
        self.scalings[slot], self.lora_ranks[0, slot] = float(scaling), rank
        nn.init.kaiming_uniform_(self.lora_a[name], a=5**0.5)
        return self.lora_a[name], self.lora_b[name]

    def _sides(self) -> tuple[tuple[nn.ParameterDict, Tensor, int], ...]:
        """Parameters, slots ``[L, R, K]`` or ``[L, N, R]``, and dimension of the rank in a slot, of A and of B."""
        return (self.lora_a, self.slots_a, 0), (self.lora_b, self.slots_b.mT, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``, in the base's dtype. ValueError: rows in a slot without an adapter."""
        check_last_dim(x, self.slots_a.shape[-1], type(self).__name__)
        batch: LoRABatch = self.punica_wrapper._step()
        present = [slot for slot in batch.rows.present[0].tolist() if slot >= 0]
        if missing := sorted(set(present) - self.scalings.keys()):
            raise ValueError(f"rows use slot {missing[0]}, which has no adapter; add_adapter({missing[0]}, rank) first")
        of_a, of_b = (self._views(present, *side) for side in self._sides())
        views = {slot: (a, b) for slot, a, b in zip(present, of_a, of_b, strict=True)}
        weight, bias = self.base_layer.weight, getattr(self.base_layer, "bias", None)
        base, rows = (weight,) if bias is None else (weight, bias), as_rows(x).to(weight.dtype)
        scales: list[Any] = list({self.scalings[slot] for slot in present} or {1.0})
        if len(scales) > 1:
            table = [self.scalings.get(slot, 0.0) for slot in range(len(self.slots_a))]
            wide = torch.promote_types(self.slots_a.dtype, torch.float32)
            scales = [torch.tensor(table, dtype=wide, device=x.device)[batch.tensors[0][: rows.shape[0]]]]
        weights = LoRAWeights.of((self.slots_a,), (self.slots_b.mT,), self.lora_ranks)
        y = lora_linear(self.punica_wrapper.ops, rows, weights, batch, scales[0], base, views)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _views(self, present: list[int], factors: nn.ParameterDict, held: Tensor, dim: int) -> list[nn.Parameter]:
        """Return the parameters in use. What was moved, copied or loaded apart from its slot is put back there."""
        views, start, step = [factors[str(slot)] for slot in present], held.data_ptr(), held[:1].nbytes
        for slot, parameter in zip(present, views, strict=True):
            if self._in_slots.get((dim, slot)) is not parameter:
                if not isinstance(parameter, nn.Parameter):
                    raise TypeError(f"a factor of slot {slot} is a {type(parameter).__name__}; give an nn.Parameter")
                self._free(dim, slot)
                self._in_slots[dim, slot] = parameter
            if parameter.data_ptr() != start + slot * step:
                parameter.data = held.data[slot].narrow(dim, 0, parameter.shape[dim]).copy_(parameter.data)
        return views

    def _free(self, dim: int, slot: int) -> None:
        """Have the parameter in a slot keep its values elsewhere; a `backward` still to come, for those, raises."""
        if (before := self._in_slots.pop((dim, slot), None)) is not None:
            before.data = before.data.clone()
            torch.autograd.graph.increment_version(before)
