"""`AdapterLoader`: reads, checks and packs the adapters that requests name, in PEFT folders or in memory.

A hostile folder costs time by many names and expensive expressions. That is limited, and spent when a request arrives:
its `Certificate` proves that the tensors fit the model, and is remembered by the content that was checked. Config and
header are read each time: only what was read tells if a file is what it was.
"""

import threading
import warnings
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from punica.adapters.check import ModuleEntry, table_of_contents
from punica.adapters.lru import LRUCache
from punica.adapters.names import BASE_WEIGHTS, TIED, NameRules, last_component
from punica.adapters.pack import AdapterPacker
from punica.adapters.read import AdapterFolder, AdapterTensors, AdapterVersion, TensorEntry
from punica.adapters.request import LoRARequest, loading
from punica.adapters.weights import LoRAModel
from punica.checks import clip
from punica.config import LoRAConfig

MOST_BYTES = 32 << 20
"""Headers of weights files, together, whose certificates are remembered; these take about five times as much memory."""


class Certificate(NamedTuple):
    """Proof that an adapter's tensors fit the model, all but their numbers."""

    entries: dict[str, TensorEntry]  # dtype, shape and place of every tensor
    contents: list[ModuleEntry]
    rank: int  # `r` in the config
    invocation: tuple[int, ...] | None  # of activated LoRA
    doubts: list[str]  # reasons why outputs may be wrong, to be warned of
    layers: list[str]  # of the model, that it adapts


class AdapterLoader:
    """Loads adapters from folders and memory; changes nothing registered.

    `lora_config`: with its dtype resolved. `is_tied`: the model's embedding and head have one weight.
    """

    def __init__(
        self, packer: AdapterPacker, rules: NameRules, lora_config: LoRAConfig, vocab_size: int, is_tied: bool
    ) -> None:
        self._packer, self._rules, self._lora_config = packer, rules, lora_config
        self._vocab_size, self._is_tied = vocab_size, is_tied
        self._most_tensors, self._has_remote = rules.most_tensors, rules.moe_ep_spec is not None  # experts
        # of adapters; None for FP8 slots: rounded once, from the dtype of the file
        self._dtype = cast(torch.dtype, lora_config.lora_dtype) if lora_config.fp8 is None else None
        self._certificates: LRUCache[tuple, Certificate] = LRUCache(MOST_BYTES)  # by content
        self._lock = threading.Lock()  # of these

    def check(self, request: LoRARequest, numbers: bool = False) -> tuple[AdapterVersion | None, Certificate]:
        """Refuse what :meth:`load` would refuse, without `numbers` as far as can be told with these unread; return the
        version of a folder, and the proof. Warns where outputs may be wrong. Errors name the adapter and its path.
        """
        with loading(request), request.tensors or AdapterFolder(request.absolute_path, self._most_tensors) as source:
            certificate = self._certificate(request, source)
            version = self._read(request, source, certificate).version if numbers else source.version()
            return version, certificate

    def load(self, request: LoRARequest) -> LoRAModel:
        """Read, check and pack a request's adapter. No number is read before all shapes are known to fit."""
        with loading(request), request.tensors or AdapterFolder(request.absolute_path, self._most_tensors) as source:
            return self._read(request, source, self._certificate(request, source))

    def _read(
        self, request: LoRARequest, source: AdapterFolder | AdapterTensors, certificate: Certificate
    ) -> LoRAModel:
        entries, contents = certificate.entries, certificate.contents
        numbers = source.numbers(entries, self._dtype, {each.key_b: each.scaling for each in contents})
        if numbers.finite:
            certificate = certificate._replace(contents=[each._replace(scaling=1) for each in contents])
        else:  # as they are, for later steps to tell which is not finite
            numbers = source.numbers(entries)
        version = source.version(numbers)
        lora = self._model(request, certificate, numbers.tensors, "cpu", numbers.finite)
        lora = self._packer.pack(lora, fits=True)
        lora.version = version
        return lora

    def common_part(self, version: AdapterVersion | None) -> AdapterVersion | None:
        """Return the part of a version that all ranks have read: not the numbers of experts of other ranks."""
        return version if version is None or not self._has_remote else version._replace(numbers=b"")

    def _certificate(self, request: LoRARequest, source: AdapterFolder | AdapterTensors) -> Certificate:
        """Return the certificate of a source's content, made now unless it is known. Warns of its doubts."""
        content = (source.content, request.is_3d_lora_weight, *(request.weights_mapper or {}).items())
        with self._lock:
            certificate = self._certificates.get(content)
        if certificate is None:
            certificate = self._certify(request, source)
            if source.cost <= MOST_BYTES:
                with self._lock:
                    self._certificates.put(content, certificate, source.cost)
        for doubt in certificate.doubts:
            warnings.warn(f"adapter {request.lora_name!r}: {doubt}", stacklevel=1)  # one place: shown once
        return certificate

    def _certify(self, request: LoRARequest, source: AdapterFolder | AdapterTensors) -> Certificate:
        config = source.helper()
        config.refuse_illegal(self._lora_config, modules=(), tensors_decide=True)
        entries = source.entries(self._rules, request.weights_mapper)
        names = {key: entry.name for key, entry in entries.items()}
        configured = {name.configured for name in names.values()}
        if config.rank_pattern:
            config.refuse_illegal(self._lora_config, configured, tensors_decide=True)
        tensors = {key: entry.meta() for key, entry in entries.items()}
        contents = table_of_contents(tensors, names, config, self._vocab_size)
        doubts = config.doubts
        if not self._has_remote and (disagreement := config.disagreement(configured)):
            doubts.append(disagreement)
        of_pair = {last_component(name) for name in configured} & {*TIED}
        if config.ensure_weight_tying and self._is_tied and len(of_pair) == 1:  # a second adapter of a PEFT model
            doubts.append(
                f"ensure_weight_tying is set, but only {of_pair.pop()!r} has tensors: it is served alone, as PEFT "
                "trained it. PEFT applies them to embedding and head when it loads the folder"
            )
        if saved := sorted(key for key in source.places if key.endswith(BASE_WEIGHTS)):
            doubts.append(
                f"{clip(saved)} are not read; PEFT saves them beside adapters of embedding and head, and loads them "
                "over the base model's. If they were changed, for added tokens for example, outputs will be wrong: "
                "serve the adapter on the model that it was trained on"
            )
        certificate = Certificate(entries, contents, config.r, config.alora_invocation_tokens, doubts, [])
        layers = self._packer.check(self._model(request, certificate, tensors, "meta", True))
        return certificate._replace(layers=layers)

    def _model(
        self, request: LoRARequest, certificate: Certificate, tensors: Mapping[str, Tensor], device: str, finite: bool
    ) -> LoRAModel:
        if not certificate.contents:  # all of it belongs to experts of other ranks
            lora = LoRAModel(request.lora_int_id, certificate.rank, {})
        else:
            lora = LoRAModel.from_contents(
                request.lora_int_id, certificate.contents, tensors, device, self._dtype, finite=finite
            )
        lora.invocation = certificate.invocation
        if request.is_3d_lora_weight and not lora.is_3d_lora_weight:
            raise ValueError("is_3d_lora_weight is set, but no experts are stored as one pair of matrices")
        return lora
