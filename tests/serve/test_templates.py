"""Chat templates in adapter folders, over the API: limits, and what waits for them."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from tokenizers import pre_tokenizers

from punica.engine import rendering

MESSAGES = [{"role": "user", "content": "hi"}]
HOSTILE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def chat(shared: Any, world: Any) -> Any:
    """Chat of an adapter whose folder gets this template; the adapter's name is ``own``."""
    client, folder = shared[1], Path(world.checkpoint.parent, "adapters/own")

    def ask(template: str) -> Any:
        (folder / "chat_template.jinja").write_text(template)
        return client.post("/v1/chat/completions", json={"model": "own", "messages": MESSAGES, "max_tokens": 2})

    shutil.copytree(world.adapters[0].absolute_path, folder)
    client.post("/v1/load_lora_adapter", json={"lora_name": "own", "lora_path": str(folder)})
    yield ask
    client.post("/v1/unload_lora_adapter", json={"lora_name": "own"})
    shutil.rmtree(folder)


def test_a_template_that_takes_too_long_is_refused_by_its_limit(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 0.25)
    answer = chat(HOSTILE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "more than 0.25 s of processor time" in answer.json()["error"]["message"]
    assert chat("{{ messages[0].content }}!").json()["usage"]["prompt_tokens"] == 3


def test_a_chat_ends_where_the_template_of_its_adapter_does(chat: Any, client: Any, world: Any) -> None:
    chat("{{ messages[0].content }}")
    config = Path(world.checkpoint.parent, "adapters/own/tokenizer_config.json")
    number = sorted(pre_tokenizers.ByteLevel.alphabet()).index("Q")
    body = {"model": "own", "messages": MESSAGES, "max_tokens": 5, "logit_bias": {number: 100}}
    for end, tokens in ((None, 5), ("Q", 1)):
        config.write_text(json.dumps({"eos_token": end}))
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == tokens
        assert answer["choices"][0]["message"]["content"] == ("" if end else "QQQQQ")
        assert answer["choices"][0]["finish_reason"] == ("stop" if end else "length")
    streamed = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert '"Q"' not in streamed
    config.write_text(json.dumps({"eos_token": "<|no such|>"}))
    answer = client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "eos_token '<|no such|>', which is no token of the model" in answer.json()["error"]["message"]


def test_only_chats_with_adapters_wait_for_a_template(chat: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, answers = threading.Event(), threading.Event(), []

    def slow(*_: Any) -> str:
        begun.set()
        assert may_end.wait(60)
        return "ab"

    monkeypatch.setattr(rendering.TemplateProcess, "render", slow)
    waiting = threading.Thread(target=lambda: answers.append(chat("slow")))
    waiting.start()
    try:
        assert begun.wait(60)
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        body = {"model": "own", "prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert not answers
    finally:
        may_end.set()
        waiting.join()
    assert answers[0].json()["usage"]["prompt_tokens"] == 2
