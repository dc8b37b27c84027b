"""Chat templates in adapter folders, over the API."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from fastapi.testclient import TestClient
from tokenizers import pre_tokenizers

from punica.adapters import LoRARequest
from punica.engine import Engine
from punica.serve.app import Settings, make_app
from tests.serve.world import EngineThread

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=[True, False], ids=["trusted", "untrusted"])
def chat(request: Any, world: Any, tmp_path: Path) -> Any:
    """Whether templates of folders are used; the answer to a chat with an adapter of this template and end token."""
    folder = shutil.copytree(world.adapters[0].absolute_path, tmp_path / "own")
    adapter = LoRARequest("own", 1, str(folder))
    engine = Engine.from_pretrained(
        world.checkpoint, [adapter], device="cpu", max_model_len=64, adapter_templates=request.param
    )
    number = sorted(pre_tokenizers.ByteLevel.alphabet()).index("Q")

    def ask(template: str, end: str | None, **more: Any) -> Any:
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        body = {"model": "own", "messages": MESSAGES, "max_tokens": 5, "logit_bias": {number: 100}}
        return client.post("/v1/chat/completions", json={**body, **more})

    with TestClient(make_app(EngineThread(engine), Settings("tiny", [adapter]))) as client:
        yield request.param, ask


def test_a_chat_takes_template_and_end_of_its_adapter_where_these_are_trusted(chat: Any) -> None:
    trusted, ask = chat
    plain = ask("{{ messages[0].content }}!", None).json()
    assert (plain["usage"]["prompt_tokens"] == 3) == trusted
    assert plain["choices"][0]["message"]["content"] == "QQQQQ"
    ended = ask("{{ messages[0].content }}!", "Q").json()
    assert ended["usage"]["completion_tokens"] == (1 if trusted else 5)
    assert ended["choices"][0]["finish_reason"] == ("stop" if trusted else "length")
    assert ('"Q"' in ask("a", "Q", stream=True).text) != trusted
