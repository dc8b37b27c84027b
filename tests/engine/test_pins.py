"""Pinned adapters keep their slots: other requests share the rest, and one without any slot fails."""

import re

import pytest

from punica.engine import Engine
from punica.scheduling import RequestStatus
from tests.world import are_served, finish, steps, tokens_of

pytestmark = pytest.mark.usefixtures("ahead")


def pin(engine: Engine, backbone, *ids: int) -> None:
    for i in ids:
        engine.manager.add_adapter(backbone.adapters[i])
        engine.manager.pin_adapter(i)


def test_a_request_that_could_wait_for_ever_is_refused_on_arrival(backbone) -> None:
    engine = backbone.engine(max_loras=2)
    pin(engine, backbone, 1, 2)
    with pytest.raises(RuntimeError, match=r"'adapter-3' \(id 3\): 2 of 2 slots are pinned.*\[1, 2\]"):
        backbone.ask(engine, "a", [1], 3)
    with pytest.raises(RuntimeError, match="2 of 2 slots are pinned"):
        engine.generate([[1], [2]], [backbone.adapters[1], backbone.adapters[3]], 4)
    finish(engine)
    served = tokens_of(engine.generate([[1], [2], [3]], [backbone.adapters[1], None, backbone.adapters[2]], 4))
    assert served == [backbone.generate_merged(p, a, 4) for p, a in (((1,), 1), ((2,), 0), ((3,), 2))]
    engine.manager.unpin_adapter(1)
    assert tokens_of(engine.generate([[1]], [backbone.adapters[3]], 4)) == [backbone.generate_merged((1,), 3, 4)]


@pytest.mark.parametrize("way_out", ["fails", "unpin", "abort"])
def test_pins_that_shut_a_queued_request_out_fail_no_other(backbone, way_out) -> None:
    """It was queued while there was a slot. As long as others run it waits for one; then no step would change that."""
    engine = backbone.engine(max_loras=2)
    running, stuck, behind = (backbone.ask(engine, name, [4, i], i, 3) for name, i in (("r", 1), ("s", 3), ("b", 2)))
    pin(engine, backbone, 1, 2)
    while running.status is not RequestStatus.FINISHED:
        engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == ["s", "b"]
    if way_out == "unpin":
        engine.manager.unpin_adapter(2)
    elif way_out == "abort":
        engine.abort_request("s")
    else:
        assert [result.request_id for result in engine.step().failed] == ["s"]
        assert re.search(r"no slot for adapter 3: all 2 slots were pinned.*\[1, 2\]", stuck.error)
    finish(engine)
    assert are_served(backbone, running, behind)
    assert stuck.output_token_ids == (backbone.generate_merged((4, 3), 3, 3) if way_out == "unpin" else [])


@pytest.mark.parametrize("unpinned", [True, False])
def test_a_running_request_shut_out_by_new_pins_ends(backbone, unpinned) -> None:
    engine = backbone.engine(max_loras=1)
    state = backbone.ask(engine, "a", [5, 6], 1, 6)
    steps(engine, 2)
    pin(engine, backbone, 2)
    if unpinned:
        engine.manager.unpin_adapter(2)
    else:
        assert "no slot for adapter 1" in engine.step().failed[0].error
    finish(engine)
    assert state.output_token_ids == backbone.generate_merged((5, 6), 1, 6 if unpinned else 2)
