"""`lazily`: names that a module offers and another one, of a higher room, defines (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def lazily(module: str, name: str, homes: Mapping[str, Sequence[str]]) -> Any:
    """Return ``name`` from its home, for ``module.__getattr__``; ``homes``: module -> names, imported when asked for.

    >>> lazily("here", "sqrt", {"math": ("sqrt", "exp")})(9)
    3.0
    """
    for home, names in homes.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            if module in sys.modules:
                vars(sys.modules[module])[name] = value
            return value
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def offer_module(path: str, get: Callable[[str], Any]) -> ModuleType:
    """Return the module at ``path``, which offers names by ``get``; an empty one where no file makes it."""
    if path not in sys.modules:
        sys.modules[path] = ModuleType(path)
        sys.modules[path].__spec__ = ModuleSpec(path, None)
    module = sys.modules[path]
    vars(module)["__getattr__"] = get
    return module
