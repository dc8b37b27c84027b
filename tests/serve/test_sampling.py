"""Sampling parameters and templates of bodies reach the engine: the same tokens and text as by ``generate``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tokenizers import pre_tokenizers

from punica.adapters import LoRARequest
from punica.engine import Engine, SamplingParams
from punica.serve.app import Settings, make_app
from tests.serve.world import EngineThread, events
from tests.world import END

PROMPT, NEW = "abc", 12
SETTINGS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5}, {"frequency_penalty": -1.0, "presence_penalty": 1},
    {"logit_bias": {"65": 30, "7": -4.5}}, {"min_tokens": 9, "logit_bias": {str(END): 100}}, {"bad_words": ["s", "ab"]},
    {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {str(END): 100}},
    {"frequency_penalty": 0.5, "temperature": 1.1, "seed": 4, "repetition_penalty": 1.2},
]  # fmt: skip


def params_of(fields: dict[str, Any]) -> SamplingParams:
    bias = {int(key): value for key, value in fields.get("logit_bias", {}).items()}
    return SamplingParams(NEW, **{**fields, "logit_bias": bias})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_parameters_are_those_of_the_engine(client: Any, alone: Any, fields: dict[str, Any], stream: bool) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, **fields}
    plain, expected = alone.generate([PROMPT] * 2, None, [NEW, params_of(fields)])
    assert expected.text != plain.text
    if not stream:
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == expected.text
        assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
        return
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text


@pytest.mark.parametrize(
    ("template", "messages", "more", "count"),
    [
        ("{{ messages[0].content }}{% if not enable_thinking %}!{% endif %}", {}, {"enable_thinking": True}, 2),
        ("{{ messages[0].content }}{% if not enable_thinking %}!{% endif %}", {}, {"enable_thinking": False}, 3),
        ("{{ messages[0].content }}{% if not enable_thinking %}!{% endif %}", {}, None, 3),
        ("{{ messages[0].name | default('') }}.", {"name": "bob"}, {}, 4),
        ("{{ messages[0].name | default('') }}.", {"name": None}, {}, 1),
    ],
    ids=["true", "false", "not given", "speaker", "no speaker"],
)
def test_variables_of_the_chat_template(client, shared, monkeypatch, template, messages, more, count) -> None:
    monkeypatch.setattr(shared[0].codec.tokenizer, "chat_template", template)
    body = {"messages": [{"role": "user", "content": "ab", **messages}], "chat_template_kwargs": more}
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "max_tokens": 1, **body})
    assert answer.json()["usage"]["prompt_tokens"] == count


def test_negative_seeds_are_seeds_and_minus_one_is_none(client: Any, alone: Any) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, "temperature": 5.0}

    def text(seed: int) -> str:
        return client.post("/v1/completions", json={**body, "seed": seed}).json()["choices"][0]["text"]

    (expected,) = alone.generate([PROMPT], None, SamplingParams(NEW, temperature=5.0, seed=(1 << 64) - 2))
    assert text(-2) == text(-2) == expected.text
    assert len({text(-1) for _ in range(3)}) > 1


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
        body = {"model": "own", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        return client.post("/v1/chat/completions", json={**body, "logit_bias": {number: 100}, **more})

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
    full = ask("a", "Q", stop_token_ids=[*range(100, 164)])
    assert (full.status_code, full.json().get("error", {}).get("param")) == (
        (400, "stop_token_ids") if trusted else (200, None)
    )
