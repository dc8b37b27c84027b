"""Versions of adapters' folders over all runners, each of which reads the files on its own."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from punica.adapters import LoRARequest
from punica.adapters.request import changed_error
from punica.adapters.source import AdapterVersion


class LoadedVersions:
    """Version of each adapter id's folder that was loaded last, by any runner."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[Hashable, AdapterVersion]] = {}  # and its source

    def start(self, versions: Mapping[int, tuple[Hashable, AdapterVersion]]) -> None:
        """Note what a runner was started with, where no other has loaded it."""
        self._versions = {**versions, **self._versions}

    def wanted(self, adapter: Any, begun: AdapterVersion | None) -> tuple[Any, AdapterVersion | None]:
        """Return the adapter that a runner serves a request with, and its version: the one that the request has
        ``begun`` with, else the latest; ``None`` where the runner is to load it.
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
