"""Strings of tokens that end inside of characters, with log-probabilities and places; events of streams."""

import json
from typing import Any

import pytest

from punica.engine import SamplingParams
from punica.engine.text import TextCodec, text_of
from punica.serve.forms import (
    Candidate,
    ChatForm,
    ChoiceStrings,
    CompletionForm,
    Position,
    TextEvents,
    TokenStrings,
    event,
    usage,
)
from tests.world import END, WORDS, byte_fallback_tokenizer, byte_tokenizer, sentencepiece_tokenizer


def test_strings_of_sentencepiece_continue_the_prompt() -> None:
    tokens = [WORDS["▁"], WORDS["▁return"], WORDS["s"], WORDS["▁x"]]
    strings = TokenStrings(TextCodec(sentencepiece_tokenizer()))
    assert [strings.of(token) for token in tokens] == [" ", " return", "s", " x"]
    assert TokenStrings(TextCodec(byte_tokenizer())).of(END) == "</s>"


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("prompt", [["▁x"], ["<s>"]], ids=str)
def test_strings_of_tokens_join_to_the_text(prompt: list[str], keeps: bool) -> None:
    codec = TextCodec(sentencepiece_tokenizer())
    before, tokens = codec.tokenizer.convert_tokens_to_ids(prompt), [WORDS["▁return"], WORDS["▁x"], WORDS["s"]]
    strings = ChoiceStrings(TokenStrings(codec), SamplingParams(skip_special_tokens=not keeps), before)
    positions = [one for token in tokens for one in strings.add([{token: -1.0, WORDS["▁x"]: -2.0}])]
    text = text_of(codec, tokens, keeps_special=keeps, prompt_token_ids=before)
    assert "".join(candidates[0].text for _, candidates in positions) == text
    other = " x" if text.startswith(" ") else "x"
    assert positions[0].candidates[1] == (other, -2.0, other.encode(), other)
    assert positions[2].candidates == [("s", -1.0, b"s", "s"), (" x", -2.0, b" x", " x")]
    assert CompletionForm().logprobs(positions, 1)["text_offset"][2] == text.index("s", text.index("x"))


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, byte_fallback_tokenizer, sentencepiece_tokenizer])
def test_bytes_of_tokens_are_their_own_where_they_are_part_of_a_character(tokenizer: Any) -> None:
    codec, text = TextCodec(tokenizer()), "größe ☃ 𝄞\ufffd\0\x7f\xad"
    strings = ChoiceStrings(TokenStrings(codec), SamplingParams(), codec.encode("x"))
    found = [candidates[0] for _, candidates in strings.add([{token: -1.0} for token in codec.encode_part(text)])]
    assert any(one.text == "\ufffd" != one.utf8.decode(errors="ignore") for one in found)
    assert b"".join(one.utf8 for one in found) == text.encode()


def test_a_replacement_character_that_is_a_token_of_its_own_keeps_its_bytes() -> None:
    assert TextCodec(sentencepiece_tokenizer()).utf8(WORDS["▁x"], "\ufffd") == "\ufffd".encode()


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, byte_fallback_tokenizer, sentencepiece_tokenizer])
def test_every_token_of_a_vocabulary_has_a_name_of_its_own(tokenizer: Any) -> None:
    """Parts of characters, special tokens, and ids beyond the tokenizer, as of padded embeddings."""
    codec = TextCodec(tokenizer())
    strings = ChoiceStrings(TokenStrings(codec), SamplingParams(), codec.encode("x"))
    tokens = range(len(codec.tokenizer) + 20)
    form = CompletionForm().logprobs(strings.add([{token: -1.0 - token for token in tokens}]), len(tokens))
    (top,), vocabulary = form["top_logprobs"], codec.tokenizer.get_vocab()
    twins = [vocabulary[byte] for word, byte in (("▁", "<0x20>"), ("s", "<0x73>")) if {word, byte} <= {*vocabulary}]
    assert sorted(top.values()) == sorted(-1.0 - token for token in tokens if token not in twins)
    assert f"token_id:{tokens[-1]}" in top
    assert not any("\ufffd" in name for name in top)


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_tokens_with_one_text_the_more_probable_is_named(order: int) -> None:
    codec = TextCodec(sentencepiece_tokenizer())
    strings = ChoiceStrings(TokenStrings(codec), SamplingParams(), codec.encode("x"))
    entry = dict([(WORDS["s"], -3.0), (len(WORDS) + ord("s"), -1.0)][::order])
    form = CompletionForm().logprobs(strings.add([entry]), 2)
    assert (form["tokens"], form["top_logprobs"]) == (["s"], [{"s": -1.0}])


