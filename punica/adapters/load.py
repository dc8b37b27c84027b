"""From a request to a packed adapter: everything about the folder that only has to be said once."""

import os
import threading
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import cast

import torch

from punica.adapters.hold import LRUCache
from punica.adapters.lora_model import LoRAModel
from punica.adapters.pack import AdapterPacker
from punica.adapters.peft_config import CONFIG_FILE, PEFTHelper, read_config
from punica.adapters.read import WEIGHTS_FILE, lora_names, read_tensors
from punica.adapters.request import LoRARequest, loading
from punica.adapters.weights import StackedLoRALayerWeights
from punica.adapters.wrap import MoEEPSpec
from punica.config import LoRAConfig
from punica.ops.quant import FP8_DTYPES

_MOST_REMEMBERED = 1024  # folders that were checked and have not changed since


class AdapterLoader:
    """Reads, checks and packs the folders that requests name; nothing here changes what is registered.

    What costs time in a folder that means harm (many names, expensive expressions) is limited, and paid by
    :meth:`check`, when a request arrives; a :meth:`load` of the unchanged folder, beside the steps of others, finds it
    done.

    Args:
        packer: of the wrapped model.
        expected_modules: what an adapter's modules may be called, see
            :func:`punica.adapters.check.check_expected_modules`.
        lora_config: with its dtype resolved.
        vocab_size: of the model.
        moe_ep_spec: which experts this rank holds.
    """

    def __init__(
        self,
        packer: AdapterPacker,
        expected_modules: Collection[str],
        lora_config: LoRAConfig,
        vocab_size: int,
        moe_ep_spec: MoEEPSpec | None,
    ) -> None:
        self._packer = packer
        self._expected_modules = expected_modules
        self._lora_config = lora_config
        self._vocab_size = vocab_size
        self._moe_ep_spec = moe_ep_spec
        self._checked: LRUCache[tuple, PEFTHelper] = LRUCache(_MOST_REMEMBERED)
        self._lock = threading.Lock()  # of what is remembered: a folder may be loaded while another one is checked

    def check(self, request: LoRARequest) -> None:
        """Refuse what :meth:`load` would refuse, as far as can be told without reading the numbers: config, names,
        types, shapes, ranks. Of tensors in FP8 only the names are looked at.

        Warns where `target_modules` and the tensors disagree.

        Raises:
            FileNotFoundError, ValueError, TypeError: with the adapter's name and path in front.
        """
        with loading(request):
            state = _state_of(request)
            if self._known(state) is not None:
                return
            config, tensors = self._read(request, with_numbers=False)
            self._check_shapes(request, config, tensors)
            modules = {name.configured for name in lora_names(tensors, None, None).values()}
            if self._moe_ep_spec is None and (problem := config.disagreement(modules)) is not None:
                warnings.warn(f"adapter {request.lora_name!r}: {problem}", stacklevel=2)
            if state is not None:
                with self._lock:
                    self._checked.put(state, config)

    def load(self, request: LoRARequest) -> LoRAModel:
        """The request's adapter, read, checked and packed. No number is read before all shapes are known to fit.

        Raises:
            FileNotFoundError, ValueError, TypeError: with the adapter's name and path in front.
        """
        with loading(request):
            state = _state_of(request)
            if self._known(state) is None:
                self._check_shapes(request, *self._read(request, with_numbers=False))
            config, tensors = self._read(request, with_numbers=True)
            return self._packer.pack(self._model(request, config, tensors, "cpu"))

    def _known(self, state: tuple | None) -> PEFTHelper | None:
        """The config of a folder in a state that was checked."""
        with self._lock:
            return None if state is None else self._checked.get(state)

    def _check_shapes(self, request: LoRARequest, config: PEFTHelper, shapes: dict[str, torch.Tensor]) -> None:
        if not any(shape.dtype in FP8_DTYPES for shape in shapes.values()):
            self._packer.check(self._model(request, config, shapes, "meta"))

    def _read(self, request: LoRARequest, *, with_numbers: bool) -> tuple[PEFTHelper, dict[str, torch.Tensor]]:
        config = self._known(_state_of(request))
        if config is None:
            config = read_config(request, self._lora_config)
        tensors = read_tensors(
            request.absolute_path, self._expected_modules, None, None, self._moe_ep_spec, self._packer.most_tensors,
            with_numbers=with_numbers,
        )  # fmt: skip
        if config.rank_pattern:
            names = lora_names(tensors, None, None)
            config.validate_legal(self._lora_config, {name.configured for name in names.values()})
        return config, tensors

    def _model(
        self, request: LoRARequest, config: PEFTHelper, tensors: dict[str, torch.Tensor], device: str
    ) -> LoRAModel:
        if not tensors and self._moe_ep_spec is not None:  # all of it belongs to experts of other ranks
            return LoRAModel(request.lora_int_id, config.r, {})
        # what becomes FP8 is rounded once, from what the file has
        dtype = cast(torch.dtype, self._lora_config.lora_dtype) if self._lora_config.fp8 is None else None
        lora = LoRAModel.from_lora_tensors(request.lora_int_id, tensors, config, device, dtype, self._vocab_size)
        if request.is_3d_lora_weight and not lora.is_3d_lora_weight:
            raise ValueError("is_3d_lora_weight is set, but no experts are stored as one pair of matrices")
        if self._moe_ep_spec is not None:
            _check_all_experts(lora, self._moe_ep_spec.global_num_experts)
        return lora


def _check_all_experts(lora: LoRAModel, num_experts: int) -> None:
    """What a folder has is over all experts, although a rank holds but a part of them. ValueError."""
    for name, weights in lora.loras.items():
        if isinstance(weights, StackedLoRALayerWeights) and weights.num_experts != num_experts:
            raise ValueError(
                f"module {name!r} has {weights.num_experts} experts of rank {weights.rank}, the rank in the adapter's "
                f"config; the model has {num_experts}"
            )


def _state_of(request: LoRARequest) -> tuple | None:
    """Changes whenever somebody writes one of the adapter's files; `None` if one of them cannot be found."""
    try:
        files = [os.stat(Path(request.absolute_path, name)) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError):
        return None
    written = tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
    return request.absolute_path, request.is_3d_lora_weight, written
