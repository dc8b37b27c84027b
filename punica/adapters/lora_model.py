"""`LoRAModel`: one adapter in host memory, the weights of all modules that it touches.

It is built from tensors with PEFT's names, in memory or in a folder, in two steps. :func:`table_of_contents` checks
names, dtypes, shapes and ranks, for which meta tensors will do; :meth:`LoRAModel.from_contents` checks only numbers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from punica.adapters.blocks import check_blocks, dense
from punica.adapters.check import check_experts, check_finite, check_pair, check_tensors, join_scales
from punica.adapters.peft_config import PEFTHelper
from punica.adapters.read import NameMapper, WeightsFile, is_stacked_name, lora_names
from punica.adapters.request import check_adapter_id
from punica.adapters.shared_experts import check_projection, is_projection_name
from punica.adapters.source import AdapterVersion
from punica.adapters.weights import Factor, ModuleWeights
from punica.adapters.wrap import MoEEPSpec
from punica.layers.packing import Blocks, Slices
from punica.ops.quant import Fp8Matrix

_next_model_id = itertools.count(1)


class ModuleEntry(NamedTuple):
    """One module in a checkpoint: its name, the keys of A and B, and what the adapter's config says of it."""

    module: str
    key_a: str
    key_b: str
    rank: int
    lora_alpha: float
    scaling: float
    blocks: Blocks


class LoRAModel:
    """All modules of one adapter.

    Args:
        lora_model_id: adapter id, integer >= 1.
        rank: the largest rank of any module.
        loras: `{module name: weights}`.
        is_3d_lora_weight: whether experts are stored as one pair for all of a layer.

    `version` is that of the folder it was loaded from, if it was.

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
        self.version: AdapterVersion | None = None

    def clone(self, lora_model_id: int) -> LoRAModel:
        """Return the same adapter, staged or not, under another id; weights are shared."""
        twin = copy.copy(self)
        twin.id = check_adapter_id("lora_model_id", lora_model_id)
        return twin

    def get_lora(self, module_name: str) -> ModuleWeights | None:
        """Return the weights of a module, `None` if the adapter does not touch it."""
        return self.loras.get(module_name)

    def slices_of(self, module_name: str) -> Slices | None:
        """Return A and B of every slice of a module, `None` if the adapter does not touch it."""
        weights = self.get_lora(module_name)
        return None if weights is None else weights.slices

    def check_lora_name(self, module_name: str) -> bool:
        """Tell if the adapter has weights for this module."""
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
        contents = table_of_contents(tensors, peft_helper, model_vocab_size, weights_mapper, skip_prefixes)
        return cls.from_contents(lora_model_id, contents, tensors, device, dtype)

    @classmethod
    def from_contents(
        cls,
        lora_model_id: int,
        contents: Collection[ModuleEntry],
        tensors: Mapping[str, Factor],
        device: torch.device | str,
        dtype: torch.dtype | None,
        *,
        finite: bool = False,
    ) -> LoRAModel:
        """Build an adapter from tensors of the shapes that `contents`, one entry or more, was made from.

        `finite`: they are known to hold neither NaN nor inf, so that only what a cast changed is checked.

        Raises:
            ValueError: NaN or inf.
        """

        def weights_of(entry: ModuleEntry) -> ModuleWeights:
            module, key_a, key_b, rank, alpha, scaling, blocks = entry
            a, b = _placed(tensors[key_a], device, dtype), _placed(tensors[key_b], device, dtype)
            for is_a, placed, read in ((True, a, tensors[key_a]), (False, b, tensors[key_b])):
                if not finite or placed.dtype != read.dtype:
                    check_finite(module, is_a, placed, read)
            a, b = dense(key_a, a, blocks.a), dense(key_b, b, blocks.b)
            pair = _by_expert(a, b, rank) if is_stacked_name(module) else (a, b)
            return ModuleWeights(module, rank, [pair], scaling, alpha, [blocks])

        loras = {weights.module_name: weights for weights in map(weights_of, contents)}
        stacked = any(map(is_stacked_name, loras))
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
        with WeightsFile(lora_dir) as file:
            entries = file.entries(expected_lora_modules, weights_mapper, moe_ep_spec, skip_prefixes)
            tensors = file.numbers(entries).tensors
        model_id = next(_next_model_id) if lora_model_id is None else lora_model_id
        if not tensors and moe_ep_spec is not None:  # all of it belongs to experts of other ranks
            return cls(model_id, peft_helper.r, {})
        return cls.from_lora_tensors(
            model_id, tensors, peft_helper, device, dtype, model_vocab_size, weights_mapper, skip_prefixes
        )


def table_of_contents(
    tensors: Mapping[str, Factor],
    peft_helper: PEFTHelper,
    model_vocab_size: int | None = None,
    weights_mapper: NameMapper | None = None,
    skip_prefixes: Sequence[str] | None = None,
) -> list[ModuleEntry]:
    """Check names, dtypes, shapes and ranks of an adapter's tensors, all but the numbers; one entry per module.

    Raises as :meth:`LoRAModel.from_lora_tensors`, whose arguments these are.
    """
    names = lora_names(tensors, weights_mapper, skip_prefixes)
    sides = check_tensors(names, tensors, model_vocab_size)
    peft_helper.resolve(name.configured for name in names.values())
    contents = []
    for module, keys in sides.items():
        configured = names[keys[False]].configured
        rank, check = peft_helper.rank_of(configured), _check_of(module)
        key_a, key_b = keys[True], keys[False]
        is_linear = check is check_pair and "lora_embedding_" not in key_a
        blocks = peft_helper.blocks_of(configured) if is_linear else Blocks()
        check_blocks(module, blocks, rank)
        check(module, dense(key_a, tensors[key_a], blocks.a), dense(key_b, tensors[key_b], blocks.b), rank)
        alpha, scaling = peft_helper.alpha_of(configured), peft_helper.scaling_of(configured)
        contents.append(ModuleEntry(module, key_a, key_b, rank, alpha, scaling, blocks))
    return contents


def _check_of(module: str) -> Callable[[str, Factor, Factor, int], None]:
    """Choose the rule for shapes of a module's A and B."""
    if is_projection_name(module):
        return check_projection
    return check_experts if is_stacked_name(module) else check_pair


def _by_expert(a: Factor, b: Factor, rank: int) -> tuple[Factor, Factor]:
    """Views `A [E, r, in]` and `B [E, out, r]` of a pair as PEFT's `target_parameters` stores all experts of a layer.

    There A is `[E*r, in]`, expert after expert, and B `[out, r*E]`, where column `j*E + e` is rank j of expert e. All
    experts share the scales of an FP8 B.
    """
    experts = a.shape[0] // rank
    values_a, values_b = (factor.values if isinstance(factor, Fp8Matrix) else factor for factor in (a, b))
    rows = values_a.view(experts, rank, a.shape[1])
    columns = values_b.view(b.shape[0], rank, experts).permute(2, 0, 1)
    a = Fp8Matrix(rows, a.scale.view(experts, rank)) if isinstance(a, Fp8Matrix) else rows
    b = Fp8Matrix(columns, b.scale.expand(experts, -1)) if isinstance(b, Fp8Matrix) else columns
    return a, b


def _placed(tensor: Factor, device: torch.device | str, dtype: torch.dtype | None) -> Factor:
    """Copy to the device as ``dtype`` (None: as it is), where that is needed."""
    if isinstance(tensor, Fp8Matrix):
        if dtype is None:
            return Fp8Matrix(tensor.values.to(device), tensor.scale.to(device))
        tensor = tensor.real()
    return tensor.detach().to(device=device, dtype=dtype or tensor.dtype)
