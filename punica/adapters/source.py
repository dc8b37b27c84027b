"""Sources of an adapter's config and tensors: a PEFT folder, or memory."""

import hashlib
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from punica.adapters.peft_config import CONFIG_FILE, PEFTHelper, read_config_text
from punica.adapters.read import WEIGHTS_FILE, Numbers, TensorEntry, WeightsFile, wanted_keys
from punica.adapters.request import LoRARequest
from punica.adapters.tensors import AdapterTensors
from punica.adapters.wrap import MoEEPSpec
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


def changed_error(request: LoRARequest, files: list[str]) -> str:
    """Return the refusal of an adapter some files of which are not those that were loaded."""
    return (
        f"adapter {clip(request.lora_name)} (id {request.lora_int_id}) has changed on disk since it was loaded: "
        f"{' and '.join(files)}; load it again, with load_inplace=True, or restore the files"
    )


class AdapterSource(Protocol):
    """Open config and tensors of one adapter, a context manager.

    Attributes:
        content: value that tells config, names, dtypes and shapes from all others. It has no part of the numbers.
        size: bytes of names and shapes, about.
    """

    content: Hashable
    size: int

    def __enter__(self) -> "AdapterSource": ...

    def __exit__(self, *error: object) -> None: ...

    def config(self) -> PEFTHelper:
        """Parse the config. ValueError, TypeError: as :meth:`PEFTHelper.from_dict`."""

    def entries(
        self, expected_lora_modules: Collection[str], moe_ep_spec: MoEEPSpec | None
    ) -> dict[str, TensorEntry]:
        """Check names, and return dtype, shape and place of every tensor that this rank needs.

        ValueError: as :meth:`WeightsFile.entries`.
        """

    def names(self) -> Collection[str]:
        """Return the names of all tensors, once :meth:`entries` has checked them."""

    def numbers(
        self, entries: Mapping[str, TensorEntry], dtype: torch.dtype | None, scalings: Mapping[str, float]
    ) -> Numbers:
        """Read tensors at checked entries, cast and scaled if they are called finite. Arguments, ValueError: as
        :meth:`WeightsFile.numbers`.
        """

    def version(self, numbers: Numbers | None = None) -> AdapterVersion | None:
        """Return the version of a folder, with the `numbers` that were read; `None` of what cannot change.

        ValueError: a file has changed since it was opened, so that not all that was read may be of one version.
        """


class AdapterFolder:
    """A PEFT folder: its config as it was read, and its open weights file.

    Raises as :func:`read_config_text` and :class:`WeightsFile`.
    """

    def __init__(self, path: str, most_tensors: int, renames: Mapping[str, str] | None) -> None:
        self._path, self._text = Path(path), read_config_text(path)
        self._weights, self._renames = WeightsFile(path, most_tensors), renames
        of_weights = self._weights.header + self._weights.size.to_bytes(8, "big")
        self._version = AdapterVersion(*(hashlib.sha256(part).digest() for part in (self._text, of_weights)))
        self.content: Hashable = self._version
        self.size = len(self._weights.header)

    def __enter__(self) -> "AdapterFolder":
        self._weights.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._weights.__exit__(*error)

    def config(self) -> PEFTHelper:
        """Parse the config."""
        return PEFTHelper.from_text(self._text, self._path / CONFIG_FILE)

    def entries(
        self, expected_lora_modules: Collection[str], moe_ep_spec: MoEEPSpec | None
    ) -> dict[str, TensorEntry]:
        """Check the header and the names in it."""
        return self._weights.entries(expected_lora_modules, self._renames, None, moe_ep_spec)

    def names(self) -> Collection[str]:
        """Return the names in the header."""
        return self._weights.places.keys()

    def numbers(
        self, entries: Mapping[str, TensorEntry], dtype: torch.dtype | None, scalings: Mapping[str, float]
    ) -> Numbers:
        """Read tensors."""
        return self._weights.numbers(entries, dtype, scalings)

    def version(self, numbers: Numbers | None = None) -> AdapterVersion:
        """Return the version that was read; ValueError: a file was written meanwhile."""
        if numbers is None:
            return self._version
        for name, changed in (
            (CONFIG_FILE, read_config_text(self._path) != self._text), (WEIGHTS_FILE, self._weights.was_written())
        ):  # fmt: skip
            if changed:
                raise ValueError(f"{name} changed while the folder was read; load it when all files are written")
        return self._version._replace(numbers=numbers.digest)


class AdapterMemory:
    """An adapter that came in memory; `numbers` are its own tensors, which must not be changed."""

    def __init__(self, tensors: AdapterTensors, most_tensors: int, renames: Mapping[str, str] | None) -> None:
        self._tensors, self._most_tensors, self._renames = tensors, most_tensors, renames
        self.content: Hashable = tensors.content
        self.size = sum(map(len, tensors)) + 64 * len(tensors)

    def __enter__(self) -> "AdapterMemory":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def config(self) -> PEFTHelper:
        """Parse the config."""
        return PEFTHelper.from_dict(self._tensors.config)

    def entries(
        self, expected_lora_modules: Collection[str], moe_ep_spec: MoEEPSpec | None
    ) -> dict[str, TensorEntry]:
        """Check the names."""
        tensors = self._tensors
        keys = wanted_keys(
            "the adapter", tensors, self._most_tensors, expected_lora_modules, self._renames, moe_ep_spec=moe_ep_spec
        )
        return {key: TensorEntry(tensors[key].dtype, tensors[key].shape, 0) for key in keys}

    def names(self) -> Collection[str]:
        """Return the tensors' names."""
        return self._tensors.keys()

    def numbers(
        self, entries: Mapping[str, TensorEntry], dtype: torch.dtype | None, scalings: Mapping[str, float]
    ) -> Numbers:
        """Return the tensors as they are, unchecked."""
        return Numbers({key: self._tensors[key] for key in entries}, finite=False)

    def version(self, numbers: Numbers | None = None) -> None:
        """Return `None`: tensors in memory stay what they are."""


def open_source(request: LoRARequest, most_tensors: int) -> AdapterSource:
    """Open what a request names. Raises as :class:`AdapterFolder`."""
    if request.tensors is not None:
        return AdapterMemory(request.tensors, most_tensors, request.weights_mapper)
    return AdapterFolder(request.absolute_path, most_tensors, request.weights_mapper)


def config_of(request: LoRARequest) -> PEFTHelper:
    """Return the config of a request's adapter. Raises as :meth:`PEFTHelper.from_local_dir`."""
    if request.tensors is not None:
        return PEFTHelper.from_dict(request.tensors.config)
    return PEFTHelper.from_local_dir(request.absolute_path)
