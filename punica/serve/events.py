"""Server-sent events of a stream."""

import json
from typing import Any

from punica.serve.forms import ChatForm, CompletionForm

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + _encode(data).encode() + b"\n\n"


class TextEvents:
    """Events with the new text of a choice; what surrounds the text is encoded once, as most events differ in it only.

    ``head``: fields before the choices.
    """

    def __init__(self, form: ChatForm | CompletionForm, head: dict[str, Any]) -> None:
        self._form, self._head = form, head
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice

    def set_usage(self, usage: dict[str, int]) -> None:
        """Set the usage of the next events."""
        self._head = {**self._head, "usage": usage}
        self._frames.clear()

    def of(self, index: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        """Return the event of choice ``index``."""
        if logprobs is not None or reason is not None:
            return self._event(index, text, logprobs, reason)
        if index not in self._frames:
            before, _, after = self._event(index, "", None, None).rpartition(b'""')  # its last string: nulls follow
            self._frames[index] = before, after
        before, after = self._frames[index]
        return before + _encode(text).encode() + after

    def _event(self, index: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        return event({**self._head, "choices": [self._form.delta(index, text, logprobs, reason)]})
