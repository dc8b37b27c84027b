"""Numbers of tokens in streams, as load generators ask for them, and the version that they write down."""

import json
from typing import Any

import pytest

import punica


def chunks(client: Any, path: str, options: dict[str, Any], **prompt: Any) -> list[dict[str, Any]]:
    """Events of one stream of 5 tokens."""
    body = {"model": "tenant-1", "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options}
    text = client.post(path, json={**body, **prompt}).text
    *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


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


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"include_usage": True}], ids=["no", "end"])
def test_only_streams_that_have_usage_have_it_in_every_chunk(client: Any, options: dict[str, Any]) -> None:
    *found, last = [chunk.get("usage") for chunk in chunks(client, "/v1/completions", options, prompt="ab")]
    assert set(found) == {None}
    assert (last is not None) == ("include_usage" in options)


def test_the_version_is_the_librarys(client: Any) -> None:
    assert client.get("/version").json() == {"version": punica.__version__}