def test_parts_of_characters_are_named_and_placed_as_by_openai() -> None:
    codec = TextCodec(byte_tokenizer())
    strings = ChoiceStrings(TokenStrings(codec), SamplingParams(), codec.encode("x"))
    tokens = [token for text in ("a€b", "€"[:1]) for token in codec.encode_part(text)]
    tokens[-1:] = [END, *codec.encode_part("é!")]  # half a character, a special token, and whole ones
    form = CompletionForm().logprobs(strings.add([{token: -1.0} for token in tokens]), 1)
    parts = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert form["tokens"] == ["a", *parts, "b", *parts[:2], "</s>", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert text_of(codec, tokens) == "a€b\ufffdé!"
    assert form["text_offset"] == [0, 1, 1, 1, 2, 3, 3, 3, 4, 4, 5]
    assert [next(iter(top)) for top in form["top_logprobs"]] == form["tokens"]


@pytest.mark.parametrize(
    ("run", "shown", "places"),
    [
        ("€".encode()[:2], "??", [0, 0]), ("€".encode()[:2] + "é".encode(), "????", [0, 0, 2, 3]),
        ("é€".encode(), "é€", [0, 0, 1, 1, 1]), ("é€".encode()[:4], "é???", [0, 0, 1, 1]),
        ("é".encode() + b"\xa9" + "é".encode(), "é????", [0, 0, 1, 3, 4]),
    ],
)  # fmt: skip
def test_places_behind_a_lost_character_of_a_byte_fallback(run: bytes, shown: str, places: list[int]) -> None:
    """Whole characters in its run of bytes are lost with it, if they come later."""
    codec = TextCodec(sentencepiece_tokenizer())
    strings = ChoiceStrings(TokenStrings(codec), SamplingParams(), codec.encode("x"))
    tokens = [*(len(WORDS) + byte for byte in run), WORDS["s"], WORDS["▁x"]]
    text, form = text_of(codec, tokens), CompletionForm().logprobs(strings.add([{token: -1.0} for token in tokens]), 1)
    assert text == shown.replace("?", "\ufffd") + "s x"
    assert form["text_offset"] == [*places, text.index("s"), text.index(" x")]


@pytest.mark.parametrize("form", [CompletionForm(), ChatForm()], ids=["completion", "chat"])
@pytest.mark.parametrize("extra", [{}, {"usage": None}], ids=["plain", "usage"])
def test_an_event_is_its_object_encoded_whole(form: Any, extra: dict[str, Any]) -> None:
    head: dict[str, Any] = {"id": "x", "model": 'a"", ""', **extra}
    events = TextEvents(form, head)

    def check(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> None:
        found = events.of(index, text, logprobs, reason)
        assert found == event({**head, "choices": [form.delta(index, text, logprobs, reason)]})
        assert json.loads(found.removeprefix(b"data: "))["model"] == head["model"]

    for index, text in [(0, "a"), (1, '"" \\ \n\x00'), (0, "größe ☃ 𝄞"), (11, "</s>"), (1, "")]:
        check(index, text)
    check(1, "", reason="stop")
    check(0, "a", form.logprobs([Position(0, [Candidate("a", -1.0, b"a", "a")])], 1))
    if extra:
        for count in range(3):
            head = {**head, "usage": usage(5, count)}
            events.set_usage(usage(5, count))
            check(0, "a")
            check(0, "b")
