"""Forms of prompts, and the chat template and tokenizer that an adapter's folder may hold beside its weights.

A prompt is a text, a chat, token ids, or one of vLLM's mappings ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``.

Training tools save a template and a tokenizer in an adapter's folder. Chats are rendered by the base model's template,
unless the operator trusts those of the folders: then theirs is used, with the special tokens that its tokenizer's
configuration names, and the end token ends the answer. Prompts are encoded by the base model's tokenizer. What is not
used is warned of once.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from punica.checks import clip

_TEMPLATE, _CONFIG, _TOKENIZERS = "chat_template.jinja", "tokenizer_config.json", ("tokenizer.json", "tokenizer.model")
_MOST_BYTES, _MOST_TEMPLATE_BYTES = 64 << 20, 1 << 20
_TEXT, _IDS = "prompt", "prompt_token_ids"


def listed_prompts(prompts: Any) -> list[Any]:
    """Return prompts as a list of texts, chats and token ids; one text, chat or mapping counts as a list of one.

    TypeError: not iterable, or a list of plain token ids. ValueError: a mapping that is neither prompt nor message.
    """
    is_one = isinstance(prompts, (str, Mapping)) or is_chat(prompts)
    found = [prompts] if is_one else listed("prompts", prompts)
    if found and hasattr(found[0], "__index__") and getattr(found[0], "ndim", 0) == 0:
        raise TypeError(f"prompts[0] is {clip(found[0])}, a token id; pass a list of prompts, [[...]] for one")
    return [_unwrapped(f"prompts[{place}]", one) for place, one in enumerate(found)]


def is_chat(prompt: Any) -> bool:
    """Check for a list of mappings that are not all prompts: its messages are checked by :func:`messages_of`."""
    return (
        isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)
        and not all(_is_prompt(one) for one in prompt)
    )  # fmt: skip


def messages_of(chat: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat with text as content; parts of a content are joined by line ends, as by vLLM.

    ValueError: a message without role or content; a part that is no text. A message with ``tool_calls`` needs no
    content.
    """
    return [_message(f"messages[{place}]", one) for place, one in enumerate(chat)]


def listed(name: str, values: Any) -> list[Any]:
    """Return ``values`` as a list; TypeError if it is not iterable, or a text or mapping."""
    if not isinstance(values, (bytes, str, Mapping)):
        with suppress(TypeError):
            return list(values)
    raise TypeError(f"{name} must be a list with one entry per prompt, got {type(values).__name__} {clip(values)}")


def _is_prompt(one: Mapping[str, Any]) -> bool:
    return one.get(_TEXT) is not None or one.get(_IDS) is not None


def _unwrapped(name: str, prompt: Any) -> Any:
    """Return text or token ids of vLLM's mapping; token ids where it has both. Anything else as it is."""
    if not isinstance(prompt, Mapping):
        return prompt
    others = sorted(str(key) for key, value in prompt.items() if key not in (_TEXT, _IDS) and value is not None)
    if others or not _is_prompt(prompt):
        raise ValueError(
            f"{name} is a mapping with {clip([str(key) for key in prompt])}: a prompt has {_TEXT!r} (a text) or "
            f"{_IDS!r} alone; a chat is a list of messages with role and content"
        )
    if (ids := prompt.get(_IDS)) is not None:
        return ids
    if not isinstance(prompt[_TEXT], str):
        raise TypeError(f"{name}[{_TEXT!r}] must be a str, got {type(prompt[_TEXT]).__name__} {clip(prompt[_TEXT])}")
    return prompt[_TEXT]


def _message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"{name} is {clip(message)}, a message has a role (a str) and content; prompts in mappings have the key "
            f"{_TEXT!r} or {_IDS!r}, each of them"
        )
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_text(f"{name}.content[{place}]", part) for place, part in enumerate(content))
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{name}.content is {clip(content)}, must be a text or a list of text parts")
    return {**message, "content": content}


def _text(name: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f'{name} is of type {clip(kind)}: this model reads text alone; pass {{"type": "text", "text": "..."}}'
        )
    return str(part["text"])


def template_of(folder: str) -> tuple[str, dict[str, str]] | None:
    """Return the chat template in an adapter's folder, as it is now, and its special tokens by name (``"eos_token"``).

    ``None``: it has no template, or there is no such folder.
    """
    template, content = _read(Path(folder, _TEMPLATE), _MOST_TEMPLATE_BYTES), _read(Path(folder, _CONFIG))
    configured, special = (None, {}) if content is None else _configured(content)
    text = configured if template is None else template.decode("utf-8", errors="replace")
    return None if text is None else (text, special)


@lru_cache(1 << 16)
def warn_of_template(folder: str) -> None:
    """Warn of a template in a folder that is not trusted, once."""
    if template_of(folder) is not None:
        warnings.warn(
            f"adapter folder {clip(folder)} has a chat template of its own; the base model's is used. To use "
            "templates of adapters, if their folders are trusted: adapter_templates=True, --adapter-templates",
            stacklevel=2,
        )


@lru_cache(1 << 16)
def warn_of_tokenizer(folder: str, base: str) -> None:
    """Warn, once, of a tokenizer in an adapter's folder with another vocabulary than that in the folder ``base``."""
    for name in _TOKENIZERS:
        own, known = (_read(Path(one, name)) for one in (folder, base))
        if own is not None and known is not None and own != known and _vocabulary(own) != _vocabulary(known):
            warnings.warn(
                f"adapter folder {clip(folder)} has a tokenizer of its own, {name}, with another vocabulary than the "
                "base model's; prompts of this adapter are encoded by the base model's",
                stacklevel=2,
            )


def _vocabulary(content: bytes) -> Any:
    """Return the part of a ``tokenizer.json`` that decides ids; all of any other file."""
    try:
        values = json.loads(content)
        return values["model"], values.get("added_tokens")
    except (ValueError, KeyError, TypeError, RecursionError):
        return content


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
