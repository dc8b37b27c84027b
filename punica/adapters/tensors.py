"""`AdapterTensors`: tensors and config of an adapter in memory, for a request without a folder."""

import copy
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from punica.checks import clip


class AdapterTensors(Mapping[str, Tensor]):
    """Tensors of an adapter by PEFT's names, copied to the CPU, with its config; read-only.

    The copies are taken here, so that a trainer may overwrite its own at once; of tensors on a GPU the host waits.

    Args:
        tensors: `{PEFT name: tensor}`, as `peft.get_peft_model_state_dict` returns them.
        config: the content of an `adapter_config.json`, or a `peft.LoraConfig`.

    Attributes:
        config: a copy, as a dict.
        label: text that tells these tensors from all others, in any process.
        content: value that is equal for the same config, names, dtypes and shapes. It has no part of the numbers.

    Raises:
        TypeError: not a mapping of names to tensors, or no config. ValueError: no tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: Any) -> None:
        if not isinstance(tensors, Mapping):
            raise TypeError(f"LoRARequest tensors must be a dict of PEFT name to tensor, got {type(tensors).__name__}")
        if not tensors:
            raise ValueError("LoRARequest tensors are empty; give lora_A and lora_B of every adapted module")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(
                    f"LoRARequest tensors must map PEFT names to tensors, got {clip(name)}: {type(tensor).__name__}"
                )
            if tensor.is_meta or tensor.layout is not torch.strided:
                raise TypeError(f"LoRARequest tensors: {clip(name)} must be a dense tensor with data")
        self._config = _as_dict(config)
        self._tensors = {name: _copied(tensor) for name, tensor in tensors.items()}
        self.label = f"tensors {secrets.token_hex(8)}"
        forms = sorted((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self._tensors.items())
        self.content = hashlib.sha256(repr((self._config, forms)).encode(errors="surrogatepass")).digest()

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the config, whose content is part of what identifies the adapter."""
        return copy.deepcopy(self._config)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _as_dict(config: Any) -> dict[str, Any]:
    given = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if not isinstance(given, Mapping):
        raise TypeError(
            "LoRARequest config must be the content of an adapter_config.json (a dict) or a peft.LoraConfig, got "
            f"{type(config).__name__}; it comes with tensors"
        )
    return copy.deepcopy(dict(given))


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
