"""Forms of prompts: texts, chats, token ids, vLLM's mappings ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``."""

from collections.abc import Mapping, Sequence
from typing import Any

from punica.checks import clip

_TEXT, _IDS = "prompt", "prompt_token_ids"


def listed_prompts(prompts: Any) -> list[Any]:
    """Return prompts as a list of texts, chats and token ids; one text, chat or mapping counts as a list of one.

    TypeError: not iterable, or a list of plain token ids. ValueError: a mapping that is neither prompt nor message.
    """
    is_one = isinstance(prompts, (str, Mapping)) or is_chat(prompts)
    listed = [prompts] if is_one else _as_list(prompts)
    if listed and hasattr(listed[0], "__index__") and getattr(listed[0], "ndim", 0) == 0:
        raise TypeError(f"prompts[0] is {clip(listed[0])}, a token id; pass a list of prompts, [[...]] for one")
    return [_unwrapped(f"prompts[{place}]", one) for place, one in enumerate(listed)]


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


def _as_list(prompts: Any) -> list[Any]:
    if not isinstance(prompts, bytes):
        try:
            return list(prompts)
        except TypeError:
            pass
    raise TypeError(f"prompts must be a list with one entry per prompt, got {type(prompts).__name__} {clip(prompts)}")


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
