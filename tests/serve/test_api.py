"""Answers of the API against the engine's own results, whole and streamed."""

import logging
from typing import Any

import pytest
from fastapi.testclient import TestClient

import punica
from punica.engine import SamplingParams
from punica.serve import app as app_module
from punica.serve.backend import Metrics
from punica.serve.stepper import Outcome
from tests.serve.world import events

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", ["tiny", "tenant-0", "tenant-2"])
def test_a_completion_is_the_text_of_its_model(client: Any, world: Any, alone: Any, name: str) -> None:
    adapter = next((one for one in world.adapters if one.lora_name == name), None)
    answer = client.post("/v1/completions", json={"model": name, "prompt": "hello", "max_tokens": 9}).json()
    result = alone.generate(["hello"], adapter, 9)[0]
    assert answer["choices"] == [
        {"index": 0, "text": result.text, "logprobs": None, "finish_reason": result.finish_reason}
    ]
    assert answer["object"] == "text_completion"
    assert answer["model"] == name
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}


def test_a_chat_goes_through_the_template(client: Any, world: Any, alone: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    expected = alone.generate([CHAT], world.adapters[1], 7)[0].text
    for messages in (CHAT, parts):
        body = {"model": "tenant-1", "messages": messages, "max_completion_tokens": 7}
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fields", [{}, {"stop": ["l", "zz"]}, {"temperature": 1.0, "seed": 3, "n": 3}], ids=str)
def test_chunks_join_to_the_whole_answer(client: Any, path: str, fields: dict[str, Any]) -> None:
    prompt = {"messages": CHAT} if "chat" in path else {"prompt": ["größe ☃", "b"]}
    body = {"model": "tenant-0", "max_tokens": 40, **prompt, **fields}
    whole = client.post(path, json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post(path, json={**body, **options}).text)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    for choice in whole["choices"]:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        text = "".join(piece["delta"]["content"] if "chat" in path else piece["text"] for piece in pieces)
        assert text == (choice["message"]["content"] if "chat" in path else choice["text"])
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_several_prompts_and_choices_keep_their_order_and_seeds(client: Any, alone: Any) -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "temperature": 1.0, "seed": (1 << 64) - 1, "max_tokens": 6}
    answer = client.post("/v1/completions", json=body).json()
    params = [SamplingParams(6, temperature=1.0, seed=seed) for seed in ((1 << 64) - 1, 0)]
    expected = [result.text for result in alone.generate(["a", "a", "b", "b"], None, params * 2)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 4  # each prompt once, with its first token


def test_log_probabilities_of_completions(client: Any, alone: Any) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 5, "logprobs": 20}
    found = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    result = alone.generate(["a"], None, SamplingParams(5, logprobs=20))[0]
    assert found["token_logprobs"] == pytest.approx([next(iter(entry.values())) for entry in result.logprobs])
    for name, top, entry in zip(found["tokens"], found["top_logprobs"], result.logprobs, strict=True):
        assert sorted(top.values()) == pytest.approx(sorted(entry.values()))  # half characters among them
        assert top[name] == pytest.approx(next(iter(entry.values())))
    texts = [alone.codec.tokenizer.decode([token]) for token in result.token_ids]
    assert any("\ufffd" in text for text in texts)
    assert [name for name in found["tokens"] if name[:6] != "bytes:"] == [text for text in texts if text != "\ufffd"]
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}).text)
    for name, values in found.items():
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [value for one in streamed if one for value in one[name]] == values


