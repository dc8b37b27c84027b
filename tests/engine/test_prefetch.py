"""The adapter of the next request loads beside the step in front of it (section 5.2), and never at anyone's expense."""

import shutil
from pathlib import Path

import pytest

from punica.adapters import LoRARequest
from punica.engine import Request


def request(backbone, name: str, adapter_id: int, new: int = 4) -> Request:
    return Request(name, [1, 2, adapter_id], new, backbone.adapters[adapter_id])


def active(engine) -> set[int]:
    return {adapter_id for adapter_id in engine.manager.lora_index_to_id if adapter_id is not None}


def test_the_head_of_the_queue_is_active_before_it_joins(backbone) -> None:
    engine = backbone.engine()
    for i in (1, 2, 3):
        engine.add_request(request(backbone, f"r{i}", i))
    engine.step()
    assert len(engine.scheduler.running) == 1
    assert active(engine) == {1, 2}, "2 is the next to join, 3 is not"


def test_without_a_slot_to_spare_nothing_moves(backbone) -> None:
    engine = backbone.engine(max_loras=1)
    requests = [request(backbone, f"r{i}", i, new=3) for i in (1, 2)]
    requests = [engine.add_request(each) for each in requests]
    engine.step()
    assert active(engine) == {1}
    while engine.has_unfinished():
        engine.step()
    for each, i in zip(requests, (1, 2), strict=True):
        assert each.output_token_ids == backbone.generate_merged((1, 2, i), i, 3)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_adapter_that_breaks_in_the_queue_fails_only_when_it_joins(backbone, tmp_path: Path, in_place) -> None:
    engine = backbone.engine()
    folder = tmp_path / "broken"
    shutil.copytree(backbone.adapters[2].lora_path, folder)
    broken = LoRARequest("broken", 9, str(folder), load_inplace=in_place)
    wishes = (request(backbone, "first", 1), Request("second", [5], 4, broken), request(backbone, "x", 3))
    first, second, third = (engine.add_request(wish) for wish in wishes)
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    engine.step()  # tries the load of `second`, whose turn it is not
    assert len(first.output_token_ids) == 1
    assert [result.request_id for result in engine.step().failed] == [second.request_id]
    assert "'broken'" in second.error
    while engine.has_unfinished():
        engine.step()
    assert second.output_token_ids == []
    for each, i in ((first, 1), (third, 3)):
        assert each.output_token_ids == backbone.generate_merged(tuple(each.prompt_token_ids), i, 4)


def test_a_load_is_tried_once_per_waiting_request(backbone, monkeypatch) -> None:
    engine = backbone.engine(max_batch_size=1, max_loras=2)
    for i in (1, 2):
        engine.add_request(request(backbone, f"r{i}", i, new=6))
    calls, real = [], engine.manager.add_adapter
    monkeypatch.setattr(
        engine.manager, "add_adapter", lambda adapter: calls.append(adapter.lora_int_id) or real(adapter)
    )
    for _ in range(5):
        engine.step()
    assert calls == [1, 2]
