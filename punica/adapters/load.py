"""`AdapterLoader`: reads, checks and packs the PEFT folders that requests name."""

import os
import threading
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from punica.adapters.check import is_scale_of_another, join_scales
from punica.adapters.lora_model import LoRAModel, ModuleEntry, table_of_contents
from punica.adapters.lru import LRUCache
from punica.adapters.pack import AdapterPacker
from punica.adapters.peft_config import CONFIG_FILE, PEFTHelper, read_config
from punica.adapters.read import WEIGHTS_FILE, is_stacked_name, lora_names, read_tensors
from punica.adapters.request import LoRARequest, loading
from punica.adapters.wrap import MoEEPSpec
from punica.config import LoRAConfig

_MOST_REMEMBERED = 1024  # certificates


class Certificate(NamedTuple):
    """Proof that a folder's tensors fit the model, all but their numbers.

    Attributes:
        config: of the folder.
        forms: dtype and shape of every tensor.
        contents: the modules.
    """

    config: PEFTHelper
    forms: dict[str, tuple[torch.dtype, torch.Size]]
    contents: list[ModuleEntry]


class AdapterLoader:
    """Loads adapters from folders; changes nothing that is registered.

    A hostile folder costs time by many names and expensive expressions. That is limited, and spent by :meth:`check`
    when a request arrives; :meth:`load` of the unchanged folder, between the steps of others, uses its certificate.

    Args:
        packer: of the wrapped model.
        expected_modules: names that an adapter's modules may have, see
            :func:`punica.adapters.check.check_expected_modules`.
        lora_config: with its dtype resolved.
        vocab_size: of the model.
        moe_ep_spec: the experts that this rank holds.
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
        self._certificates: LRUCache[tuple, Certificate] = LRUCache(_MOST_REMEMBERED)
        self._lock = threading.Lock()  # of the certificates: a folder may be loaded while another one is checked

    def check(self, request: LoRARequest) -> None:
        """Refuse what :meth:`load` would refuse, as far as can be told without reading the numbers: config, names,
        types, shapes, ranks. Warns where `target_modules` and the tensors disagree.

        Raises:
            FileNotFoundError, ValueError, TypeError: prefixed with the adapter's name and path.
        """
        with loading(request):
            state = _state_of(request)
            if self._known(state) is not None:
                return
            certificate = self._certify(request)
            problem = certificate.config.disagreement(_configured(certificate.forms))
            if self._moe_ep_spec is None and problem is not None:
                warnings.warn(f"adapter {request.lora_name!r}: {problem}", stacklevel=2)
            if state is not None:
                with self._lock:
                    self._certificates.put(state, certificate)

    def load(self, request: LoRARequest) -> LoRAModel:
        """Read, check and pack a request's adapter. No number is read before all shapes are known to fit.

        Raises:
            FileNotFoundError, ValueError, TypeError: prefixed with the adapter's name and path.
        """
        with loading(request):
            certificate = self._known(_state_of(request))
            if certificate is None:
                certificate = self._certify(request)
            tensors = self._read(request, with_numbers=True)
            if _forms(tensors) != certificate.forms:  # the folder was replaced meanwhile
                certificate = self._certify(request, tensors)
            return self._packer.pack(self._model(request, certificate, tensors, "cpu"), fits=True)

    def _known(self, state: tuple | None) -> Certificate | None:
        """Find the certificate of a folder in this state."""
        with self._lock:
            return None if state is None else self._certificates.get(state)

    def _certify(self, request: LoRARequest, tensors: dict[str, Tensor] | None = None) -> Certificate:
        """Check a folder's config, and names, types and shapes of its tensors, read from the header by default."""
        config = read_config(request, self._lora_config)
        if tensors is None:
            tensors = self._read(request, with_numbers=False)
        if config.rank_pattern:
            config.validate_legal(self._lora_config, _configured(tensors))
        contents = []
        if tensors or self._moe_ep_spec is None:  # else all of it belongs to experts of other ranks
            contents = table_of_contents(join_scales(tensors), config, self._vocab_size)
        certificate = Certificate(config, _forms(tensors), contents)
        self._packer.check(self._model(request, certificate, tensors, "meta"))
        return certificate

    def _read(self, request: LoRARequest, *, with_numbers: bool) -> dict[str, Tensor]:
        return read_tensors(
            request.absolute_path, self._expected_modules, None, None, self._moe_ep_spec, self._packer.most_tensors,
            with_numbers=with_numbers,
        )  # fmt: skip

    def _model(
        self, request: LoRARequest, certificate: Certificate, tensors: dict[str, Tensor], device: str
    ) -> LoRAModel:
        if not certificate.contents:
            return LoRAModel(request.lora_int_id, certificate.config.r, {})
        # FP8 slots: rounded once, from the dtype of the file
        dtype = cast(torch.dtype, self._lora_config.lora_dtype) if self._lora_config.fp8 is None else None
        lora = LoRAModel.from_contents(
            request.lora_int_id, certificate.contents, join_scales(tensors), device, dtype
        )
        if request.is_3d_lora_weight and not lora.is_3d_lora_weight:
            raise ValueError("is_3d_lora_weight is set, but no experts are stored as one pair of matrices")
        if self._moe_ep_spec is not None:
            _check_all_experts(lora, self._moe_ep_spec.global_num_experts)
        return lora


def _configured(keys: Collection[str]) -> set[str]:
    """Return the adapter's names of the modules that it has tensors for."""
    names = lora_names((key for key in keys if not is_scale_of_another(key, keys)), None, None)
    return {name.configured for name in names.values()}


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}


def _check_all_experts(lora: LoRAModel, num_experts: int) -> None:
    """ValueError for a folder that has a part of the experts; a rank takes its own from all of them."""
    for name, weights in lora.loras.items():
        a = weights.slices[0][0]
        if a is not None and is_stacked_name(name) and a.shape[0] != num_experts:
            raise ValueError(
                f"module {name!r} has {a.shape[0]} experts of rank {weights.rank}, the rank in the adapter's config; "
                f"the model has {num_experts}"
            )


def _state_of(request: LoRARequest) -> tuple | None:
    """Return a value that changes with every write to the adapter's files; `None` if one of them cannot be found."""
    try:
        files = [os.stat(Path(request.absolute_path, name)) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError):
        return None
    written = tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
    return request.absolute_path, request.is_3d_lora_weight, written
