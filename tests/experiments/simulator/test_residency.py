"""Residency of adapters: slots, host memory and loads by hand, and a simulation whose requests wait for them."""

from math import inf

import numpy as np
import pytest

from experiments.simulator import LoadCost, Residency, ResidencyConfig, StepCost, Trace, simulate
from experiments.workload import RequestLengths
from punica.cluster import ClusterPolicy

LOADS = LoadCost("by hand", host_base=0.5, host_rank=0.25, disk_base=8.0, disk_rank=1.0)
"""Rank 2: a second from host memory, ten more from disk."""
SECOND = StepCost("a step is a second", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=0.0)


class Slots(Residency):
    """Two slots, at a time that a test sets; all adapters have rank 2."""

    def __init__(self, host_adapters: int | None = None) -> None:
        self.now = 0.0
        super().__init__(ResidencyConfig(2, LOADS, host_adapters), lambda: self.now)

    def use(self, adapter_id: int, rank: int = 2) -> None:
        super().use(adapter_id, rank)

    def states(self) -> str:
        """Of 1 to 3. s: in a slot, l: a load of it waits or runs, h: in host memory alone, d: on disk."""
        kinds = (("s", self.in_slot), ("l", self.loading), ("h", self.on_host), ("d", lambda adapter: True))
        return "".join(next(kind for kind, holds in kinds if holds(adapter)) for adapter in (1, 2, 3))


def test_loads_run_one_after_the_other():
    slots = Slots()
    assert slots.states() == "hhh"
    slots.use(1)
    slots.use(2)
    assert (slots.states(), slots.load_ends, slots.free_slots) == ("llh", 1.0, 0)
    slots.now = 1.0
    assert (slots.states(), slots.load_ends, slots.in_slot_since(1), slots.in_slot_since(2)) == ("slh", 2.0, 1.0, inf)
    slots.now = 7.0
    assert (slots.states(), slots.load_ends, slots.in_slot_since(2)) == ("ssh", inf, 2.0)
    assert (slots.loads_from_host, slots.loads_from_disk) == (2, 0)


def test_the_adapter_that_no_member_used_for_longest_leaves():
    slots = Slots()
    for adapter in (1, 2, 1):
        slots.use(adapter)
    slots.now = 5.0
    slots.release(2)
    slots.use(3)
    slots.now = 6.0
    assert slots.states() == "shs", "two members use 1"
    for adapter in (1, 1, 3):
        slots.release(adapter)
    assert (slots.states(), slots.free_slots) == ("shs", 2)
    slots.use(2)
    slots.now = 7.0
    assert slots.states() == "hss", "3 was used after 1"


def test_a_load_continues_without_its_member_and_an_adapter_in_a_slot_is_not_loaded_again():
    slots = Slots()
    slots.use(1)
    slots.use(2)
    slots.release(2)  # its load has not begun
    slots.release(1)
    assert slots.states() == "lhh"
    slots.use(1)
    slots.now = 9.0
    slots.release(1)
    slots.use(1)
    assert (slots.states(), slots.loads_from_host) == ("shh", 1)


def test_what_is_on_disk_is_read_first_and_stays_in_host_memory():
    slots = Slots(host_adapters=2)
    for adapter in (1, 2):
        slots.use(adapter)
        assert slots.load_ends == slots.now + 11.0
        slots.now += 11
        slots.release(adapter)
    assert slots.states() == "ssd"
    slots.use(3)
    assert slots.states() == "dsl", "the least recently used one leaves host memory too"
    assert (slots.loads_from_host, slots.loads_from_disk) == (0, 3)


def served(adapters, arrivals, outputs, ranks=None, works_ahead=False, cost=SECOND, padded=False):
    count = len(adapters)
    lengths = RequestLengths(np.full(count, 3), np.array(outputs))
    asked = Trace(np.array(arrivals, float), lengths, np.array(adapters), np.array(ranks or [2] * count))
    policy = ClusterPolicy(max_batch_size=4)
    policy.add_gpu("gpu", 1000)
    return simulate(asked, policy, cost, padded, works_ahead, ResidencyConfig(4, LOADS))


def test_an_idle_gpu_begins_when_the_load_ends():
    result = served([1, 1], [0.25, 9.0], [2, 1])
    assert result.first_token_s.tolist() == [2.25, 10.0]
    assert (result.loads_from_host, result.loads_from_disk, result.load_wait_s) == (1, 0, 1.0)


def test_a_load_overlaps_with_steps_and_the_line_waits_for_its_first():
    # 0 decodes from 0 on; 1 is placed at 0.5 and loaded at 2.5; 0 again waits behind it
    result = served([0, 1, 0], [0.0, 0.5, 0.75], [9, 1, 1], ranks=[0, 6, 0])
    assert result.first_token_s.tolist() == [1.0, 4.0, 5.0]
    assert (result.finish_s[0], result.load_wait_s) == (9.0, 2.0), "from the step at 1 to that at 3"


def test_a_step_that_was_launched_ahead_has_what_was_loaded_by_then():
    plain, ahead = (served([0, 1], [0.0, 0.5], [9, 1], works_ahead=works) for works in (False, True))
    assert plain.first_token_s[1] == 3.0  # loaded at 1.5, joins at 2
    assert ahead.first_token_s[1] == 4.0  # the step at 2 was launched at 1


@pytest.mark.parametrize(("padded", "both"), [(False, 2 + 6), (True, 2 * 6)])
def test_a_step_reads_the_ranks_of_those_that_joined(padded, both):
    cost = StepCost("ranks", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=1.0)
    # 1 of rank 2 is loaded at 1; its first step takes 3, and 2 of rank 6 waits for its load, from 1 to 3, and the step
    result = served([1, 2], [0.0, 0.0], [2, 1], ranks=[2, 6], cost=cost, padded=padded)
    assert result.first_token_s.tolist() == [4.0, 4.0 + 1 + both]
