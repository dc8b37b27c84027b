"""Text of one choice as its tokens arrive, and the strings of single tokens."""

from collections.abc import Sequence
from functools import lru_cache

from punica.engine import SamplingParams
from punica.engine.text import TextCodec, growing_text
from punica.serve.engine_thread import Piece

_VOCABULARY = 1 << 18  # strings of tokens that are kept


class ChoiceText:
    """Text of one choice in pieces: whole characters, held back while they may begin a stop string; together they are
    the text of the result.
    """

    def __init__(self, codec: TextCodec, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._text = growing_text(codec, params, prompt_token_ids)
        self._num_sent = 0

    def add(self, piece: Piece) -> str:
        """Return the text that became certain with a piece."""
        for token in piece.token_ids[: piece.num_text]:
            self._text.append(token)
        whole = self._text.settled if piece.result is None else self._text.finish()
        start, self._num_sent = self._num_sent, len(whole)
        return whole[start:]


class TokenStrings:
    """Strings of single tokens, special ones included; ``\\ufffd`` where a token is part of a character."""

    def __init__(self, codec: TextCodec) -> None:
        self.of = lru_cache(_VOCABULARY)(codec.spelled)
