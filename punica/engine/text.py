"""Text in, text out: the tokenizer of a checkpoint folder, chat templates, incremental decoding."""

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from punica.checks import check_encodable, clip
from punica.engine.prompts import is_chat, messages_of, template_of, warn_of_template, warn_of_tokenizer
from punica.scheduling import SamplingParams

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_LONGEST_CHARACTER = 16  # tokens
_UNFINISHED = "�"  # decoded incomplete UTF-8 sequence
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)}.difference(_PRINTED)))
}  # by letter of byte-level tokens
_SPACES = ("▁", "<0x20>")  # SentencePiece's space before a word, and as a byte
_DEVELOPER = re.compile("""["']developer["']""")  # a template's comparison with the role
_TEMPLATE_ARGUMENTS = frozenset({
    "conversation", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs",
})  # fmt: skip


class TextCodec:
    """A transformers tokenizer; decoded text has no special tokens, unless asked for.

    ``adapter_templates``: chats with an adapter take the template of its folder, which runs in this process.
    """

    def __init__(self, tokenizer: Any, adapter_templates: bool = False) -> None:
        self.tokenizer, self.adapter_templates = tokenizer, adapter_templates
        self._lock = threading.Lock()  # encoding sets options of the tokenizer
        own, plain = type(tokenizer), PreTrainedTokenizerFast
        is_plain = all(getattr(own, name, None) is getattr(plain, name) for name in ("decode", "_decode"))
        self._fast = tokenizer.backend_tokenizer if is_plain else None  # half the time of its wrapper, once per token

    def __reduce__(self) -> tuple[type, tuple[Any, bool]]:
        return TextCodec, (self.tokenizer, self.adapter_templates)

    def encode(
        self, prompt: str | Sequence[Mapping[str, Any]], adapter_folder: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:  # fmt: skip
        """Encode a text, with the tokenizer's special tokens, or a chat by its template, with a generation prompt.

        A chat is ``[{"role": "user", "content": "..."}]``. With ``adapter_templates`` the one in ``adapter_folder``
        takes precedence over the tokenizer's. ``arguments``: further variables of the template, e.g.
        ``{"enable_thinking": False}``. Role ``developer`` is ``system`` for a template without it.

        ValueError: a lone surrogate; messages that are none; no chat template, or it refuses the messages.
        """
        if adapter_folder is not None:
            warn_of_tokenizer(adapter_folder, getattr(self.tokenizer, "name_or_path", "") or ".")
        text = prompt if isinstance(prompt, str) else self._rendered(prompt, adapter_folder, arguments or {})
        check_encodable("the prompt", text)
        with self._lock:
            return list(self.tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"])

    def end_token_ids(self, prompt: Any, adapter_folder: str | None) -> tuple[int, ...]:
        """Return the end token of the chat template in ``adapter_folder``, as its ``tokenizer_config.json`` names it.

        None where that template is not used: for other prompts than chats. ValueError: the tokenizer has no such token.
        """
        _, special = (self._template_of(adapter_folder) if is_chat(prompt) else None) or ("", {})
        if (end := special.get("eos_token")) is None:
            return ()
        token_id = self.tokenizer.convert_tokens_to_ids(end)
        if token_id is None or self.tokenizer.convert_ids_to_tokens(token_id) != end:
            raise ValueError(
                f"the adapter's tokenizer_config.json has the eos_token {clip(end)}, which is no token of the model's "
                "tokenizer, so no answer by its chat template would end; name one of the model's there, or remove the "
                "template"
            )
        return (int(token_id),)

    def encode_part(self, text: str) -> tuple[int, ...]:
        with self._lock:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], *, keeps_special: bool = False) -> str:
        if self._fast is not None:
            return str(self._fast.decode(token_ids, skip_special_tokens=not keeps_special))
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=not keeps_special, clean_up_tokenization_spaces=False
        )
        return text

    def spelled(self, token_id: int) -> str:
        """Return the text of one token within a text, special ones included.

        SentencePiece's decoders drop the space of ``▁word`` at the start of a text, see :meth:`dropped_space`.
        """
        alone = self.decode([token_id], keeps_special=True)
        if not self._piece(token_id).startswith(_SPACES):
            return alone
        return self.decode([token_id, token_id], keeps_special=True)[len(alone) :]

    def utf8(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that is spelled ``text``; of a part of a character its own, as the vocabulary
        tells them in byte-level letters or as ``<0xE2>``.
        """
        if _UNFINISHED not in text:
            return text.encode()
        piece = self._piece(token_id)
        fallback = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        own = bytes.fromhex(fallback[1]) if fallback else bytes(_BYTES.get(letter, 0) for letter in piece)
        return own if own.decode(errors="replace") == text else text.encode()

    def name(self, token_id: int, text: str) -> str:
        """Return the spelling by which clients tell a token from others: ``text``; of a part of a character OpenAI's
        ``bytes:\\xe2``; without text the vocabulary's piece, or ``token_id:7`` as vLLM's.
        """
        if not text:
            piece = getattr(self.tokenizer, "convert_ids_to_tokens", str)(token_id)
            return str(piece or f"token_id:{token_id}")
        if _UNFINISHED not in text or (own := self.utf8(token_id, text)) == text.encode():
            return text
        return "bytes:" + own.decode(errors="backslashreplace")

    def dropped_space(self, token_id: int) -> str:
        """Return the space of a token that decoding drops at the start of a text."""
        inside, alone = self.spelled(token_id), self.decode([token_id], keeps_special=True)
        return inside.removesuffix(alone) if inside.endswith(alone) else ""

    def leading_space(self, first: int, prompt_token_ids: Sequence[int], *, keeps_special: bool) -> str:
        """Return the space before an output whose text begins with ``first``: none behind a prompt without text."""
        space = self.dropped_space(first)
        if space and self.first_text(reversed(prompt_token_ids), keeps_special=keeps_special) is None:
            return ""
        return space

    def first_text(self, token_ids: Iterable[int], *, keeps_special: bool) -> int | None:
        """Return the first token that gives text, be it a space that decoding drops."""
        hidden = () if keeps_special else self.special_texts
        return next((token for token in token_ids if token not in hidden and self.spelled(token)), None)

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """Texts of the tokens that :meth:`decode` leaves out, by id."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        ids = {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        return {number: self.decode([number], keeps_special=True) for number in ids if not self.decode([number])}

    @cached_property
    def loses_each_byte(self) -> bool:
        """Tell if each byte of an incomplete character decodes to a replacement character, as by a byte fallback."""
        return "<0xE2>" in getattr(self.tokenizer, "get_vocab", dict)()

    def _piece(self, token_id: int) -> str:
        return str(getattr(self.tokenizer, "convert_ids_to_tokens", str)(token_id))

    def _template_of(self, adapter_folder: str | None) -> tuple[str, dict[str, str]] | None:
        if self.adapter_templates and adapter_folder is not None:
            return template_of(adapter_folder)
        if adapter_folder is not None:
            warn_of_template(adapter_folder)
        return None

    def _rendered(
        self, chat: Sequence[Mapping[str, Any]], adapter_folder: str | None, arguments: Mapping[str, Any]
    ) -> str:
        messages = messages_of(chat)
        if taken := sorted(_TEMPLATE_ARGUMENTS.intersection(arguments)):
            raise ValueError(f"chat template arguments {taken} are set by the engine; leave them out")
        own = self._template_of(adapter_folder)
        template, special = own or (getattr(self.tokenizer, "chat_template", None), {})
        if isinstance(template, Mapping):
            template = template.get("default")
        if not _DEVELOPER.search(str(template)):
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                messages, chat_template=own and own[0], tokenize=False, add_generation_prompt=True,
                **{**special, **arguments},
            )  # fmt: skip
        except Exception as error:  # any exception of a template
            raise ValueError(
                f"the chat template cannot turn {clip(messages)} into a prompt: {clip(str(error))}; pass a "
                "list of messages with role and content, or a text"
            ) from error
        return rendered


