"""Prompts as users have them: mappings, chats, parts, surrogates, and adapters' own templates."""

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from punica.adapters import LoRARequest
from punica.engine import Engine, SamplingParams
from punica.engine.prompts import listed_prompts
from punica.engine.text import TextCodec, load_tokenizer
from tests.world import byte_fallback_tokenizer, byte_tokenizer, save_tokenizer

USER = {"role": "user", "content": "Hi"}


def talker_with(backbone, tokenizer) -> Engine:
    """An engine whose texts begin without an id beyond its vocabulary."""
    tokenizer.backend_tokenizer.post_processor = byte_fallback_tokenizer().backend_tokenizer.post_processor
    return backbone.engine(tokenizer=tokenizer, adapter_templates=True)


@pytest.fixture
def talker(backbone) -> Engine:
    return talker_with(backbone, byte_tokenizer())


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
    with pytest.raises(TypeError, match=r"prompts\[0\]\['prompt'\] must be a str, got list"):
        listed_prompts([{"prompt": [1, 2]}])


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
        ([{"role": 3, "content": "Hi"}], r"messages\[0\] is .* role"),
        ([USER, {}], r"messages\[1\] is \{\}"),
        ([{"prompt": "ab"}, USER], r"messages\[0\] is"),
        ([[USER], {"text": "ab"}], r"prompts\[1\] is a mapping with \['text'\]"),
        ({"prompt": "ab", "multi_modal_data": {"image": 1}}, r"prompts\[0\] is a mapping with .*multi_modal_data"),
        ({}, r"prompts\[0\] is a mapping with \[\]"),
        ([{"role": "user", "content": 5}], r"content is 5"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}],
         r"messages\[0\]\.content\[1\] is of type 'input_audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is of type 'text'"),
        (["ok", "bad \ud800"], r"prompts\[1\]: .*U\+D800 at character 4"),
        ([{"role": "user", "content": "\udfff"}], r"prompts\[0\]: .*U\+DFFF"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_before_any_runs(talker, prompts, message) -> None:
    talker.step = lambda: 1 / 0
    for call in (talker.generate, lambda *given: list(talker.stream(*given))):
        with pytest.raises(ValueError, match=message):
            call(prompts)
    assert not talker.has_unfinished()


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "text", "text": "b"}], "a\nb"), ([], ""), ("a", "a"),
    ],
)  # fmt: skip
def test_text_parts_are_joined(codec, content, joined) -> None:
    assert codec.decode(codec.encode([{"role": "user", "content": content}])).endswith(f"<user>{joined}\n<a>")


def test_a_message_of_tool_calls_needs_no_content(codec) -> None:
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert codec.decode(codec.encode(chat)).startswith("<user>Hi\n<assistant>")


# --- chat templates --------------------------------------------------------------------------------------------------

THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
)


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ messages[0].content.missing.more }}"])
def test_chats_without_a_fitting_template(template) -> None:
    with pytest.raises(ValueError, match="chat template cannot turn"):
        TextCodec(byte_tokenizer(template)).encode([USER])


def test_variables_of_the_chat_template(backbone) -> None:
    engine = talker_with(backbone, byte_tokenizer(THINKING))
    plain, off, on = (
        prompt_ids(engine, [USER], chat_template_kwargs=given)[0]
        for given in (None, {"enable_thinking": False}, {"enable_thinking": True})
    )
    assert engine.codec.decode(off) == engine.codec.decode(plain) + "!"
    assert on == plain
    (chunk, *_) = engine.stream([USER], None, 1, chat_template_kwargs={"enable_thinking": False})
    assert list(chunk.result.prompt_token_ids) == off


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [
        ([USER], {"tokenize": True}, r"\['tokenize'\] are set by the engine"),
        ([[1, 2]], {"enable_thinking": False}, "no prompt is a chat"),
    ],
)
def test_variables_that_would_be_lost_or_are_taken(talker, prompts, given, message) -> None:
    with pytest.raises(ValueError, match=message):
        talker.generate(prompts, None, 1, chat_template_kwargs=given)


# --- adapters' own text ----------------------------------------------------------------------------------------------


def own_template(folder: str, how: str) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    if how == "file":
        Path(folder, "chat_template.jinja").write_text(template)
    else:
        several = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
        value = template if how == "config" else several
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))


@pytest.fixture
def adapter(backbone, tmp_path) -> LoRARequest:
    folder = shutil.copytree(backbone.adapters[1].lora_path, tmp_path / "adapter")
    return LoRARequest("own", 31, str(folder))