def test_log_probabilities_of_chats(client: Any, alone: Any) -> None:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert (
        bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace")
        == (choice["message"]["content"])
    )
    result = alone.generate([CHAT], None, SamplingParams(5, logprobs=3))[0]
    for entry, expected in zip(content, result.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(next(iter(expected.values())))
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == pytest.approx(sorted(expected.values(), reverse=True)[:3])


def test_neutral_values_of_what_is_not_served_are_taken(client: Any) -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "tools": [], "user": "me",
               "response_format": {"type": "text"}, "top_k": -1, "n": None, "stop": None}  # fmt: skip
    messages = [*CHAT, {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1, **neutral}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1}, {"n": 2, "best_of": 2}, {"lora_path": "tenant-0"}, {"stop_token_ids": []}, {"unknown": None},
        {"safety_identifier": "a", "prompt_cache_key": "b"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    ids=str,
)  # fmt: skip
def test_what_load_generators_and_clients_send_besides_is_taken(client: Any, fields: dict[str, Any]) -> None:
    body = {"model": "tenant-0", "prompt": "a", "max_tokens": 1, **fields}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_field_without_a_name_hides_no_other(client: Any) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "": "none", "max_completion_tokens": "x"}
    assert client.post("/v1/completions", json=body).status_code == 400


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "none"}, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"functions": [TOOL["function"]], "function_call": "none"}, {"store": True}, {"metadata": {"a": "b"}},
        {"service_tier": "flex"}, {"prompt_cache_retention": "24h"}, {"prompt_cache_options": {"mode": "explicit"}},
        {"store": False, "metadata": {}, "service_tier": "auto", "prompt_cache_retention": None},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_asks_for_nothing_changes_nothing(client: Any, path: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "max_tokens": 4, **({"messages": CHAT} if "chat" in path else {"prompt": "a"})}
    answer = client.post(path, json={**body, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == client.post(path, json=body).json()["choices"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_fields_of_text_parts_are_the_clients_own(client: Any, role: str) -> None:
    """As LangChain returns an answer's parts, and clients of other servers mark a prefix to be kept."""
    own = {"annotations": [{"type": "url_citation"}], "id": "msg_1", "index": 0, "extras": {"a": None}, "logprobs": []}
    cached = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [{"type": "text", "text": "hi", **own}, {"type": "text", "text": "you", **cached, "annotations": None}]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": role, "content": parts, "id": "a"}, *CHAT]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    role = "system" if role == "developer" else role
    body["messages"] = [{"role": role, "content": "hi\nyou"}, *CHAT]
    plain = client.post("/v1/chat/completions", json=body)
    assert (answer.json()["choices"], answer.json()["usage"]) == (plain.json()["choices"], plain.json()["usage"])


@pytest.mark.parametrize("content", [None, "", []])
def test_an_answer_without_text_goes_back_into_the_chat(client: Any, content: Any) -> None:
    """As agent frameworks keep it, with the empty fields of other servers and some of their own."""
    kept = {"role": "assistant", "content": content, "tool_calls": None, "reasoning": "", "id": 7, "opts": {"a": 1}}
    question = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]}
    body = {"model": "tiny", "messages": [question, kept, *CHAT], "max_tokens": 4, "top_logprobs": 0}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    plain = [*CHAT, {"role": "assistant", "content": ""}, *CHAT]
    same = client.post("/v1/chat/completions", json={"model": "tiny", "messages": plain, "max_tokens": 4})
    assert answer.json()["choices"] == same.json()["choices"]


def test_a_chat_without_a_limit_fills_the_context(client: Any) -> None:
    body = {"model": "tiny", "messages": CHAT, "ignore_eos": True}
    assert client.post("/v1/chat/completions", json=body).json()["usage"]["total_tokens"] == 128


def test_models_are_the_base_and_its_adapters(client: Any) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed[:4]] == [
        ("tiny", None), ("tenant-0", "tiny"), ("tenant-1", "tiny"), ("tenant-2", "tiny"),
    ]  # fmt: skip
    assert client.get("/v1/models/tenant-1").json()["id"] == "tenant-1"
    assert client.get("/v1/models/none").status_code == 404


def test_health_and_metrics(client: Any) -> None:
    assert client.get("/health").status_code == 200
    client.post("/v1/completions", json={"model": "tenant-0", "prompt": "a", "max_tokens": 2})
    text = client.get("/metrics").text
    assert 'punica_requests_total{reason="length"}' in text
    assert "punica_requests_waiting 0.0" in text
    assert "tenant" not in text


def test_times_of_a_result_are_of_its_tokens() -> None:
    metrics = Metrics()
    metrics.note_result(Outcome("abc", "length", None, 5, 3, arrival_s=1.0, first_token_s=2.0, last_token_s=5.0))
    sums = {"first_token_seconds_sum": 1, "request_seconds_sum": 4, "token_seconds_sum": 1.5, "prompt_tokens_total": 5}
    assert all(f"punica_{name} {value:.1f}\n" in metrics.exposition().decode() for name, value in sums.items())


@pytest.mark.parametrize("path", ["health", "version", "metrics", "v1/models", "v1/models/tenant-1", "v1/models/x"])
def test_head_is_get_without_a_body(client: Any, path: str) -> None:
    whole, head = client.get(f"/{path}"), client.head(f"/{path}")
    assert head.status_code == whole.status_code != 405
    assert (head.headers["content-type"], head.content) == (whole.headers["content-type"], b"")


