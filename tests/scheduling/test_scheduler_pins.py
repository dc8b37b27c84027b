"""Pinned adapters keep their slots: the scheduler gives the others what is left."""

import pytest
from test_scheduler import advance, check_invariants, drain, make, make_scheduler, names

from punica.scheduling import RequestStatus


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
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert [names(plan.prefills) for plan in drain(scheduler)] == ["b", "", "", ""]


def test_finished_members_of_a_batch_yield_before_unfinished_ones() -> None:
    scheduler = make_scheduler("static_mixed", max_adapters=2)
    for name, new, adapter_id in (("a", 1, 1), ("b", 5, 2)):
        scheduler.add(make(name, new=new, adapter_id=adapter_id))
    advance(scheduler)
    plan = scheduler.schedule(pinned={9})
    assert (names(plan.preempted), names(plan.idle), names(plan.decodes)) == ("", "", "b")
    check_invariants(scheduler)
