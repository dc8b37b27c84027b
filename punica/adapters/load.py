"""`AdapterLoader`: reads, checks and packs the adapters that requests name, in PEFT folders or in memory."""

import threading
import warnings
from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

import torch

from punica.adapters.check import is_scale_of_another, join_scales
from punica.adapters.doubts import doubt_of_base_weights
from punica.adapters.lora_model import LoRAModel, ModuleEntry, table_of_contents
from punica.adapters.lru import LRUCache
from punica.adapters.pack import AdapterPacker
from punica.adapters.read import Numbers, TensorEntry, is_stacked_name, lora_names
from punica.adapters.request import LoRARequest, loading
from punica.adapters.shared_experts import is_projection_name
from punica.adapters.source import AdapterVersion, Source, open_source
from punica.adapters.wrap import MoEEPSpec
from punica.config import LoRAConfig
from punica.layers.utils import ADAPTER_DTYPES

MOST_BYTES = 32 << 20
"""Headers of weights files, together, whose certificates are remembered; these take about five times as much memory."""


class Certificate(NamedTuple):
    """Proof that an adapter's tensors fit the model, all but their numbers.

    Attributes:
        entries: dtype, shape and place of every tensor.
        contents: the modules.
        rank: `r` in the config.
        doubts: reasons why outputs may be wrong, to be warned of.
    """

    entries: dict[str, TensorEntry]
    contents: list[ModuleEntry]
    rank: int
    doubts: list[str]


