"""Tensors of a PEFT folder, `adapter_model.safetensors`: their names and their numbers.

Of a :class:`WeightsFile` no number is read before the names of all tensors have been checked. No pickle is ever read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from punica.adapters.check import (
    NOT_READ,
    SCALE_SUFFIX,
    all_finite,
    check_any,
    check_expected_modules,
    is_scale_of_another,
    remedy_of,
)
from punica.adapters.joined import alike, new_block, split, split_scaled
from punica.adapters.request import resolve_adapter_path
from punica.adapters.wrap import MoEEPSpec
from punica.checks import clip
from punica.threads import map_in_threads

WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
MOST_HEADER_BYTES = 32 << 20
MOST_TENSORS = 1 << 17
MOST_NAME = 1 << 14
"""Most characters of a renamed tensor."""
MOST_PARTS = 32
"""Most parts of a module's name, each end of which is looked up: without a limit in quadratic time."""
RUN_BYTES = 4 << 20
"""Bytes of neighbouring tensors that are read at once: enough to forget what a call costs."""
RUN_TENSORS = 512
"""Most tensors that are read at once; a call of the system takes 1,024 pieces."""

NameMapper = Callable[[str], str] | Mapping[str, str]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "C64": torch.complex64,
}  # fmt: skip
"""Dtypes by their names in safetensors, whose own way to find the dtype reads the whole tensor."""

# <module>.lora_A[.<adapter>].weight, or <module>.lora_embedding_A[.<adapter>]
_TENSOR_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.[^.]+)?(?(embedding)|\.weight)"
)


def map_tensor_name(name: str, weights_mapper: NameMapper | None) -> str:
    """Return a checkpoint tensor's name without `base_model.model.`, renamed by `weights_mapper`.

    The mapper is a function, or a dict `{old: new}` whose keys are replaced in order wherever they occur in the name.
    Raises TypeError for anything else, ValueError for a dict that makes a name too long.
    """
    name = name.removeprefix(PEFT_PREFIX)
    if weights_mapper is None:
        return name
    if isinstance(weights_mapper, Mapping):
        for old, new in weights_mapper.items():
            if len(name) + name.count(old) * len(new) > MOST_NAME:  # before it is built: names could grow at each turn
                raise ValueError(
                    f"weights_mapper replaces {clip(old)} by {clip(new)} in {clip(name)}; at most {MOST_NAME} "
                    "characters, use longer keys or fewer"
                )
            name = name.replace(old, new)
        return name
    if not callable(weights_mapper):
        raise TypeError(f"weights_mapper must be a function or a dict, got {type(weights_mapper).__name__}")
    return weights_mapper(name)


class TensorName(NamedTuple):
    """Meaning of a checkpoint tensor's name: A or B of a module.

    `configured` is the module's name in the adapter's config, before the `weights_mapper`; the mapped one where only
    that can be parsed.
    """

    module: str
    is_a: bool
    configured: str


def parse_fine_tuned_lora_name(name: str, weights_mapper: NameMapper | None = None) -> tuple[str, bool]:
    """Split a checkpoint tensor's name into `(module_name, is_lora_a)`.

    `base_model.model.<m>.lora_A.weight`, `<m>.lora_A.<adapter>.weight`, and the same without the prefix give
    `(<m>, True)`; B gives `False`; embeddings are spelled `<m>.lora_embedding_A`.

    ValueError: a DoRA magnitude, or any other name ("unsupported LoRA weight").
    """
    return _parse(name, weights_mapper)[:2]


def _parse(key: str, weights_mapper: NameMapper | None) -> TensorName:
    mapped = map_tensor_name(key, weights_mapper)
    if "lora_magnitude_vector" in mapped:
        raise ValueError(
            f"{clip(key)} is a DoRA magnitude; DoRA adapters are not supported, merge the adapter or train plain LoRA"
        )
    match = _TENSOR_NAME.fullmatch(mapped)
    if match is None:
        raise ValueError(
            f"unsupported LoRA weight {clip(key)}; expected <module>.lora_A.weight, .lora_B.weight or "
            f".lora_embedding_A/B{remedy_of(key)}"
        )
    own = match if weights_mapper is None else _TENSOR_NAME.fullmatch(map_tensor_name(key, None)) or match
    configured = own["module"]
    if (parts := configured.count(".") + 1) > MOST_PARTS:
        raise ValueError(f"{clip(configured)} has {parts} parts, a module's name at most {MOST_PARTS}; rename it")
    return TensorName(match["module"], match["side"] == "A", configured)


