"""From a request to an adapter that is ready to register: PEFT folder -> checked tensors -> merged for the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from punica.adapters.merging import AdapterMerger
from punica.adapters.peft import LoRARequest, PEFTHelper, resolve_adapter_path
from punica.adapters.weights import LoRALayerWeights, LoRAModel
from punica.config import LoRAConfig


class AdapterLoader:
    """Loads the folders of requests for one wrapped model; changes no state.

    Args:
        merger: packs, scales and checks for the model.
        expected_modules: last name components that adapters may use.
        lora_config: limits; its `max_lora_rank` bounds every rank.
        dtype: what tensors are cast to.
        vocab_size: ids that embedding adapters must cover.
    """

    def __init__(
        self,
        merger: AdapterMerger,
        expected_modules: Collection[str],
        lora_config: LoRAConfig,
        dtype: torch.dtype,
        vocab_size: int,
    ) -> None:
        self._merger = merger
        self._expected_modules = expected_modules
        self._lora_config = lora_config
        self._dtype = dtype
        self._vocab_size = vocab_size

    def load(self, request: LoRARequest) -> LoRAModel:
        """The request's adapter, merged and checked.

        Raises:
            FileNotFoundError, ValueError, TypeError: as raised inside, with the adapter's name and path in front.
        """
        try:
            folder = resolve_adapter_path(request.absolute_path)
            helper = PEFTHelper.from_local_dir(folder)
            helper.validate_legal(self._lora_config)
            lora = LoRAModel.from_local_checkpoint(
                folder,
                self._expected_modules,
                helper,
                lora_model_id=request.lora_int_id,
                dtype=self._dtype,
                model_vocab_size=self._vocab_size,
            )
            _leave_file(lora)
            return self._merger.merge(lora)
        except FileNotFoundError as error:
            raise FileNotFoundError(in_context(request, error)) from error
        except TypeError as error:
            raise TypeError(in_context(request, error)) from error
        except ValueError as error:
            raise ValueError(in_context(request, error)) from error


def _leave_file(lora: LoRAModel) -> None:
    """Copy the tensors out of the file they are mapped from: who overwrites it must not change a registered adapter."""
    for weights in lora.loras.values():
        if isinstance(weights, LoRALayerWeights):
            a, b = weights.pair()
            weights.lora_a, weights.lora_b = a.clone(), b.clone()


def in_context(request: LoRARequest, error: Exception) -> str:
    """The message of ``error`` with the adapter's name and path in front."""
    return f"cannot load adapter {request.lora_name!r} from {request.lora_path!r}: {error}"


def source(request: LoRARequest) -> tuple[str, str]:
    """What makes two requests with one id the same adapter: name and absolute path."""
    return request.lora_name, request.absolute_path


def distinct_requests(requests: Iterable[LoRARequest | None]) -> dict[int, LoRARequest]:
    """`{id: request}` in order of first appearance, without `None`; one with `load_inplace` counts before one without.

    Raises:
        TypeError: an entry is neither a request nor `None`. ValueError: one id stands for two names or paths.
    """
    wanted: dict[int, LoRARequest] = {}
    for request in requests:
        if request is None:
            continue
        if not isinstance(request, LoRARequest):
            raise TypeError(f"requests must be LoRARequest or None, got {type(request).__name__}")
        first = wanted.setdefault(request.lora_int_id, request)
        if source(first) != source(request):
            raise ValueError(
                f"adapter id {request.lora_int_id} is requested as {source(first)} and as {source(request)}"
            )
        if request.load_inplace and not first.load_inplace:
            wanted[request.lora_int_id] = request
    return wanted
