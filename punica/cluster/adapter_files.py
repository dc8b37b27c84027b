"""Adapter files fetched from a store into temporary folders of a runner's machine."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from punica.adapters import LoRARequest, LRUCache
from punica.adapters.config import CONFIG_FILE, MOST_CONFIG_BYTES, resolve_adapter_path
from punica.adapters.read import WEIGHTS_FILE
from punica.parallel import all_ranks_agree

AdapterFiles = Mapping[str, bytes]
"""Files of a PEFT folder, ``{name: content}``."""

MOST_WEIGHTS_BYTES = 16 << 30
"""Largest weights file that is put into the object store; all of a file is read into memory."""


@dataclass(frozen=True)
class StoredFiles:
    """Reference to the files of one adapter: a runner's ``fetch(content)`` returns them, ``digest`` identifies them."""

    digest: str
    content: Any


def read_adapter_files(adapter: LoRARequest) -> AdapterFiles:
    """Read the files of an adapter's folder, after a check of both files' sizes.

    FileNotFoundError: no such folder, or a file is missing or not a regular one. ValueError: a file is too large, or
    changed meanwhile, so that the files may be of two versions.
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
        size = file.stat().st_size
        if size > most:
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
    """LRU cache of adapter folders; an evicted folder is fetched again, under the same path.

    Eviction is safe while an adapter runs: an engine reads the folder once, when a request with the adapter joins.

    Args:
        fetch: returns the files of an adapter from `StoredFiles.content`.
        capacity: most folders.
    """

    def __init__(self, fetch: Callable[[Any], AdapterFiles], capacity: int) -> None:
        self._fetch = fetch
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._folders: LRUCache[str, Path] = LRUCache(capacity, on_remove=_remove)

    def __len__(self) -> int:
        return len(self._folders)

    def local(self, adapter: LoRARequest, files: StoredFiles) -> LoRARequest:
        """Return the adapter with a folder of this machine; an error of ``fetch`` on one rank is raised on all."""
        if self._home is None:
            self._home = tempfile.TemporaryDirectory(prefix="punica-adapters-")
        name = f"{adapter.lora_int_id}-{files.digest}"
        folder = self._folders.get(name)
        if folder is None:
            folder = Path(self._home.name, name)
            with all_ranks_agree():
                _write(self._fetch(files.content), folder)
            self._folders.put(name, folder)
        return replace(adapter, lora_path=str(folder))


def _write(contents: AdapterFiles, folder: Path) -> None:
    """Write files into a new folder beside `folder` and rename it; nothing is left of it after an error."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for file, content in contents.items():
            (unfinished / os.path.basename(file)).write_bytes(content)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _remove(name: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
