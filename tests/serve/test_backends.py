"""The API over an engine in a process of its own: answers as of one in this process, and nothing is kept."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from punica.serve.app import Settings, make_app
from punica.serve.process import EngineProcess
from tests.serve.engines import Served, builder
from tests.serve.world import World, events, load, served, text, wait_until


@pytest.fixture(scope="module")
def home(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of two adapters, in a folder that requests may name."""
    made = tmp_path_factory.mktemp("loadable").resolve()
    for number in (2, 3):
        shutil.copytree(world.adapters[number].absolute_path, made / f"copy-{number}")
    return made


@pytest.fixture(scope="module")
def started(world: World, home: Path) -> Iterator[Served]:
    with EngineProcess(builder(world, home / "failures")) as process:
        with served(make_app(process, Settings("tiny", world.adapters[:2], roots=[home]))) as url:
            yield Served(url, process, home / "failures")
        assert process.health == "failed"  # the lifespan has ended it


@pytest.fixture
def server(started: Served) -> Iterator[Served]:
    """The server, which keeps nothing of a test's requests."""
    before = started.state()
    yield started
    wait_until(lambda: {**started.state(), "adapters": None} == {**before, "adapters": None})


def post(server: Served, path: str = "completions", **body: Any) -> Any:
    return server.post(f"/v1/{path}", body)


def told(answer: Any) -> Any:
    """An answer, or the events of a stream, without what differs from one call to the next."""
    text = re.sub('"(id|created)":("[^"]*"|[0-9]+)', "", re.sub("cmpl-[0-9a-f]+", "", answer.text))
    return answer.status_code, text


CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "prompt": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"model": "tenant-1", "logprobs": 2}), (200, {"n": 3, "temperature": 1.0, "seed": 5}),
        (200, {"prompt": ["a", "b c"], "stop": ["e", "l"], "max_tokens": 30}), (200, CHAT),
        (400, {"prompt": [[1], [2], [9999]]}), (400, {"logit_bias": {"9999": 1}}), (404, {"model": "nobody"}),
    ],
    ids=["logprobs", "seeds", "stop strings", "chat", "prompt", "bias", "model"],
)  # fmt: skip
def test_answers_are_those_of_an_engine_in_this_process(server, client, status, body, stream) -> None:
    path = "chat/completions" if body is CHAT else "completions"
    asked = {"model": "tenant-0", "prompt": "hello", "max_tokens": 9, "stream": stream, **body}
    asked = {name: value for name, value in asked.items() if value is not None}
    found, state = post(server, path, **asked), server.state()
    assert found.status_code == status
    if stream and status == 200:
        texts = [join(answer.text) for answer in (found, client.post(f"/v1/{path}", json=asked))]
        assert texts[0] == texts[1]
    else:
        assert told(found) == told(client.post(f"/v1/{path}", json=asked))
    assert server.state() == state


def join(text: str) -> dict[int, list[Any]]:
    """Choices of a stream by index: choices of one step may come in any order."""
    found: dict[int, list[Any]] = {}
    for event in events(text):
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


def evict(server: Served) -> None:
    """Fill the memory of the engine with the adapters that it was started with."""
    for name in ("tenant-0", "tenant-1"):
        text(server, name)


def test_a_name_serves_what_was_loaded_until_it_is_loaded_again(server: Served, home: Path) -> None:
    folder = home / "changed"
    config = folder / "adapter_config.json"

    def change(number: int) -> None:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": number}))

    def refusal() -> str:
        answer = post(server, model="poet", prompt="hello")
        assert answer.status_code >= 400
        return str(answer.json()["error"]["message"])

    shutil.copytree(home / "copy-2", folder)
    evict(server)
    assert load(server, "poet", folder).status_code == 200
    change(99)  # before it is used
    assert re.search(rf"adapter 'poet' \(id \d+\) has changed .*: {config.name}; load it again, with", refusal())
    assert load(server, "poet", folder, load_inplace=True).status_code == 200
    new = text(server, "poet")
    change(-99)
    assert text(server, "poet") == new
    evict(server)
    assert config.name in refusal()
    change(99)
    assert text(server, "poet") == new
    assert post(server, "unload_lora_adapter", lora_name="poet").status_code == 200


def test_numbers_that_are_not_finite_are_refused_by_the_load(server: Served, home: Path) -> None:
    folder, module = home / "nan", "model.layers.0.self_attn.q_proj"
    shutil.copytree(home / "copy-2", folder)
    assert load(server, "poet", folder).status_code == 200
    good = text(server, "poet")
    tensors = load_file(file := folder / "adapter_model.safetensors")
    tensors[f"base_model.model.{module}.lora_B.weight"][1, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    for name, in_place in (("poet", True), ("other", False)):
        answer = load(server, name, folder, load_inplace=in_place)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
        assert f"module '{module}': B contains NaN or inf" in answer.json()["error"]["message"]
    assert text(server, "poet") == good
    assert post(server, model="other", prompt="a").status_code == 404
    assert post(server, "unload_lora_adapter", lora_name="poet").status_code == 200


def test_one_failed_step_is_repeated_and_two_fail_the_requests(server: Served) -> None:
    whole = text(server, "tenant-0", 3)
    for _ in range(2):  # not in a row
        server.fail_steps(1)
        assert text(server, "tenant-0", 3) == whole
    server.fail_steps(2)
    answer = post(server, model="tenant-0", prompt="a", max_tokens=3)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
    assert "injected" in answer.json()["error"]["message"]
    assert httpx2.get(f"{server.url}/health", trust_env=False).status_code == 503
    server.fail_steps(2)
    stream = post(server, model="tenant-0", prompt="a", max_tokens=3, stream=True).text
    assert "injected" in stream
    assert stream.endswith("data: [DONE]\n\n")
    assert text(server, "tenant-0", 3) == whole
    assert httpx2.get(f"{server.url}/health", trust_env=False).status_code == 200
