"""Adapter files: fetched from a store into folders of a runner's machine, in one version for all runners."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from punica.adapters import LoRARequest, LRUCache
from punica.adapters.config import CONFIG_FILE, MOST_CONFIG_BYTES, resolve_adapter_path
from punica.adapters.read import WEIGHTS_FILE, AdapterVersion
from punica.adapters.request import changed_error

AdapterFiles = Mapping[str, bytes]  # of a PEFT folder, by name
MOST_WEIGHTS_BYTES = 16 << 30
"""Largest weights file that is put into the object store; all of a file is read into memory."""


@dataclass(frozen=True)
class StoredFiles:
    """Reference to the files of one adapter: a runner's ``fetch(content)`` returns them, ``digest`` identifies them."""

    digest: str
    content: Any


def read_adapter_files(adapter: LoRARequest) -> AdapterFiles:
    """Read the files of an adapter's folder.

    FileNotFoundError: no such folder, or a file is not a regular one. ValueError: one is too large, or changed
    meanwhile, so that the files may be of two versions.
    """
    folder = resolve_adapter_path(adapter.absolute_path)
    limits = {CONFIG_FILE: MOST_CONFIG_BYTES, WEIGHTS_FILE: MOST_WEIGHTS_BYTES}

    def states() -> list[tuple[int, int, int]]:
        found = [(folder / name).stat() for name in limits]
        return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]

    for name, most in limits.items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{str(file)!r} is not a regular file; a PEFT adapter folder needs {name}")
        if (size := file.stat().st_size) > most:
            raise ValueError(
                f"{str(file)!r} has {size} bytes, and at most {most} are served from the object store; give the "
                "adapter a smaller file, or name it when the engines start, which then read its folder"
            )
    before = states()
    files = {name: (folder / name).read_bytes() for name in limits}
    if states() != before:
        raise ValueError(f"{str(folder)!r} changed while it was read; load it when all files are written")
    return files


def digest_of(files: AdapterFiles) -> str:
    """Hash names and contents to sixteen hex digits."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(f"{name} {len(content)} ".encode() + content)
    return found.hexdigest()[:16]


class AdapterFolderCache:
    """LRU cache of adapter folders; an evicted one is fetched again, under the same path.

    Eviction is safe while an adapter runs: an engine reads the folder once, when a request with the adapter joins.
    """

    def __init__(self, fetch: Callable[[Any], AdapterFiles], capacity: int) -> None:
        self._fetch = fetch
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._folders: LRUCache[str, Path] = LRUCache(capacity, on_remove=lambda _, folder: rmtree(folder, True))

    def __len__(self) -> int:
        return len(self._folders)

    def local(self, adapter: LoRARequest, files: StoredFiles) -> LoRARequest:
        """Return the adapter with a folder of this machine."""
        if self._home is None:
            self._home = tempfile.TemporaryDirectory(prefix="punica-adapters-")
        name = f"{adapter.lora_int_id}-{files.digest}"
        folder = self._folders.get(name)
        if folder is None:
            folder = Path(self._home.name, name)
            contents, unfinished = self._fetch(files.content), Path(tempfile.mkdtemp(dir=self._home.name))
            try:
                for file, content in contents.items():
                    (unfinished / os.path.basename(file)).write_bytes(content)
                unfinished.rename(folder)
            except BaseException:  # nothing is left of it
                rmtree(unfinished, ignore_errors=True)
                raise
            self._folders.put(name, folder)
        return replace(adapter, lora_path=str(folder))


class LoadedVersions:
    """Version of each adapter id's folder that was loaded last, by any runner."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[Hashable, AdapterVersion]] = {}  # and its source

    def start(self, versions: Mapping[int, tuple[Hashable, AdapterVersion]]) -> None:
        """Note what a runner was started with, where no other has loaded it."""
        self._versions = {**versions, **self._versions}

    def wanted(self, adapter: Any, begun: AdapterVersion | None) -> tuple[Any, AdapterVersion | None]:
        """Return the adapter of a request for its runner, and the version: that it has ``begun`` with, else the latest,
        ``None`` where the runner is to load it.
        """
        if not isinstance(adapter, LoRARequest):
            return adapter, None
        if begun is not None:
            return replace(adapter, load_inplace=False), begun
        return adapter, self._latest(adapter)

    def begin(self, adapter: Any, version: AdapterVersion) -> str | None:
        """Note the version that a request began with; return an error where two runners have loaded two at once."""
        known = self._latest(adapter)
        if known is None:
            self._versions[adapter.lora_int_id] = adapter.source, version
        elif changed := known.changed_files(version):
            return f"ValueError: {changed_error(adapter, changed)}"
        return None

    def _latest(self, adapter: LoRARequest) -> AdapterVersion | None:
        source, version = self._versions.get(adapter.lora_int_id, (None, None))
        return version if source == adapter.source and not adapter.load_inplace else None
