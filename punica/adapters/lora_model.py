"""`LoRAModel`: one adapter in host memory, the weights of all modules that it touches.

It is built from tensors with PEFT's names, in memory or in a folder. A layer adds `delta W = scaling * B A` of its own
module; how a module's A and B look, alone or packed with others, is said in `weights.py`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from punica.adapters.check import check_finite, check_tensors, join_scales
from punica.adapters.peft_config import PEFTHelper
from punica.adapters.read import NameMapper, is_stacked_name, lora_names, read_tensors
from punica.adapters.request import check_adapter_id
from punica.adapters.weights import LoRALayerWeights, PackedLoRALayerWeights, StackedLoRALayerWeights
from punica.adapters.wrap import MoEEPSpec
from punica.layers.base import LoRAInput
from punica.ops.quant import Fp8Matrix

ModuleWeights = LoRALayerWeights | PackedLoRALayerWeights
_next_model_id = itertools.count(1)


class LoRAModel:
    """All modules of one adapter.

    Args:
        lora_model_id: adapter id, integer >= 1.
        rank: the largest rank of any module.
        loras: `{module name: weights}`.
        is_3d_lora_weight: whether experts are stored as one pair for all of a layer.

    Raises:
        TypeError, ValueError: the id is not an integer >= 1.
    """

    def __init__(
        self, lora_model_id: int, rank: int, loras: Mapping[str, ModuleWeights], is_3d_lora_weight: bool = False
    ) -> None:
        check_adapter_id("lora_model_id", lora_model_id)
        self.id = lora_model_id
        self.rank = rank
        self.is_3d_lora_weight = is_3d_lora_weight
        self.loras: dict[str, ModuleWeights] = dict(loras)

    def clone(self, lora_model_id: int) -> LoRAModel:
        """The same adapter under another id; tensors are shared."""
        return LoRAModel(lora_model_id, self.rank, self.loras, self.is_3d_lora_weight)

    def renamed(self, lora_model_id: int) -> LoRAModel:
        """What this is, staged or not, under another id, which may be one of the engine's own (negative)."""
        twin = copy.copy(self)
        twin.id = lora_model_id
        return twin

    def get_lora(self, module_name: str) -> ModuleWeights | None:
        """The weights of a module, `None` if the adapter does not touch it."""
        return self.loras.get(module_name)

    def pair_of(self, module_name: str) -> tuple[LoRAInput, LoRAInput]:
        """`(A, B)` of a module as its layer takes them, `(None, None)` if the adapter does not touch it."""
        weights = self.get_lora(module_name)
        return (None, None) if weights is None else weights.pair()

    def check_lora_name(self, module_name: str) -> bool:
        """True if the adapter has weights for this module."""
        return module_name in self.loras

    @classmethod
    def from_lora_tensors(
        cls,
        lora_model_id: int,
        tensors: Mapping[str, torch.Tensor | Fp8Matrix], peft_helper: PEFTHelper,
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None, model_vocab_size: int | None = None,
        weights_mapper: NameMapper | None = None, skip_prefixes: Sequence[str] | None = None,
    ) -> LoRAModel:  # fmt: skip
        """Build an adapter from PEFT-named tensors in memory.

        Args:
            lora_model_id: adapter id >= 1.
            tensors: `{PEFT name: tensor}`, e.g. `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`; of FP8
                tensors the scales under `..._scale`, see :func:`punica.adapters.check.join_scales`.
            peft_helper: rank and scaling of every module.
            device, dtype: where to place the tensors and as what; `dtype=None` keeps each tensor's own, and FP8 with
                its scales. Tensors that already fit are shared, not copied.
            model_vocab_size: if given, embedding adapters must cover exactly this many ids.
            weights_mapper: renames modules, see :func:`punica.adapters.read.map_tensor_name`.
            skip_prefixes: modules to leave out.

        Raises:
            TypeError: a value is not a tensor, or of a dtype that cannot be loaded. ValueError: no tensors, A without
                B, shapes or ranks that disagree, NaN or inf, an embedding of another vocabulary.
        """
        tensors = join_scales(tensors)
        names = lora_names(tensors, weights_mapper, skip_prefixes)
        sides = check_tensors(names, tensors, model_vocab_size)
        peft_helper.resolve(name.configured for name in names.values())
        placed: dict[str, torch.Tensor | Fp8Matrix] = {}
        for key, (module, is_a, _) in names.items():
            placed[key] = _placed(tensors[key], device, dtype)
            check_finite(module, is_a, placed[key], tensors[key])
        loras: dict[str, ModuleWeights] = {}
        for module, keys in sides.items():
            shell = LoRALayerWeights.from_config(names[keys[False]].configured, peft_helper)
            kind = StackedLoRALayerWeights if is_stacked_name(module) else LoRALayerWeights
            a, b = placed[keys[True]], placed[keys[False]]
            loras[module] = kind(module, shell.rank, shell.lora_alpha, a, b, shell.scaling)
        stacked = any(isinstance(weights, StackedLoRALayerWeights) for weights in loras.values())
        return cls(lora_model_id, max(weights.rank for weights in loras.values()), loras, stacked)

    @classmethod
    def from_local_checkpoint(
        cls, lora_dir: str | Path, expected_lora_modules: Collection[str], peft_helper: PEFTHelper,
        *, lora_model_id: int | None = None, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
        model_vocab_size: int | None = None, weights_mapper: NameMapper | None = None,
        skip_prefixes: Sequence[str] | None = None, moe_ep_spec: MoEEPSpec | None = None,
    ) -> LoRAModel:  # fmt: skip
        """Load a PEFT folder (`adapter_model.safetensors`; the config comes as `peft_helper`).

        Names are checked before a single tensor is read: the last name component of each module must be in
        `expected_lora_modules`. `lora_model_id=None` takes the next number of a process-wide counter. `moe_ep_spec`:
        tensors of experts on other ranks are not read. The other arguments and errors are those of
        :meth:`from_lora_tensors`.

        Raises:
            FileNotFoundError: no folder, or no weights file in it.
            ValueError: pickled or damaged file, unexpected modules (all are listed), bad content.
        """
        tensors = read_tensors(lora_dir, expected_lora_modules, weights_mapper, skip_prefixes, moe_ep_spec)
        model_id = next(_next_model_id) if lora_model_id is None else lora_model_id
        if not tensors and moe_ep_spec is not None:  # all of it belongs to experts of other ranks
            return cls(model_id, peft_helper.r, {})
        return cls.from_lora_tensors(
            model_id, tensors, peft_helper, device, dtype, model_vocab_size, weights_mapper, skip_prefixes
        )


def _placed(
    tensor: torch.Tensor | Fp8Matrix, device: torch.device | str, dtype: torch.dtype | None
) -> torch.Tensor | Fp8Matrix:
    """On the device, as ``dtype`` (None: as it is)."""
    if isinstance(tensor, Fp8Matrix):
        if dtype is None:
            return Fp8Matrix(tensor.values.to(device), tensor.scale.to(device))
        tensor = tensor.real()
    return tensor.detach().to(device=device, dtype=dtype or tensor.dtype)
