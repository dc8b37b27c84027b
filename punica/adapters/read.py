"""Sources of an adapter: a PEFT folder, an open `adapter_model.safetensors` with a config; or tensors in memory.

No pickle is ever read, and no number of a file before the names of all its tensors have been checked.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import secrets
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from punica.adapters.check import all_finite, dtype_error
from punica.adapters.config import CONFIG_FILE, PEFTHelper, read_config_text, resolve_adapter_path
from punica.adapters.names import NameMapper, NameRules, TensorName
from punica.checks import clip
from punica.ops.pages import Pages
from punica.ops.slot_image import copy_matrices
from punica.threads import map_in_threads

WEIGHTS_FILE = "adapter_model.safetensors"
MOST_HEADER_BYTES = 32 << 20
RUN_BYTES = 4 << 20  # of neighbouring tensors that are read at once: enough to forget what a call costs
RUN_TENSORS = 512  # that are read at once; a call of the system takes 1,024 pieces

# Dtypes by their names in safetensors, whose own way to find the dtype reads the whole tensor.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorEntry(NamedTuple):
    """Dtype, shape and size of a tensor, where its bytes begin behind a file's header, and its name's meaning."""

    dtype: torch.dtype
    shape: torch.Size
    name: TensorName
    nbytes: int = 0
    start: int = 0

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Numbers(NamedTuple):
    """Tensors by name. ``finite``: known to hold neither NaN nor inf. ``digest``: of the bytes, if they were read."""

    tensors: dict[str, Tensor]
    finite: bool
    digest: bytes = b""


class WeightsFile:
    """An open `adapter_model.safetensors` of a PEFT folder, a context manager.

    Header and numbers come from one open file, so that a folder that is replaced meanwhile is read as it was. Tensors
    are read, never mapped from the file: a truncation does not kill the process (SIGBUS). `header` has the eight bytes
    of its size before it; `places` is the header parsed, once :meth:`entries` has checked it.

    ValueError: only pickled weights (.bin, .pt), or a header too large for `most_tensors` tensors. FileNotFoundError.
    """

    def __init__(self, folder: str | Path, most_tensors: int = NameRules.most_tensors) -> None:
        directory = resolve_adapter_path(folder)
        self._file = directory / WEIGHTS_FILE
        if not self._file.is_file():
            for pickled in ("adapter_model.bin", "adapter_model.pt"):
                if (directory / pickled).is_file():
                    raise ValueError(
                        f"{str(directory / pickled)!r} is a pickle and is not read; convert the adapter to "
                        f"{WEIGHTS_FILE} (load it with the peft library and save it with safe_serialization=True)"
                    )
            found = clip(sorted(os.listdir(directory)))
            raise FileNotFoundError(f"adapter folder {str(directory)!r} holds no {WEIGHTS_FILE}; it has {found}")
        self._opened = self._file.open("rb")
        try:
            status = os.fstat(self._opened.fileno())
            self.size, self._written_ns = status.st_size, status.st_mtime_ns
            start, most_bytes = self._opened.read(8), min(MOST_HEADER_BYTES, (1 << 20) + 1024 * most_tensors)
            if (header_size := int.from_bytes(start, "little")) > most_bytes:
                raise self._invalid(f"its header has {header_size} bytes, at most {most_bytes} are read")
            self.header = start + self._opened.read(header_size)
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def _invalid(self, reason: str) -> ValueError:
        return ValueError(f"{str(self._file)!r} is not a valid safetensors file of an adapter: {reason}")

    def entries(self, rules: NameRules, weights_mapper: NameMapper | None = None) -> dict[str, TensorEntry]:
        """Check the header and the names in it; return the entries of the tensors that this rank reads. ValueError: no
        safetensors file, or names that the rules refuse. TypeError: a dtype that no adapter has.
        """
        with tempfile.NamedTemporaryFile() as mirror:
            mirror.write(self.header)
            mirror.truncate(max(len(self.header), self.size))  # all holes: costs nothing, and safetensors checks sizes
            mirror.flush()
            try:
                with safe_open(mirror.name, framework="pt", device="cpu") as handle:
                    wanted = rules.wanted(dict.fromkeys(handle.keys()), weights_mapper)
                    self.places = json.loads(self.header[8:])
                    return {key: self._entry(key, handle.get_slice(key), name) for key, name in wanted.items()}
            except SafetensorError as error:
                raise ValueError(f"{str(self._file)!r} is not a valid safetensors file: {error}") from error

    def _entry(self, key: str, checked: Any, name: TensorName) -> TensorEntry:
        """Read an entry of the checked header."""
        if (dtype := FLOATS.get(checked.get_dtype())) is None:
            raise dtype_error(key, checked.get_dtype())
        if max(shape := checked.get_shape(), default=0) >= 1 << 63:
            raise self._invalid(f"torch cannot hold the shape {clip(shape)} of {clip(key)}")
        start, end = self.places[key]["data_offsets"]
        return TensorEntry(dtype, torch.Size(shape), name, end - start, start)

    def numbers(
        self, entries: Mapping[str, TensorEntry], dtype: torch.dtype | None = None,
        scalings: Mapping[str, float] = MappingProxyType({}),
    ) -> Numbers:  # fmt: skip
        """Read checked entries, cast to `dtype`, B's times their scaling. ValueError: the file became shorter."""
        runs = map_in_threads(lambda run: self._read_run(run, dtype, scalings), _runs(entries))
        tensors = {key: tensor for run in runs for key, tensor in run.tensors.items()}
        digest = hashlib.sha256(b"".join(run.digest for run in runs)).digest()
        return Numbers({key: tensors[key] for key in entries}, all(run.finite for run in runs), digest)

    def _read_run(self, run: _Run, dtype: torch.dtype | None, scalings: Mapping[str, float]) -> Numbers:
        """Read neighbouring tensors of one dtype: A's into a block of memory, B's into one for each scaling and number
        of columns. Few large operations prepare them, while they are in the cache.
        """
        stored = run[0][1].dtype
        groups: dict[tuple, list[tuple[str, TensorEntry]]] = {}
        for key, entry in run:  # A's apart from B's also unscaled: a B that is scaled later drops its memory
            form = (False, scalings[key], entry.shape[-1]) if key in scalings else (entry.name.is_a, None, 0)
            groups.setdefault(form, []).append((key, entry))
        blocks: dict[tuple, Tensor] = {}
        places: dict[str, memoryview] = {}
        for form, members in groups.items():
            blocks[form] = block = _new_block(sum(entry.shape.numel() for _, entry in members), stored)
            rest = memoryview(block.view(torch.uint8).numpy())  # type: ignore[arg-type]
            for key, entry in members:
                places[key], rest = rest[: entry.nbytes], rest[entry.nbytes :]
        self._fill([places[key] for key, _ in run], len(self.header) + run[0][1].start)
        sums = b"".join(zlib.crc32(places[key]).to_bytes(4, "big") for key, _ in run)  # against mishaps, not forgery
        tensors: dict[str, Tensor] = {}
        finite = True
        for form, members in groups.items():
            block, shapes, scaling = blocks.pop(form), [entry.shape for _, entry in members], form[1]
            if dtype not in (None, stored):
                block = _new_block(block.numel(), dtype).copy_(block)
            if scaling is None:
                parts = block.split([shape.numel() for shape in shapes])
                pieces = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            else:
                pieces = _split_scaled(block, shapes, scaling)
            tensors |= zip([key for key, _ in members], pieces, strict=True)
            finite = finite and all_finite(block)
        return Numbers(tensors, finite, sums)

    def _fill(self, targets: list[memoryview], start: int) -> None:
        """Read bytes from `start` on into one target after the other."""
        targets = [target for target in targets if len(target)]
        while targets:  # one call reads 2 GiB at most
            read = os.preadv(self._opened.fileno(), targets, start)
            if read == 0:
                raise ValueError(f"{str(self._file)!r} became shorter while it was read; rename another to it instead")
            start += read
            while targets and read >= len(targets[0]):
                read -= len(targets.pop(0))
            if read:
                targets[0] = targets[0][read:]


