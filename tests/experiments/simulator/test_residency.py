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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def two_slots(host_adapters: int | None = None) -> tuple[Residency, Clock]:
    clock = Clock()
    return Residency(ResidencyConfig(2, LOADS, host_adapters), clock), clock


def states(residency: Residency, adapters: str = "123") -> str:
    """s: in a slot, l: a load of it waits or runs, h: in host memory alone, d: on disk."""
    kinds = (("s", residency.in_slot), ("l", residency.loading), ("h", residency.on_host), ("d", lambda adapter: True))
    return "".join(next(kind for kind, holds in kinds if holds(int(adapter))) for adapter in adapters)


def test_loads_run_one_after_the_other():
    residency, clock = two_slots()
    assert states(residency) == "hhh"
    residency.use(1, 2)
    residency.use(2, 2)
    assert (states(residency), residency.load_ends, residency.free_slots) == ("llh", 1.0, 0)
    clock.now = 1.0
    assert (states(residency), residency.load_ends, residency.in_slot_since(1)) == ("slh", 2.0, 1.0)
    assert residency.in_slot_since(2) == inf
    clock.now = 7.0
    assert (states(residency), residency.load_ends, residency.in_slot_since(2)) == ("ssh", inf, 2.0)
    assert (residency.loads_from_host, residency.loads_from_disk) == (2, 0)


def test_the_adapter_that_no_member_used_for_longest_leaves():
    residency, clock = two_slots()
    for adapter in (1, 2):
        residency.use(adapter, 2)
    residency.use(1, 2)
    clock.now = 5.0
    residency.release(2)
    residency.use(3, 2)
    clock.now = 6.0
    assert states(residency) == "shs", "two members use 1"
    for adapter in (1, 1, 3):
        residency.release(adapter)
    assert (states(residency), residency.free_slots) == ("shs", 2)
    residency.use(2, 2)
    clock.now = 7.0
    assert states(residency) == "hss", "3 was used after 1"


def test_an_adapter_in_a_slot_is_not_loaded_again():
    residency, clock = two_slots()
    residency.use(1, 2)
    clock.now = 1.0
    residency.release(1)
    residency.use(1, 2)
    residency.use(1, 2)
    assert (states(residency), residency.loads_from_host) == ("shh", 1)


def test_a_load_goes_on_without_its_member_and_serves_the_next_one():
    residency, clock = two_slots()
    residency.use(1, 2)
    residency.use(2, 2)
    residency.release(2)  # its load has not begun
    residency.release(1)
    assert states(residency) == "lhh"
    residency.use(1, 2)
    clock.now = 9.0
    assert (states(residency), residency.loads_from_host) == ("shh", 1)


def test_what_is_on_disk_is_read_first_and_stays_in_host_memory():
    residency, clock = two_slots(host_adapters=2)
    residency.use(1, 2)
    assert residency.load_ends == 11.0
    clock.now = 11.0
    residency.release(1)
    residency.use(2, 2)
    clock.now = 22.0
    residency.release(2)
    assert states(residency) == "ssd"
    residency.use(3, 2)
    assert states(residency) == "dsl", "the least recently used one leaves host memory too"
    clock.now = 33.0
    residency.release(3)
    residency.use(1, 2)
    assert (residency.loads_from_host, residency.loads_from_disk) == (0, 4)


def test_host_memory_may_hold_more_than_the_slots():
    residency, clock = two_slots(host_adapters=3)
    for adapter in (1, 2, 3, 1):
        residency.use(adapter, 2)
        clock.now += 11
        residency.release(adapter)
    assert (states(residency), residency.loads_from_host, residency.loads_from_disk) == ("shs", 1, 3)


def test_the_plain_backbone_needs_no_slot():
    residency, _ = two_slots()
    residency.use(0, 0)
    residency.release(0)
    assert (residency.in_slot(0), residency.in_slot_since(0), residency.free_slots) == (True, -inf, 2)


def served(adapters, arrivals, outputs, ranks=None, works_ahead=False, cost=SECOND, padded=False, batch=4):
    count = len(adapters)
    lengths = RequestLengths(np.full(count, 3), np.array(outputs))
    asked = Trace(np.array(arrivals, float), lengths, np.array(adapters), np.array(ranks or [2] * count))
    policy = ClusterPolicy(max_batch_size=batch)
    policy.add_gpu("gpu", 1000)
    return simulate(asked, policy, cost, padded, works_ahead, ResidencyConfig(batch, LOADS))