@pytest.mark.parametrize("how", ["file", "config", "several"])
def test_chats_take_the_template_of_the_adapter(talker, adapter, how) -> None:
    base = prompt_ids(talker, [USER])
    own_template(adapter.lora_path, how)
    own, other, text = prompt_ids(talker, [[USER], [USER], "Hi"], adapters=[adapter, None, adapter])
    assert (said(talker, own), [other], said(talker, text)) == ("[Hi]", base, "Hi")


def test_a_rewritten_template_is_the_one_in_use_and_a_damaged_one_an_error(talker, adapter) -> None:
    own_template(adapter.lora_path, "file")
    prompt_ids(talker, [USER], adapters=adapter)
    file = Path(adapter.lora_path, "chat_template.jinja")
    file.write_text("new")
    assert said(talker, *prompt_ids(talker, [USER], adapters=adapter)) == "new"
    file.write_text("{% for %}")
    with pytest.raises(ValueError, match=r"prompts\[0\]: the chat template cannot turn"):
        talker.generate([USER], adapter, 1)
    file.unlink()
    Path(adapter.lora_path, "tokenizer_config.json").write_text("{")
    assert prompt_ids(talker, [USER], adapters=adapter) == prompt_ids(talker, [USER])


def warned(text: str, call) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return sum(text in str(one.message) for one in caught)


def test_a_template_that_is_not_trusted_is_warned_of_once(adapter) -> None:
    codec = TextCodec(byte_tokenizer())
    own_template(adapter.lora_path, "config")
    found = []
    assert warned("chat template", lambda: found.extend(codec.encode([USER], adapter.lora_path) for _ in range(3))) == 1
    assert found == [codec.encode([USER])] * 3
    assert codec.end_token_ids([USER], adapter.lora_path) == ()


def test_templates_in_configurations_have_a_limit(codec, tmp_path) -> None:
    for size, is_taken in ((1 << 20, True), (1 + (1 << 20), False)):
        config = {"chat_template": "a" * size, "eos_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert bool(codec.end_token_ids([USER], str(tmp_path))) == is_taken


@pytest.mark.parametrize("differs", [True, False], ids=["another vocabulary", "the base model's"])
def test_another_tokenizer_is_warned_of_once(adapter, tmp_path, differs) -> None:
    codec = TextCodec(load_tokenizer(save_tokenizer(tmp_path)))
    file = save_tokenizer(Path(adapter.lora_path)) / "tokenizer.json"
    values = json.loads(file.read_text())
    if differs:
        values["added_tokens"].append({**values["added_tokens"][0], "id": 258, "content": "<tool>"})
    file.write_text(json.dumps(values))  # other bytes, the same tokenizer
    assert warned("tokenizer of its own", lambda: [codec.encode("a", adapter.lora_path) for _ in range(3)]) == differs


ENDED = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def own_end(adapter: LoRARequest, end: object, as_file: bool = True) -> None:
    """A template and an end token in an adapter's folder."""
    if as_file:
        Path(adapter.lora_path, "chat_template.jinja").write_text(ENDED)
    config = {"eos_token": end} if as_file else {"eos_token": end, "chat_template": ENDED, "pad_token": None}
    Path(adapter.lora_path, "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, **config}))


@pytest.mark.parametrize(("end", "as_file"), [("Q", True), ({"content": "Q", "lstrip": False}, False)])
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
    with pytest.raises(ValueError, match=rf"prompts\[0\]: .*eos_token {re.escape(repr(end))}"):
        talker.generate([USER], adapter, 1)
    assert talker.generate(["Hi"], adapter, 1)[0].error is None


@pytest.mark.parametrize("end", [None, ["Q"], {"content": 7}], ids=str)
def test_without_a_named_end_token_the_models_own_remain(codec, adapter, end) -> None:
    own_end(adapter, end)
    folder = adapter.absolute_path
    assert codec.decode(codec.encode([USER], folder), keeps_special=True) == "Hi</s>"
    assert codec.end_token_ids([USER], folder) == ()


@pytest.mark.parametrize(("place", "known"), [("tokenizer", True), ("tokenizer", False), ("several", False),
                                              ("adapter", True), ("adapter", False)])  # fmt: skip
def test_a_developer_is_the_system_where_a_template_knows_none(place, known, codec, tmp_path) -> None:
    template = "{% if m.role == 'developer' %}dev{% endif %}" if known else 'a developer\'s "template"'
    template = "{% for m in messages %}<{{ m.role }}>" + template + "{% endfor %}"
    if place == "adapter":
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        several = {"default": template, "tool_use": "'developer'"}
        codec.tokenizer.chat_template = several if place == "several" else template
    ids = codec.encode([{**USER, "role": "developer"}, USER], str(tmp_path))
    assert codec.decode(ids).startswith("<developer>dev<user>" if known else "<system>a dev")
