"""Prompts and texts as users have them: mappings, parts, surrogates, special stop strings, adapters' own templates."""

import json
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig, SamplingParams
from punica.engine.prompts import listed_prompts
from punica.engine.text import GrowingText, TextCodec, text_of
from tests.world import END, byte_fallback_tokenizer, byte_tokenizer, save_tokenizer

USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def talker(backbone) -> Engine:
    """An engine with a tokenizer whose bytes are the first 256 ids; texts begin with an id beyond its vocabulary."""
    config = EngineConfig(max_batch_size=8, max_model_len=64, adapter_templates=True)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = byte_fallback_tokenizer().backend_tokenizer.post_processor
    return Engine(backbone.model(), config.lora_config(16), config, tokenizer=tokenizer)


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(byte_tokenizer(), adapter_templates=True)


def prompt_ids(engine: Engine, prompts: Any, **more: Any) -> list[list[int]]:
    return [list(result.prompt_token_ids) for result in engine.generate(prompts, params=1, **more)]


def said(engine: Engine, ids: list[int]) -> str:
    return engine.codec.tokenizer.decode(ids)


# --- forms of prompts ------------------------------------------------------------------------------------------------


def test_mappings_are_prompts_as_in_vllm(talker) -> None:
    as_text = prompt_ids(talker, ["ab", "c"])
    assert prompt_ids(talker, [{"prompt": "ab"}, {"prompt": "c"}]) == as_text
    assert prompt_ids(talker, [{"prompt_token_ids": as_text[0]}, {"prompt": "c"}]) == as_text
    assert prompt_ids(talker, {"prompt": "ab"}) == prompt_ids(talker, ({"prompt": "ab"},)) == as_text[:1]
    assert prompt_ids(talker, ["ab", {"prompt": "c", "prompt_token_ids": None}]) == as_text
    assert prompt_ids(talker, {"prompt": "other", "prompt_token_ids": as_text[1]}) == as_text[1:]


def test_chats_in_every_place(talker) -> None:
    (ids,) = prompt_ids(talker, [USER])
    assert said(talker, ids).endswith("<user>Hi\n<a>")
    assert prompt_ids(talker, [[USER], (USER,), "x"])[:2] == [ids, ids]
    assert prompt_ids(talker, (USER,)) == [ids]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([{"text": "ab"}], r"messages\[0\] is .*'text'.* role"),
        ([{"role": "user"}], r"messages\[0\]\.content is None"),
        ([{"content": "Hi"}], r"messages\[0\] is .* role"),
        ([{"role": 3, "content": "Hi"}], r"messages\[0\] is .* role"),
        ([USER, {}], r"messages\[1\] is \{\}"),
        ([{"prompt": "ab"}, USER], r"messages\[0\] is .*prompts in mappings have the key"),
        ([[USER], {"text": "ab"}], r"prompts\[1\] is a mapping with \['text'\]"),
        ({"prompt": "ab", "multi_modal_data": {"image": 1}}, r"prompts\[0\] is a mapping with .*multi_modal_data"),
        ({}, r"prompts\[0\] is a mapping with \[\]"),
        ([{"role": "user", "content": 5}], r"content is 5, must be a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         r"messages\[0\]\.content\[0\] is of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}],
         r"messages\[0\]\.content\[1\] is of type 'input_audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is of type 'text'"),
        (["ok", "bad \ud800"], r"prompts\[1\]: .*lone surrogate U\+D800 at character 4"),
        ([{"role": "user", "content": "\udfff"}], r"prompts\[0\]: .*lone surrogate U\+DFFF"),
        ([{"prompt": "\udc00"}], r"prompts\[0\]: .*lone surrogate U\+DC00 at character 0"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_before_any_runs(talker, prompts, message) -> None:
    steps = []
    talker.step = lambda: steps.append(1)
    for call in (talker.generate, lambda *given: list(talker.stream(*given))):
        with pytest.raises(ValueError, match=message):
            call(prompts)
    assert not steps
    assert not talker.has_unfinished()


def test_a_prompt_of_a_mapping_is_text() -> None:
    with pytest.raises(TypeError, match=r"prompts\[0\]\['prompt'\] must be a str, got list"):
        listed_prompts([{"prompt": [1, 2]}])


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "text", "text": "b"}], "a\nb"), ([], ""), ("a", "a"),
    ],
)  # fmt: skip
def test_text_parts_are_joined(talker, content, joined) -> None:
    (ids,) = prompt_ids(talker, [{"role": "user", "content": content}])
    assert said(talker, ids).endswith(f"<user>{joined}\n<a>")


