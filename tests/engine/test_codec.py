"""Text in, text out: tokenizers of folders, and text that grows token by token, up to a stop string."""

import random

import pytest

from punica.engine import SamplingParams
from punica.engine.text import GrowingText, TextCodec, load_tokenizer, text_of
from tests.world import (
    BEGIN,
    END,
    WORDS,
    byte_fallback_tokenizer,
    byte_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
)

TEXT = "Größe: 3 € — 数 👍!\nend"
HALF = byte_tokenizer().encode("€", add_special_tokens=False)[0]  # of a character


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(byte_tokenizer())


def ids_of(codec: TextCodec, text: str) -> list[int]:
    return codec.encode(text)[1:]


def grow(codec: TextCodec, tokens: list[int], stop: tuple[str, ...] = (), **options) -> tuple[str, list[str], int]:
    """Return the text, its chunks, and the number of tokens taken: nothing that was shown is ever taken back."""
    growing, chunks, shown, count = GrowingText(codec, stop, **options), [], "", 0
    for token in tokens:
        growing.append(token)
        count += 1
        assert growing.settled.startswith(shown)
        chunks.append(growing.settled[len(shown) :])
        shown = growing.settled
        if growing.stopped:
            break
    text = growing.finish()
    return text, [*chunks, text[len(shown) :]], count


def test_a_folder_with_and_without_a_tokenizer(tmp_path) -> None:
    assert load_tokenizer(tmp_path) is None
    loaded = TextCodec(load_tokenizer(save_tokenizer(tmp_path)))
    ids = loaded.encode(TEXT)
    assert (ids[0], len(ids)) == (BEGIN, 1 + len(TEXT.encode()))
    assert loaded.decode(ids) == TEXT
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_what_may_begin_a_stop_string_is_held_back(codec) -> None:
    assert grow(codec, ids_of(codec, "abcx"), ["xyz"])[:2] == ("abcx", ["", "", "a", "b", "cx"])


def test_unfinished_characters_do_not_pile_up(codec, monkeypatch) -> None:
    """Bytes that never become a character must not be decoded again and again, all of them at every token."""
    lengths, decode, half = [], codec.decode, ids_of(codec, "€")[:1]
    monkeypatch.setattr(codec, "decode", lambda ids, **options: lengths.append(len(ids)) or decode(ids, **options))
    assert grow(codec, half * 300)[0] == decode(half * 300)
    assert max(lengths) < 50


def test_decoding_is_the_tokenizers_own_with_and_without_its_wrapper(codec) -> None:
    """The wrapper is left out where no class overrides it, as it costs more than decoding."""
    ids = [*codec.encode("größe ☃"), END, 65]
    for keeps in (False, True):
        expected = codec.tokenizer.decode(ids, skip_special_tokens=not keeps, clean_up_tokenization_spaces=False)
        assert codec.decode(tuple(ids), keeps_special=keeps) == expected

    class Shouting(type(codec.tokenizer)):
        def _decode(self, *args, **options) -> str:
            return super()._decode(*args, **options).upper()

    assert TextCodec(Shouting(tokenizer_object=codec.tokenizer.backend_tokenizer)).decode(ids_of(codec, "ab")) == "AB"


# --- bytes of characters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["é", "日本", "a€b", "é€"])
def test_text_cut_inside_a_character_keeps_the_whole_ones(text) -> None:
    codec, data = TextCodec(byte_fallback_tokenizer()), text.encode()
    for end in range(1, len(data) + 1):
        whole = data[:end].decode(errors="ignore")
        found = text_of(codec, list(data[:end]))
        assert found.startswith(whole)
        assert set(found[len(whole) :]) <= {"\ufffd"}
        assert (found == whole) == (len(whole.encode()) == end)


@pytest.mark.parametrize("make", [byte_fallback_tokenizer, byte_tokenizer])
def test_text_of_random_tokens_is_what_grows(make) -> None:
    draw, codec = random.Random(1), TextCodec(make())
    for _ in range(60):
        tokens = [draw.choice([draw.randrange(256), *"aé€".encode()]) for _ in range(draw.randrange(1, 40))]
        assert text_of(codec, tokens) == "".join(grow(codec, tokens)[1])


