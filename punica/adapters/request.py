"""`LoRARequest`: id, name and folder or tensors of an adapter, and the rule that one id has one source."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from punica.adapters.config import PEFTHelper
from punica.adapters.read import AdapterTensors
from punica.checks import check_bool, check_count, clip

NO_ADAPTER = "0 means 'no adapter'"
LOAD_ERROR = "cannot load adapter "
"""Beginning of the errors of a load, which name the adapter's place; a server keeps that from clients."""


@dataclass(frozen=True, eq=False)
class LoRARequest:
    """The adapter a generation request asks for.

    The adapter is a PEFT folder (`lora_path`), or in memory (`tensors` with `config`).

    Args:
        lora_name: non-empty label; equality and hash use it alone.
        lora_int_id: integer >= 1, globally unique (0 means "no adapter" everywhere in the library); `None`: one derived
            from name and folder (in memory: the name), the same in every request and on every rank.
        lora_path: PEFT folder, a str or a `pathlib.Path` (kept as str); `~` and relative paths are resolved here, to
            `absolute_path` (in memory: the label of the tensors), and looked up when the adapter is loaded.
        base_model_name: informational.
        load_inplace: read the folder again even if the id is registered; the tensors, if they are others.
        is_3d_lora_weight: refuse an adapter whose experts are not in one pair of matrices per layer.
        weights_mapper: `{old: new}`, replaced in the names of the tensors, in order: for adapters that were trained
            inside of another model, e.g. `{"language_model.model.": "model."}`.
        tensors, config: copied here, see :class:`AdapterTensors`; copies of the request share them, and every new
            request is a version of its own.

    TypeError: a field has the wrong Python type. ValueError: empty name or path, id < 1, a path and tensors, neither.
    """

    lora_name: str
    lora_int_id: int = None  # type: ignore[assignment]  # an int as soon as it is built
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    weights_mapper: Mapping[str, str] | None = None
    tensors: AdapterTensors | None = field(default=None, repr=False)  # a plain dict becomes one
    config: Any = field(default=None, repr=False)
    absolute_path: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        for key in ("lora_name", "lora_path"):
            value = getattr(self, key)
            if not isinstance(value, str):
                raise TypeError(f"LoRARequest {key} must be a str, got {clip(value)} ({type(value).__name__})")
            if not value and (key == "lora_name" or self.tensors is None):
                raise ValueError(f"LoRARequest {key} must not be empty (lora_name={clip(self.lora_name)})")
        for key in ("load_inplace", "is_3d_lora_weight"):
            check_bool(f"LoRARequest {key}", getattr(self, key))
        if (renames := self.weights_mapper) is not None:
            texts = [*renames, *renames.values()] if isinstance(renames, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"LoRARequest weights_mapper must be a dict of str to str, got {clip(renames)}")
            if "" in renames:
                raise ValueError("LoRARequest weights_mapper has an empty text to replace; name a part of the names")
            object.__setattr__(self, "weights_mapper", dict(renames))
        if self.tensors is None:
            if self.config is not None:
                raise ValueError("LoRARequest config comes with tensors; a folder has its own")
            where = folder = os.path.abspath(os.path.expanduser(self.lora_path))
        else:
            if self.lora_path:
                raise ValueError(f"LoRARequest has tensors and lora_path {clip(self.lora_path)}; give one of the two")
            if not isinstance(self.tensors, AdapterTensors) or self.tensors.config != self.config:
                object.__setattr__(self, "tensors", AdapterTensors(self.tensors, self.config))
                object.__setattr__(self, "config", self.tensors.config)
            where, folder = self.tensors.label, ""
        object.__setattr__(self, "absolute_path", where)
        given = _derived_id(self.lora_name, folder) if self.lora_int_id is None else self.lora_int_id
        object.__setattr__(self, "lora_int_id", check_count("LoRARequest lora_int_id", given, meaning=NO_ADAPTER))

    adapter_id = property(attrgetter("lora_int_id"))
    name = property(attrgetter("lora_name"))
    path = property(attrgetter("lora_path"))  # as given

    @property
    def source(self) -> tuple:
        """Name, absolute path or label of the tensors, and renames: equal for two requests of the same adapter."""
        return self.lora_name, self.absolute_path, *(self.weights_mapper or {}).items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


def _derived_id(name: str, path: str) -> int:
    """An id >= 1 of 62 bits; among n adapters two share one with a probability of n**2 / 2**63."""
    digest = hashlib.sha256(f"{name}\0{path}".encode(errors="surrogatepass")).digest()
    return 1 + (int.from_bytes(digest[:8], "big") >> 2)


def config_of(request: LoRARequest) -> PEFTHelper:
    """Return the config of a request's adapter. Raises as :meth:`PEFTHelper.from_local_dir`."""
    return PEFTHelper.from_local_dir(request.absolute_path) if request.tensors is None else request.tensors.helper()


def changed_error(request: LoRARequest, files: list[str]) -> str:
    """Return the refusal of an adapter some files of which are not those that were loaded."""
    return (
        f"adapter {clip(request.lora_name)} (id {request.lora_int_id}) has changed on disk since it was loaded: "
        f"{' and '.join(files)}; load it again, with load_inplace=True, or restore the files"
    )


def check_same_source(known: LoRARequest | None, request: LoRARequest) -> None:
    """ValueError if `known`, the present request of this id, names another adapter; `None`: the id is free."""
    if known is not None and known.source != request.source:
        raise ValueError(
            f"adapter id {request.lora_int_id} stands for {clip(known.source)}, now requested as "
            f"{clip(request.source)}; use another id, or load_inplace=True in a later step to replace it"
        )


def distinct_requests(requests: Iterable[LoRARequest | None]) -> dict[int, LoRARequest]:
    """`{id: request}` in order of appearance; `load_inplace` takes precedence. ValueError: one id with two names."""
    wanted: dict[int, LoRARequest] = {}
    for request in requests:
        if request is None:
            continue
        if not isinstance(request, LoRARequest):
            raise TypeError(f"requests must be LoRARequest or None, got {type(request).__name__}")
        first = wanted.setdefault(request.lora_int_id, request)
        check_same_source(first, request)
        if request.load_inplace and not first.load_inplace:
            wanted[request.lora_int_id] = request
    return wanted


@contextmanager
def loading(request: LoRARequest) -> Iterator[None]:
    """Prefix the errors of a load with the adapter's name and path; others of the system are ValueErrors."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        kind = next((kind for kind in (FileNotFoundError, TypeError) if isinstance(error, kind)), ValueError)
        name, path = clip(request.lora_name), clip(str(request.lora_path or request.absolute_path))
        raise kind(f"{LOAD_ERROR}{name} from {path}: {error}") from error
