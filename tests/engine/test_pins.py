"""Pinned adapters keep their slots while an engine serves: the others share what is left, and nobody waits unheard."""

import pytest
from test_scheduler import advance, check_invariants, drain, make, make_scheduler, names

from punica.engine import Engine, Request, RequestStatus

RULES = ("fcfs", "single_adapter", "static", "static_mixed")


# --- the scheduler, without a model -----------------------------------------------------------------------------------


def test_a_pinned_adapter_occupies_its_slot_unused() -> None:
    scheduler = make_scheduler(max_adapters=2)
    for name, adapter_id in zip("abc", (1, 2, 9), strict=True):
        scheduler.add(make(name, new=9, adapter_id=adapter_id))
    assert names(scheduler.schedule(pinned={9}).prefills) == "a"
    assert names(scheduler.schedule(pinned={9}).prefills) == ""  # b needs a third slot
    assert names(scheduler.schedule(pinned={7, 9}).preempted) == "a"
    assert names(scheduler.schedule(pinned=()).prefills) == "a"
    check_invariants(scheduler)


def test_requests_without_adapter_and_of_the_pinned_one_need_no_other_slot() -> None:
    scheduler = make_scheduler(max_adapters=2)
    for name, adapter_id in zip("abcd", (9, 0, 8, 9), strict=True):
        scheduler.add(make(name, new=20, adapter_id=adapter_id))
    admitted = [names(scheduler.schedule(pinned={8, 9}).prefills) for _ in range(5)]
    assert admitted == ["a", "b", "c", "d", ""]


@pytest.mark.parametrize(
    ("slots", "pinned", "leaving"),
    [(3, {1, 9}, "c"), (3, {9}, "c"), (3, {8, 9}, "cb"), (3, {7, 8, 9}, "cba"), (4, {9}, ""), (3, {1, 2, 3}, "")],
)
def test_pins_take_the_slots_of_who_joined_last(slots, pinned, leaving) -> None:
    scheduler = make_scheduler(max_adapters=slots)
    for name, adapter_id in zip("abcd", (1, 2, 3, 0), strict=True):
        scheduler.add(make(name, new=30, adapter_id=adapter_id))
    while scheduler.waiting:
        advance(scheduler)
    plan = scheduler.schedule(pinned)
    assert names(plan.preempted) == leaving
    assert names(scheduler.waiting) == leaving[::-1]
    assert plan.prefills == ()
    assert all(request.status is RequestStatus.WAITING for request in plan.preempted)
    check_invariants(scheduler)


def test_all_requests_of_an_adapter_leave_and_return_in_their_order() -> None:
    scheduler = make_scheduler(max_adapters=3)
    for name, adapter_id in zip("abcde", (5, 6, 7, 5, 6), strict=True):
        scheduler.add(make(name, new=12, adapter_id=adapter_id))
    while scheduler.waiting:
        advance(scheduler)
    plan = scheduler.schedule(pinned={8, 9})
    assert names(plan.preempted) == "ecb"
    assert names(plan.decodes) == "ad"
    assert names(scheduler.waiting) == "bce"
    for request in plan.decodes:
        request.append(7)
    assert "".join(names(plan.prefills) for plan in drain(scheduler)) == "bce"


@pytest.mark.parametrize(("rule", "finished"), [("static", 1), ("static_mixed", 1), ("static_mixed", 0)])
def test_what_is_left_of_a_batch_that_loses_its_running_members_is_retired(rule, finished) -> None:
    """The finished member leaves, even if it needs no slot: nothing would ever run beside it."""
    scheduler = make_scheduler(rule, max_adapters=1)
    for name, new, adapter_id in (("a", 1, finished), ("b", 5, 1)):
        scheduler.add(make(name, new=new, adapter_id=adapter_id))
    advance(scheduler)
    plan = scheduler.schedule(pinned={9})
    assert (names(plan.preempted), names(plan.idle), plan.is_empty) == ("b", "", True)
    assert scheduler.running == []
    assert scheduler.pages.num_free == scheduler.pages.num_pages
    assert [names(plan.prefills) for plan in drain(scheduler)] == ["b", "", "", ""]