def lora_names(
    keys: Iterable[str], weights_mapper: NameMapper | None, skip_prefixes: Sequence[str] | None
) -> dict[str, TensorName]:
    """Parse the names of LoRA tensors. Left out are those `NOT_READ`, and modules whose name, or its part after some
    dot, starts with one of `skip_prefixes`.

    ValueError: a key is not a LoRA name, or two keys name the same matrix.
    """
    names: dict[str, TensorName] = {}
    owner: dict[tuple[str, bool], str] = {}
    for key in keys:
        mapped = map_tensor_name(key, weights_mapper)
        skipped = any(f".{prefix}" in f".{mapped}" for prefix in skip_prefixes or ())
        if skipped or key.endswith(NOT_READ):
            continue
        names[key] = name = _parse(key, weights_mapper)
        first = owner.setdefault(name[:2], key)
        if first != key:
            side = "A" if name.is_a else "B"
            raise ValueError(f"tensors {clip(first)} and {clip(key)} are both {side} of module {clip(name.module)}")
    return names


_STACKED_NAME = re.compile(r"(?:.*\.)?experts(?:\.base_layer)*")


def is_stacked_name(module: str) -> bool:
    """Tell if a module is all experts of a layer at once: `...experts`, `...experts.base_layer`."""
    return _STACKED_NAME.fullmatch(module) is not None


