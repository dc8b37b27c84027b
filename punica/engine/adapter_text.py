"""Chat template and tokenizer that an adapter's folder may hold beside its weights.

Training tools save both there. Chats are rendered by the base model's template, unless the operator trusts those of the
folders: then theirs is used, with the special tokens that its tokenizer's configuration names, and the end token ends
the answer. Prompts are encoded by the base model's tokenizer. What is not used is warned of once.
"""

import json
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from punica.checks import clip

_TEMPLATE, _CONFIG, _TOKENIZERS = "chat_template.jinja", "tokenizer_config.json", ("tokenizer.json", "tokenizer.model")
_MOST_BYTES, _MOST_TEMPLATE_BYTES = 64 << 20, 1 << 20


class AdapterText:
    """Texts of adapter folders beside the base model's ``tokenizer``; ``trusted``: their templates are used."""

    def __init__(self, tokenizer: Any, trusted: bool) -> None:
        self._home, self._trusted = Path(getattr(tokenizer, "name_or_path", "") or "."), trusted
        self._checked: set[tuple[str, int, int]] = set()

    def template_of(self, folder: str | None) -> tuple[str, dict[str, str]] | None:
        """Return the chat template in a folder, as it is now, and its special tokens by name (``"eos_token"``).

        ``None``: it has no template, there is no such folder, or folders are not trusted.
        """
        return self._found(folder) if self._trusted and folder is not None else None

    def check_template(self, folder: str) -> None:
        """Warn once of a template in a folder that is not trusted."""
        if self._trusted:
            return
        is_new = [self._is_new(Path(folder, name)) for name in (_TEMPLATE, _CONFIG)]
        if any(is_new) and self._found(folder) is not None:
            warnings.warn(
                f"adapter folder {clip(folder)} has a chat template of its own; the base model's is used. To use "
                "templates of adapters, if their folders are trusted: adapter_templates=True, --adapter-templates",
                stacklevel=2,
            )

    def _found(self, folder: str) -> tuple[str, dict[str, str]] | None:
        template, content = _read(Path(folder, _TEMPLATE), _MOST_TEMPLATE_BYTES), _read(Path(folder, _CONFIG))
        configured, special = (None, {}) if content is None else _configured(content)
        text = configured if template is None else template.decode("utf-8", errors="replace")
        return None if text is None else (text, special)

    def check_tokenizer(self, folder: str) -> None:
        """Warn once if a folder's tokenizer differs from the base model's."""
        for name in _TOKENIZERS:
            path = Path(folder, name)
            if not self._is_new(path):
                continue
            own, base = _read(path), _read(self._home / name)
            if own is not None and base is not None and own != base and _vocabulary(own) != _vocabulary(base):
                warnings.warn(
                    f"adapter folder {clip(folder)} has a tokenizer of its own, {name}, with another vocabulary than "
                    "the base model's; prompts of this adapter are encoded by the base model's",
                    stacklevel=2,
                )

    def _is_new(self, path: Path) -> bool:
        """Tell once of each version of a file that it is there."""
        try:
            status = path.stat()
        except (OSError, ValueError):
            return False
        version = (str(path), status.st_mtime_ns, status.st_size)
        known = version in self._checked
        self._checked.add(version)
        return not known


def _read(path: Path, most: int = _MOST_BYTES) -> bytes | None:
    """Read a regular file of at most ``most`` bytes; a pipe would keep the reader for ever."""
    try:
        return path.read_bytes() if path.is_file() and path.stat().st_size <= most else None
    except (OSError, ValueError):
        return None


@lru_cache(64)
def _configured(content: bytes) -> tuple[str | None, dict[str, str]]:
    """Return template and special tokens in the content of a ``tokenizer_config.json``.

    A template is a text, or the default one of several; a token is a text, or the content of a mapping.
    """
    try:
        values = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None, {}
    found = values.get("chat_template")
    with suppress(KeyError, TypeError):
        if isinstance(found, list):
            found = {one["name"]: one["template"] for one in found}["default"]
    template = found if isinstance(found, str) and len(found) <= _MOST_TEMPLATE_BYTES else None
    tokens = {name: one.get("content") if isinstance(one, dict) else one for name, one in values.items()}
    return template, {name: one for name, one in tokens.items() if name.endswith("_token") and isinstance(one, str)}


def _vocabulary(content: bytes) -> Any:
    """Return the part of a ``tokenizer.json`` that decides ids; all of any other file."""
    try:
        values = json.loads(content)
        return values["model"], values.get("added_tokens")
    except (ValueError, KeyError, TypeError, RecursionError):
        return content
