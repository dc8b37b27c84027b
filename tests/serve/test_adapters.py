"""Adapters that are loaded, replaced and unloaded while the server runs."""

import asyncio
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file

from punica.adapters import LoRARequest
from punica.engine import Engine, Request
from punica.serve.app import Settings, make_app
from punica.serve.backend import Call
from tests.serve.world import EngineThread, load, state_of, text, wait_until


@pytest.fixture
def home(world: Any, tmp_path: Path) -> Path:
    """Copies of two adapters, in a folder that requests may name."""
    for number in (2, 3):
        shutil.copytree(world.adapters[number].absolute_path, tmp_path / f"copy-{number}")
    return tmp_path


@pytest.fixture
def served_home(world: Any, home: Path) -> Any:
    engine, app = world.app(1, {"max_loras": 2}, roots=[home.resolve()])
    with TestClient(app) as client:
        yield engine, client, home


def expected(alone: Any, folder: Path, new: int = 8) -> str:
    return alone.generate(["hello"], LoRARequest(folder.name, lora_path=folder), new)[0].text


def test_a_loaded_adapter_serves_until_it_is_unloaded(served_home: Any, alone: Any) -> None:
    engine, client, home = served_home
    before = state_of(engine)
    others = {"base_model_name": "meta-llama/Llama-3.1-8B", "load_inplace": None, "weights_mapper": None}
    answer = load(client, "poet", home / "copy-2", **others)  # as Kubernetes' LoRA sidecar sends it
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    assert text(client, "poet") == expected(alone, home / "copy-2")
    assert "poet" in [model["id"] for model in client.get("/v1/models").json()["data"]]
    body = {"lora_name": "poet", "lora_int_id": None, "base_model_name": "meta-llama/Llama-3.1-8B"}
    assert client.post("/v1/unload_lora_adapter", json=body).status_code == 200
    assert state_of(engine) == before
    assert client.post("/v1/completions", json={"model": "poet", "prompt": "a"}).status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).status_code == 404


def test_requests_keep_the_version_they_began_with(served_home: Any, alone: Any) -> None:
    engine, client, home = served_home
    load(client, "poet", home / "copy-2")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(text(client, "poet", 100)))
    reader.start()
    wait_until(lambda: engine.scheduler.running)
    assert load(client, "poet", home / "copy-3", load_inplace=True).status_code == 200
    assert engine.scheduler.running  # it is not over yet
    assert text(client, "poet") == expected(alone, home / "copy-3")
    client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
    reader.join()
    assert found == [expected(alone, home / "copy-2", 100)]
    wait_until(lambda: set(engine.manager.list_adapters()) <= {1})  # no version of the adapter


@pytest.mark.parametrize("name", ["tiny", "tenant-0", "", "a b", "a" * 257, "x\n"])
def test_names_that_are_refused(served_home: Any, name: str) -> None:
    _, client, home = served_home
    error = load(client, name, home / "copy-2")
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "lora_name"


def test_adapters_that_are_refused(served_home: Any, world: Any) -> None:
    _, client, home = served_home
    (home / "empty").mkdir()
    (home / "broken").mkdir()
    (home / "broken/adapter_config.json").write_text("{")
    (home / "broken/adapter_model.safetensors").write_bytes(bytes(8))
    for path, status in (
        (home / "missing", 404), (home / "empty", 404), (home / "broken", 400), (home / "..", 403),
        (world.adapters[1].absolute_path, 403),
    ):  # fmt: skip
        answer = load(client, "x", Path(path))
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "lora_path"), path
    answer = load(client, "x", home / "copy-2", is_3d_lora_weight=True)
    assert "no experts" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json={"model": "x", "prompt": "a"}).status_code == 404


def test_an_adapter_that_breaks_after_it_was_loaded_fails_its_requests_alone(served_home: Any, alone: Any) -> None:
    engine, client, home = served_home
    before = state_of(engine)
    poet = expected(alone, home / "copy-2")
    load(client, "poet", home / "copy-2")
    load(client, "novelist", home / "copy-3")
    shutil.rmtree(home / "copy-2")
    assert text(client, "poet") == poet, "it was loaded"
    for name in ("novelist", "tenant-0"):  # which take its place
        text(client, name)
    client.post("/v1/unload_lora_adapter", json={"lora_name": "novelist"})
    for stream in (False, True):
        answer = client.post("/v1/completions", json={"model": "poet", "prompt": "a", "stream": stream})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
    assert text(client, "tenant-0")
    assert state_of(engine) == before