def test_finished_members_of_a_batch_yield_before_unfinished_ones() -> None:
    scheduler = make_scheduler("static_mixed", max_adapters=2)
    for name, new, adapter_id in (("a", 1, 1), ("b", 5, 2)):
        scheduler.add(make(name, new=new, adapter_id=adapter_id))
    advance(scheduler)
    plan = scheduler.schedule(pinned={9})
    assert (names(plan.preempted), names(plan.idle), names(plan.decodes)) == ("", "", "b")
    check_invariants(scheduler)


# --- the engine -------------------------------------------------------------------------------------------------------


def finish(engine: Engine) -> None:
    for _ in range(200):
        if not engine.has_unfinished():
            break
        engine.step()
        active = [i for i in engine.manager.lora_index_to_id if i is not None]
        assert engine.manager.pinned_adapters <= set(active)
    assert not engine.has_unfinished()
    assert engine.pages.num_free == engine.pages.num_pages


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
    for request in requests:
        engine.add_request(request)
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
    assert engine._residency._sources.keys() == set()
    with pytest.raises(RuntimeError, match="all 2 slots are pinned"):
        engine.generate([[1], [2]], [backbone.adapters[1], backbone.adapters[3]], 4)
    assert not engine.has_unfinished()
    served = engine.generate([[1], [2], [3]], [backbone.adapters[1], None, backbone.adapters[2]], 4)
    assert served == [backbone.generate_merged(p, a, 4) for p, a in (((1,), 1), ((2,), 0), ((3,), 2))]
    engine.manager.unpin_adapter(1)
    assert engine.generate([[1]], [backbone.adapters[3]], 4) == [backbone.generate_merged((1,), 3, 4)]


@pytest.mark.parametrize("way_out", ["unpin", "abort"])
def test_pins_that_shut_a_queued_request_out_are_reported_and_lose_nothing(backbone, way_out) -> None:
    """It was queued while there was a slot. As long as others run it waits; then the engine says so, once per step."""
    engine = backbone.engine(max_loras=2)
    running, stuck, behind = (Request(n, [4, i], 3, backbone.adapters[i]) for n, i in (("r", 1), ("s", 3), ("b", 2)))
    engine.add_request(running)
    engine.add_request(stuck)
    engine.add_request(behind)
    pin(engine, backbone, 1, 2)
    while running.status is not RequestStatus.FINISHED:
        engine.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"request 's' waits for a slot for adapter 3.*\[1, 2\].*unpin_adapter"):
            engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == ["s", "b"]
    if way_out == "unpin":
        engine.manager.unpin_adapter(2)
    else:
        engine.abort_request("s")
    finish(engine)
    assert running.output_token_ids == backbone.generate_merged((4, 1), 1, 3)
    assert behind.output_token_ids == backbone.generate_merged((4, 2), 2, 3)
    assert stuck.output_token_ids == (backbone.generate_merged((4, 3), 3, 3) if way_out == "unpin" else [])


def test_a_running_request_shut_out_by_new_pins_goes_on_after_unpinning(backbone) -> None:
    engine = backbone.engine(max_loras=1)
    request = Request("a", [5, 6], 6, backbone.adapters[1])
    engine.add_request(request)
    engine.step()
    engine.step()
    pin(engine, backbone, 2)
    with pytest.raises(RuntimeError, match="request 'a' waits for a slot"):
        engine.step()
    assert request.output_token_ids == backbone.generate_merged((5, 6), 1, 2)
    engine.manager.unpin_adapter(2)
    finish(engine)
    assert request.output_token_ids == backbone.generate_merged((5, 6), 1, 6)
