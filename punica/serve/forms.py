"""Shapes of answers: OpenAI's completion and chat objects, whole, in chunks and as events, with strings of tokens."""

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from punica.engine import SamplingParams
from punica.engine.text import GrowingText, TextCodec

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in
_VOCABULARY = 1 << 18  # strings of tokens that are kept
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Candidate(NamedTuple):
    """Token with its log-probability (``name``: see :meth:`punica.engine.text.TextCodec.name`)."""

    text: str
    logprob: float
    utf8: bytes
    name: str


class Position(NamedTuple):
    """Place of an answer's token in its text, in characters, and the candidates for it, the chosen one first."""

    offset: int
    candidates: Sequence[Candidate]


class CompletionForm:
    """Objects of ``/v1/completions``."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    delta = choice

    def opening(self, index: int) -> None:
        """No choice before the first token."""

    def logprobs(self, positions: Sequence[Position], num_top: int) -> dict[str, Any]:
        """Log-probabilities of new tokens; alternatives are what the engine gave, by name."""
        tops: list[dict[str, float]] = [{} for _ in positions]
        for top, position in zip(tops, positions, strict=True):
            for one in position.candidates:  # of tokens with one text the more probable
                top[one.name] = max(_finite(one.logprob), top.get(one.name, _LOWEST_LOGPROB))
        chosen = [position.candidates[0] for position in positions]
        return {
            "tokens": [one.name for one in chosen], "token_logprobs": [_finite(one.logprob) for one in chosen],
            "top_logprobs": tops, "text_offset": [position.offset for position in positions],
        }  # fmt: skip


class ChatForm:
    """Objects of ``/v1/chat/completions``."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def delta(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def logprobs(self, positions: Sequence[Position], num_top: int) -> dict[str, Any]:
        """Log-probabilities of new tokens, with the ``num_top`` most probable ones of each."""

        def described(one: Candidate) -> dict[str, Any]:
            return {"token": one.text, "logprob": _finite(one.logprob), "bytes": list(one.utf8)}

        content = []
        for _, candidates in positions:
            best = sorted(candidates, key=lambda one: -one.logprob)[:num_top]
            content.append({**described(candidates[0]), "top_logprobs": [described(one) for one in best]})
        return {"content": content, "refusal": None}


def usage(num_prompt: int, num_generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": num_prompt + num_generated,
    }  # fmt: skip


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + _encode(data).encode() + b"\n\n"


class TextEvents:
    """Events with the new text of a choice; what surrounds the text is encoded once, as most differ in it only."""

    def __init__(self, form: ChatForm | CompletionForm, head: dict[str, Any]) -> None:
        self._form, self._head = form, head
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice

    def set_usage(self, usage: dict[str, int]) -> None:
        self._head = {**self._head, "usage": usage}
        self._frames.clear()

    def of(self, index: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        if logprobs is not None or reason is not None:
            return self._event(index, text, logprobs, reason)
        if index not in self._frames:
            before, _, after = self._event(index, "", None, None).rpartition(b'""')  # its last string: nulls follow
            self._frames[index] = before, after
        before, after = self._frames[index]
        return before + _encode(text).encode() + after

    def _event(self, index: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        return event({**self._head, "choices": [self._form.delta(index, text, logprobs, reason)]})


class TokenStrings:
    """Strings of single tokens, special ones included; ``\\ufffd`` where a token is part of a character."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.of = lru_cache(_VOCABULARY)(codec.spelled)

    def at_start(self, token_id: int) -> str:
        """Return the string of a token at the start of a text, without its space."""
        return self.of(token_id).removeprefix(self.codec.dropped_space(token_id))


class ChoiceStrings:
    """Strings of the tokens of one choice with their log-probabilities and places in its text."""

    def __init__(self, strings: TokenStrings, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._strings, keeps = strings, not params.skip_special_tokens
        self._hidden = {} if keeps else strings.codec.special_texts
        self._text = GrowingText(strings.codec, keeps_special=keeps, prompt_token_ids=prompt_token_ids)
        self._is_first = strings.codec.first_text(reversed(prompt_token_ids), keeps_special=keeps) is None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = 0  # place of the last token

    def add(self, logprobs: Sequence[Mapping[int, float]]) -> list[Position]:
        codec, found = self._strings.codec, []
        for entry in logprobs:
            is_start, chosen = self._is_first and not self._text.has_begun, next(iter(entry))
            of = self._strings.at_start if is_start else self._strings.of
            candidates = [
                Candidate(text := of(token), value, codec.utf8(token, text), codec.name(token, text))
                for token, value in entry.items()
            ]
            found.append(Position(self._place(chosen, candidates[0].utf8), candidates))
        return found

    def _place(self, token_id: int, utf8: bytes) -> int:
        """Take the next token and its bytes; return where its text begins, at the character that it continues."""
        incomplete, place, each = self._decoder.getstate()[0], self._text.length, self._strings.codec.loses_each_byte
        utf8 = b"" if token_id in self._hidden else utf8
        is_continued = bool(incomplete) and len((incomplete + utf8[:1]).decode(errors="replace")) == 1
        self._decoder.decode(utf8)
        self._text.append(token_id)
        if is_continued and not each:
            place -= 1
        elif is_continued and (self._decoder.getstate()[0] or self._text.length <= place):  # not lost with earlier ones
            place = self._last
        self._last = place
        return place
