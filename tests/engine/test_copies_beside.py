"""An adapter in host memory goes into a spare slot beside the steps of others; no host waits for a copy."""

import shutil
from pathlib import Path

import pytest

from punica.adapters import LoRARequest
from punica.engine import Request
from tests.engine.test_reads_beside import engine_of, request
from tests.world import damage, finish


class SlowLink:
    """Copies into slots are under way until `arrive`; which adapters, in order."""

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


def with_registered(backbone, rule="fcfs", ids=(1, 2, 3), **sizes):
    """An engine with adapters in host memory, none in a slot."""
    engine = engine_of(backbone, rule, **{"max_loras": 3, **sizes})
    for adapter_id in ids:
        engine.manager.add_adapter(backbone.adapters[adapter_id])
        engine.manager.deactivate_adapter(adapter_id)
    return engine


@pytest.mark.parametrize("rule", ["fcfs", "fcfs_many", "resident_first"])
def test_a_request_joins_at_once_and_its_copy_is_waited_for_by_the_device_alone(backbone, monkeypatch, rule) -> None:
    engine = with_registered(backbone, rule)
    link = SlowLink(engine.manager, monkeypatch)
    link.ready = False
    first = engine.add_request(request(backbone, "first", 1, new=14))
    engine.step()
    second = engine.add_request(request(backbone, "second", 2))
    engine.step()
    assert (first.num_generated, second.num_generated) == (2, 1)
    assert link.begun == [1, 2]
    finish(engine)
    for state, adapter, new in ((first, 1, 14), (second, 2, 4)):
        assert state.output_token_ids == backbone.generate_merged(tuple(state.prompt_token_ids), adapter, new)


@pytest.mark.parametrize("rule", ["fcfs", "fcfs_many", "resident_first"])
def test_the_spare_slot_is_filled_beside_the_steps_before_the_next_one_joins(backbone, monkeypatch, rule) -> None:
    """A full batch of as many adapters: the next one's copy has ended when its turn comes."""
    engine = with_registered(backbone, rule, max_batch_size=2, max_loras=None)
    link = SlowLink(engine.manager, monkeypatch)
    for name, adapter, new in (("first", 1, 3), ("second", 2, 9)):
        engine.add_request(request(backbone, name, adapter, new=new))
        engine.step()
    third = engine.add_request(request(backbone, "third", 3))
    engine.step()
    assert (link.begun, third.num_generated) == ([1, 2, 3], 0)
    engine.step()
    assert (link.begun, third.num_generated) == ([1, 2, 3], 1)


def test_who_leaves_before_its_turn_costs_no_running_one_its_slot(backbone, monkeypatch) -> None:
    """Its adapter was used last of all, when the next one needs a slot."""
    engine = with_registered(backbone, max_loras=2, ids=())
    link = SlowLink(engine.manager, monkeypatch)
    first = engine.add_request(request(backbone, "first", 1, new=12))
    engine.step()
    engine.add_request(request(backbone, "second", 2))
    while 2 not in link.begun:
        engine.step()
        if (reading := engine._residency._readers.readings.get("second")) is not None:
            reading.result(60)
    engine.abort_request("second")
    third = engine.add_request(request(backbone, "third", 3, new=2))
    finish(engine)
    assert link.begun == [1, 2, 3]
    assert first.output_token_ids == backbone.generate_merged((1, 2, 1), 1, 12)
    assert third.output_token_ids == backbone.generate_merged((1, 2, 3), 3, 2)


def test_a_slot_that_somebody_takes_meanwhile_starves_nobody(backbone, monkeypatch) -> None:
    engine = with_registered(backbone, ids=(1, 2), max_batch_size=1, max_loras=None)
    link = SlowLink(engine.manager, monkeypatch)
    engine.add_request(request(backbone, "first", 1, new=3))
    second = engine.add_request(request(backbone, "second", 2))
    engine.step()
    assert link.begun == [1, 2]
    engine.manager.deactivate_adapter(2)
    finish(engine)
    assert link.begun == [1, 2, 2]
    assert second.output_token_ids == backbone.generate_merged((1, 2, 2), 2, 4)


def test_a_folder_that_cannot_be_read_is_read_once(backbone, monkeypatch, tmp_path: Path) -> None:
    engine = engine_of(backbone, max_batch_size=1, max_loras=2)
    shutil.copytree(backbone.adapters[2].lora_path, folder := tmp_path / "nan")
    damage(folder)
    loader, reads = engine.manager._loader, []
    real = loader.load
    monkeypatch.setattr(loader, "load", lambda adapter: reads.append(adapter.lora_name) or real(adapter))
    engine.add_request(request(backbone, "first", 1, new=8))
    engine.step()
    broken = engine.add_request(Request("second", [5], 4, LoRARequest("nan", 9, str(folder))))
    engine.step()
    with pytest.raises(ValueError, match="nan"):
        engine._residency._readers.readings["second"].result(60)
    finish(engine)
    assert reads == ["adapter-1", "nan"]
    assert "'nan'" in broken.error
