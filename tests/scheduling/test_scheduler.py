"""Admission, growth and preemption, without a model: a step is `schedule`, a token per request, `retire_finished`."""

import random

import pytest

from punica.adapters import LoRARequest
from punica.scheduling import (
    ADMISSION_RULES,
    BlockManager,
    PrefixCache,
    Request,
    RequestState,
    RequestStatus,
    Scheduler,
    StepPlan,
)
from punica.scheduling.admission import FirstComeFirstServed, ResidentFirst


def make(name: str, prompt: int = 4, new: int = 4, adapter_id: int = 0) -> RequestState:
    adapter = LoRARequest(f"adapter-{adapter_id}", adapter_id, "unused") if adapter_id else None
    return RequestState(Request(name, [1] * prompt, new, adapter))


def make_scheduler(rule: str = "fcfs", num_blocks: int = 1000, batch: int = 32, **limits) -> Scheduler:
    return Scheduler(
        ADMISSION_RULES.get(rule)(), BlockManager(num_blocks, 4), batch, limits.pop("max_tokens", 10_000), **limits
    )


def names(requests) -> str:
    return "".join(request.request_id for request in requests)


def advance(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    for request in (*plan.prefills, *plan.decodes):
        request.append(7)
    scheduler.retire_finished()
    check_invariants(scheduler)
    return plan


def check_invariants(scheduler: Scheduler) -> None:
    assert scheduler.blocks._tables.keys() == {request.request_id for request in scheduler.running}
    assert not {id(r) for r in scheduler.running} & {id(r) for r in scheduler.waiting}
    assert all(request.status is RequestStatus.WAITING for request in scheduler.waiting)


def drain(scheduler: Scheduler, limit: int = 1000) -> list[StepPlan]:
    plans = []
    while scheduler.waiting or scheduler.running:
        plans.append(advance(scheduler))
        assert len(plans) < limit, "the scheduler makes no progress"
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    return plans


def filled(scheduler: Scheduler, **requests: tuple[int, int]) -> Scheduler:
    """Add requests, each `name=(new tokens, adapter id)`."""
    for name, (new, adapter_id) in requests.items():
        scheduler.add(make(name, new=new, adapter_id=adapter_id))
    return scheduler


def test_fcfs_admits_one_per_step_whatever_the_adapter_up_to_the_batch_limit() -> None:
    plans = drain(filled(make_scheduler(batch=3), a=(4, 0), b=(4, 1), c=(4, 2), d=(2, 3)))
    assert [names(plan.prefills) for plan in plans] == ["a", "b", "c", "", "d", ""]
    assert [names(plan.decodes) for plan in plans] == ["", "a", "ab", "abc", "bc", "cd"]


def test_single_adapter_waits_for_the_running_adapter() -> None:
    plans = drain(filled(make_scheduler("single_adapter"), a=(4, 1), b=(4, 1), c=(4, 2), d=(4, 1)))
    assert "".join(names(plan.prefills) for plan in plans) == "abcd"  # no overtaking
    for plan in plans:
        assert len(plan.prefills) <= 1
        assert len({request.adapter_id for request in (*plan.prefills, *plan.decodes)}) <= 1
    assert len(plans) == 5 + 4 + 4  # a and b overlap, c and d run alone


def test_static_batch_forms_at_once_and_runs_to_the_longest() -> None:
    plans = drain(filled(make_scheduler("static", batch=3), a=(1, 1), b=(4, 1), c=(2, 1), d=(2, 1), e=(1, 2)))
    assert [names(plan.prefills) for plan in plans] == ["abc", "", "", "", "d", "", "e"]
    assert [names(plan.decodes) for plan in plans] == ["", "bc", "b", "b", "", "d", ""]
    assert [names(plan.idle) for plan in plans] == ["", "a", "ac", "ac", "", "", ""]  # finished rows go on costing


def test_mixed_static_batches_take_any_adapter() -> None:
    plans = drain(filled(make_scheduler("static_mixed", batch=3), a=(2, 1), b=(5, 2), c=(1, 3), d=(4, 4), e=(3, 5)))
    seen = [(len(plan.prefills), len(plan.decodes), len(plan.idle)) for plan in plans]
    assert seen == [(3, 0, 0), (0, 2, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2), (2, 0, 0), (0, 2, 0), (0, 2, 0), (0, 1, 1)]


def test_static_batch_reserves_blocks_in_full_and_is_never_preempted() -> None:
    scheduler = make_scheduler("static", num_blocks=6)
    for name in "abc":
        scheduler.add(make(name, prompt=4, new=9))  # 12 tokens in the cache at the end: 3 blocks
    plans = drain(scheduler)
    assert names(plans[0].prefills) == "ab"
    assert all(not plan.preempted for plan in plans)


def test_static_batch_is_bounded_by_rows_per_step() -> None:
    scheduler = make_scheduler("static", max_tokens=9)
    for name in "abc":
        scheduler.add(make(name, prompt=4))
    assert names(advance(scheduler).prefills) == "ab"


def test_exhaustion_preempts_the_newest_which_returns_first() -> None:
    scheduler = make_scheduler(num_blocks=6)
    for name in "abc":
        scheduler.add(make(name, prompt=4, new=13))  # 1 block at first, 4 at the end
    preempted, admitted = "", ""
    requests = list(scheduler.waiting)
    for plan in drain(scheduler):
        preempted += names(plan.preempted)
        admitted += names(plan.prefills)
        assert not (plan.preempted and plan.prefills)  # none joins while others are thrown out
    assert preempted
    assert "a" not in preempted  # the oldest is never the victim
    assert admitted[0] == "a"
    assert all(len(request.output_token_ids) == 13 for request in requests)


@pytest.mark.parametrize("blocks", [3, 4])
def test_joining_leaves_a_block_for_all_to_grow_into(blocks) -> None:
    """A spare one for each of the batch, the new one included."""
    scheduler = make_scheduler(num_blocks=blocks)
    for name in "ab":
        scheduler.add(make(name, prompt=4, new=5))  # 1 block at first, 2 at the end
    plans = drain(scheduler)
    assert [names(plan.prefills) for plan in plans] == ["a", "", "", "", "", "b", "", "", "", ""]
    assert not any(plan.preempted for plan in plans)


def test_head_of_the_queue_waits_for_a_slot_without_being_overtaken() -> None:
    plans = drain(filled(make_scheduler(max_adapters=2), a=(2, 1), b=(6, 2), c=(2, 3), d=(2, 1), e=(2, 0)))
    for plan in plans:
        adapters = {request.adapter_id for request in (*plan.prefills, *plan.decodes)} - {0}
        assert len(adapters) <= 2
    assert "".join(names(plan.prefills) for plan in plans) == "abcde"


@pytest.mark.parametrize("rule", ["fcfs", "static"])
def test_a_request_is_taken_out_wherever_it_is(rule) -> None:
    """The last unfinished member of a batch takes the finished ones along: nothing would ever run beside them."""
    scheduler = filled(make_scheduler(rule, batch=2), a=(1, 0), b=(9, 0), c=(9, 0), d=(2, 0))
    requests = list(scheduler.waiting)
    for _ in range(2):
        advance(scheduler)
    scheduler.remove(requests[2])
    check_invariants(scheduler)
    scheduler.remove(requests[1])
    assert scheduler.running == []
    assert [names(plan.prefills) for plan in drain(scheduler)] == ["d", ""]


# --- adapters in slots go first, up to a limit of overtakes -----------------------------------------------------------


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


@pytest.mark.parametrize(
    ("rule", "joined"),
    [
        (FirstComeFirstServed(), ["a", "", "", "b", "", "", "c", "d", ""]),
        (ResidentFirst(), ["a", "c", "d", "", "", "b", "", "", ""]),
        (ResidentFirst(1), ["a", "c", "", "", "b", "", "", "d", ""]),  # d would be the second to overtake b
    ],
    ids=["fcfs", "resident first", "one overtake"],
)
def test_a_request_that_needs_a_slot_is_overtaken_by_resident_ones_up_to_a_limit(rule, joined) -> None:
    scheduler, slots = scheduler_of(rule, slots=1)
    filled(scheduler, a=(3, 1), b=(3, 2), c=(3, 1), d=(3, 1))
    assert [names(slots.step()) for _ in range(9)] == joined


def test_the_wall_stands_wherever_it_is_in_the_queue() -> None:
    waiting = [make(name, adapter_id=one) for name, one in zip("abc", (2, 3, 1), strict=True)]
    waiting[1].overtaken = 5  # one that was preempted may stand before it
    rule = ResidentFirst(5)
    assert rule.candidate(waiting, lambda request: request.adapter_id == 1) is waiting[0]
    assert rule.candidate(waiting, lambda request: request.adapter_id == 3) is waiting[1]


@pytest.mark.parametrize(
    ("most", "slots", "batch", "blocks"),
    [(0, 1, 4, 1000), (1, 3, 6, 40), (3, 1, 4, 1000), (3, 3, 6, 40), (32, 1, 4, 1000), (32, 8, 8, 1000)],
)
@pytest.mark.parametrize("seed", range(2))
def test_no_request_is_overtaken_more_often_than_allowed(most, seed, slots, batch, blocks) -> None:
    """Random streams, some with preemption; overtakes are counted from the order in which requests first joined."""
    choose = random.Random(seed)
    scheduler, active = scheduler_of(ResidentFirst(most), slots, batch, blocks)
    requests: list[RequestState] = []
    joined: list[int] = []
    for step in range(1500):
        if step < 60:
            for _ in range(choose.randrange(3)):
                requests.append(
                    make(str(len(requests)), 4, choose.randint(1, 9), choose.choice((1, 1, 1, 2, 3, 4, 5, 6)))
                )
                scheduler.add(requests[-1])
        joined += [int(request.request_id) for request in active.step() if int(request.request_id) not in joined]
        if step >= 60 and not (scheduler.waiting or scheduler.running):
            break
    assert sorted(joined) == list(range(len(requests))), "all joined"
    overtakers = [sum(later > number for later in joined[: joined.index(number)]) for number in range(len(requests))]
    assert max(overtakers) <= most
    counts = zip(overtakers, requests, strict=True)
    assert all(count <= request.overtaken <= most for count, request in counts), "preempted ones may be passed again"
    if most == 32 and slots == 1:
        assert max(overtakers) > 3, "the rule does overtake"


@pytest.mark.parametrize("most", [-1, 1.5, True])
def test_the_bound_is_a_count(most) -> None:
    with pytest.raises((TypeError, ValueError), match="most_overtakes"):
        ResidentFirst(most)


# --- pinned adapters keep their slots ---------------------------------------------------------------------------------


def test_a_pinned_adapter_occupies_its_slot_unused() -> None:
    scheduler = filled(make_scheduler(max_adapters=2), a=(9, 1), b=(9, 2), c=(9, 9))
    assert names(scheduler.schedule(pinned={9}).prefills) == "a"
    assert names(scheduler.schedule(pinned={9}).prefills) == ""  # b needs a third slot
    assert names(scheduler.schedule(pinned={7, 9}).preempted) == "a"
    assert names(scheduler.schedule(pinned=()).prefills) == "a"
    check_invariants(scheduler)


def test_requests_without_adapter_and_of_the_pinned_one_need_no_other_slot() -> None:
    scheduler = filled(make_scheduler(max_adapters=2), a=(20, 9), b=(20, 0), c=(20, 8), d=(20, 9))
    admitted = [names(scheduler.schedule(pinned={8, 9}).prefills) for _ in range(5)]
    assert admitted == ["a", "b", "c", "d", ""]


@pytest.mark.parametrize(
    ("slots", "pinned", "leaving"),
    [(3, {1, 9}, "c"), (3, {9}, "c"), (3, {8, 9}, "cb"), (3, {7, 8, 9}, "cba"), (4, {9}, ""), (3, {1, 2, 3}, "")],
)
def test_pins_take_the_slots_of_those_that_joined_last(slots, pinned, leaving) -> None:
    scheduler = filled(make_scheduler(max_adapters=slots), a=(30, 1), b=(30, 2), c=(30, 3), d=(30, 0))
    while scheduler.waiting:
        advance(scheduler)
    plan = scheduler.schedule(pinned)
    assert names(plan.preempted) == leaving
    assert names(scheduler.waiting) == leaving[::-1]
    assert plan.prefills == {}
    assert all(request.status is RequestStatus.WAITING for request in plan.preempted)
    check_invariants(scheduler)


def test_all_requests_of_an_adapter_leave_and_return_in_their_order() -> None:
    scheduler = filled(make_scheduler(max_adapters=3), a=(12, 5), b=(12, 6), c=(12, 7), d=(12, 5), e=(12, 6))
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
    scheduler = filled(make_scheduler(rule, max_adapters=1), a=(1, finished), b=(5, 1))
    advance(scheduler)
    plan = scheduler.schedule(pinned={9})
    assert (names(plan.preempted), names(plan.idle), plan.is_empty) == ("b", "", True)
    assert scheduler.running == []
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert [names(plan.prefills) for plan in drain(scheduler)] == ["b", "", "", ""]


def test_finished_members_of_a_batch_yield_before_unfinished_ones() -> None:
    scheduler = filled(make_scheduler("static_mixed", max_adapters=2), a=(1, 1), b=(5, 2))
    advance(scheduler)
    plan = scheduler.schedule(pinned={9})
    assert (names(plan.preempted), names(plan.idle), names(plan.decodes)) == ("", "", "b")
    check_invariants(scheduler)


def test_a_prompt_under_way_is_overtaken_by_none_whose_rest_fits_behind_it() -> None:
    """With a grain, rows are left behind its piece."""
    scheduler = Scheduler(ADMISSION_RULES.get("chunked")(), PrefixCache(100, 4, 8), 8, 20, chunk=12, grain=8)
    cached, long = make("a", 20), make("b", 24)
    long.prompt_token_ids = (2,) * 24
    scheduler.add(cached)
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        for request in {*plan.prefills, *plan.decodes} - {scheduler.partial}:
            scheduler.blocks.register("a", request.tokens_between, 20, request.prefix_key)
            request.append(7)
        scheduler.retire_finished()
    rest = make("c", 18)
    scheduler.add(long)
    scheduler.add(rest)
    for pieces, partial in (({long: (0, 8)}, long), ({long: (8, 16)}, long), ({long: (16, 24), rest: (16, 18)}, None)):
        assert scheduler.schedule().prefills == pieces
        assert scheduler.partial is partial
