"""The rule that prefers adapters in slots: the next request, and the limit of overtakes."""

import random

import pytest

from punica.adapters import LoRARequest
from punica.scheduling import BlockManager, Request, RequestState, Scheduler
from punica.scheduling.admission import FirstComeFirstServed, ResidentFirst


def make(name: str, adapter_id: int, new: int = 3) -> RequestState:
    return RequestState(Request(name, [1] * 4, new, LoRARequest(f"adapter-{adapter_id}", adapter_id, "unused")))


class Slots:
    """Adapters in `count` slots: those of the batch stay, the longest unused of the others makes room."""

    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self.scheduler, self.count, self.used = scheduler, count, list[int]()
        scheduler.is_resident = lambda request: request.adapter_id in self.used

    def step(self) -> list[RequestState]:
        plan = self.scheduler.schedule()
        for request in (*plan.decodes, *plan.prefills):
            self.used = [other for other in self.used if other != request.adapter_id] + [request.adapter_id]
        self.used = self.used[-self.count :]
        assert {request.adapter_id for request in self.scheduler.running} <= set(self.used)
        for request in (*plan.prefills, *plan.decodes):
            request.append(7)
        self.scheduler.retire_finished()
        return list(plan.prefills)


def scheduler_of(rule, slots: int, batch: int = 8, blocks: int = 1000) -> tuple[Scheduler, Slots]:
    scheduler = Scheduler(rule, BlockManager(blocks, 4), batch, 1000, slots)
    return scheduler, Slots(scheduler, slots)


def test_who_needs_a_slot_does_not_hold_up_those_behind() -> None:
    joined = {}
    for rule in (FirstComeFirstServed(), ResidentFirst()):
        scheduler, slots = scheduler_of(rule, slots=1)
        for name, adapter_id in (("a", 1), ("b", 2), ("c", 1), ("d", 1)):
            scheduler.add(make(name, adapter_id))
        joined[type(rule)] = ["".join(request.request_id for request in slots.step()) for _ in range(8)]
    assert joined[FirstComeFirstServed] == ["a", "", "", "b", "", "", "c", "d"]
    assert joined[ResidentFirst] == ["a", "c", "d", "", "", "b", "", ""]


def test_a_request_that_was_overtaken_often_enough_is_a_wall() -> None:
    scheduler, slots = scheduler_of(ResidentFirst(1), slots=1)
    for name, adapter_id in (("a", 1), ("b", 2), ("c", 1), ("d", 1)):
        scheduler.add(make(name, adapter_id))
    joined = ["".join(request.request_id for request in slots.step()) for _ in range(9)]
    assert joined == ["a", "c", "", "", "b", "", "", "d", ""], "d would be the second to overtake b"


def test_the_wall_stands_wherever_it_is_in_the_queue() -> None:
    waiting = [make("a", 2), make("b", 3), make("c", 1)]
    waiting[1].overtaken = 5  # one that was preempted may stand before it
    rule = ResidentFirst(5)
    assert rule.candidate(waiting, lambda request: request.adapter_id == 1) is waiting[0]
    assert rule.candidate(waiting, lambda request: request.adapter_id == 3) is waiting[1]


@pytest.mark.parametrize("most", [0, 1, 3, 32])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slots", "batch", "blocks"), [(1, 4, 1000), (3, 6, 40), (8, 8, 1000)])
def test_nobody_is_overtaken_more_often_than_allowed(most, seed, slots, batch, blocks) -> None:
    """Random streams, some with preemption; overtakes are counted from the order in which requests first joined."""
    choose = random.Random(seed)
    scheduler, active = scheduler_of(ResidentFirst(most), slots, batch, blocks)
    requests: list[RequestState] = []
    joined: list[int] = []
    for step in range(1500):
        if step < 60:
            for _ in range(choose.randrange(3)):
                requests.append(make(str(len(requests)), choose.choice((1, 1, 1, 2, 3, 4, 5, 6)), choose.randint(1, 9)))
                scheduler.add(requests[-1])
        joined += [int(request.request_id) for request in active.step() if int(request.request_id) not in joined]
        if step >= 60 and not (scheduler.waiting or scheduler.running):
            break
    assert sorted(joined) == list(range(len(requests))), "everybody joined"
    overtakers = [sum(later > number for later in joined[: joined.index(number)]) for number in range(len(requests))]
    assert max(overtakers) <= most
    assert all(
        count <= request.overtaken <= most for count, request in zip(overtakers, requests, strict=True)
    ), "who was preempted may be passed again by one that stood behind it"
    if most == 32 and slots == 1:
        assert max(overtakers) > 3, "the rule does overtake"


@pytest.mark.parametrize("most", [-1, 1.5, True])
def test_the_bound_is_a_count(most) -> None:
    with pytest.raises((TypeError, ValueError), match="most_overtakes"):
        ResidentFirst(most)
