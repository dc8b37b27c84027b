"""No starvation: more adapters than slots, a tenant that never pauses, pins; waits are within the stated bound."""

import random

import pytest

from punica.engine import Request
from punica.scheduling.admission import MOST_OVERTAKES

LONGEST = 7


@pytest.mark.parametrize("rule", ["fcfs", "fcfs_many", "resident_first", "single_adapter", "static", "static_mixed"])
@pytest.mark.parametrize(
    ("slots", "pinned", "blocks"),
    [(1, (), None), (2, (6,), 9), (3, (1, 6), None)],
    ids=["one slot", "a pin, little memory", "the hot one pinned"],
)
def test_waits_are_bounded_by_who_came_before(backbone, rule, slots, pinned, blocks) -> None:
    """Tenant 1 adds requests at every step, the others one now and then; L = 7 is the longest generation."""
    engine, choose = backbone.engine(rule, slots, max_batch_size=3, block_size=4, num_blocks=blocks), random.Random(5)
    for adapter_id in pinned:
        engine.manager.add_adapter(backbone.adapters[adapter_id])
        engine.manager.pin_adapter(adapter_id)
    arrived: dict[str, tuple[int, int]] = {}  # step, unfinished requests before it
    waited, joined, states = {}, [], {}
    for step in range(600):
        if step < 20:
            for tenant in (1, choose.choice((2, 3, 4, 5, 6, None))):
                name = f"{step} of {tenant}"
                before = sum(not state.has_ended for state in states.values())
                prompt, new = [choose.randrange(256) for _ in range(choose.randint(1, 9))], choose.randint(1, LONGEST)
                states[name] = engine.add_request(Request(name, prompt, new, backbone.adapters.get(tenant)))
                arrived[name] = step, before
        new_tokens = engine.step().tokens
        for name in [name for name in arrived if name in new_tokens and name not in waited]:
            waited[name] = step - arrived[name][0]
            joined.append(name)
        if step >= 20 and not engine.has_unfinished():
            break
    assert not engine.has_unfinished()
    assert {state.finish_reason for state in states.values()} == {"length"}
    overtakers = MOST_OVERTAKES if rule == "resident_first" else 0
    assert all(waited[name] <= (before + 1 + overtakers) * LONGEST for name, (_, before) in arrived.items())
    assert all(state.overtaken <= overtakers for state in states.values())
    order = [list(arrived).index(name) for name in joined]
    if not overtakers:
        assert all(later >= place - 2 for place, later in enumerate(order))  # a batch of three may join in one step
    assert max(waited.values()) > 20  # the queue was long