class TensorEntry(NamedTuple):
    """Dtype and shape of a tensor in a file, and where its bytes begin behind the header."""

    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.shape.numel() * self.dtype.itemsize

    def meta(self) -> torch.Tensor:
        """Build a tensor of this dtype and shape on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Numbers(NamedTuple):
    """Tensors by name. ``finite``: they were found to hold neither NaN nor inf; else that is not known. ``digest``: of
    the bytes that were read, if they were.
    """

    tensors: dict[str, torch.Tensor]
    finite: bool
    digest: bytes = b""


class WeightsFile:
    """An open `adapter_model.safetensors` of a PEFT folder, a context manager.

    Header and numbers come from one open file, so that a folder that is replaced meanwhile is read as it was. Tensors
    are read, never mapped from the file: a truncation does not kill the process (SIGBUS).

    Args:
        folder: with the file.
        most_tensors: bounds the header's size.

    Attributes:
        header: its bytes, with the eight of its size. `places`: parsed, by tensor, once :meth:`entries` has checked it.
        size: of the file, in bytes.

    Raises:
        ValueError: only pickled weights (.bin, .pt), or a header too large for `most_tensors` tensors.
        FileNotFoundError: no folder, or no weights in it.
    """

    def __init__(self, folder: str | Path, most_tensors: int = MOST_TENSORS) -> None:
        directory = resolve_adapter_path(folder)
        self._file, self._most_tensors = directory / WEIGHTS_FILE, most_tensors
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
            most_bytes = min(MOST_HEADER_BYTES, (1 << 20) + 1024 * most_tensors)
            self.header = _read_header(self._opened, self._file, most_bytes)
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def entries(
        self, expected_lora_modules: Collection[str], weights_mapper: NameMapper | None,
        moe_ep_spec: MoEEPSpec | None, skip_prefixes: Sequence[str] | None = None,
    ) -> dict[str, TensorEntry]:  # fmt: skip
        """Check the header and the names in it; return the entries of the LoRA tensors, and of the scales of those in
        FP8, but for those of remote experts.

        Raises:
            ValueError: no safetensors file, too many tensors, or a dtype that torch lacks. A name is not a LoRA name,
                or a module is not in `expected_lora_modules`.
        """
        file = self._file
        with tempfile.NamedTemporaryFile() as mirror:
            mirror.write(self.header)
            mirror.truncate(max(len(self.header), self.size))  # all holes: costs nothing, and safetensors checks sizes
            mirror.flush()
            try:
                with safe_open(mirror.name, framework="pt", device="cpu") as handle:
                    keys = dict.fromkeys(handle.keys())
                    wanted = wanted_keys(
                        repr(str(file)), keys, self._most_tensors, expected_lora_modules, weights_mapper, skip_prefixes,
                        moe_ep_spec,
                    )  # fmt: skip
                    self.places = places = json.loads(self.header[8:])
                    return {
                        key: _entry(file, key, handle.get_slice(key), places[key]["data_offsets"][0]) for key in wanted
                    }
            except SafetensorError as error:
                raise ValueError(f"{str(file)!r} is not a valid safetensors file: {error}") from error

    def numbers(
        self,
        entries: Mapping[str, TensorEntry],
        dtype: torch.dtype | None = None,
        scalings: Mapping[str, float] = MappingProxyType({}),
    ) -> Numbers:
        """Read tensors at checked entries, cast to `dtype`; those with a scaling, B's, are then multiplied by it.

        ValueError: the file became shorter meanwhile.
        """
        runs = map_in_threads(lambda run: self._read_run(run, dtype, scalings), _runs(entries))
        tensors = {key: tensor for run in runs for key, tensor in run.tensors.items()}
        digest = hashlib.sha256(b"".join(run.digest for run in runs)).digest()
        return Numbers({key: tensors[key] for key in entries}, all(run.finite for run in runs), digest)

    def was_written(self) -> bool:
        """Tell if the open file was written to since it was opened."""
        now = os.fstat(self._opened.fileno())
        return (now.st_size, now.st_mtime_ns) != (self.size, self._written_ns)

    def _read_run(self, run: _Run, dtype: torch.dtype | None, scalings: Mapping[str, float]) -> Numbers:
        """Read neighbouring tensors of one dtype: A's into a block of memory, B's into one for each scaling and number
        of columns. Few large operations prepare them, while they are in the cache.
        """
        stored, forms = run[0][1].dtype, alike(run, scalings, _is_b)
        blocks = {
            form: new_block(sum(entry.shape.numel() for _, entry in members), stored)
            for form, members in forms.items()
        }
        places: dict[str, memoryview] = {}
        for form, members in forms.items():
            rest = memoryview(blocks[form].view(torch.uint8).numpy())  # type: ignore[arg-type]
            for key, entry in members:
                places[key], rest = rest[: entry.nbytes], rest[entry.nbytes :]
        self._fill([places[key] for key, _ in run], len(self.header) + run[0][1].start)
        sums = b"".join(zlib.crc32(places[key]).to_bytes(4, "big") for key, _ in run)  # against mishaps, not forgery
        tensors: dict[str, torch.Tensor] = {}
        finite = stored.is_floating_point and stored.itemsize > 1
        for form, members in forms.items():
            block, shapes = blocks.pop(form), [entry.shape for _, entry in members]
            if dtype not in (None, stored):
                block = new_block(block.numel(), dtype).copy_(block)
            pieces = split(block, shapes) if form.scaling is None else split_scaled(block, shapes, form.scaling)
            tensors |= zip([key for key, _ in members], pieces, strict=True)
            finite = finite and all_finite(block)
        return Numbers(tensors, finite, sums)

    def _fill(self, targets: list[memoryview], start: int) -> None:
        """Read bytes from `start` on into one target after the other."""
        targets = [target for target in targets if len(target)]
        while targets:  # one call reads 2 GiB at most
            read = os.preadv(self._opened.fileno(), targets, start)
            if read == 0:
                raise ValueError(
                    f"{str(self._file)!r} became shorter while it was read; replace a file by renaming another to it"
                )
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
    for key, entry in sorted(entries.items(), key=lambda item: item[1].start):
        is_next = runs and entry.start == end and entry.dtype == runs[-1][-1][1].dtype
        if not is_next or size >= RUN_BYTES or len(runs[-1]) == RUN_TENSORS:
            runs.append([])
            size = 0
        runs[-1].append((key, entry))
        end, size = entry.start + entry.nbytes, size + entry.nbytes
    return runs


def _is_b(key: str) -> bool:
    name = _TENSOR_NAME.fullmatch(key)
    return name is not None and name["side"] == "B"


def wanted_keys(
    where: str,
    keys: Collection[str],
    most_tensors: int,
    expected_lora_modules: Collection[str],
    weights_mapper: NameMapper | None = None,
    skip_prefixes: Sequence[str] | None = None,
    moe_ep_spec: MoEEPSpec | None = None,
) -> list[str]:
    """Check the names of an adapter's tensors; return those of the LoRA tensors, but for those of remote experts, and
    of the scales of FP8 tensors.

    ValueError: more than `most_tensors`, counted in `where`; a name is not a LoRA name, or a module not expected.
    """
    if len(keys) > most_tensors:
        raise ValueError(f"{where} has {len(keys)} tensors, an adapter of this model at most {most_tensors}")
    names = lora_names([key for key in keys if not is_scale_of_another(key, keys)], weights_mapper, skip_prefixes)
    check_any(names)
    check_expected_modules((name.module for name in names.values()), expected_lora_modules)
    wanted = [key for key, name in names.items() if moe_ep_spec is None or not moe_ep_spec.is_remote(name.module)]
    return [*wanted, *(key + SCALE_SUFFIX for key in wanted if key + SCALE_SUFFIX in keys)]


def _read_header(opened: BinaryIO, file: Path, most: int) -> bytes:
    """Read the header with the eight bytes of its size; ValueError if it is longer than `most` bytes."""
    start = opened.read(8)
    size = int.from_bytes(start, "little")
    if size > most:
        raise ValueError(
            f"{str(file)!r} is not a valid safetensors file of an adapter: its header has {size} bytes, at most {most} "
            "are read"
        )
    return start + opened.read(size)


def _entry(file: Path, key: str, checked: Any, start: int) -> TensorEntry:
    """Read an entry of the checked header."""
    dtype, shape = _DTYPES.get(checked.get_dtype()), checked.get_shape()
    if dtype is torch.float4_e2m1fn_x2:  # two numbers to an element
        *rows, columns = shape
        dtype, shape = (None, shape) if columns % 2 else (dtype, [*rows, columns // 2])
    if dtype is None or max(shape, default=0) >= 1 << 63:
        raise ValueError(
            f"{str(file)!r} is not a valid safetensors file of an adapter: {clip(key)} is {checked.get_dtype()} "
            f"{clip(shape)}, which torch cannot hold; save LoRA tensors as float16, bfloat16, float32 or float8"
        )
    return TensorEntry(dtype, torch.Size(shape), start)
