"""Text of one choice as its tokens arrive, and the strings of single tokens."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

from punica.engine import SamplingParams
from punica.engine.text import TextCodec, growing_text
from punica.serve.calls import Piece
from punica.serve.forms import Logprobs

_VOCABULARY = 1 << 18  # strings of tokens that are kept


class ChoiceText:
    """Text of one choice in pieces: whole characters, held back while they may begin a stop string; together they are
    the text of the result.
    """

    def __init__(self, codec: TextCodec, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._text = growing_text(codec, params, prompt_token_ids)

    def add(self, piece: Piece) -> str:
        """Return the text that became certain with a piece."""
        return self._text.take(piece.token_ids[: piece.num_text], is_last=piece.result is not None)


class TokenStrings:
    """Strings of single tokens, special ones included; ``\\ufffd`` where a token is part of a character."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.of = lru_cache(_VOCABULARY)(codec.spelled)

    def at_start(self, token_id: int) -> str:
        """Return the string of a token at the start of a text, where its space is dropped."""
        return self.of(token_id).removeprefix(self.codec.dropped_space(token_id))


class ChoiceStrings:
    """Strings of the tokens of one choice with their log-probabilities, which join to its text, and their length."""

    def __init__(self, strings: TokenStrings, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._strings = strings
        self._first_text = partial(strings.codec.first_text, keeps_special=not params.skip_special_tokens)
        self._is_start = self._first_text(reversed(prompt_token_ids)) is None
        self.length = 0

    def add(self, logprobs: Sequence[Mapping[int, float]]) -> Logprobs:
        """Return ``(string, logprob, bytes)`` of the next tokens, the chosen one of each first."""
        utf8, found = self._strings.codec.utf8, []
        for entry in logprobs:
            of = self._strings.at_start if self._is_start else self._strings.of
            found.append([(text := of(token), value, utf8(token, text)) for token, value in entry.items()])
            self.length += len(found[-1][0][0])
            self._is_start = self._is_start and self._first_text([next(iter(entry))]) is None
        return found