def test_a_message_of_tool_calls_needs_no_content(codec) -> None:
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert codec.decode(codec.encode(chat)).startswith("<user>Hi\n<assistant>")


# --- special stop strings --------------------------------------------------------------------------------------------


def grow(codec: TextCodec, tokens: list[int], stop: tuple[str, ...]) -> tuple[str, list[str], int]:
    """Return the text, its chunks, and the number of tokens taken."""
    growing, chunks, sent, count = GrowingText(codec, stop), [], 0, 0
    for count, token in enumerate(tokens, start=1):  # noqa: B007
        growing.append(token)
        chunks.append(growing.settled[sent:])
        sent = len(growing.settled)
        if growing.stopped:
            break
    text = growing.finish()
    chunks.append(text[sent:])
    return text, chunks, count


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (("</s>",), "ab", 3), (("b</s>",), "a", 3), (("</s>c",), "ab", 4), (("b</s>c",), "a", 4),
        (("xx", "</s>"), "ab", 3), (("cd",), "ab", 5), (("bc",), "abcd", 5),
        (("</s",), "abcd", 5), (("d", "</s></s>"), "abc", 5),
    ],
    ids=str,
)  # fmt: skip
def test_stop_strings_match_special_tokens(codec, stop, text, count) -> None:
    """Text leaves special tokens out; a string without one matches the text that is shown."""
    tokens = [*codec.encode("ab")[1:], END, *codec.encode("cd")[1:]]
    expected = ("a" if stop == ("bc",) else text, 4 if stop == ("bc",) else count)
    found, chunks, taken = grow(codec, tokens, stop)
    assert (found, taken) == expected
    assert "".join(chunks) == found


def test_special_stop_strings_with_characters_of_several_tokens(codec) -> None:
    tokens = [*codec.encode("é€")[1:], END, *codec.encode("x")[1:]]
    assert grow(codec, tokens, ("€</s>",))[0] == "é"
    assert grow(codec, [*tokens[:4], END], ("</s>",))[0] == "é\ufffd"


def test_a_special_stop_string_ends_a_request(backbone, talker) -> None:
    (free,) = talker.generate([[5, 6]], None, 12)
    letters = [place for place, token in enumerate(free.token_ids) if token < 94]  # ids of printable ASCII
    place = next(one for one in letters if one and free.token_ids[one] not in free.token_ids[:one])
    special = free.token_ids[place]
    tokenizer = byte_tokenizer()
    letter = tokenizer.convert_ids_to_tokens(special)
    tokenizer.add_special_tokens({"additional_special_tokens": [letter]})
    assert tokenizer.convert_tokens_to_ids(letter) == special
    engine = Engine(backbone.model(), None, EngineConfig(max_batch_size=2, max_model_len=64), tokenizer=tokenizer)
    params = SamplingParams(12, stop=(letter,))
    (result,) = engine.generate([[5, 6]], None, params)
    assert (result.finish_reason, result.token_ids) == ("stop", free.token_ids[: place + 1])
    assert result.text == engine.codec.decode(free.token_ids[:place])
    chunks = list(engine.stream([[5, 6]], None, params))
    assert "".join(chunk.text for chunk in chunks) == result.text


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("zzzz",)], ids=["no stop string", "a stop string"])
@pytest.mark.parametrize("make", [byte_fallback_tokenizer, byte_tokenizer])
def test_chunks_join_to_the_text_whatever_the_bytes(backbone, make, stop) -> None:
    """The tiny model's tokens are bytes, most of them no characters."""
    config = EngineConfig(max_batch_size=8, max_model_len=64)
    engine = Engine(backbone.model(), None, config, tokenizer=make())
    prompts = [[number, 7] for number in range(8)]
    params = [SamplingParams(9 + number, temperature=1.0, seed=number, stop=stop) for number in range(8)]
    texts = [result.text for result in engine.generate(prompts, None, params)]
    joined = [""] * len(prompts)
    for chunk in engine.stream(prompts, None, params):
        joined[chunk.index] += chunk.text
    assert joined == texts
    assert any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("text", ["é", "日本", "a€b", "👍", "é€"])