class GrowingText:
    """Incremental decoding, at a constant cost per token, with stop strings.

    ``settled`` is the text that no later token can change: whole characters, without a possible start of one of the
    ``stop`` strings. Once one of these is complete, ``stopped`` is true and the text ends before it. Special tokens are
    left out unless ``keeps_special``, but stop strings that contain one match it. Those that are complete before token
    number ``min_tokens`` are text. ``prompt_token_ids``: tokens before the text, which begins with their space.
    """

    def __init__(
        self, codec: TextCodec, stop: Sequence[str] = (), *, keeps_special: bool = False, min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._codec, self._stop, self._keeps_special = codec, stop, keeps_special
        self._min_tokens, self._prompt_token_ids = min_tokens, prompt_token_ids
        self._specials = {} if keeps_special else codec.special_texts
        self._is_searched = any(text in one for one in stop for text in self._specials.values())
        self.begin()

    def begin(self) -> None:
        """Forget all tokens."""
        self.stopped = self.has_begun = False
        self._longest = max((len(one) for one in self._stop), default=1)
        self._text = ""  # with the hidden parts: special tokens that may be in a stop string
        self._hidden: list[tuple[int, int]] = []
        self._ids: list[int] = []  # the first num_context are in the text, as known: context of the next
        self._num_tokens, self._num_taken, self._num_context, self._known = 0, 0, 0, ""

    @property
    def settled(self) -> str:
        return self._visible(len(self._text) if self.stopped else max(0, len(self._text) - self._longest + 1))

    @property
    def length(self) -> int:
        """Characters of the text if it ended here, without stop strings."""
        return len(self._text) + len(self._pending())

    def append(self, token_id: int) -> None:
        self._num_tokens += 1
        special = self._specials.get(token_id)
        if special is not None:  # never decoded: as context they would be the start of a text
            if self._is_searched:
                self._settle(self._pending())
                self._hidden.append((len(self._text), len(self._text) + len(special)))
                self._extend(special)
            return
        if not self.has_begun and self._codec.spelled(token_id):
            self._begin(token_id)
        self._ids.append(token_id)
        piece = self._pending()
        # longer than any character in bytes: the replacement character is final
        is_whole = piece and not piece.endswith(_UNFINISHED)
        if is_whole or len(self._ids) - self._num_context > _LONGEST_CHARACTER:
            self._settle(piece)

    def take(self, token_ids: Iterable[int], *, is_last: bool) -> str:
        """Append tokens; return the text that became certain since the last call, all that is left with the last."""
        for token_id in token_ids:
            self.append(token_id)
        whole = self.finish() if is_last else self.settled
        start, self._num_taken = self._num_taken, len(whole)
        return whole[start:]

    def finish(self) -> str:
        """Return the whole text after the last token, held-back parts included."""
        if not self.stopped:
            self._settle(self._pending())
            self._longest = 1
        return self._visible(len(self._text))

    def _begin(self, first: int) -> None:
        self.has_begun = True
        space = self._codec.leading_space(first, self._prompt_token_ids, keeps_special=self._keeps_special)
        if not space and self._hidden:  # in no text, but a stop string may have it behind a special token
            space = self._codec.dropped_space(first)
            self._hidden.append((len(self._text), len(self._text) + len(space)))
        self._extend(space)

    def _pending(self) -> str:
        return self._codec.decode(self._ids, keeps_special=self._keeps_special)[len(self._known) :]

    def _settle(self, piece: str) -> None:
        if self._num_context < len(self._ids):
            del self._ids[: self._num_context]
            self._num_context = len(self._ids)
            self._known = self._codec.decode(self._ids, keeps_special=self._keeps_special)
        self._extend(piece)

    def _extend(self, piece: str) -> None:
        if self.stopped:
            return
        before = len(self._text)
        self._text += piece
        if not self._stop or self._num_tokens < self._min_tokens:
            return
        # from where a string can begin that this piece completes
        places = [self._text.find(one, max(0, before - len(one) + 1)) for one in self._stop]
        found = [place for place in places if place >= 0]
        if found:
            self.stopped, self._text = True, self._text[: min(found)]

    def _visible(self, end: int) -> str:
        if not self._hidden:
            return self._text[:end]
        starts = [0, *(stop for _, stop in self._hidden)]
        stops = [*(start for start, _ in self._hidden), end]
        return "".join(self._text[start : min(stop, end)] for start, stop in zip(starts, stops, strict=True))


def ending_at(params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
    """Return parameters with more end tokens, unless they ignore those of the model."""
    if params.ignore_eos or not token_ids:
        return params
    return replace(params, stop_token_ids=tuple({*params.stop_token_ids, *token_ids}))


def growing_text(codec: TextCodec, params: SamplingParams, prompt_token_ids: Sequence[int]) -> GrowingText:
    return GrowingText(
        codec, params.stop, keeps_special=not params.skip_special_tokens, min_tokens=params.min_tokens,
        prompt_token_ids=prompt_token_ids,
    )  # fmt: skip


def text_of(
    codec: TextCodec, token_ids: Sequence[int], *, keeps_special: bool = False, prompt_token_ids: Sequence[int] = ()
) -> str:
    """Return the text of an output without stop strings, the same as its chunks in a stream join to.

    They differ from the decoded whole where a byte-fallback tokenizer meets bytes that are no character: it turns the
    run of bytes around them into replacement characters, the whole characters before included.
    """
    text = codec.decode(token_ids, keeps_special=keeps_special)
    if _UNFINISHED not in text:
        first = codec.first_text(token_ids, keeps_special=keeps_special)
        space = "" if first is None else codec.leading_space(first, prompt_token_ids, keeps_special=keeps_special)
        return space + text
    growing = GrowingText(codec, keeps_special=keeps_special, prompt_token_ids=prompt_token_ids)
    return growing.take(token_ids, is_last=True)


def bad_sequences(codec: TextCodec | None, words: Sequence[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of bad words: of a text as it is, and after a space, as within a sentence."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[word] = None
        elif codec is not None:
            found |= dict.fromkeys(codec.encode_part(text) for text in (word, f" {word.lstrip()}"))
    return tuple(sequence for sequence in found if sequence)


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a checkpoint folder; ``None`` if it has none. ValueError: its files are damaged.

    Nothing is downloaded and no code of the folder runs.
    """
    home = Path(folder).expanduser()
    if not any((home / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(home, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any exception of tokenizers
        raise ValueError(f"the tokenizer in {str(home)!r} cannot be loaded: {clip(str(error))}") from error