# --- special tokens and spaces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "count"),
    [
        ([TEXT], ["3 €"], "Größe: ", None), ([TEXT], ["zzz", "👍", "数"], "Größe: 3 € — ", None),
        ([TEXT], ["G"], "", 1), ([TEXT], ["ö", "rö"], "G", None), ([TEXT], ["END"], TEXT, None),
        (["ab", END, "cd"], ["</s>"], "ab", 3), (["ab", END, "cd"], ["b</s>"], "a", 3),
        (["ab", END, "cd"], ["</s>c"], "ab", 4), (["ab", END, "cd"], ["b</s>c"], "a", 4),
        (["ab", END, "cd"], ["xx", "</s>"], "ab", 3), (["ab", END, "cd"], ["bc"], "a", 4),
        (["ab", END, "cd"], ["</s"], "abcd", 5), (["ab", END, "cd"], ["d", "</s></s>"], "abc", 5),
        (["é€", END, "x"], ["€</s>"], "é", 6), (["é", HALF, END], ["</s>"], "é\ufffd", 4),
    ],
    ids=str,
)  # fmt: skip
def test_stop_strings_end_the_text_before_them(codec, tokens, stop, text, count) -> None:
    """Text leaves special tokens out; a string without one matches the text that is shown."""
    ids = [one for each in tokens for one in ([each] if isinstance(each, int) else ids_of(codec, each))]
    found, chunks, taken = grow(codec, ids, stop)
    assert ("".join(chunks), found) == (text, text)
    assert count in (taken, None)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("stop", [(), ("</s>zzz",)], ids=["plain", "stop"])
def test_random_outputs_continue_their_prompts(keeps, stop) -> None:
    """Special tokens, spaces and words anywhere; as one text, and token by token."""
    codec, chance = TextCodec(sentencepiece_tokenizer()), random.Random(5)
    vocabulary = codec.tokenizer.convert_tokens_to_ids([*WORDS, "<s>", "</s>", "<0x20>", "<0x41>"])
    special = codec.tokenizer.convert_tokens_to_ids(["<s>"])
    for _ in range(300):
        prompt, output = (chance.choices(vocabulary, k=chance.randrange(5)) for _ in range(2))
        prompt += chance.choice([[], special * 20])
        output += chance.choice([[], special * 20 + [WORDS["▁return"]]])
        start, together = (codec.decode(ids, keeps_special=keeps) for ids in (prompt, prompt + output))
        whole = text_of(codec, output, keeps_special=keeps, prompt_token_ids=prompt)
        assert start + whole == together, (prompt, output)
        assert grow(codec, output, stop, keeps_special=keeps, prompt_token_ids=prompt)[0] == whole, (prompt, output)


@pytest.mark.parametrize(
    ("prompt", "output", "stop", "left"),
    [
        ("▁x", ["</s>", "▁return", "s"], "</s> return", ""), ("<s>", ["</s>", "▁return", "s"], "</s> return", ""),
        ("▁x", ["</s>", "▁return", "s"], "turns", " re"), ("<s>", ["</s>", "▁return", "s"], "turns", "re"),
        ("▁x", ["▁return", "s"], " return", ""), ("▁x", ["▁return", "s"], " ", ""),
        ("▁x", ["▁return", "s"], "urns", " ret"),
    ],
    ids=str,
)  # fmt: skip
def test_a_stop_string_may_begin_with_a_special_token_or_the_space_of_an_output(prompt, output, stop, left) -> None:
    codec = TextCodec(sentencepiece_tokenizer())
    before, tokens = map(codec.tokenizer.convert_tokens_to_ids, ([prompt], output))
    assert grow(codec, tokens, (stop, "</s>zzz"), prompt_token_ids=before)[0] == left


@pytest.mark.parametrize("stop", [(), ("no",)])
def test_results_and_chunks_of_an_engine_continue_the_prompt(backbone, stop) -> None:
    engine = backbone.engine(tokenizer=sentencepiece_tokenizer())
    prompts, params = [[WORDS["▁x"]], [65]], SamplingParams(2, logit_bias={WORDS["▁return"]: 100.0}, stop=stop)
    assert [result.text for result in engine.generate(prompts, None, params)] == [" return return"] * 2
    assert "".join(chunk.text for chunk in engine.stream(prompts[:1], None, params)) == " return return"
