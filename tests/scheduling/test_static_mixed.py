"""The admission rule `static_mixed`: static batches whatever the adapters."""

from punica.adapters import LoRARequest
from punica.scheduling import ADMISSION_RULES, BlockManager, Request, RequestState, RequestStatus, Scheduler


def test_batches_hold_consecutive_requests_of_any_adapter_until_the_longest_is_done() -> None:
    scheduler = Scheduler(ADMISSION_RULES.get("static_mixed")(), BlockManager(100, 4), 3, 1000)
    news = [2, 5, 1, 4, 3]
    for index, new in enumerate(news):
        request = Request(f"r{index}", [1, 2], new, LoRARequest(f"a{index}", index + 1, "unused"))
        scheduler.add(RequestState(request))
    seen = []
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        seen.append((len(plan.prefills), len(plan.decodes), len(plan.idle)))
        for request in (*plan.prefills, *plan.decodes):
            assert request.status is RequestStatus.RUNNING
            request.append(7)
        scheduler.retire_finished()
    assert seen == [(3, 0, 0), (0, 2, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2), (2, 0, 0), (0, 2, 0), (0, 2, 0), (0, 1, 1)]
