"""Sampling parameters of bodies reach the engine: the same tokens and text as by ``generate``."""

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from punica.engine import SamplingParams
from tests.world import END

PROMPT, NEW = "abc", 12
SETTINGS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5}, {"frequency_penalty": -1.0, "presence_penalty": 1},
    {"logit_bias": {"65": 30, "7": -4.5}}, {"min_tokens": 9}, {"bad_words": ["r", "ab"]},
    {"skip_special_tokens": False},
    {"frequency_penalty": 0.5, "temperature": 1.1, "seed": 4, "repetition_penalty": 1.2},
]  # fmt: skip


def params_of(fields: dict[str, Any]) -> SamplingParams:
    bias = {int(key): value for key, value in fields.get("logit_bias", {}).items()}
    return SamplingParams(NEW, **{**fields, "logit_bias": bias})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_parameters_are_those_of_the_engine(client: Any, alone: Any, fields: dict[str, Any], stream: bool) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, **fields}
    (expected,) = alone.generate([PROMPT], None, params_of(fields))
    if not stream:
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == expected.text
        assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
        return
    lines = client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text


def test_parameters_change_the_answer(client: Any) -> None:
    """Else the test above could pass without any of them."""

    def text(**fields: Any) -> str:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, **fields}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    assert text(logit_bias={"65": 100}) == text(logit_bias={"65": 100}, presence_penalty=0)
    assert len({text(), text(logit_bias={"65": 100}), text(frequency_penalty=2, logit_bias={"65": 12})}) == 3
    shown = text(logit_bias={str(END): 100}, ignore_eos=True, skip_special_tokens=False)
    assert shown == "</s>" * NEW
    assert text(logit_bias={str(END): 100}, ignore_eos=True) == ""
    assert len(text(logit_bias={str(END): 100, "65": 90}, min_tokens=3)) == 3


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
def test_variables_of_the_chat_template(
    client: Any, shared: Any, monkeypatch: pytest.MonkeyPatch, template: str, messages: Any, more: Any, count: int
) -> None:
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


def test_a_lone_surrogate_is_the_request_at_fault(client: Any) -> None:
    for content in (b'{"model": "tiny", "prompt": ["a", "b\\ud800"]}', b'{"model": "tiny", "prompt": "\\udfff"}'):
        response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert "lone surrogate" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "prompt"