def test_text_cut_inside_a_character_keeps_the_whole_ones(text) -> None:
    codec = TextCodec(byte_fallback_tokenizer())
    data = text.encode()
    for end in range(1, len(data) + 1):
        whole = data[:end].decode(errors="ignore")
        found = text_of(codec, list(data[:end]))
        assert found.startswith(whole)
        assert set(found[len(whole) :]) <= {"\ufffd"}
        assert (found == whole) == (len(whole.encode()) == end)
        assert "".join(grow(codec, list(data[:end]), ())[1]) == found


def test_text_of_random_tokens_is_what_grows() -> None:
    draw = random.Random(1)
    for make in (byte_fallback_tokenizer, byte_tokenizer):
        codec = TextCodec(make())
        for _ in range(60):
            tokens = [draw.choice([draw.randrange(256), *"aé€".encode()]) for _ in range(draw.randrange(1, 40))]
            assert text_of(codec, tokens) == "".join(grow(codec, tokens, ())[1])


# --- adapters' own text ----------------------------------------------------------------------------------------------


def own_template(folder: Path, how: str) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    if how == "file":
        (folder / "chat_template.jinja").write_text(template)
    else:
        several = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
        value = template if how == "config" else several
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))


@pytest.fixture
def adapter(backbone, tmp_path) -> LoRARequest:
    folder = shutil.copytree(backbone.adapters[1].lora_path, tmp_path / "adapter")
    return LoRARequest("own", 31, str(folder))


@pytest.mark.parametrize("how", ["file", "config", "several"])
def test_chats_take_the_template_of_the_adapter(talker, adapter, how) -> None:
    base = prompt_ids(talker, [USER])
    own_template(Path(adapter.lora_path), how)
    (ids,) = prompt_ids(talker, [USER], adapters=adapter)
    assert said(talker, ids) == "[Hi]"
    assert prompt_ids(talker, [USER]) == base
    both = prompt_ids(talker, [[USER], [USER], "Hi"], adapters=[adapter, None, adapter])
    assert both[:2] == [ids, *base]
    assert said(talker, both[2]) == "Hi"


def test_a_template_that_is_not_trusted_is_warned_of_once(adapter) -> None:
    codec = TextCodec(byte_tokenizer())
    own_template(Path(adapter.lora_path), "config")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [codec.encode([USER], adapter.lora_path) for _ in range(3)] == [codec.encode([USER])] * 3
        assert codec.end_token_ids([USER], adapter.lora_path) == ()
    assert sum("chat template of its own" in str(one.message) for one in caught) == 1


