"""Sources of an adapter's config and tensors: a PEFT folder, an open weights file with a config; or memory."""

import copy
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from punica.adapters.config import CONFIG_FILE, PEFTHelper, read_config_text
from punica.adapters.names import NameMapper, NameRules
from punica.adapters.read import WEIGHTS_FILE, Numbers, TensorEntry, WeightsFile
from punica.checks import clip


class AdapterVersion(NamedTuple):
    """Digests of what was read of an adapter's folder; `numbers` is empty where they were not."""

    config: bytes
    header: bytes
    numbers: bytes = b""

    def changed_files(self, now: "AdapterVersion") -> list[str]:
        """Return the names of the files that differ now, as far as both versions tell."""
        same_numbers = self.numbers == now.numbers or not (self.numbers and now.numbers)
        same = {CONFIG_FILE: self.config == now.config, WEIGHTS_FILE: self.header == now.header and same_numbers}
        return [name for name, is_same in same.items() if not is_same]


class AdapterFolder(WeightsFile):
    """A PEFT folder: its config as it was read, and its open weights file. Raises as both.

    ``content`` tells config, names, dtypes and shapes from all others; it has no part of the numbers. ``cost``: bytes
    of names and shapes.
    """

    def __init__(self, path: str, most_tensors: int) -> None:
        self._text = read_config_text(path)
        super().__init__(path, most_tensors)
        of_weights = self.header + self.size.to_bytes(8, "big")
        self.content = AdapterVersion(*(hashlib.sha256(part).digest() for part in (self._text, of_weights)))
        self.cost = len(self.header)

    def helper(self) -> PEFTHelper:
        return PEFTHelper.from_text(self._text, self._file.with_name(CONFIG_FILE))

    def version(self, numbers: Numbers | None = None) -> AdapterVersion:
        """Return the version that was read, with its numbers. ValueError: a file was written meanwhile, so that not all
        that was read may be of one version.
        """
        if numbers is None:
            return self.content
        now = os.fstat(self._opened.fileno())
        is_same = (now.st_size, now.st_mtime_ns) == (self.size, self._written_ns)
        same = {CONFIG_FILE: read_config_text(self._file.parent) == self._text, WEIGHTS_FILE: is_same}
        if changed := [name for name, is_same in same.items() if not is_same]:
            raise ValueError(f"{changed[0]} changed while the folder was read; load it when all files are written")
        return self.content._replace(numbers=numbers.digest)


class AdapterTensors(Mapping[str, Tensor]):
    """Tensors of an adapter by PEFT's names, copied to the CPU, with its config; read-only.

    The copies are taken here, so that a trainer may overwrite its own at once; of tensors on a GPU the host waits.

    Args:
        tensors: `{PEFT name: tensor}`, as `peft.get_peft_model_state_dict` returns them.
        config: the content of an `adapter_config.json`, or a `peft.LoraConfig`.

    `label` tells these tensors from all others, in any process. TypeError, ValueError: no names and tensors, no config.
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
        given = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
        if not isinstance(given, Mapping):
            raise TypeError(
                "LoRARequest config must be the content of an adapter_config.json (a dict) or a peft.LoraConfig, got "
                f"{type(config).__name__}; it comes with tensors"
            )
        self._config = copy.deepcopy(dict(given))
        self.places = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
            for name, tensor in tensors.items()
        }
        self.label = f"tensors {secrets.token_hex(8)}"
        forms = sorted((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self.places.items())
        self.content = hashlib.sha256(repr((self._config, forms)).encode(errors="surrogatepass")).digest()
        self.cost = sum(map(len, self.places)) + 64 * len(self.places)

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the config."""
        return copy.deepcopy(self._config)

    def __getitem__(self, name: str) -> Tensor:
        return self.places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: the request keeps its tensors."""

    def helper(self) -> PEFTHelper:
        return PEFTHelper.from_dict(self.config)

    def entries(self, rules: NameRules, weights_mapper: NameMapper | None) -> dict[str, TensorEntry]:
        """Check the names; arguments and errors of :meth:`WeightsFile.entries`."""
        names = rules.wanted(self.places, weights_mapper)
        return {key: TensorEntry(self.places[key].dtype, self.places[key].shape, name) for key, name in names.items()}

    def numbers(self, entries: Mapping[str, TensorEntry], *_cast_and_scaling: object) -> Numbers:
        """Return the tensors as they are, unchecked; they must not be changed."""
        return Numbers({key: self.places[key] for key in entries}, finite=False)

    def version(self, numbers: Numbers | None = None) -> None:
        """Return `None`: tensors in memory stay what they are."""
