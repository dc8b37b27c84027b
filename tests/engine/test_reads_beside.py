"""Adapters beside the steps of others: read by threads, copied into spare slots, loaded before their request joins.

Section 5.2 of the paper. No running request waits for a disk or a copy, and none loses its slot.
"""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from punica.adapters import LoRARequest
from punica.engine import Engine, Request, RequestState
from punica.engine.residency import READERS
from tests.world import are_served, damage, finish, is_of, reading_beside, steps

RULES = pytest.mark.parametrize("rule", ["fcfs", "fcfs_many", "resident_first"])


class SlowDisk:
    """Reads of `manager` end once `open` is set; `asked`: those that have begun."""

    def __init__(self, manager, monkeypatch) -> None:
        self.open, self.asked, real = threading.Event(), list[int](), manager.read_adapter

        def read(adapter):
            self.asked.append(adapter.lora_int_id)
            assert self.open.wait(60)
            return real(adapter)

        monkeypatch.setattr(manager, "read_adapter", read)


class SlowLink:
    """Copies into slots are under way until `ready`; `begun`: their adapters, in order."""

    def __init__(self, manager, monkeypatch) -> None:
        self.begun, self.ready, real = list[int](), True, manager._writer.write

        def write(slot, lora):
            real(slot, lora)
            self.begun.append(lora.id)
            return Copy(self)

        monkeypatch.setattr(manager._writer, "write", write)


class Copy:
    def __init__(self, link: SlowLink) -> None:
        self.link, self.arrived = link, link.ready

    def is_ready(self) -> bool:
        self.arrived = self.arrived or self.link.ready
        return self.arrived

    def wait(self) -> None:
        raise AssertionError("the host waited for a copy")


def engine_of(backbone, rule: str = "fcfs", **sizes) -> Engine:
    """As on a GPU: with a thread that reads."""
    return reading_beside(backbone.engine(rule, **sizes))


def ask(backbone, engine: Engine, name: str, adapter_id: int, new: int = 4) -> RequestState:
    return backbone.ask(engine, name, [1, 2, adapter_id], adapter_id, new)


def one_runs(
    backbone, monkeypatch, rule: str = "fcfs", new: int = 40, **sizes
) -> tuple[Engine, RequestState, SlowDisk]:
    """An engine, a request that runs, and the disk from then on."""
    engine = engine_of(backbone, rule, **sizes)
    first = ask(backbone, engine, "first", 1, new)
    engine.step()
    return engine, first, SlowDisk(engine.manager, monkeypatch)


def copies(backbone, root: Path, count: int) -> list[LoRARequest]:
    """Adapters 101, 102, ...: each a folder of its own with what adapter 2 has."""
    for i in range(count):
        shutil.copytree(backbone.adapters[2].lora_path, root / str(i))
    return [LoRARequest(f"copy-{i}", 101 + i, str(root / str(i))) for i in range(count)]


# --- folders are read by threads -------------------------------------------------------------------------------------


def test_running_requests_go_on_while_a_folder_is_read(backbone, monkeypatch) -> None:
    engine = engine_of(backbone)
    disk = SlowDisk(engine.manager, monkeypatch)
    first = ask(backbone, engine, "first", 1, 12)
    engine.step()
    assert disk.asked == [], "no other ran, so that it was read at once"
    second = ask(backbone, engine, "second", 2)
    steps(engine, 5)
    assert (first.num_generated, second.num_generated) == (6, 0)
    disk.open.set()
    engine._residency._readers.readings["second"].result(60)
    engine.step()
    assert (first.num_generated, second.num_generated, disk.asked) == (7, 1, [2])
    finish(engine)
    assert are_served(backbone, first, second)


def test_a_resident_request_may_pass_one_that_is_read(backbone, monkeypatch) -> None:
    engine, _, disk = one_runs(backbone, monkeypatch, "resident_first", new=9)
    slow, quick = (ask(backbone, engine, name, i) for name, i in (("slow", 2), ("quick", 1)))
    engine.step()
    assert (slow.num_generated, slow.overtaken, quick.num_generated) == (0, 1, 1)
    disk.open.set()
    finish(engine)
    assert (slow.finish_reason, quick.finish_reason) == ("length", "length")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_folder_that_breaks_in_the_queue_fails_only_when_its_request_joins(
    backbone, tmp_path: Path, in_place, beside
) -> None:
    engine = engine_of(backbone) if beside else backbone.engine()
    shutil.copytree(backbone.adapters[2].lora_path, folder := tmp_path / "broken")
    first = ask(backbone, engine, "first", 1, 50)
    engine.step()
    second = engine.add_request(Request("second", [5], 4, LoRARequest("broken", 9, str(folder), load_inplace=in_place)))
    third = ask(backbone, engine, "third", 3)
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    failed: list[str] = []
    while not second.has_ended and first.num_generated < 40:
        failed += [result.request_id for result in engine.step().failed]
    if not failed:  # the thread has not come to it: nothing but its turn can end it
        engine._residency._readers.readings["second"].exception(60)
        failed = [result.request_id for result in engine.step().failed]
    assert failed == ["second"]
    assert "'broken'" in second.error
    finish(engine)
    assert are_served(backbone, first, third)


