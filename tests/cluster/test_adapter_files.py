"""Adapters of runners: a bounded cache of stored folders; folders that runners read by themselves, in one version."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from punica.adapters import LoRARequest, write_random_adapter
from punica.cluster import ray_runners
from punica.cluster.adapter_files import AdapterFolderCache, StoredFiles, digest_of, read_adapter_files
from punica.cluster.dispatcher import Dispatcher
from punica.cluster.runner import Runner
from punica.engine import Request, RequestState
from tests.cluster.runner_world import MODEL, LocalRunners, factory, new_runner, run, undisturbed, write_adapters

NUM_ADAPTERS = 10


def files_in(adapter: LoRARequest) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(adapter.absolute_path).iterdir()}


def test_a_runner_keeps_few_folders_and_fetches_again(tmp_path) -> None:
    """Many more adapters than folders, each of which comes back."""
    adapters = [
        LoRARequest(f"adapter-{i}", i, str(write_random_adapter(tmp_path / str(i), MODEL, 8, i)))
        for i in range(1, NUM_ADAPTERS + 1)
    ]
    stored = {adapter.lora_int_id: files_in(adapter) for adapter in adapters}
    fetched: list[int] = []
    runner = new_runner(stored, beside=True)
    fetch = runner.folders._fetch
    runner.folders._fetch = lambda key: fetched.append(key) or fetch(key)
    files = {key: StoredFiles(digest_of(content), key) for key, content in stored.items()}
    dispatcher = Dispatcher(runner.describe(), files_of=lambda adapter: files[adapter.lora_int_id])
    dispatcher.join("runner", runner.describe())
    asked = [
        Request(f"{turn}-{adapter.lora_int_id}", [1, 2, turn + 3], 3 + adapter.lora_int_id % 3, adapter)
        for turn in range(3) for adapter in adapters
    ]  # fmt: skip
    expected = undisturbed(asked)
    for adapter in adapters:  # no runner can see it
        shutil.rmtree(adapter.absolute_path)
    states = [dispatcher.add(request) for request in asked]
    assert run(LocalRunners(dispatcher, {"runner": runner})) == {}
    assert {state.request_id: state.output_token_ids for state in states} == expected
    kept = runner.engine.manager.lora_config.max_cpu_loras
    assert len(runner.folders) == len(list(Path(runner.folders._home.name).iterdir())) == kept < NUM_ADAPTERS
    assert set(fetched) == set(stored)
    assert len(fetched) > NUM_ADAPTERS, "some were fetched again"


def test_another_content_under_the_same_id_is_another_folder(tmp_path) -> None:
    contents = {"a": {"x": b"1"}, "b": {"x": b"2"}}
    folders = AdapterFolderCache(contents.__getitem__, 1)
    adapter = LoRARequest("one", 1, "nowhere")
    found = [folders.local(adapter, StoredFiles(digest_of(contents[key]), key)).lora_path for key in "aab"]
    assert found[0] == found[1] != found[2]
    assert not Path(found[0]).exists()
    assert Path(found[2], "x").read_bytes() == b"2"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_only_regular_files_of_a_bounded_size_are_read(tmp_path, name) -> None:
    folder = write_random_adapter(tmp_path / "one", MODEL, 8, 1)
    adapter = LoRARequest("one", 1, str(folder))
    assert read_adapter_files(adapter) == files_in(adapter)
    os.truncate(folder / name, 1 << 40)  # sparse
    with pytest.raises(ValueError, match=f"{name}' has 1099511627776 bytes, and at most .* give the adapter a smaller"):
        read_adapter_files(adapter)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(FileNotFoundError, match="is not a regular file"):
        read_adapter_files(adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("how", ["in place", "by a new file"])
def test_files_of_two_versions_are_not_stored(tmp_path, monkeypatch, name, how) -> None:
    folder, real = write_random_adapter(tmp_path / "one", MODEL, 8, 1), Path.read_bytes
    new = write_random_adapter(tmp_path / "two", MODEL, 4, 2) / name

    def read(path: Path) -> bytes:
        found = real(path)
        if path.name == "adapter_config.json" and new.exists():
            if how == "in place":
                (folder / name).write_bytes(real(new))
                new.unlink()
            else:
                new.rename(folder / name)
        return found

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(ValueError, match="changed while it was read; load it when all files are written"):
        read_adapter_files(LoRARequest("one", 1, str(folder)))
    assert read_adapter_files(LoRARequest("one", 1, str(folder)))[name] == real(folder / name)


def test_a_runner_that_hangs_at_a_check_is_named(monkeypatch) -> None:
    class GetTimeoutError(Exception):
        pass

    def get(future: object, timeout: float) -> None:
        assert 0 < timeout <= ray_runners.CHECK_TIMEOUT_S
        raise GetTimeoutError

    errors = SimpleNamespace(GetTimeoutError=GetTimeoutError, RayError=RuntimeError)
    monkeypatch.setattr(ray_runners, "import_ray", lambda: SimpleNamespace(get=get, exceptions=errors))
    runner = ray_runners.RunnerProcess(new_runner, ray_runners.RunnerResources())
    runner.actor = SimpleNamespace(check_adapter=SimpleNamespace(remote=lambda *_: object()))
    wait = runner.order_check(LoRARequest("poet", 1, "nowhere"), None)
    with pytest.raises(RuntimeError, match="'poet' was not checked: its runner has not replied within 30 s"):
        wait()


def test_a_folder_that_cannot_be_stored_is_not_kept_in_part(tmp_path, monkeypatch) -> None:
    folders = AdapterFolderCache({"a": {"x": b"1", "y": b"2"}}.__getitem__, 1)
    adapter, files = LoRARequest("one", 1, "nowhere"), StoredFiles("digest", "a")
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> None:
        if path.name == "y":
            raise OSError(28, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            folders.local(adapter, files)
    assert list(Path(folders._home.name).iterdir()) == []
    assert Path(folders.local(adapter, files).lora_path, "y").read_bytes() == b"2"


@pytest.fixture
def adapters(tmp_path: Path) -> dict[int, LoRARequest]:
    return write_adapters(tmp_path)


def change(adapter: LoRARequest) -> None:
    file = Path(adapter.absolute_path) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3000:-1500] = content[-1500:]
    file.write_bytes(content)


def ask(world: LocalRunners, name: str, adapter: LoRARequest, uuid: str) -> RequestState:
    """Have one of the runners serve a request, while the others are away."""
    others = [other for other in world.runners if other != uuid]
    for other in others:
        world.dispatcher.leave(other)
    state = world.dispatcher.add(Request(name, [1, 2, 3], 6, adapter))
    run(world)
    for other in others:
        world.dispatcher.join(other, world.runners[other].describe())
    return state


def test_another_runner_serves_what_the_first_has_loaded_or_says_what_changed(adapters) -> None:
    world, adapter = LocalRunners.of(2), adapters[2]
    expected = undisturbed([Request("x", [1, 2, 3], 6, adapter)])["x"]
    assert ask(world, "first", adapter, "runner-0").output_token_ids == expected
    change(adapter)
    assert ask(world, "in memory", adapter, "runner-0").output_token_ids == expected
    for turn in range(2):
        refused = ask(world, f"refused {turn}", adapter, "runner-1")
        assert f"'{adapter.lora_name}' (id 2) has changed on disk since it was loaded" in refused.error
        assert refused.output_token_ids == []
    new = ask(world, "again", replace(adapter, load_inplace=True), "runner-1").output_token_ids
    assert new == undisturbed([Request("x", [1, 2, 3], 6, adapter)])["x"] != expected
    assert ask(world, "old runner", adapter, "runner-0").output_token_ids == new, "the first runner loads it, too"
    assert world.dispatcher.num_unfinished == 0


def test_a_runner_that_starts_later_does_not_bring_another_version(adapters) -> None:
    adapter = adapters[3]

    def start() -> Runner:
        runner = Runner(factory(), fetch={}.__getitem__)
        runner.engine.manager.add_adapter(adapter)  # as from_pretrained does
        return runner

    def restart() -> None:
        world.dispatcher.died("runner-0", "a crash")
        world.runners["runner-0"] = start()
        world.dispatcher.join("runner-0", world.runners["runner-0"].describe())

    world = LocalRunners.of(1)
    restart()
    expected = undisturbed([Request("x", [1, 2, 3], 6, adapter)])["x"]
    change(adapter)
    restart()
    state = world.dispatcher.add(Request("r", [1, 2, 3], 6, adapter))
    assert list(run(world)) == ["r"]
    assert "has changed on disk since it was loaded" in state.error
    state = world.dispatcher.add(Request("in place", [1, 2, 3], 6, replace(adapter, load_inplace=True)))
    assert run(world) == {}
    assert state.output_token_ids != expected


def test_a_request_goes_on_with_the_version_it_began_with_or_fails(adapters) -> None:
    """Its runner dies, and the folder has been loaded again since by another."""
    world, adapter = LocalRunners.of(2), adapters[2]
    state = world.dispatcher.add(Request("r", [1, 2, 3], 9, replace(adapter, load_inplace=True)))
    (uuid,) = world.dispatcher.startable
    for _ in range(3):
        world.step(uuid)
    assert state.num_generated == 3
    change(adapter)
    world.dispatcher.died(uuid, "a crash")
    assert list(run(world)) == ["r"]
    assert "has changed on disk since it was loaded" in state.error


@pytest.mark.parametrize("new", [1, 6], ids=["its only token", "first of six"])
def test_of_two_runners_that_load_two_versions_at_once_one_is_refused(adapters, new) -> None:
    world, adapter = LocalRunners.of(2, max_batch_size=1), adapters[2]
    expected = undisturbed([Request("x", [1, 2, 3], 6, adapter)])["x"]
    states = [world.dispatcher.add(Request(f"r{i}", [1, 2, 3], new, adapter)) for i in range(2)]
    commands = {uuid: world.dispatcher.begin(uuid) for uuid in sorted(world.dispatcher.startable)}
    assert len(commands) == 2
    replies = {}
    for uuid, command in commands.items():
        replies[uuid] = world.runners[uuid].step(command)
        change(adapter)
    ended = [world.dispatcher.end(uuid, reply) for uuid, reply in replies.items()]
    assert [len(each.failed) for each in ended] == [0, 1]
    assert [len(each.tokens) for each in ended] == [1, 0]
    run(world)
    errors = [state.error for state in states]
    assert errors.count(None) == 1
    assert "has changed on disk since it was loaded" in next(filter(None, errors))
    assert [state.output_token_ids for state in states if state.error is None] == [expected[:new]]
    assert all(not runner.engine.has_unfinished() for runner in world.runners.values())
