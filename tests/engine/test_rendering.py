"""Chat templates of adapter folders: the text of transformers, within limits that no template exceeds."""

import json
import os
import weakref
from pathlib import Path

import pytest

from punica.engine import render_worker, rendering
from punica.engine.adapter_text import AdapterText
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
        ("{{ range(10 ** 9) | list }}", "range"),
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
    with pytest.raises(ValueError, match="processor time"):
        process.render(template, CHAT[:1], {})
    assert process._process is not ended  # another chat is
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


def test_printed_text_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = TemplateProcess()
    assert [process.render(text, CHAT, {}) for text in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("os.write(fd, b'7 {}\\n'); sys.stdin.read()", "another chat"),
        ("os.write(fd, b'1 no\\n'); sys.stdin.read()", "Expecting value"),
        ("sys.exit(3)", "ended"), ("sys.stdin.read()", "ended with status -9"),
    ],
)  # fmt: skip
def test_a_wrong_answer_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    (worker := tmp_path / "worker.py").write_text(f"import os, sys\nfd = int(sys.argv[3])\n{program}\n")
    monkeypatch.setattr(rendering, "_PROGRAM", worker)
    monkeypatch.setattr(rendering, "ANSWER_S", 0.5)
    process = TemplateProcess()
    with pytest.raises(ValueError, match=message):
        process.render("a", CHAT, {})
    assert process._process is not None
    assert process._process.returncode is not None


def test_ended_processes_leave_no_pipes() -> None:
    process = TemplateProcess()
    counts = []
    for _ in range(3):
        process._start()
        counts.append(len(os.listdir("/dev/fd")))
        process._process.kill()
        process._process.wait()
    assert len(set(counts)) == 1


def test_a_process_without_memory_is_ended(process: TemplateProcess) -> None:
    with pytest.raises(ValueError, match="memory"):
        process.render("{{ 'a' * 10 ** 9 }}", CHAT, {})
    assert process._process.returncode is not None
    assert process.render("b", CHAT, {}) == "b"


def test_memory_is_limited_where_its_use_is_unknown() -> None:
    assert 0 < render_worker.in_use("/missing") < 1 << 40


def test_a_job_that_is_no_json_is_an_error() -> None:
    assert "JSONDecodeError" in json.loads(render_worker.rendered(b"{"))["error"]


def test_templates_in_configurations_have_a_limit(tmp_path: Path) -> None:
    for size, is_taken in ((1 << 20, True), (1 + (1 << 20), False)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a" * size}))
        assert (AdapterText(None).template_of(str(tmp_path)) is not None) == is_taken
