"""Admission, growth and preemption, without a model: a step is `schedule`, a token per request, `retire_finished`."""

import pytest

from punica.adapters import LoRARequest
from punica.scheduling import (
    ADMISSION_RULES,
    BlockManager,
    Request,
    RequestState,
    RequestStatus,
    Scheduler,
    StepPlan,
)


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
    assert set(scheduler.blocks.owners()) == {request.request_id for request in scheduler.running}
    assert not {id(r) for r in scheduler.running} & {id(r) for r in scheduler.waiting}
    assert all(request.status is RequestStatus.WAITING for request in scheduler.waiting)


def drain(scheduler: Scheduler, limit: int = 1000) -> list[StepPlan]:
    plans = []
    while scheduler.waiting or scheduler.running:
        plans.append(advance(scheduler))
        assert len(plans) < limit, "the scheduler makes no progress"
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    return plans


def test_fcfs_admits_one_per_step_whatever_the_adapter() -> None:
    scheduler = make_scheduler()
    for i, name in enumerate("abc"):
        scheduler.add(make(name, adapter_id=i))
    plans = drain(scheduler)
    assert [names(plan.prefills) for plan in plans[:4]] == ["a", "b", "c", ""]
    assert [names(plan.decodes) for plan in plans[:4]] == ["", "a", "ab", "abc"]
    assert len(plans) == 6  # c starts in the third step and makes four tokens


def test_fcfs_respects_the_batch_limit() -> None:
    scheduler = make_scheduler(batch=2)
    for name in "abcd":
        scheduler.add(make(name))
    for plan in drain(scheduler):
        assert len(plan.prefills) + len(plan.decodes) <= 2


def test_single_adapter_waits_for_the_running_adapter() -> None:
    scheduler = make_scheduler("single_adapter")
    for name, adapter_id in zip("abcd", (1, 1, 2, 1), strict=True):
        scheduler.add(make(name, adapter_id=adapter_id))
    plans = drain(scheduler)
    assert "".join(names(plan.prefills) for plan in plans) == "abcd"  # nobody overtakes
    for plan in plans:
        assert len(plan.prefills) <= 1
        assert len({request.adapter_id for request in (*plan.prefills, *plan.decodes)}) <= 1
    assert len(plans) == 5 + 4 + 4  # a and b overlap, c and d run alone


def test_static_batch_forms_at_once_and_runs_to_the_longest() -> None:
    scheduler = make_scheduler("static", batch=3)
    for name, new, adapter_id in (("a", 1, 1), ("b", 4, 1), ("c", 2, 1), ("d", 2, 1), ("e", 1, 2)):
        scheduler.add(make(name, new=new, adapter_id=adapter_id))
    plans = drain(scheduler)
    assert [names(plan.prefills) for plan in plans] == ["abc", "", "", "", "d", "", "e"]
    assert [names(plan.decodes) for plan in plans] == ["", "bc", "b", "b", "", "d", ""]
    assert [names(plan.idle) for plan in plans] == ["", "a", "ac", "ac", "", "", ""]  # finished rows go on costing


def test_mixed_static_batches_take_any_adapter() -> None:
    scheduler = make_scheduler("static_mixed", batch=3)
    for index, new in enumerate([2, 5, 1, 4, 3]):
        scheduler.add(make(f"{index}", new=new, adapter_id=index + 1))
    seen = [(len(plan.prefills), len(plan.decodes), len(plan.idle)) for plan in drain(scheduler)]
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
        assert not (plan.preempted and plan.prefills)  # nobody joins while others are thrown out
    assert preempted.startswith("c") or preempted.startswith("b")
    assert "a" not in preempted  # the oldest is never the victim
    assert admitted[0] == "a"
    assert all(len(request.output_token_ids) == 13 for request in requests)


def test_preempted_requests_return_to_the_head_in_order() -> None:
    scheduler = make_scheduler(num_blocks=12)
    requests = [make(name, prompt=4, new=13) for name in "abcd"]
    for request in requests:
        scheduler.add(request)
    while len(scheduler.running) < 3:
        advance(scheduler)
    scheduler.preempt(scheduler.running[-1])
    scheduler.preempt(scheduler.running[-1])
    assert names(scheduler.waiting) == "bcd"
    check_invariants(scheduler)


def test_joining_leaves_a_block_for_everyone_to_grow_into() -> None:
    scheduler = make_scheduler(num_blocks=3)
    for name in "ab":
        scheduler.add(make(name, prompt=4, new=5))  # 1 block at first, 2 at the end: 3 do not hold both
    plans = drain(scheduler)
    assert [names(plan.prefills) for plan in plans] == ["a", "", "", "", "", "b", "", "", "", ""]
    assert not any(plan.preempted for plan in plans)


def test_request_that_needs_the_whole_pool_runs_alone() -> None:
    scheduler = make_scheduler(num_blocks=4)
    for name in "ab":
        scheduler.add(make(name, prompt=13, new=4))  # 16 tokens: all 4 blocks
    assert [names(plan.prefills) for plan in drain(scheduler)] == ["a", "", "", "", "b", "", "", ""]


def test_head_of_the_queue_waits_for_a_slot_and_nobody_overtakes() -> None:
    scheduler = make_scheduler(max_adapters=2)
    for name, adapter_id, new in (("a", 1, 2), ("b", 2, 6), ("c", 3, 2), ("d", 1, 2), ("e", 0, 2)):
        scheduler.add(make(name, new=new, adapter_id=adapter_id))
    plans = drain(scheduler)
    for plan in plans:
        adapters = {request.adapter_id for request in (*plan.prefills, *plan.decodes)} - {0}
        assert len(adapters) <= 2
    assert "".join(names(plan.prefills) for plan in plans) == "abcde"


def test_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown admission rule 'no such rule'.*fcfs.*single_adapter.*static"):
        ADMISSION_RULES.get("no such rule")


@pytest.mark.parametrize("rule", ["fcfs", "static"])
def test_a_request_is_taken_out_wherever_it_is(rule) -> None:
    """The last unfinished member of a batch takes the finished ones along: nothing would ever run beside them."""
    scheduler = make_scheduler(rule, batch=2)
    requests = [make(name, new=new) for name, new in (("a", 1), ("b", 9), ("c", 9), ("d", 2))]
    for request in requests:
        scheduler.add(request)
    for _ in range(2):
        advance(scheduler)
    scheduler.remove(requests[2])
    check_invariants(scheduler)
    scheduler.remove(requests[1])
    assert scheduler.running == []
    assert [names(plan.prefills) for plan in drain(scheduler)] == ["d", ""]


def test_a_finished_member_of_a_batch_can_be_taken_out() -> None:
    scheduler = make_scheduler("static", batch=2)
    short, long = make("a", new=1), make("b", new=3)
    for request in (short, long):
        scheduler.add(request)
    advance(scheduler)
    scheduler.remove(short)
    plan = advance(scheduler)
    assert (names(plan.decodes), names(plan.idle)) == ("b", "")