def test_an_idle_gpu_begins_when_the_load_ends():
    result = served([1, 1], [0.25, 9.0], [2, 1])
    assert result.first_token_s.tolist() == [2.25, 10.0]
    assert (result.loads_from_host, result.loads_from_disk, result.load_wait_s) == (1, 0, 1.0)


def test_a_load_overlaps_with_steps_and_the_line_waits_for_its_first():
    # 0 decodes from 0 on; 1 is placed at 0.5 and loaded at 2.5; 0 again waits behind it
    result = served([0, 1, 0], [0.0, 0.5, 0.75], [9, 1, 1], ranks=[0, 6, 0])
    assert result.first_token_s.tolist() == [1.0, 4.0, 5.0]
    assert result.finish_s[0] == 9.0
    assert result.load_wait_s == 2.0, "from the step at 1 to that at 3"


def test_a_step_that_was_launched_ahead_has_what_was_loaded_by_then():
    plain, ahead = (served([0, 1], [0.0, 0.5], [9, 1], works_ahead=works) for works in (False, True))
    assert plain.first_token_s[1] == 3.0  # loaded at 1.5, joins at 2
    assert ahead.first_token_s[1] == 4.0  # the step at 2 was launched at 1


def test_a_step_reads_the_ranks_of_those_that_joined():
    cost = StepCost("ranks", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=1.0)
    # 1 of rank 2 is loaded at 1; its first step takes 3, and 2 of rank 6 waits for its load, from 1 to 3, and the step
    plain = served([1, 2], [0.0, 0.0], [2, 1], ranks=[2, 6], cost=cost)
    assert plain.first_token_s.tolist() == [4.0, 4.0 + 1 + 2 + 6]
    padded = served([1, 2], [0.0, 0.0], [2, 1], ranks=[2, 6], cost=cost, padded=True)
    assert padded.first_token_s.tolist() == [4.0, 4.0 + 1 + 2 * 6]


def test_loads_that_take_no_time_delay_no_request():
    count = 40
    lengths = RequestLengths(np.full(count, 3), np.arange(count) % 7 + 1)
    asked = Trace(np.arange(count) / 3, lengths, np.arange(count) % 5, np.arange(count) % 5)
    results = []
    for adapters in (None, ResidencyConfig(4, LoadCost("none", 0, 0, 0, 0), 4)):
        policy = ClusterPolicy(max_batch_size=4)
        policy.add_gpu("gpu", 1000)
        results.append(simulate(asked, policy, SECOND, adapters=adapters))
    assert results[0].finish_s.tolist() == results[1].finish_s.tolist()
    assert results[1].load_wait_s == 0
    assert results[0].loads_from_disk == 0 < results[1].loads_from_disk


def test_bad_input():
    policy = ClusterPolicy(max_batch_size=4)
    policy.add_gpu("gpu", 9)
    nothing = np.zeros(0, dtype=np.int64)
    asked = Trace(np.zeros(0), RequestLengths(nothing, nothing), nothing, nothing)
    with pytest.raises(ValueError, match="num_slots is 3 for batches of 4"):
        simulate(asked, policy, SECOND, adapters=ResidencyConfig(3, LOADS))
    one = np.ones(1, dtype=np.int64)
    huge = LoadCost("huge", 1e308, 1e308, 0, 0)
    asked = Trace(np.zeros(1), RequestLengths(one, one), one, 4 * one)
    with pytest.raises(ValueError, match="a load of rank 4 never ends by load cost 'huge'"):
        simulate(asked, policy, SECOND, adapters=ResidencyConfig(4, huge))
    two, lengths = np.ones(2, dtype=np.int64), RequestLengths(np.ones(2, dtype=np.int64), np.ones(2, dtype=np.int64))
    with pytest.raises(ValueError, match="adapter 1 has ranks 1 and 8"):
        Trace(np.zeros(2), lengths, two, np.array([1, 8]))
    with pytest.raises(ValueError, match="ranks has -1"):
        Trace(np.zeros(2), lengths, two, -two)
    with pytest.raises(ValueError, match="adapters has -1"):
        Trace(np.zeros(2), lengths, -two, two)
    with pytest.raises(ValueError, match="host_adapters is 1, must be >= 2"):
        ResidencyConfig(2, LOADS, 1)
    with pytest.raises(ValueError, match="num_slots is 0"):
        ResidencyConfig(0, LOADS)
    for wrong in (-1.0, inf, float("nan")):
        with pytest.raises(ValueError, match="finite seconds, at least 0"):
            LoadCost("wrong", wrong, 0, 0, 0)
