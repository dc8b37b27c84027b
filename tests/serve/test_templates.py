"""Chat templates in adapter folders, over the API: limits, and what waits for them."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

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
