"""Every name of the contract is importable by its path and takes the parameters that it took (``contract.txt``)."""

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
LINES = [line for line in Path(__file__).with_name("contract.txt").read_text().splitlines() if not line.startswith("#")]
CONTRACT = dict(re.fullmatch(r"([\w.]+)\((.*)\)", line).groups() for line in LINES)  # type: ignore[union-attr]


def found(path: str) -> Any:
    """Import the longest part of ``path`` that is a module, and read the rest."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            value = getattr(value, name)
        return value
    raise ModuleNotFoundError(path)


def parameters(function: Any) -> list[str]:
    """``name``, ``name=default``, ``*``, ``**name``, as a line of the file has them."""
    rendered, keywords = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL) and not keywords:
            keywords = True
            rendered += ["*"] if one.kind is one.KEYWORD_ONLY else []
        plain = isinstance(one.default, int | float | str | bool | tuple | None)
        default = "" if one.default is one.empty else f"={one.default!r}" if plain else "=..."
        rendered.append({one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name + default)
    return rendered


def broken(wanted: list[str], actual: list[str]) -> list[str]:
    """Wanted parameters that are missing, and new ones that a caller would have to give.

    A keyword with a default may be one of ``**options``.
    """
    options = any(one.startswith("**") for one in actual)
    missing = [
        one for one in wanted if one not in actual and one != "*" and not (options and re.search(r"=|\*\*", one))
    ]
    kept = [one for one in actual if one in wanted]
    order = [] if kept == [one for one in wanted if one in actual] else ["another order"]
    return missing + order + [one for one in actual if one not in wanted and "=" not in one and "*" not in one]


@pytest.mark.parametrize("path", CONTRACT)
def test_a_name_keeps_its_path_and_parameters(path: str) -> None:
    if ".triton_ops" in path or path.startswith("punica.ops.fused") or ".lora_" in path:
        pytest.importorskip("triton")
    wanted = re.findall(r"[^,()]+(?:\([^)]*\))?[^,]*", CONTRACT[path].replace(" ", "")) if CONTRACT[path] else []
    assert broken(wanted, [one.replace(" ", "") for one in parameters(found(path))]) == []
