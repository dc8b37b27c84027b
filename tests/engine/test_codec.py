"""Text in, text out: tokenizers of folders, chats, and text that grows token by token."""

import random

import pytest

from punica.engine import SamplingParams
from punica.engine.text import GrowingText, TextCodec, load_tokenizer, text_of
from tests.world import BEGIN, END, WORDS, byte_tokenizer, save_tokenizer, sentencepiece_tokenizer

TEXT = "Größe: 3 € — 数 👍!\nend"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(byte_tokenizer())


def ids_of(codec: TextCodec, text: str) -> list[int]:
    return codec.encode(text)[1:]


def test_a_folder_with_and_without_a_tokenizer(tmp_path) -> None:
    assert load_tokenizer(tmp_path) is None
    loaded = TextCodec(load_tokenizer(save_tokenizer(tmp_path)))
    ids = loaded.encode(TEXT)
    assert (ids[0], len(ids)) == (BEGIN, 1 + len(TEXT.encode()))
    assert loaded.decode(ids) == TEXT


def test_a_damaged_tokenizer_is_one_clear_error(tmp_path) -> None:
    (save_tokenizer(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)


def test_chats_by_the_template_of_the_tokenizer(codec) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert codec.decode(codec.encode(chat)) == "<system>Be brief.\n<user>Hi\n<a>"


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ messages[0].content.missing.more }}"])
def test_chats_without_a_fitting_template(template) -> None:
    with pytest.raises(ValueError, match="chat template cannot turn"):
        TextCodec(byte_tokenizer(template)).encode([{"role": "user", "content": "Hi"}])


def test_text_grows_by_whole_characters_and_is_the_decoded_text(codec) -> None:
    growing, seen = GrowingText(codec), [""]
    for token in ids_of(codec, TEXT):
        growing.append(token)
        assert growing.settled.startswith(seen[-1])
        seen.append(growing.settled)
    assert "�" not in "".join(seen)
    assert seen[-1] == growing.finish() == TEXT


def test_cut_characters_appear_at_the_end(codec) -> None:
    growing = GrowingText(codec)
    ids = ids_of(codec, "a€")[:-1]
    for token in ids:
        growing.append(token)
    assert growing.settled == "a"
    assert growing.finish() == codec.decode(ids) == "a�"


@pytest.mark.parametrize(
    ("stop", "left"),
    [(["3 €"], "Größe: "), (["zzz", "👍", "数"], "Größe: 3 € — "), (["G"], ""), (["ö", "rö"], "G"), (["END"], None)],
    ids=["in the middle", "first of several", "at once", "overlapping", "never"],
)
def test_stop_strings_end_the_text_before_them(codec, stop, left) -> None:
    growing, seen = GrowingText(codec, stop), ""
    for token in ids_of(codec, TEXT):
        growing.append(token)
        assert growing.settled.startswith(seen)
        seen = growing.settled  # nothing that was shown is ever taken back
        if growing.stopped:
            break
    assert growing.stopped == (left is not None)
    assert growing.finish() == (TEXT if left is None else left)


def test_what_may_begin_a_stop_string_is_held_back(codec) -> None:
    growing = GrowingText(codec, ["xyz"])
    for token in ids_of(codec, "abcx"):
        growing.append(token)
    assert growing.settled == "ab"
    assert growing.finish() == "abcx" == growing.settled


def test_unfinished_characters_do_not_pile_up() -> None:
    """Bytes that never become a character must not be decoded again and again, all of them at every token."""
    lengths: list[int] = []

    class Counting(TextCodec):
        def decode(self, token_ids, **options) -> str:
            lengths.append(len(token_ids))
            return super().decode(token_ids, **options)

    codec = Counting(byte_tokenizer())
    growing = GrowingText(codec)
    half = ids_of(codec, "€")[0]
    for _ in range(300):
        growing.append(half)
    assert max(lengths) < 50
    assert growing.finish() == codec.decode([half] * 300)


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


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("stop", [(), ("</s>zzz",)], ids=["plain", "stop"])
def test_random_outputs_continue_their_prompts(keeps, stop) -> None:
    """Special tokens, spaces and words anywhere; as one text, and token by token."""
    codec, chance = TextCodec(sentencepiece_tokenizer()), random.Random(5)
    vocabulary = codec.tokenizer.convert_tokens_to_ids([*WORDS, "<s>", "</s>", "<0x20>", "<0x41>"])
    special = codec.tokenizer.convert_tokens_to_ids(["<s>"])
    for _ in range(500):
        prompt, output = (chance.choices(vocabulary, k=chance.randrange(5)) for _ in range(2))
        prompt += chance.choice([[], special * 20])
        output += chance.choice([[], special * 20 + [WORDS["▁return"]]])
        start, together = (codec.decode(ids, keeps_special=keeps) for ids in (prompt, prompt + output))
        whole = text_of(codec, output, keeps_special=keeps, prompt_token_ids=prompt)
        assert start + whole == together, (prompt, output)
        growing = GrowingText(codec, stop, keeps_special=keeps, prompt_token_ids=prompt)
        for token in output:
            growing.append(token)
        assert growing.finish() == whole, (prompt, output)


@pytest.mark.parametrize("prompt", ["▁x", "<s>"])
@pytest.mark.parametrize("stop", ["</s> return", "turns"])
def test_a_stop_string_may_begin_an_output_with_a_special_token(prompt, stop) -> None:
    codec = TextCodec(sentencepiece_tokenizer())
    before, output = map(codec.tokenizer.convert_tokens_to_ids, ([prompt], ["</s>", "▁return", "s"]))
    growing = GrowingText(codec, [stop, "</s>zzz"], prompt_token_ids=before)
    for token in output:
        growing.append(token)
    left = "" if stop.startswith("</s>") else codec.decode([*before, *output])[len(codec.decode(before)) : -len(stop)]
    assert (growing.stopped, growing.finish()) == (True, left)


@pytest.mark.parametrize(("stop", "left"), [(" return", ""), (" ", ""), ("urns", " ret")])
def test_a_stop_string_may_begin_with_the_space_of_the_output(stop, left) -> None:
    growing = GrowingText(TextCodec(sentencepiece_tokenizer()), [stop], prompt_token_ids=[WORDS["▁x"]])
    for word in ("▁return", "s"):
        growing.append(WORDS[word])
    assert (growing.stopped, growing.finish()) == (True, left)


def test_results_and_chunks_of_an_engine_continue_the_prompt(backbone) -> None:
    engine = backbone.engine(tokenizer=sentencepiece_tokenizer())
    bias = {WORDS["▁return"]: 100.0}
    for params in (SamplingParams(2, logit_bias=bias), SamplingParams(2, logit_bias=bias, stop="no")):
        prompts = [[WORDS["▁x"]], [65]]
        assert [result.text for result in engine.generate(prompts, None, params)] == [" return return"] * 2
        assert "".join(chunk.text for chunk in engine.stream(prompts[:1], None, params)) == " return return"
