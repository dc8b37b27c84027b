"""Adapters whose files come from elsewhere, in temporary folders of a runner's machine."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from punica.adapters import LoRARequest, LRUCache
from punica.parallel import all_ranks_agree

AdapterFiles = Mapping[str, bytes]
"""The files of a PEFT folder, ``{name: content}``."""


@dataclass(frozen=True)
class StoredFiles:
    """Files that are to be had by a runner's ``fetch(content)``; ``digest`` tells them from others."""

    digest: str
    content: Any


def digest_of(files: AdapterFiles) -> str:
    """Sixteen hex digits over names and contents."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(f"{name} {len(content)} ".encode() + content)
    return found.hexdigest()[:16]


class AdapterFolders:
    """At most ``capacity`` folders, those used last; who comes back to another one finds it fetched again, under the
    same path.

    An engine reads a folder when a request with the adapter is added and joins, one at a time in a runner, and keeps
    in memory what runs: no folder is missed that makes room for another.

    Args:
        fetch: the files of an adapter from `StoredFiles.content`.
        capacity: most folders.
    """

    def __init__(self, fetch: Callable[[Any], AdapterFiles], capacity: int) -> None:
        self._fetch = fetch
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._folders: LRUCache[str, Path] = LRUCache(capacity, on_remove=_remove)

    def __len__(self) -> int:
        return len(self._folders)

    def local(self, adapter: LoRARequest, files: StoredFiles) -> LoRARequest:
        """The adapter in a folder of this machine. On all ranks what ``fetch`` raises on one of them."""
        if self._home is None:
            self._home = tempfile.TemporaryDirectory(prefix="punica-adapters-")
        name = f"{adapter.lora_int_id}-{files.digest}"
        folder = self._folders.get(name)
        if folder is None:
            folder = Path(self._home.name, name)
            with all_ranks_agree():
                contents = self._fetch(files.content)
                unfinished = Path(tempfile.mkdtemp(dir=self._home.name))
                for file, content in contents.items():
                    (unfinished / os.path.basename(file)).write_bytes(content)
                unfinished.rename(folder)
            self._folders.put(name, folder)
        return replace(adapter, lora_path=str(folder))


def _remove(name: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
