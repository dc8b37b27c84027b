"""Chat template and tokenizer that an adapter's folder may hold beside its weights.

Training tools save both there. The template is used for chats with that adapter. Its tokenizer is not: prompts are
encoded by the base model's, and a tokenizer with another vocabulary is warned of once.
"""

import json
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

from punica.checks import clip

_TEMPLATE, _CONFIG, _TOKENIZERS = "chat_template.jinja", "tokenizer_config.json", ("tokenizer.json", "tokenizer.model")
_MOST_BYTES, _MOST_TEMPLATE_BYTES = 64 << 20, 1 << 20


class AdapterText:
    """Texts of adapter folders beside the base model's ``tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._home = Path(getattr(tokenizer, "name_or_path", "") or ".")
        self._checked: set[tuple[str, int, int]] = set()

    def template_of(self, folder: str) -> str | None:
        """Return the chat template in a folder, as it is now; ``None``: it has none, or no such folder."""
        template = _read(Path(folder, _TEMPLATE), _MOST_TEMPLATE_BYTES)
        if template is not None:
            return template.decode("utf-8", errors="replace")
        config = _read(Path(folder, _CONFIG))
        return None if config is None else _template_in(config)

    def check_tokenizer(self, folder: str) -> None:
        """Warn once if a folder's tokenizer differs from the base model's."""
        for name in _TOKENIZERS:
            path = Path(folder, name)
            try:
                status = path.stat()
            except (OSError, ValueError):
                continue
            version = (str(path), status.st_mtime_ns, status.st_size)
            if version in self._checked:
                continue
            self._checked.add(version)
            own, base = _read(path), _read(self._home / name)
            if own is not None and base is not None and own != base and _vocabulary(own) != _vocabulary(base):
                warnings.warn(
                    f"adapter folder {clip(folder)} has a tokenizer of its own, {name}, with another vocabulary than "
                    "the base model's; prompts of this adapter are encoded by the base model's",
                    stacklevel=2,
                )


def _read(path: Path, most: int = _MOST_BYTES) -> bytes | None:
    """Read a regular file of at most ``most`` bytes; a pipe would keep the reader for ever."""
    try:
        return path.read_bytes() if path.is_file() and path.stat().st_size <= most else None
    except (OSError, ValueError):
        return None


@lru_cache(64)
def _template_in(config: bytes) -> str | None:
    """Return the template in the content of a ``tokenizer_config.json``: a text, or the default one of several."""
    try:
        found = json.loads(config)["chat_template"]
        if isinstance(found, list):
            found = {one["name"]: one["template"] for one in found}["default"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) and len(found) <= _MOST_TEMPLATE_BYTES else None


def _vocabulary(content: bytes) -> Any:
    """Return the part of a ``tokenizer.json`` that decides ids; all of any other file."""
    try:
        values = json.loads(content)
        return values["model"], values.get("added_tokens")
    except (ValueError, KeyError, TypeError, RecursionError):
        return content
