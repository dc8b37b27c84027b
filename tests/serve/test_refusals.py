"""Bodies that are refused: by 400 with the parameter's name, in OpenAI's form, never by a 5xx."""

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from punica.serve.app import Envelope
from punica.serve.protocol import UNSUPPORTED, ChatBody

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}


def refusal(response: Any, status: int = 400) -> dict[str, Any]:
    """The error of an answer in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": -1}), ("temperature", {"temperature": "1"}), ("top_p", {"top_p": 0}),
        ("max_tokens", {"max_tokens": 0}), ("max_tokens", {"max_tokens": 2.5}), ("n", {"n": 0}), ("n", {"n": True}),
        ("seed", {"seed": -(1 << 63) - 1}), ("seed", {"seed": 1 << 64}), ("stop", {"stop": [""]}),
        ("stop", {"stop": ["a"] * 65}),
        ("stop_token_ids", {"stop_token_ids": [9999]}), ("stop_token_ids", {"stop_token_ids": [-1]}),
        ("logprobs", {"logprobs": 21}), ("logprobs", {"logprobs": True}), ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": 2}), ("repetition_penalty", {"repetition_penalty": 0}),
        ("stream_options", {"stream_options": {"include_usage": True}}), ("model", {"model": None}),
        ("prompt", {"prompt": []}), ("prompt", {"prompt": [[]]}), ("prompt", {"prompt": [1, -2]}),
        ("prompt", {"prompt": [9999]}), ("prompt", {"prompt": {"text": "a"}}), ("prompt", {"prompt": [[1], "a"]}),
        ("prompt", {"prompt": "a" * 127}), ("n", {"n": 128, "prompt": ["a"] * 128}), ("bogus", {"bogus": 1}),
        *((name, {name: {"x": 1}}) for name in UNSUPPORTED), ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": "1"}), ("frequency_penalty", {"frequency_penalty": -2.01}),
        ("logit_bias", {"logit_bias": {"a": 1}}), ("logit_bias", {"logit_bias": {"5": 101}}),
        ("logit_bias", {"logit_bias": {"9999": 1}}), ("logit_bias", {"logit_bias": {"-1": 1}}),
        ("min_tokens", {"min_tokens": 3}), ("min_tokens", {"min_tokens": -1}), ("bad_words", {"bad_words": [""]}),
        ("bad_words", {"bad_words": "a"}), ("skip_special_tokens", {"skip_special_tokens": 1}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": 1}}), ("best_of", {"best_of": 1, "n": 2}),
        ("best_of", {"best_of": 2}), ("best_of", {"best_of": True}), ("priority", {"priority": False}),
        ("lora_path", {"lora_path": "tenant-0"}), ("user", {"user": 1}), ("stop", {"stop": ["a", None]}),
        ("stream_options", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ],
    ids=str,
)  # fmt: skip
def test_a_completion_names_the_parameter(client: Any, param: str, fields: dict[str, Any]) -> None:
    assert refusal(client.post("/v1/completions", json={**COMPLETION, **fields}))["param"] == param


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": []}), ("messages", {"messages": "a"}), ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
        ("messages[0].audio", {"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]}),
        ("messages", {"messages": [{"role": "user", "content": "a", "name": "b" * 257}]}),
        ("messages", {"messages": [{"role": "user", "content": "a" * 200}]}), ("tools", {"tools": [{}]}),
        ("top_logprobs", {"top_logprobs": 2}), ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
        ("logprobs", {"logprobs": 1}), ("prompt", {"prompt": "a"}),
        ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
        ("messages", {"chat_template_kwargs": {"tokenize": True}}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_a_chat_names_the_parameter(client: Any, param: str, fields: dict[str, Any]) -> None:
    assert refusal(client.post("/v1/chat/completions", json={**CHAT, **fields}))["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"a": 1}]}, {"tools": [1], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [1], "function_call": "none"}, {"functions": [1], "function_call": "auto"},
    ],
    ids=str,
)  # fmt: skip
def test_tools_that_may_be_chosen_are_refused_with_the_remedy(client: Any, fields: dict[str, Any]) -> None:
    error = refusal(client.post("/v1/chat/completions", json={**CHAT, **fields}))
    name, choice = ("tools", "tool_choice") if "tools" in fields else ("functions", "function_call")
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"].endswith(f'is not supported by this server; leave it out, or send {choice}="none"')


TOOL_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}, "messages[0].tool_calls is not supported"),
        ({"role": "developer", "content": "a", "images": ["b"]}, "messages[0].images is not supported"),
        ({"role": "user", "content": None}, "messages[0].content is missing"),
        ({"role": "user", "content": 5}, "messages[0].content: Input should be a valid string; messages[0].content: I"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, "messages[0].content[1] is of type"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]: Input should be a valid dictionary"),
    ],
    ids=str,
)  # fmt: skip
def test_the_place_in_a_message_is_named(client: Any, message: dict[str, Any], reason: str) -> None:
    error = refusal(client.post("/v1/chat/completions", json={**CHAT, "messages": [message]}))
    assert error["message"].startswith(reason)


def test_an_assistant_without_content_said_nothing() -> None:
    messages = [{"role": "assistant", "name": "a", "audio": None}, {"role": "user", "content": "b"}]
    body = ChatBody(model="tiny", messages=messages)
    assert body.prompts == [[{"role": "assistant", "content": "", "name": "a"}, {"role": "user", "content": "b"}]]


def test_the_context_has_openais_code(client: Any) -> None:
    error = refusal(client.post("/v1/completions", json={**COMPLETION, "max_tokens": 1000}))
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 128 tokens. However, you requested 1002 tokens (2 in the prompt, 1000 "
    )


def test_unknown_models_and_routes(client: Any) -> None:
    assert refusal(client.post("/v1/completions", json={**COMPLETION, "model": "x"}), 404)["code"] == "model_not_found"
    refusal(client.get("/v1/nothing"), 404)
    refusal(client.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("completions", b'{"model": "tiny", "prompt": "\\ud800"}', "prompt"),
        ("completions", b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature"),
        ("completions", b'{"model": "tiny", "prompt": "a", "stop": "\\ud800", "top_k": 0.5}', "top_k"),
        ("completions", b'{"model": "tiny", "prompt": 1e999}', "prompt"),
        ("load_lora_adapter", b'{"lora_name": "\\udc00", "lora_path": "x"}', "lora_name"),
    ],
    ids=range(5),
)  # fmt: skip
def test_values_that_json_has_and_a_parameter_has_not(client: Any, path: str, content: bytes, param: str) -> None:
    assert refusal(client.post(f"/v1/{path}", content=content, headers=JSON))["param"] == param


BEGIN = b'{"model": "tiny",\n "prompt": '


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (BEGIN + b'"a" 1}', ["line 2 column 16", "'1}'"]), (BEGIN, ["line 2 column 12"]),
        (BEGIN + b"n" * 99, ["line 2 column 12", repr("n" * 20)]), (b"model=tiny", ["line 1 column 1", "'model=tiny'"]),
        (BEGIN + b'"gr\xf6\xdfe"}', ["0xf6", "32"]), (BEGIN + b"[" * 100_000, ["recursion"]),
        (BEGIN + b"9" * 5000 + b"}", ["4300 digits"]), (b"[1]", ["is a list"]), (b'"a"', ["is a string"]),
        (b"1.5", ["is a number"]), (b"true", ["is a boolean"]), (b"null", ["null"]), (b"", ["empty"]),
    ],
    ids=range(13),
)  # fmt: skip
@pytest.mark.parametrize("path", ["completions", "unload_lora_adapter"])
def test_what_of_a_body_cannot_be_read_is_told(client: Any, path: str, content: bytes, told: list[str]) -> None:
    error = refusal(client.post(f"/v1/{path}", content=content, headers=JSON))
    assert all(part in error["message"] for part in told), error["message"]
    assert (error["param"], error["code"]) == (None, None)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_type_names_the_header(client: Any, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    content = b'{"model": "tiny", "prompt": "a"}'
    assert (
        "Content-Type: application/json"
        in refusal(client.post("/v1/completions", content=content, headers=headers))["message"]
    )


def test_a_body_beyond_the_limit_is_not_read(client: Any) -> None:
    body = b" " * ((1 << 20) + 1)
    assert "1048576" in refusal(client.post("/v1/completions", content=body, headers=JSON), 413)["message"]


def test_pieces_of_a_body_are_counted_together() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            await receive()

    async def receive() -> Any:
        return {"type": "http.request", "body": b"ab", "more_body": True}

    asyncio.run(Envelope(app, 6)({}, receive, receive))
    with pytest.raises(HTTPException) as caught:
        asyncio.run(Envelope(app, 5)({}, receive, receive))
    assert caught.value.status_code == 413
