"""`Certificate`: proof that the tensors of an adapter fit the model, remembered by the content that was checked."""

import threading
from typing import NamedTuple

from punica.adapters.lora_model import ModuleEntry
from punica.adapters.lru import LRUCache
from punica.adapters.read import TensorEntry

MOST_BYTES = 32 << 20
"""Headers of weights files, together, whose certificates are remembered; these take about five times as much memory."""


class Certificate(NamedTuple):
    """Proof that an adapter's tensors fit the model, all but their numbers.

    Attributes:
        entries: dtype, shape and place of every tensor.
        contents: the modules.
        rank: `r` in the config.
        doubts: reasons why outputs may be wrong, to be warned of.
    """

    entries: dict[str, TensorEntry]
    contents: list[ModuleEntry]
    rank: int
    doubts: list[str]


class Certificates:
    """Certificates by content, the least recently used of which are forgotten; thread-safe.

    Args:
        most_bytes: bound of the sizes given to :meth:`put`, together.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self.bytes = most_bytes, 0
        self._entries: LRUCache[tuple, tuple[Certificate, int]] = LRUCache(most_bytes, self._on_remove)
        self._lock = threading.Lock()

    def find(self, content: tuple) -> Certificate | None:
        """Return the certificate of this content, or `None`."""
        with self._lock:
            found = self._entries.get(content)
        return None if found is None else found[0]

    def put(self, content: tuple, certificate: Certificate, size: int) -> None:
        """Remember a certificate made of a header of `size` bytes, unless that alone exceeds the bound."""
        if size > self._most_bytes:
            return
        with self._lock:
            self.bytes += size
            self._entries.put(content, (certificate, size))
            while self.bytes > self._most_bytes:
                self._entries.remove_oldest()

    def _on_remove(self, content: tuple, entry: tuple[Certificate, int]) -> None:
        self.bytes -= entry[1]
