"""Registries, name -> thing, for replaceable parts: op backends, serving systems, admission and scheduling rules,
workloads.

Adding one is a file, a ``@REGISTRY.register("name")`` line and a test.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Named things of one kind.

    ``kind`` names an entry in error messages, e.g. ``Registry("workload")``.

    >>> SHAPES: Registry[type] = Registry("shape")
    >>> @SHAPES.register("circle")
    ... class Circle: ...
    >>> SHAPES.get("circle") is Circle, SHAPES.names()
    (True, ('circle',))
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under ``name`` and returns it unchanged. Raises TypeError when
        ``name`` is not a string, ValueError when it is empty or already taken.
        """
        if not isinstance(name, str):
            raise TypeError(f"name of a {self.kind} must be a str, got {type(name).__name__} {name!r}")
        if not name:
            raise ValueError(f"name of a {self.kind} must not be empty")

        def store(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already taken by {self._entries[name]!r}")
            self._entries[name] = entry
            return entry

        return store

    def get(self, name: str) -> T:
        """Return the entry called ``name``; ValueError lists the known names when there is no such entry."""
        if isinstance(name, str) and name in self._entries:
            return self._entries[name]
        known = ", ".join(self.names()) or "none"
        raise ValueError(
            f"unknown {self.kind} {name!r}; known: {known}. Use one of these, or register yours with "
            f'@<registry>.register("{name}") in a module that is imported before it is asked for'
        )

    def names(self) -> tuple[str, ...]:
        """Return the known names, in the order of registration."""
        return tuple(self._entries)
