"""Pinned adapters keep their slots: other requests share the rest, and one without any slot fails."""

import re

import pytest

from punica.engine import Engine, Request
from punica.engine.runner import ModelRunner
from punica.scheduling import RequestStatus
from tests.world import finish as finished
from tests.world import tokens_of

RULES = ("fcfs", "fcfs_many", "resident_first", "single_adapter", "static", "static_mixed")


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "ahead"])
def works_ahead(request, monkeypatch) -> None:
    """A CPU's steps, and a GPU's, where a step begins before the host has read the one before."""
    monkeypatch.setattr(ModelRunner, "works_ahead", request.param)


def finish(engine: Engine) -> None:
    """Serve all; pinned adapters are active after every step."""
    while engine.has_unfinished():
        engine.step()
        assert engine.manager.pinned_adapters <= set(engine.manager.lora_index_to_id)
    finished(engine)


def pin(engine: Engine, backbone, *ids: int) -> None:
    for i in ids:
        engine.manager.add_adapter(backbone.adapters[i])
        engine.manager.pin_adapter(i)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pinned", [(6,), (6, 5), (2,)], ids=["one unused", "two unused", "one in use"])
def test_mixed_requests_are_served_beside_pins(backbone, serve, mixed_wishes, rule, pinned) -> None:
    engine = backbone.engine(rule, max_loras=3)
    pin(engine, backbone, *pinned)
    wishes = mixed_wishes[:8]
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in wishes]
    assert serve(engine, wishes) == expected
    assert engine.manager.pinned_adapters == set(pinned)
    assert set(pinned) <= set(engine.manager.lora_index_to_id)


@pytest.mark.parametrize("rule", RULES)
def test_pinning_over_running_requests_costs_no_token(backbone, rule) -> None:
    """The pin takes the slot of a running request, which waits for the other one to finish and is computed again."""
    engine = backbone.engine(rule, max_loras=2)
    requests = [Request(str(i), [i + 1, 7], new, backbone.adapters[i]) for i, new in ((1, 6), (2, 9))]
    requests = [engine.add_request(request) for request in requests]
    for _ in range(3):
        engine.step()
    pin(engine, backbone, 3)
    finish(engine)
    expected = [backbone.generate_merged((2, 7), 1, 6), backbone.generate_merged((3, 7), 2, 9)]
    assert [request.output_token_ids for request in requests] == expected
    assert 3 in engine.manager.lora_index_to_id


def test_a_request_that_could_wait_for_ever_is_refused_on_arrival(backbone) -> None:
    engine = backbone.engine(max_loras=2)
    pin(engine, backbone, 1, 2)
    with pytest.raises(
        RuntimeError, match=r"no slot for adapter 'adapter-3' \(id 3\): all 2 slots are pinned.*\[1, 2\]"
    ):
        engine.add_request(Request("a", [1], 4, backbone.adapters[3]))
    assert not engine.has_unfinished()
    assert engine._residency._users == {}
    with pytest.raises(RuntimeError, match="all 2 slots are pinned"):
        engine.generate([[1], [2]], [backbone.adapters[1], backbone.adapters[3]], 4)
    assert not engine.has_unfinished()
    served = tokens_of(engine.generate([[1], [2], [3]], [backbone.adapters[1], None, backbone.adapters[2]], 4))
    assert served == [backbone.generate_merged(p, a, 4) for p, a in (((1,), 1), ((2,), 0), ((3,), 2))]
    engine.manager.unpin_adapter(1)
    assert tokens_of(engine.generate([[1]], [backbone.adapters[3]], 4)) == [backbone.generate_merged((1,), 3, 4)]


@pytest.mark.parametrize("way_out", ["fails", "unpin", "abort"])
def test_pins_that_shut_a_queued_request_out_fail_it_and_nobody_else(backbone, way_out) -> None:
    """It was queued while there was a slot. As long as others run it waits for one; then no step would change that."""
    engine = backbone.engine(max_loras=2)
    wishes = [Request(n, [4, i], 3, backbone.adapters[i]) for n, i in (("r", 1), ("s", 3), ("b", 2))]
    running, stuck, behind = (engine.add_request(wish) for wish in wishes)
    pin(engine, backbone, 1, 2)
    while running.status is not RequestStatus.FINISHED:
        engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == ["s", "b"]
    if way_out == "unpin":
        engine.manager.unpin_adapter(2)
    elif way_out == "abort":
        engine.abort_request("s")
    else:
        assert [result.request_id for result in engine.step().failed] == [stuck.request_id]
        assert re.search(r"no slot for adapter 3: all 2 slots were pinned.*\[1, 2\].*unpin_adapter", stuck.error)
    finish(engine)
    assert running.output_token_ids == backbone.generate_merged((4, 1), 1, 3)
    assert behind.output_token_ids == backbone.generate_merged((4, 2), 2, 3)
    assert stuck.output_token_ids == (backbone.generate_merged((4, 3), 3, 3) if way_out == "unpin" else [])


@pytest.mark.parametrize("unpinned", [True, False])
def test_a_running_request_shut_out_by_new_pins_ends(backbone, unpinned) -> None:
    engine = backbone.engine(max_loras=1)
    request = engine.add_request(Request("a", [5, 6], 6, backbone.adapters[1]))
    engine.step()
    engine.step()
    pin(engine, backbone, 2)
    if unpinned:
        engine.manager.unpin_adapter(2)
    else:
        assert [result.request_id for result in engine.step().failed] == [request.request_id]
        assert "no slot for adapter 1" in request.error
    finish(engine)
    assert request.output_token_ids == backbone.generate_merged((5, 6), 1, 6 if unpinned else 2)
