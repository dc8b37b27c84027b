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


def test_choices_have_seeds_of_their_own(client: Any, alone: Any) -> None:
    body = {"model": "tiny", "prompt": [PROMPT, "x"], "max_tokens": NEW, "n": 2, "seed": 7, "temperature": 1.2}
    texts = [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]
    params = SamplingParams(NEW, temperature=1.2, seed=7, n=2)
    assert texts == [result.text for result in alone.generate([PROMPT, "x"], None, params)]


def test_variables_of_the_chat_template(client: Any, shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = shared[0].codec.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}{% if not enable_thinking %}!{% endif %}")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1}
    counts = [
        client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": given}).json()["usage"]
        for given in ({"enable_thinking": True}, {"enable_thinking": False}, {}, None)
    ]
    assert [count["prompt_tokens"] for count in counts] == [2, 3, 3, 3]


def test_the_name_of_a_speaker_is_a_variable_of_the_message(
    client: Any, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks of several agents send it with every message."""
    monkeypatch.setattr(shared[0].codec.tokenizer, "chat_template", "{{ messages[0].name | default('') }}.")
    counts = []
    for name in ("bob", None):
        messages = [{"role": "user", "content": "ab", "name": name}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        counts.append(client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])
    assert counts == [4, 1]


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
