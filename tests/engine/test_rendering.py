"""Chat templates of adapter folders: the text of transformers, within limits that no template exceeds."""

import weakref

import pytest

from punica.engine import rendering
from punica.engine.rendering import TemplateProcess
from tests.engine.text_world import byte_tokenizer

CHAT = [{"role": "user", "content": "größe ☃ {{ 1 }}"}, {"role": "assistant", "content": None, "tool_calls": [1]}]
TEMPLATE = (
    "{% for m in messages %}{% if m.content is defined %}<{{ m.role }}>{{ m.content | trim }}{% endif %}\n"
    "{% endfor %}{{ messages | tojson }}{{ eos_token }}{% if add_generation_prompt %}!{% endif %}{{ more }}"
)
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def process() -> TemplateProcess:
    return TemplateProcess()


def test_the_text_is_that_of_transformers(process: TemplateProcess) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, more=[3, {"ü": None}])
    variables = {**tokenizer.special_tokens_map, "add_generation_prompt": True, "more": [3, {"ü": None}]}
    assert process.render(TEMPLATE, CHAT, variables) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ range(10 ** 9) | list }}", "range"), ("{{ 'a' * 10 ** 9 }}", "memory"),
        ("{{ 'a' * 10 ** 7 }}", "characters"),
        ("{{ raise_exception('no') }}", "no"), ("{% for %}", "TemplateSyntaxError"), ("{{ [].a.b }}", "UndefinedError"),
    ],
)  # fmt: skip
def test_errors_of_templates_do_not_end_the_process(process: TemplateProcess, template: str, message: str) -> None:
    process.render("a", CHAT, {})
    worker = process._process
    with pytest.raises(ValueError, match=message):
        process.render(template, CHAT, {})
    assert process.render("b{{ x }}", CHAT, {"x": 1}) == "b1"
    assert process._process is worker


@pytest.mark.slow
@pytest.mark.parametrize("template", [NESTED, "{{ 10 ** (10 ** 8) }}"], ids=["loops", "one operation"])
def test_processor_time_is_limited(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 0.2)
    process = TemplateProcess()
    with pytest.raises(ValueError, match=r"more than 0\.2 s of processor time"):
        process.render(template, CHAT, {})
    ended = process._process
    with pytest.raises(ValueError, match="processor time"):
        process.render(template, CHAT, {})
    assert process._process is ended  # not tried again
    monkeypatch.setattr(rendering, "REFUSED_S", -1.0)
    process._refused.clear()
    for _ in range(2):
        with pytest.raises(ValueError, match="processor time"):
            process.render(template, CHAT, {})
        assert process._process is not ended  # tried again, as its time is over
        ended = process._process
    assert process.render("fine", CHAT, {}) == "fine"


def test_a_killed_process_is_started_again() -> None:
    process = TemplateProcess()
    process._process = process._start()
    process._process.kill()
    process._process.wait()
    assert process.render("b", CHAT, {}) == "b"
    worker, gone = process._process, weakref.ref(process)
    del process
    assert gone() is None
    assert worker.poll() is not None  # nothing is left behind


def test_values_are_json(process: TemplateProcess) -> None:
    with pytest.raises(ValueError, match="JSON values"):
        process.render("a", CHAT, {"tool": print})