def chunks(client: Any, path: str, options: dict[str, Any], **prompt: Any) -> list[dict[str, Any]]:
    """Events of one stream of 5 tokens."""
    body = {"model": "tenant-1", "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options}
    return events(client.post(path, json={**body, **prompt}).text)


@pytest.mark.parametrize(
    ("path", "prompt", "opening"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3], "logprobs": 0}, []),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}, [0]),
    ],
    ids=["completions", "chat"],
)
def test_every_chunk_has_the_tokens_so_far(client: Any, path: str, prompt: dict[str, Any], opening: list[int]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = [chunk["usage"] for chunk in chunks(client, path, options, **prompt)]
    assert [usage["completion_tokens"] for usage in found] == [*opening, 1, 2, 3, 4, 5, 5]
    assert len({usage["prompt_tokens"] for usage in found}) == 1
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in found)


def test_no_event_comes_before_the_first_token(client: Any) -> None:
    body = {"model": "tiny", "messages": CHAT, "adapters": {"tenant-1": 3e38, "tenant-2": 3e38}, "stream": True}
    (event,) = events(client.post("/v1/chat/completions", json=body).text)
    assert "hold NaN" in event["error"]["message"]


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"include_usage": True}], ids=["no", "end"])
def test_only_streams_that_have_usage_have_it_in_every_chunk(client: Any, options: dict[str, Any]) -> None:
    *found, last = [chunk.get("usage") for chunk in chunks(client, "/v1/completions", options, prompt="ab")]
    assert set(found) == {None}
    assert (last is not None) == ("include_usage" in options)


def test_the_version_is_the_librarys(client: Any) -> None:
    assert client.get("/version").json() == {"version": punica.__version__}
    assert client.get("/openapi.json").json()["info"] == {"title": "punica", "version": punica.__version__}


# --- ids of requests --------------------------------------------------------------------------------------------------

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 2}
CALLS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "whole": ("POST", "/v1/completions", {"json": BODY}, 200),
    "stream": ("POST", "/v1/completions", {"json": {**BODY, "stream": True}}, 200),
    "refused": ("POST", "/v1/completions", {"json": {**BODY, "n": 0}}, 400),
    "too large": ("POST", "/v1/completions", {"json": {**BODY, "prompt": "a" * (1 << 21)}}, 413),
    "no JSON": ("POST", "/v1/completions", {"content": "{", "headers": {"content-type": "application/json"}}, 400),
    "no model": ("POST", "/v1/completions", {"json": {**BODY, "model": "none"}}, 404),
    "no route": ("GET", "/nothing", {}, 404), "no method": ("GET", "/v1/completions", {}, 405),
    "load": ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "x", "lora_path": "/y"}}, 403),
    "health": ("GET", "/health", {}, 200), "head": ("HEAD", "/version", {}, 200),
    "metrics": ("GET", "/metrics", {}, 200),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_the_clients_id_comes_back(client: Any, kind: str) -> None:
    method, path, options, status = CALLS[kind]
    options = {**options, "headers": {**options.get("headers", {}), "X-Request-ID": "its/own-id_7"}}
    response = client.request(method, path, **options)
    assert response.status_code == status, response.text
    assert response.headers.get_list("x-request-id") == ["its/own-id_7"]


@pytest.mark.parametrize("given", [None, "", " ", "two words", "größe".encode(), b"a\x7f", "a" * 129], ids=repr)
def test_another_id_is_made_where_none_or_no_valid_one_comes(client: Any, given: Any) -> None:
    headers = {} if given is None else {"x-request-id": given}
    found = {client.get("/health", headers=headers).headers["x-request-id"] for _ in range(3)}
    assert len(found) == 3
    assert all(one.isalnum() and len(one) == 32 for one in found)
    assert client.get("/health", headers={"x-request-id": "a" * 128}).headers["x-request-id"] == "a" * 128


def test_an_internal_error_has_the_id_that_the_log_names(world, monkeypatch, caplog) -> None:
    def fails(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app_module, "check_supported", fails)
    with TestClient(world.app(1)[1], raise_server_exceptions=False) as client, caplog.at_level(logging.ERROR):
        response = client.post("/v1/completions", json=BODY, headers={"x-request-id": "seven"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "seven")
    assert response.json()["error"]["type"] == "server_error"
    assert "request seven failed" in caplog.text