def test_clients_are_not_told_where_adapters_are(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by a path as it was given, relative to the folder in which the server was started."""
    shutil.copytree(world.adapters[0].absolute_path, tmp_path / "secret" / "poet")
    monkeypatch.chdir(tmp_path)
    settings = Settings("tiny", [LoRARequest("poet", 9, "secret/poet")])
    with TestClient(make_app(EngineThread(world.engine(2)), settings)) as client:
        config = tmp_path / "secret/poet/adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 999}))
        answer = client.post("/v1/completions", json={"model": "poet", "prompt": "a"})
    assert answer.status_code == 400
    assert "load it again" in answer.json()["error"]["message"]
    assert "secret" not in answer.text


def test_an_adapter_trained_inside_of_another_model_is_renamed(served_home: Any, alone: Any) -> None:
    _, client, home = served_home
    expected_text, file = expected(alone, home / "copy-2"), home / "copy-2/adapter_model.safetensors"
    inside = {name.replace(".model.", ".model.vision.", 1): tensor for name, tensor in load_file(file).items()}
    save_file(inside, file)
    assert load(client, "poet", home / "copy-2").status_code == 400
    assert load(client, "poet", home / "copy-2", weights_mapper={"": "a"}).status_code == 400
    assert load(client, "poet", home / "copy-2", weights_mapper={"vision.": ""}).status_code == 200
    assert text(client, "poet") == expected_text


def test_a_server_without_slots_says_how_to_get_them(world: Any, home: Path) -> None:
    plain = Engine.from_pretrained(world.checkpoint, device="cpu", max_model_len=64)
    sizes = replace(plain.config, ignore_adapters=True)
    for engine in (plain, Engine(plain.runner.model, None, sizes, tokenizer=plain.codec.tokenizer)):
        with TestClient(make_app(EngineThread(engine), Settings("tiny", roots=[home.resolve()]))) as client:
            assert "--max-loras" in load(client, "x", home / "copy-2").json()["error"]["message"]


def test_a_retired_adapter_leaves_with_its_last_request_or_the_one_that_comes_after(world: Any) -> None:
    engine = world.engine(2)

    async def scenario() -> None:
        thread = EngineThread(engine)
        thread.start()
        await thread.retire(1)
        assert set(engine.manager.list_adapters()) == {2}
        call = Call([Request("late", [1], 3, world.adapters[0])], streams=False)
        await thread.submit(call)
        async for _ in call.batches():
            pass
        assert set(engine.manager.list_adapters()) == {2}
        long = Call([Request("long", [1], 100, world.adapters[1])], streams=True)
        await thread.submit(long)
        await anext(long.batches())
        await thread.retire(2)
        assert set(engine.manager.list_adapters()) == {2}
        thread.abort(long)
        await thread.order(lambda stepper: None)  # carried out after it
        assert set(engine.manager.list_adapters()) == set()
        await thread.stop()

    asyncio.run(scenario())


def test_a_mixture_is_served_until_its_adapters_are_unloaded(served_home: Any, alone: Any, world: Any) -> None:
    engine, client, home = served_home
    load(client, "poet", home / "copy-2")
    weights, second = {"tenant-0": 0.7, "poet": 0.3}, LoRARequest("copy-2", lora_path=home / "copy-2")

    def answer(**fields: Any) -> Any:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "adapters": weights, **fields}
        return client.post("/v1/completions", json=body)

    mixed = alone.generate(["hello"], {world.adapters[0]: 0.7, second: 0.3}, 8)[0].text
    assert answer().json()["choices"][0]["text"] == mixed
    assert mixed not in (text(client, "tiny"), text(client, "poet"), text(client, "tenant-0"))
    assert answer(adapters={"poet": 1}).json()["choices"][0]["text"] == text(client, "poet")
    infinite = '{"model": "tiny", "prompt": "a", "adapters": {"poet": 1e400}}'  # of which Python's reader makes inf
    refused = client.post("/v1/completions", content=infinite, headers={"Content-Type": "application/json"})
    assert (refused.status_code, "weight of 'poet'" in refused.text, str(home) in refused.text) == (400, True, False)
    for given in ({}, {"poet": "much"}, {"poet": True}, {"poet": 1e39}, {"tiny": 1}, {"nobody": 1}):
        refused = answer(adapters=given)
        assert (refused.status_code, "error" in refused.json()) == (404 if "nobody" in given else 400, True)
    assert answer(model="poet").status_code == 400
    config = home / "copy-3/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": [5]}))
    load(client, "late", home / "copy-3")
    before = state_of(engine)
    for stream in (False, True):
        refused = answer(adapters={"late": 0.5, "poet": 0.5}, stream=stream)
        assert (refused.status_code, "'late' is activated LoRA" in refused.text) == (400, True)
    assert state_of(engine) == before
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).status_code == 200
    assert answer().status_code == 404
