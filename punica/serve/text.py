"""Strings of single tokens, with their log-probabilities and places in the text of a choice."""

import codecs
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

from punica.engine import SamplingParams
from punica.engine.text import TextCodec
from punica.serve.forms import Candidate, Position

_VOCABULARY = 1 << 18  # strings of tokens that are kept


class TokenStrings:
    """Strings of single tokens, special ones included; ``\\ufffd`` where a token is part of a character."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.of = lru_cache(_VOCABULARY)(codec.spelled)

    def at_start(self, token_id: int) -> str:
        """Return the string of a token at the start of a text, where its space is dropped."""
        return self.of(token_id).removeprefix(self.codec.dropped_space(token_id))


class ChoiceStrings:
    """Strings of the tokens of one choice with their log-probabilities and places in its text."""

    def __init__(self, strings: TokenStrings, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._strings = strings
        self._hidden = strings.codec.special_texts if params.skip_special_tokens else {}
        self._first_text = partial(strings.codec.first_text, keeps_special=not params.skip_special_tokens)
        self._is_start = self._first_text(reversed(prompt_token_ids)) is None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # without a character that is incomplete

    def add(self, logprobs: Sequence[Mapping[int, float]]) -> list[Position]:
        """Return the next tokens and their alternatives."""
        codec, found = self._strings.codec, []
        for entry in logprobs:
            of, chosen = self._strings.at_start if self._is_start else self._strings.of, next(iter(entry))
            candidates = [
                Candidate(text := of(token), value, codec.utf8(token, text), codec.name(token, text))
                for token, value in entry.items()
            ]
            found.append(Position(self._place(b"" if chosen in self._hidden else candidates[0].utf8), candidates))
            self._is_start = self._is_start and self._first_text([chosen]) is None
        return found

    def _place(self, utf8: bytes) -> int:
        """Take the bytes of the next token; return where its text begins, at the character that it continues."""
        incomplete = self._decoder.getstate()[0]
        is_continued = len((incomplete + utf8[:1]).decode(errors="replace")) == 1
        place = self._length + (bool(incomplete) and not is_continued)
        self._length += len(self._decoder.decode(utf8))
        return place