_Run = list[tuple[str, TensorEntry]]


def _runs(entries: Mapping[str, TensorEntry]) -> list[_Run]:
    """Divide tensors, in the order of the file, into runs of neighbours of one dtype: of `RUN_BYTES`, or one tensor."""
    runs: list[_Run] = []
    end = size = 0
    starts = {key: entry.start for key, entry in entries.items()}
    for key in sorted(entries, key=starts.__getitem__):
        entry = entries[key]
        is_next = runs and entry.start == end and entry.dtype == runs[-1][-1][1].dtype
        if not is_next or size >= RUN_BYTES or len(runs[-1]) == RUN_TENSORS:
            runs.append([])
            size = 0
        runs[-1].append((key, entry))
        end, size = entry.start + entry.nbytes, size + entry.nbytes
    return runs


def _new_block(numel: int, dtype: torch.dtype) -> Tensor:
    size = numel * dtype.itemsize
    return Pages.of(size).tensor(size).view(dtype)


def _split_scaled(block: Tensor, shapes: Sequence[torch.Size], scaling: float) -> list[Tensor]:
    """Scale a block of B's with one number of columns; return views of a copy that holds them rank after rank."""
    if scaling != 1:
        block *= scaling  # torch computes products of half precision in float32
    columns = shapes[0][-1]
    turned = _new_block(block.numel(), block.dtype).view(columns, -1)
    copy_matrices([turned], [block.view(-1, columns).T])
    pieces = turned.split([shape[:-1].numel() for shape in shapes], 1)
    return [piece.T.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class AdapterVersion(NamedTuple):
    """Digests of what was read of an adapter's folder; `numbers` is empty where they were not."""

    config: bytes
    header: bytes
    numbers: bytes = b""

    def changed_files(self, now: AdapterVersion) -> list[str]:
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
        """Return the version that was read, with its numbers. ValueError: a file was written meanwhile."""
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
                raise TypeError(f"tensors must map PEFT names to tensors, got {clip(name)}: {type(tensor).__name__}")
            if tensor.is_meta or tensor.layout is not torch.strided:
                raise TypeError(f"LoRARequest tensors: {clip(name)} must be a dense tensor with data")
        given = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
        if not isinstance(given, Mapping):
            raise TypeError(f"config must be the content of an adapter_config.json or a LoraConfig, got {type(config)}")
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
