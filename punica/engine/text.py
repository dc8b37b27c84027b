"""Text in, text out: the tokenizer of a checkpoint folder, chat templates, incremental decoding."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from punica.checks import clip

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_LONGEST_CHARACTER = 16  # tokens
_UNFINISHED = "�"  # decoded incomplete UTF-8 sequence


class TextCodec:
    """A transformers tokenizer; decoded text has no special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Encode a text, with the tokenizer's special tokens, or a chat by its template, with a generation prompt.

        A chat is ``[{"role": "user", "content": "..."}]``.

        ValueError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        try:
            return list(self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False))
        except Exception as error:  # any exception of a template
            raise ValueError(
                f"the tokenizer's chat template cannot turn {clip(prompt)} into a prompt: {clip(str(error))}; pass a "
                "list of messages with role and content, or a text"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class GrowingText:
    """Incremental decoding, at a constant cost per token, with stop strings.

    ``settled`` is the text that no later token can change: whole characters, without a possible start of one of the
    ``stop`` strings. Once one of these is complete, ``stopped`` is true and the text ends before it.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._codec, self._stop = codec, stop
        self._longest = max((len(one) for one in stop), default=1)
        self._text = ""
        self._ids: list[int] = []
        self._before, self._read = 0, 0  # tokens [before, read) are in the text: context of the next

    @property
    def settled(self) -> str:
        """Text that no later token can change."""
        return self._text if self.stopped else self._text[: max(0, len(self._text) - self._longest + 1)]

    def append(self, token_id: int) -> None:
        """Take the next token."""
        self._ids.append(token_id)
        piece = self._pending()
        # longer than any character in bytes: the replacement character is final
        settles = piece and not piece.endswith(_UNFINISHED)
        if settles or len(self._ids) - self._read > _LONGEST_CHARACTER:
            self._before, self._read = self._read, len(self._ids)
            self._extend(piece)

    def finish(self) -> str:
        """Return the whole text after the last token, held-back parts included."""
        if not self.stopped:
            self._extend(self._pending())
            self._before = self._read = len(self._ids)
            self._longest = 1
        return self._text

    def _pending(self) -> str:
        known = self._codec.decode(self._ids[self._before : self._read])
        return self._codec.decode(self._ids[self._before :])[len(known) :]

    def _extend(self, piece: str) -> None:
        searched = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        found = [place for one in self._stop if (place := self._text.find(one, searched)) >= 0]
        if found:
            self.stopped, self._text = True, self._text[: min(found)]


def load_codec(folder: str | Path) -> TextCodec | None:
    """Load the tokenizer of a checkpoint folder; ``None`` if it has none. ValueError: its files are damaged.

    Nothing is downloaded and no code of the folder runs.
    """
    home = Path(folder).expanduser()
    if not any((home / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return TextCodec(AutoTokenizer.from_pretrained(home, local_files_only=True, trust_remote_code=False))
    except Exception as error:  # any exception of tokenizers
        raise ValueError(f"the tokenizer in {str(home)!r} cannot be loaded: {clip(str(error))}") from error