@RULES
def test_a_request_that_leaves_while_its_folder_is_read_leaves_nothing(backbone, monkeypatch, rule) -> None:
    engine, first, disk = one_runs(backbone, monkeypatch, rule, new=6)
    ask(backbone, engine, "second", 2)
    engine.step()
    engine.abort_request("second")
    disk.open.set()
    finish(engine)
    assert engine.manager.get_adapter(2) is None
    third = ask(backbone, engine, "third", 2)
    finish(engine)
    assert are_served(backbone, first, third)


@RULES
def test_the_next_in_the_queue_are_read_with_the_head_and_no_more(backbone, monkeypatch, tmp_path, rule) -> None:
    """More adapters than slots and host memory; each is read once."""
    engine, _, disk = one_runs(backbone, monkeypatch, rule, max_loras=2)
    adapters = copies(backbone, tmp_path, 3 * READERS)
    states = [engine.add_request(Request(str(i), [1, 2, 2], 2, adapter)) for i, adapter in enumerate(adapters)]
    steps(engine, 3)
    assert list(engine._residency._readers.readings) == [str(i) for i in range(READERS)]
    disk.open.set()
    while engine.has_unfinished():
        engine.step()
        assert len(set(engine._residency._readers.readings.values())) <= READERS
    assert sorted(disk.asked) == [101 + i for i in range(3 * READERS)]
    assert all(is_of(backbone, state, 2) for state in states)


def test_as_one_is_used_the_next_is_read_though_none_can_join(backbone, monkeypatch, tmp_path) -> None:
    """The batch is full again: the next place finds its adapter read."""
    engine, _, disk = one_runs(backbone, monkeypatch, max_batch_size=2, max_loras=2)
    for i, adapter in enumerate(copies(backbone, tmp_path, READERS + 2)):
        engine.add_request(Request(str(i), [1, 2, 2], 20, adapter))
    engine.step()
    disk.open.set()
    engine._residency._readers.readings["0"].result(60)
    engine.step()
    assert [state.request_id for state in engine.scheduler.running] == ["first", "0"]
    assert {str(i) for i in range(2, READERS + 1)} <= engine._residency._readers.readings.keys()


@pytest.mark.parametrize("leaves", [False, True], ids=["both join", "the first leaves"])
def test_two_requests_for_one_folder_share_its_reading(backbone, monkeypatch, leaves) -> None:
    engine, _, disk = one_runs(backbone, monkeypatch)
    second, third = (ask(backbone, engine, name, 2, 9) for name in ("second", "third"))
    engine.step()
    residency = engine._residency
    assert residency.is_loaded(residency._waiting["third"]) is False
    assert residency._readers.readings["third"] is residency._readers.readings["second"]
    if leaves:
        engine.abort_request("second")
    disk.open.set()
    while not third.num_generated:
        engine.step()
    assert residency._readers.readings == residency._waiting == {}, "nothing is kept for running requests"
    finish(engine)
    assert disk.asked == [2]
    assert are_served(backbone, *((third,) if leaves else (second, third)))


def test_no_folder_is_read_for_a_request_that_has_left(backbone, monkeypatch, tmp_path) -> None:
    """All readers are busy; what waits for one is not begun once its request is gone."""
    engine, _, disk = one_runs(backbone, monkeypatch)
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


def test_a_request_that_counts_on_a_new_load_gets_nothing_read_before_it(backbone, tmp_path: Path) -> None:
    """A folder is read for a waiting request; then it changes, is loaded anew, and forgotten by the manager."""
    engine = engine_of(backbone, max_loras=2)
    adapter = copies(backbone, tmp_path, 1)[0]
    residency = engine._residency
    ask(backbone, engine, "first", 1, 40)
    engine.step()
    old = engine.add_request(Request("old", [1, 2], 3, adapter))
    residency.is_loaded(old)
    residency._readers.readings["old"].result(60)
    shutil.copytree(backbone.adapters[3].lora_path, adapter.lora_path, dirs_exist_ok=True)
    in_place = LoRARequest("copy-0", 101, adapter.lora_path, load_inplace=True)
    anew = engine.add_request(Request("anew", [1, 2], 1, in_place))
    later = engine.add_request(Request("later", [1, 2], 3, adapter))
    residency._readers.readings["later"] = residency._readers.readings["old"]  # as if it had asked at once
    residency._reload(anew, anew.adapter)
    assert residency._readers.readings == {}
    engine.manager.remove_adapter(101)
    finish(engine)
    assert (is_of(backbone, later, 3), is_of(backbone, anew, 3)) == (True, True)


def test_a_reading_that_failed_is_not_shared(backbone, monkeypatch, tmp_path: Path) -> None:
    """The disk waits until the engine has looked for the next: what is read ahead later reads the damage."""
    engine, _, disk = one_runs(backbone, monkeypatch)
    adapter = copies(backbone, tmp_path, 1)[0]
    file = Path(adapter.lora_path) / "adapter_model.safetensors"
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
    assert disk.asked == [101, 101]
    assert "'copy-0'" in broken.error
    assert is_of(backbone, whole, 2)


