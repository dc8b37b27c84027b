"""GPUs whose batch has room, in the order in which a rule prefers them."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from itertools import chain

from punica.cluster.gpu import Gpu

Order = Callable[[Gpu], tuple]
"""Key of a GPU, which ends with its UUID and changes with its members only."""


class OpenGpus:
    """GPUs in ascending ``order``; without one in any order."""

    def __init__(self, order: Order | None = None) -> None:
        self._order = order
        self._gpus: dict[str, Gpu] = {}
        self._key_of: dict[str, tuple] = {}
        self._keys: list[tuple] = []  # ascending

    def __iter__(self) -> Iterator[Gpu]:
        return iter(self._gpus.values())

    def __reversed__(self) -> Iterator[Gpu]:
        """Yield GPUs in descending order."""
        return (self._gpus[key[-1]] for key in reversed(self._keys))

    def after(self, key: tuple) -> Iterator[Gpu]:
        """Yield GPUs in ascending order, those after ``key`` first."""
        first = bisect_right(self._keys, key)
        return (self._gpus[self._keys[i][-1]] for i in chain(range(first, len(self._keys)), range(first)))

    def put(self, gpu: Gpu) -> None:
        """Add a GPU, or give one whose members changed its place."""
        self._gpus[gpu.uuid] = gpu
        if self._order is not None:
            self._forget(gpu.uuid)
            key = self._key_of[gpu.uuid] = self._order(gpu)
            insort(self._keys, key)

    def discard(self, gpu: Gpu) -> None:
        """Remove a GPU, if it is there."""
        self._gpus.pop(gpu.uuid, None)
        self._forget(gpu.uuid)

    def _forget(self, uuid: str) -> None:
        key = self._key_of.pop(uuid, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]
