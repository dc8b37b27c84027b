"""Served models by name: the base model and its adapters."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from punica.adapters import LoRARequest
from punica.checks import clip
from punica.engine import Mixture
from punica.serve.access import Keys, allowed_folder
from punica.serve.backend import Backend
from punica.serve.errors import ApiError
from punica.serve.protocol import AnyBody, LoadAdapter

MOST_ADAPTERS = 65_536
"""Adapters that have a name at once; further ones are refused."""


class Catalogue:
    """Names of the served models. Every load has a new adapter id, so requests keep the version they began with."""

    def __init__(
        self, base: str, adapters: Sequence[LoRARequest], keys: Keys, roots: Sequence[Path], max_model_len: int
    ) -> None:
        self.base, self.keys, self._max_model_len = base, keys, max_model_len
        self._roots = roots
        self._adapters = {adapter.lora_name: adapter for adapter in adapters}
        self._ids = itertools.count(1 + max((adapter.lora_int_id for adapter in adapters), default=0))
        self._created = int(time.time())
        self._lock = asyncio.Lock()  # one load or unload at a time

    def find(self, name: str, key: str | None) -> LoRARequest | None:
        """Return the adapter of this name, ``None`` for the base model. ApiError 401, or 404: none for this key."""
        self.keys.check(key)
        if not self.keys.opens(key, name) or (name != self.base and name not in self._adapters):
            raise ApiError(
                404, f"the model {clip(name)} does not exist, or this API key does not open it; see /v1/models",
                "model", "model_not_found",
            )  # fmt: skip
        return self._adapters.get(name)

    def served(self, body: AnyBody, key: str | None) -> LoRARequest | Mixture | None:
        """Return what a body asks for. ApiError as :meth:`find`; 400 for a mixture that is refused."""
        adapter = self.find(body.model, key)
        if body.adapters is None:
            return adapter
        found = {self.find(name, key): weight for name, weight in body.adapters.items()}
        if adapter is not None or None in found:
            text = f"adapters are mixed on the base model: send model={self.base!r}, and adapters' names with weights"
            raise ApiError(400, text, "adapters")
        try:
            return Mixture.of("adapters", found)
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), "adapters") from error

    def visible(self, key: str | None) -> list[dict[str, Any]]:
        self.keys.check(key)
        return [self.describe(name) for name in (self.base, *self._adapters) if self.keys.opens(key, name)]

    def describe(self, name: str) -> dict[str, Any]:
        parent = None if name == self.base else self.base
        sizes = {"parent": parent, "max_model_len": self._max_model_len}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "punica", **sizes}

    async def load(self, body: LoadAdapter, key: str | None, backend: Backend) -> None:
        """Serve an adapter under a name, as it is in its folder now. ApiError: key, folder, name or adapter refused."""
        name, fields = body.lora_name, body.model_dump(include={"is_3d_lora_weight", "weights_mapper"})
        self.keys.check_manager(key)
        folder = await asyncio.to_thread(allowed_folder, body.lora_path, self._roots)
        async with self._lock:
            if name == self.base:
                raise ApiError(400, f"{clip(name)} is the name of the base model; choose another", "lora_name")
            if name in self._adapters and not body.load_inplace:
                text = f"adapter {clip(name)} has already been loaded; unload it or pass load_inplace=true"
                raise ApiError(400, text, "lora_name")
            if name not in self._adapters and len(self._adapters) >= MOST_ADAPTERS:
                raise ApiError(400, f"{len(self._adapters)} adapters are loaded, the limit; unload some", "lora_name")
            if not backend.facts.has_lora:
                raise ApiError(400, "this server has no adapter slots; start it with --adapter or --max-loras")
            try:
                adapter = LoRARequest(name, next(self._ids), folder, **fields)
                await backend.admit(adapter)
            except (OSError, TypeError, ValueError) as error:
                status = 404 if isinstance(error, FileNotFoundError) else 400
                raise ApiError(status, str(error), "lora_path") from error
            old, self._adapters[name] = self._adapters.get(name), adapter
            if old is not None:
                await backend.retire(old.lora_int_id)

    async def unload(self, name: str, key: str | None, backend: Backend) -> None:
        """Forget a name; requests with it are served to their end. ApiError 401, 404: no such adapter."""
        self.keys.check_manager(key)
        async with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise ApiError(404, f"no adapter {clip(name)} is loaded", "lora_name", "model_not_found")
            await backend.retire(adapter.lora_int_id)