class Certificates:
    """Certificates by content, the least recently used of which are forgotten; thread-safe.

    Args:
        most_bytes: bound of the sizes given to :meth:`put`, together.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self.bytes = most_bytes, 0
        self._entries: LRUCache[tuple, tuple[Certificate, int]] = LRUCache(most_bytes, self._on_remove)
        self._lock = threading.Lock()

    def find(self, content: tuple) -> Certificate | None:
        """Return the certificate of this content, or `None`."""
        with self._lock:
            found = self._entries.get(content)
        return None if found is None else found[0]

    def put(self, content: tuple, certificate: Certificate, size: int) -> None:
        """Remember a certificate made of a header of `size` bytes, unless that alone exceeds the bound."""
        if size > self._most_bytes:
            return
        with self._lock:
            self.bytes += size
            self._entries.put(content, (certificate, size))
            while self.bytes > self._most_bytes:
                self._entries.remove_oldest()

    def _on_remove(self, content: tuple, entry: tuple[Certificate, int]) -> None:
        self.bytes -= entry[1]


class AdapterLoader:
    """Loads adapters from folders and from memory; changes nothing that is registered.

    A hostile folder costs time by many names and expensive expressions. That is limited, and spent by :meth:`check`
    when a request arrives; :meth:`load` of the same content, between the steps of others, uses its certificate. Config
    and header are read each time: only what was read tells if a file is what it was.

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
        self._certificates = Certificates()

    def check(self, request: LoRARequest) -> AdapterVersion | None:
        """Refuse what :meth:`load` would refuse, as far as can be told without reading the numbers: config, names,
        types, shapes, ranks. Return the version of a folder. Warns where outputs may be wrong.

        Raises:
            FileNotFoundError, ValueError, TypeError: prefixed with the adapter's name and path.
        """
        with loading(request), open_source(request, self._packer.most_tensors) as source:
            self._certificate(request, source)
            return source.version()

    def load(self, request: LoRARequest) -> LoRAModel:
        """Read, check and pack a request's adapter. No number is read before all shapes are known to fit.

        Raises:
            FileNotFoundError, ValueError, TypeError: prefixed with the adapter's name and path.
        """
        with loading(request), open_source(request, self._packer.most_tensors) as source:
            certificate, numbers = self._read(source, self._certificate(request, source))
            version = source.version(numbers)
            lora = self._packer.pack(self._model(request, certificate, numbers, "cpu"), fits=True)
            lora.version = version
            return lora

    def common_part(self, version: AdapterVersion | None) -> AdapterVersion | None:
        """Return the part of a version that all ranks have read: not the numbers of experts of other ranks."""
        return version if version is None or self._moe_ep_spec is None else version._replace(numbers=b"")

    def _read(self, source: Source, certificate: Certificate) -> tuple[Certificate, Numbers]:
        """Read a source's tensors, cast and scaled; or as they are, for later steps to tell which is not finite."""
        entries, contents = certificate.entries, certificate.contents
        if all(entry.dtype in ADAPTER_DTYPES for entry in entries.values()):  # FP8 has its own scales
            numbers = source.numbers(entries, self._dtype, {each.key_b: each.scaling for each in contents})
            if numbers.finite:
                return certificate._replace(contents=[each._replace(scaling=1) for each in contents]), numbers
        return certificate, source.numbers(entries, None, {})

    def _certificate(self, request: LoRARequest, source: Source) -> Certificate:
        """Return the certificate of a source's content, made now unless it is known. Warns of its doubts."""
        content = (source.content, request.is_3d_lora_weight, *(request.weights_mapper or {}).items())
        certificate = self._certificates.find(content)
        if certificate is None:
            certificate = self._certify(request, source)
            self._certificates.put(content, certificate, source.cost)
        for doubt in certificate.doubts:
            warnings.warn(f"adapter {request.lora_name!r}: {doubt}", stacklevel=1)  # one place: shown once
        return certificate

    def _certify(self, request: LoRARequest, source: Source) -> Certificate:
        """Check a source's config, and names, types and shapes of its tensors."""
        config = source.config()
        config.refuse_illegal(self._lora_config, modules=(), tensors_decide=True)
        entries = source.entries(self._expected_modules, request.weights_mapper, self._moe_ep_spec)
        configured = _configured(entries, request.weights_mapper)
        if config.rank_pattern:
            config.refuse_illegal(self._lora_config, configured, tensors_decide=True)
        tensors = {key: entry.meta() for key, entry in entries.items()}
        contents = []
        if tensors or self._moe_ep_spec is None:  # else all of it belongs to experts of other ranks
            contents = table_of_contents(
                join_scales(tensors), config, self._vocab_size, request.weights_mapper
            )
        disagreement = config.disagreement(configured) if self._moe_ep_spec is None else None
        all_doubts = (*config.doubts, disagreement, doubt_of_base_weights(source.places))
        doubts = [doubt for doubt in all_doubts if doubt is not None]
        certificate = Certificate(entries, contents, config.r, doubts)
        self._packer.check(self._model(request, certificate, Numbers(tensors, finite=True), "meta"))
        return certificate

    @property
    def _dtype(self) -> torch.dtype | None:
        """Dtype of adapters; `None` for FP8 slots: rounded once, from the dtype of the file."""
        return cast(torch.dtype, self._lora_config.lora_dtype) if self._lora_config.fp8 is None else None

    def _model(
        self, request: LoRARequest, certificate: Certificate, numbers: Numbers, device: str
    ) -> LoRAModel:
        if not certificate.contents:
            return LoRAModel(request.lora_int_id, certificate.rank, {})
        lora = LoRAModel.from_contents(
            request.lora_int_id, certificate.contents, join_scales(numbers.tensors), device, self._dtype,
            finite=numbers.finite,
        )  # fmt: skip
        if request.is_3d_lora_weight and not lora.is_3d_lora_weight:
            raise ValueError("is_3d_lora_weight is set, but no experts are stored as one pair of matrices")
        if self._moe_ep_spec is not None:
            _check_all_experts(lora, self._moe_ep_spec.global_num_experts)
        return lora


def _configured(keys: Collection[str], renames: Mapping[str, str] | None) -> set[str]:
    """Return the adapter's names of the modules that it has tensors for."""
    names = lora_names((key for key in keys if not is_scale_of_another(key, keys)), renames, None)
    return {name.configured for name in names.values()}


def _check_all_experts(lora: LoRAModel, num_experts: int) -> None:
    """ValueError for a folder that has a part of the experts; a rank takes its own from all of them."""
    for name, weights in lora.loras.items():
        allowed = (num_experts, 1) if is_projection_name(name) else (num_experts,)
        for factor in weights.slices[0] if is_stacked_name(name) or is_projection_name(name) else ():
            if factor is not None and factor.shape[0] not in allowed:
                raise ValueError(
                    f"module {name!r} has {factor.shape[0]} experts of rank {weights.rank}, the rank in the adapter's "
                    f"config; the model has {num_experts}"
                )