def test_templates_in_configurations_have_a_limit(codec, tmp_path) -> None:
    for size, is_taken in ((1 << 20, True), (1 + (1 << 20), False)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a" * size}))
        assert (codec.decode(codec.encode([USER], str(tmp_path))) == "a" * size) == is_taken


def test_a_rewritten_template_is_the_one_in_use(talker, adapter) -> None:
    own_template(Path(adapter.lora_path), "file")
    prompt_ids(talker, [USER], adapters=adapter)
    Path(adapter.lora_path, "chat_template.jinja").write_text("new")
    assert [said(talker, ids) for ids in prompt_ids(talker, [USER], adapters=adapter)] == ["new"]


def test_a_damaged_template_is_one_error_and_a_damaged_config_none(talker, adapter) -> None:
    Path(adapter.lora_path, "tokenizer_config.json").write_text("{")
    assert prompt_ids(talker, [USER], adapters=adapter) == prompt_ids(talker, [USER])
    Path(adapter.lora_path, "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match=r"prompts\[0\]: the chat template cannot turn"):
        talker.generate([USER], adapter, 1)


@pytest.mark.parametrize("differs", [True, False], ids=["another vocabulary", "the base model's"])
def test_another_tokenizer_is_warned_of_once(backbone, adapter, tmp_path, differs) -> None:
    base = shutil.copytree(backbone.folder, tmp_path / "base", ignore=shutil.ignore_patterns("adapter*"))
    save_tokenizer(base)
    save_tokenizer(Path(adapter.lora_path))
    if differs:
        file = Path(adapter.lora_path, "tokenizer.json")
        values = json.loads(file.read_text())
        values["added_tokens"].append({**values["added_tokens"][0], "id": 258, "content": "<tool>"})
        file.write_text(json.dumps(values))
    else:
        file = Path(adapter.lora_path, "tokenizer.json")
        file.write_text(json.dumps(json.loads(file.read_text())))  # other bytes, the same tokenizer
    engine = Engine.from_pretrained(base, adapter, device="cpu", max_model_len=64)
    engine.codec.tokenizer.backend_tokenizer.post_processor = byte_fallback_tokenizer().backend_tokenizer.post_processor
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            engine.generate(["ab"], adapter, 1)
    found = [str(one.message) for one in caught if "tokenizer of its own" in str(one.message)]
    assert len(found) == differs


ENDED = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def own_end(adapter: LoRARequest, end: object, as_file: bool = True) -> None:
    """A template and an end token in an adapter's folder."""
    if as_file:
        Path(adapter.lora_path, "chat_template.jinja").write_text(ENDED)
    config = {"eos_token": end} if as_file else {"eos_token": end, "chat_template": ENDED, "pad_token": None}
    Path(adapter.lora_path, "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, **config}))


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "config"])
@pytest.mark.parametrize("end", ["Q", {"content": "Q", "lstrip": False}], ids=["text", "mapping"])
def test_a_chat_by_the_template_of_an_adapter_ends_at_its_end_token(talker, adapter, end, as_file) -> None:
    own_end(adapter, end, as_file)
    q, z = talker.codec.encode("QZ")
    params = SamplingParams(4, logit_bias={q: 100.0}, stop_token_ids=[z])
    prompts = [[USER], [USER], "Hi"]
    chat, base, text = talker.generate(prompts, [adapter, None, adapter], params)
    assert said(talker, chat.prompt_token_ids) == "HiQ"
    assert (chat.token_ids, chat.text, chat.finish_reason) == ([q], "", "stop")
    assert base.text == text.text == "QQQQ"
    assert "".join(chunk.text for chunk in talker.stream(prompts[:1], adapter, params)) == ""
    params = SamplingParams(4, logit_bias={q: 100.0}, ignore_eos=True)
    assert talker.generate([USER], adapter, params)[0].text == "QQQQ"
    assert talker.generate([USER], adapter, SamplingParams(4, logit_bias={z: 100.0}))[0].text == "ZZZZ"


@pytest.mark.parametrize("end", ["<|no such|>", "QZ", ""], ids=str)
def test_an_end_token_that_the_model_does_not_have_is_one_error(talker, adapter, end) -> None:
    own_end(adapter, end)
    with pytest.raises(ValueError, match=rf"prompts\[0\]: .*eos_token {re.escape(repr(end))}, which is no token"):
        talker.generate([USER], adapter, 1)
    assert talker.generate(["Hi"], adapter, 1)[0].error is None


@pytest.mark.parametrize("end", [None, 7, ["Q"], {"content": 7}], ids=str)
def test_without_a_named_end_token_the_models_own_remain(codec, adapter, end) -> None:
    own_end(adapter, end)
    folder = adapter.absolute_path
    assert codec.decode(codec.encode([USER], folder), keeps_special=True) == "Hi</s>"
    assert codec.end_token_ids([USER], folder) == ()


@pytest.mark.parametrize("place", ["tokenizer", "several", "adapter"])
@pytest.mark.parametrize("known", [True, False])
def test_a_developer_is_the_system_where_a_template_knows_none(place, known, tmp_path) -> None:
    template = "{% if m.role == 'developer' %}dev{% endif %}" if known else "a developer's \"template\""
    template = "{% for m in messages %}<{{ m.role }}>" + template + "{% endfor %}"
    codec = TextCodec(byte_tokenizer(), adapter_templates=True)
    if place == "adapter":
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        other = {"tool_use": "'developer'"}
        codec.tokenizer.chat_template = template if place == "tokenizer" else {"default": template, **other}
    ids = codec.encode([{**USER, "role": "developer"}, USER], str(tmp_path))
    assert codec.decode(ids).startswith("<developer>dev<user>" if known else "<system>a dev")
