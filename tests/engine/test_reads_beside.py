"""A folder is read beside the steps of others: nobody who runs waits for a disk."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from punica.adapters import LoRARequest
from punica.engine import Request
from punica.engine.residency import READERS
from tests.world import finish, reading_beside


class SlowDisk:
    """Reads of `manager` go on when `open` is set; `asked`: whose have begun."""

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
    engine._residency._readers.readings["second"].result(60)
    engine.step()
    assert (first.num_generated, second.num_generated) == (7, 1)
    assert disk.asked == [2], "once"
    finish(engine)
    for state, adapter in ((first, 1), (second, 2)):
        wanted = backbone.generate_merged(tuple(state.prompt_token_ids), adapter, state.params.max_new_tokens)
        assert state.output_token_ids == wanted
    assert engine._residency._readers.readings == {}


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
        engine._residency._readers.readings["second"].exception(60)
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
    assert engine._residency._readers.readings == {}
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


def one_runs(backbone, monkeypatch, rule="fcfs", **sizes):
    """An engine with a request that runs for long, and its disk."""
    engine = engine_of(backbone, rule, **sizes)
    engine.add_request(request(backbone, "first", 1, new=40))
    engine.step()
    return engine, SlowDisk(engine.manager, monkeypatch)


def copies(backbone, root: Path, count: int) -> list[LoRARequest]:
    """Adapters 101, 102, ...: each a folder of its own with what adapter 2 has."""
    for i in range(count):
        shutil.copytree(backbone.adapters[2].lora_path, root / str(i))
    return [LoRARequest(f"copy-{i}", 101 + i, str(root / str(i))) for i in range(count)]


@pytest.mark.parametrize("rule", ["fcfs", "fcfs_many", "resident_first"])
def test_the_next_in_the_queue_are_read_with_the_head_and_no_more(backbone, monkeypatch, tmp_path, rule) -> None:
    engine, disk = one_runs(backbone, monkeypatch, rule, max_loras=4)
    states = [
        engine.add_request(Request(str(i), [1, 2, 2], 2, adapter))
        for i, adapter in enumerate(copies(backbone, tmp_path, 3 * READERS))
    ]
    for _ in range(3):
        engine.step()
    assert list(engine._residency._readers.readings) == [str(i) for i in range(READERS)]
    disk.open.set()
    while engine.has_unfinished():
        engine.step()
        assert len(set(engine._residency._readers.readings.values())) <= READERS
    assert sorted(disk.asked) == [101 + i for i in range(3 * READERS)], "each once"
    for state in states:
        assert state.output_token_ids == backbone.generate_merged((1, 2, 2), 2, 2)


def test_as_one_is_used_the_next_is_read_though_nobody_can_join(backbone, monkeypatch, tmp_path) -> None:
    """The batch is full again: whoever leaves it finds the next adapter read."""
    engine, disk = one_runs(backbone, monkeypatch, max_batch_size=2, max_loras=2)
    for i, adapter in enumerate(copies(backbone, tmp_path, READERS + 2)):
        engine.add_request(Request(str(i), [1, 2, 2], 20, adapter))
    engine.step()
    disk.open.set()
    engine._residency._readers.readings["0"].result(60)
    engine.step()
    assert [state.request_id for state in engine.scheduler.running] == ["first", "0"]
    assert {str(i) for i in range(2, READERS + 1)} <= engine._residency._readers.readings.keys()
    finish(engine)


@pytest.mark.parametrize("leaves", [False, True], ids=["both join", "the first leaves"])
def test_two_who_wait_for_one_folder_share_its_reading(backbone, monkeypatch, leaves) -> None:
    engine, disk = one_runs(backbone, monkeypatch)
    second, third = (engine.add_request(request(backbone, name, 2, new=9)) for name in ("second", "third"))
    engine.step()
    residency = engine._residency
    assert residency.is_loaded(residency._waiting["third"]) is False
    assert residency._readers.readings["third"] is residency._readers.readings["second"]
    if leaves:
        engine.abort_request("second")
    disk.open.set()
    while not third.num_generated:
        engine.step()
    assert residency._readers.readings == residency._waiting == {}, "nothing is kept for those who run"
    finish(engine)
    assert disk.asked == [2]
    for state in (third,) if leaves else (second, third):
        assert state.output_token_ids == backbone.generate_merged((1, 2, 2), 2, 9)


def test_nobody_reads_for_who_has_left(backbone, monkeypatch, tmp_path) -> None:
    """All readers are busy; what waits for one is not begun once its request is gone."""
    engine, disk = one_runs(backbone, monkeypatch)
    adapters = copies(backbone, tmp_path, READERS + 1)
    for i, adapter in enumerate(adapters):
        engine.add_request(Request(str(i), [1, 2, 2], 2, adapter))
    late = [engine.add_request(Request(name, [1, 2, 2], 2, adapters[-1])) for name in ("late", "later")]
    engine.step()
    residency = engine._residency
    assert not any([residency.is_loaded(state) for state in late])  # beyond those that are read ahead
    reading = residency._readers.readings["late"]
    engine.abort_request("late")
    assert not reading.cancelled()
    engine.abort_request("later")
    assert reading.cancelled()
    engine.abort_request(str(READERS))
    disk.open.set()
    finish(engine)
    assert sorted(disk.asked) == [101 + i for i in range(READERS)]


def test_who_counts_on_a_new_load_gets_nothing_read_before_it(backbone, tmp_path: Path) -> None:
    """Adapter 2 is read for one who waits; then its folder changes, is loaded anew, and forgotten by the manager."""
    engine = engine_of(backbone, max_loras=2)
    shutil.copytree(backbone.adapters[2].lora_path, folder := tmp_path / "changing")
    adapter = LoRARequest("changing", 9, str(folder))
    residency = engine._residency
    engine.add_request(request(backbone, "first", 1, new=40))
    engine.step()
    old = engine.add_request(Request("old", [1, 2], 3, adapter))
    residency.is_loaded(old)
    residency._readers.readings["old"].result(60)
    shutil.copytree(backbone.adapters[3].lora_path, folder, dirs_exist_ok=True)
    anew = engine.add_request(Request("anew", [1, 2], 1, LoRARequest("changing", 9, str(folder), load_inplace=True)))
    later = engine.add_request(Request("later", [1, 2], 3, adapter))
    residency._readers.readings["later"] = residency._readers.readings["old"]  # as if it had asked at once
    residency._reload(anew, anew.adapter)
    assert residency._readers.readings == {}
    engine.manager.remove_adapter(9)
    finish(engine)
    assert later.output_token_ids == backbone.generate_merged((1, 2), 3, 3)
    assert anew.output_token_ids == backbone.generate_merged((1, 2), 3, 1)


def test_a_reading_that_failed_is_not_shared(backbone, monkeypatch, tmp_path: Path) -> None:
    """The disk waits until the engine has looked who is next: who is read ahead after the failure reads the damage."""
    engine, disk = one_runs(backbone, monkeypatch)
    shutil.copytree(backbone.adapters[2].lora_path, folder := tmp_path / "repaired")
    file, adapter = folder / "adapter_model.safetensors", LoRARequest("repaired", 9, str(folder))
    good = file.read_bytes()
    broken, whole = (engine.add_request(Request(name, [1, 2, 2], 2, adapter)) for name in ("broken", "whole"))
    file.write_bytes(b"damaged")
    engine._residency.is_loaded(broken)
    disk.open.set()
    assert engine._residency._readers.readings["broken"].exception(60) is not None
    assert engine._residency._readers.readings.keys() == {"broken"}
    file.write_bytes(good)
    engine._residency.is_loaded(whole)
    finish(engine)
    assert disk.asked == [9, 9]
    assert "'repaired'" in broken.error
    assert whole.output_token_ids == backbone.generate_merged((1, 2, 2), 2, 2)


def test_readers_compute_alone_and_all_others_as_before(backbone) -> None:
    threads = torch.get_num_threads()
    readers = engine_of(backbone)._residency._readers._pool
    assert readers.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == threads
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == threads
