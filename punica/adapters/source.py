"""Sources of an adapter's config and tensors: a PEFT folder, or memory."""

import hashlib
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import NamedTuple

from punica.adapters.peft_config import CONFIG_FILE, PEFTHelper, read_config_text
from punica.adapters.read import WEIGHTS_FILE, NameMapper, Numbers, TensorEntry, WeightsFile, wanted_keys
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


class AdapterFolder(WeightsFile):
    """A PEFT folder: its config as it was read, and its open weights file.

    ``content`` tells config, names, dtypes and shapes from all others; it has no part of the numbers. ``cost``: bytes
    of names and shapes. Raises as :func:`read_config_text` and :class:`WeightsFile`.
    """

    def __init__(self, path: str, most_tensors: int) -> None:
        self._text = read_config_text(path)
        super().__init__(path, most_tensors)
        of_weights = self.header + self.size.to_bytes(8, "big")
        self.content = AdapterVersion(*(hashlib.sha256(part).digest() for part in (self._text, of_weights)))
        self.cost = len(self.header)

    def config(self) -> PEFTHelper:
        """Parse the config."""
        return PEFTHelper.from_text(self._text, self._file.with_name(CONFIG_FILE))

    def version(self, numbers: Numbers | None = None) -> AdapterVersion:
        """Return the version that was read, with its numbers. ValueError: a file was written meanwhile, so that not all
        that was read may be of one version.
        """
        if numbers is None:
            return self.content
        written = {CONFIG_FILE: read_config_text(self._file.parent) != self._text, WEIGHTS_FILE: self.was_written()}
        for name in (name for name, was_written in written.items() if was_written):
            raise ValueError(f"{name} changed while the folder was read; load it when all files are written")
        return self.content._replace(numbers=numbers.digest)


class AdapterMemory(nullcontext):
    """An adapter that came in memory; `numbers` are its own tensors, unchecked, which must not be changed."""

    def __init__(self, tensors: AdapterTensors, most_tensors: int) -> None:
        super().__init__(self)
        self.places, self._most_tensors = tensors, most_tensors
        self.content, self.cost = tensors.content, sum(map(len, tensors)) + 64 * len(tensors)

    def config(self) -> PEFTHelper:
        """Parse the config."""
        return PEFTHelper.from_dict(self.places.config)

    def entries(
        self, expected_lora_modules: Collection[str], weights_mapper: NameMapper | None, moe_ep_spec: MoEEPSpec | None
    ) -> dict[str, TensorEntry]:
        """Check the names; arguments and errors of :meth:`WeightsFile.entries`."""
        keys = wanted_keys(
            "the adapter", self.places, self._most_tensors, expected_lora_modules, weights_mapper,
            moe_ep_spec=moe_ep_spec,
        )  # fmt: skip
        return {key: TensorEntry(self.places[key].dtype, self.places[key].shape, 0) for key in keys}

    def numbers(self, entries: Mapping[str, TensorEntry], *_cast_and_scaling: object) -> Numbers:
        """Return the tensors as they are."""
        return Numbers({key: self.places[key] for key in entries}, finite=False)

    def version(self, numbers: Numbers | None = None) -> None:
        """Return `None`: tensors in memory stay what they are."""


Source = AdapterFolder | AdapterMemory


def open_source(request: LoRARequest, most_tensors: int) -> Source:
    """Open what a request names. Raises as :class:`AdapterFolder`."""
    if request.tensors is not None:
        return AdapterMemory(request.tensors, most_tensors)
    return AdapterFolder(request.absolute_path, most_tensors)


def config_of(request: LoRARequest) -> PEFTHelper:
    """Return the config of a request's adapter. Raises as :meth:`PEFTHelper.from_local_dir`."""
    if request.tensors is not None:
        return PEFTHelper.from_dict(request.tensors.config)
    return PEFTHelper.from_local_dir(request.absolute_path)
