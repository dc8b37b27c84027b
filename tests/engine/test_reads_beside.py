"""A folder is read beside the steps of others: nobody who runs waits for a disk."""

import shutil
import threading
from pathlib import Path

import pytest

from punica.adapters import LoRARequest
from punica.engine import Request
from tests.engine.beside_world import reading_beside


class SlowDisk:
    """Reads of `manager` begin when `open` is set."""

    def __init__(self, manager, monkeypatch) -> None:
        self.open, self.asked, real = threading.Event(), list[int](), manager.read_adapter

        def read(adapter):
            self.asked.append(adapter.lora_int_id)
            assert self.open.wait(60)
            return real(adapter)

        monkeypatch.setattr(manager, "read_adapter", read)


def engine_of(backbone, rule="fcfs", **sizes):
    """As on a GPU: with a thread that reads."""
    return reading_beside(backbone.engine(rule, **sizes))


def request(backbone, name: str, adapter_id: int, new: int = 4) -> Request:
    return Request(name, [1, 2, adapter_id], new, backbone.adapters[adapter_id])


def finish(engine) -> None:
    while engine.has_unfinished():
        engine.step()


def test_those_who_run_go_on_while_a_folder_is_read(backbone, monkeypatch) -> None:
    engine = engine_of(backbone)
    disk = SlowDisk(engine.manager, monkeypatch)
    first = engine.add_request(request(backbone, "first", 1, new=12))
    engine.step()
    assert disk.asked == [], "nobody ran, so that it was read at once"
    second = engine.add_request(request(backbone, "second", 2))
    for _ in range(5):
        engine.step()
    assert (first.num_generated, second.num_generated) == (6, 0)
    disk.open.set()
    engine._residency._reading["second"].result(60)
    engine.step()
    assert (first.num_generated, second.num_generated) == (7, 1)
    assert disk.asked == [2], "once"
    finish(engine)
    for state, adapter in ((first, 1), (second, 2)):
        wanted = backbone.generate_merged(tuple(state.prompt_token_ids), adapter, state.params.max_new_tokens)
        assert state.output_token_ids == wanted
    assert engine._residency._reading == {}


def test_one_that_is_resident_may_pass_one_that_is_read(backbone, monkeypatch) -> None:
    engine = engine_of(backbone, "resident_first")
    disk = SlowDisk(engine.manager, monkeypatch)
    engine.add_request(request(backbone, "first", 1, new=9))
    engine.step()
    slow, quick = (engine.add_request(request(backbone, name, i)) for name, i in (("slow", 2), ("quick", 1)))
    engine.step()
    assert (slow.num_generated, slow.overtaken, quick.num_generated) == (0, 1, 1)
    disk.open.set()
    finish(engine)
    assert (slow.finish_reason, quick.finish_reason) == ("length", "length")


def test_a_read_that_fails_ends_its_own_request_when_it_joins(backbone, tmp_path: Path) -> None:
    engine = engine_of(backbone)
    folder = tmp_path / "broken"
    shutil.copytree(backbone.adapters[2].lora_path, folder)
    first = engine.add_request(request(backbone, "first", 1, new=50))
    engine.step()
    second = engine.add_request(Request("second", [5], 4, LoRARequest("broken", 9, str(folder))))
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    failed = [result.request_id for _ in range(40) if not second.has_ended for result in engine.step().failed]
    if not failed:  # the thread has not come to it: nothing but its turn can end it
        engine._residency._reading["second"].exception(60)
        failed = [result.request_id for result in engine.step().failed]
    assert failed == ["second"]
    assert "'broken'" in second.error
    finish(engine)
    assert first.finish_reason == "length"


@pytest.mark.parametrize("rule", ["fcfs", "fcfs_many", "resident_first"])
def test_who_leaves_while_its_folder_is_read_leaves_nothing(backbone, monkeypatch, rule) -> None:
    engine = engine_of(backbone, rule)
    disk = SlowDisk(engine.manager, monkeypatch)
    first = engine.add_request(request(backbone, "first", 1, new=6))
    engine.step()
    engine.add_request(request(backbone, "second", 2))
    engine.step()
    engine.abort_request("second")
    disk.open.set()
    finish(engine)
    assert engine._residency._reading == {}
    assert engine.manager.get_adapter(2) is None
    assert first.num_generated == 6
    third = engine.add_request(request(backbone, "third", 2))
    finish(engine)
    assert third.output_token_ids == backbone.generate_merged((1, 2, 2), 2, 4)


def test_with_many_more_adapters_than_memory_all_tokens_are_right(backbone) -> None:
    engine = engine_of(backbone, "resident_first", max_loras=2)  # and as many in host memory
    states = [engine.add_request(request(backbone, str(i), 1 + i % 6, new=1 + i % 5)) for i in range(24)]
    finish(engine)
    for i, state in enumerate(states):
        assert state.output_token_ids == backbone.generate_merged((1, 2, 1 + i % 6), 1 + i % 6, 1 + i % 5)