def test_readers_compute_alone_and_all_others_as_before(backbone) -> None:
    threads = torch.get_num_threads()
    readers = engine_of(backbone)._residency._readers._pool
    assert readers.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == threads
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == threads


# --- copies into spare slots -----------------------------------------------------------------------------------------


def with_registered(backbone, monkeypatch, rule: str = "fcfs", ids=(1, 2, 3), **sizes) -> tuple[Engine, SlowLink]:
    """An engine with adapters in host memory, none in a slot."""
    engine = engine_of(backbone, rule, **{"max_loras": 3, **sizes})
    for adapter_id in ids:
        engine.manager.add_adapter(backbone.adapters[adapter_id])
        engine.manager.deactivate_adapter(adapter_id)
    return engine, SlowLink(engine.manager, monkeypatch)


@RULES
def test_a_request_joins_at_once_and_its_copy_is_waited_for_by_the_device_alone(backbone, monkeypatch, rule) -> None:
    engine, link = with_registered(backbone, monkeypatch, rule)
    link.ready = False
    first = ask(backbone, engine, "first", 1, 14)
    engine.step()
    second = ask(backbone, engine, "second", 2)
    engine.step()
    assert (first.num_generated, second.num_generated, link.begun) == (2, 1, [1, 2])
    finish(engine)
    assert are_served(backbone, first, second)


@RULES
def test_the_spare_slot_is_filled_beside_the_steps_before_the_next_one_joins(backbone, monkeypatch, rule) -> None:
    """A full batch of as many adapters: the next one's copy has ended when its turn comes."""
    engine, link = with_registered(backbone, monkeypatch, rule, max_batch_size=2, max_loras=None)
    for name, adapter, new in (("first", 1, 3), ("second", 2, 9)):
        ask(backbone, engine, name, adapter, new)
        engine.step()
    third = ask(backbone, engine, "third", 3)
    engine.step()
    assert (link.begun, third.num_generated) == ([1, 2, 3], 0)
    engine.step()
    assert (link.begun, third.num_generated) == ([1, 2, 3], 1)


def test_a_request_that_leaves_before_its_turn_costs_no_running_one_its_slot(backbone, monkeypatch) -> None:
    """Its adapter was used last of all, when the next one needs a slot."""
    engine, link = with_registered(backbone, monkeypatch, max_loras=2, ids=())
    first = ask(backbone, engine, "first", 1, 12)
    engine.step()
    ask(backbone, engine, "second", 2)
    while 2 not in link.begun:
        engine.step()
        if (reading := engine._residency._readers.readings.get("second")) is not None:
            reading.result(60)
    engine.abort_request("second")
    third = ask(backbone, engine, "third", 3, 2)
    finish(engine)
    assert link.begun == [1, 2, 3]
    assert are_served(backbone, first, third)


def test_a_spare_slot_that_is_taken_meanwhile_starves_no_request(backbone, monkeypatch) -> None:
    engine, link = with_registered(backbone, monkeypatch, ids=(1, 2), max_batch_size=1, max_loras=None)
    ask(backbone, engine, "first", 1, 3)
    second = ask(backbone, engine, "second", 2)
    engine.step()
    assert link.begun == [1, 2]
    engine.manager.deactivate_adapter(2)
    finish(engine)
    assert link.begun == [1, 2, 2]
    assert is_of(backbone, second)


def test_a_folder_that_cannot_be_read_is_read_once(backbone, monkeypatch, tmp_path: Path) -> None:
    engine, _, disk = one_runs(backbone, monkeypatch, new=8, max_batch_size=1, max_loras=2)
    disk.open.set()
    damage((adapter := copies(backbone, tmp_path, 1)[0]).lora_path)
    broken = engine.add_request(Request("second", [5], 4, adapter))
    engine.step()
    with pytest.raises(ValueError, match="copy-0"):
        engine._residency._readers.readings["second"].result(60)
    finish(engine)
    assert disk.asked == [101]
    assert "'copy-0'" in broken.error


# --- one step ahead, without threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "active"), [(None, {1, 2}), (1, {1})], ids=["spare slots", "none"])
def test_the_head_of_the_queue_is_active_before_it_joins_if_a_slot_is_spare(backbone, slots, active) -> None:
    engine = backbone.engine(max_loras=slots)
    states = [ask(backbone, engine, f"r{i}", i) for i in (1, 2, 3)]
    engine.step()
    assert len(engine.scheduler.running) == 1
    assert {one for one in engine.manager.lora_index_to_id if one is not None} == active
    finish(engine)
    assert are_served(backbone, *states)


def test_a_load_is_tried_once_per_waiting_request(backbone, monkeypatch) -> None:
    engine = backbone.engine(max_batch_size=1, max_loras=2)
    for i in (1, 2):
        ask(backbone, engine, f"r{i}", i, 6)
    calls, real = [], engine.manager.add_adapter
    monkeypatch.setattr(engine.manager, "add_adapter", lambda one: calls.append(one.lora_int_id) or real(one))
    steps(engine, 5)
    assert calls == [1, 2]
