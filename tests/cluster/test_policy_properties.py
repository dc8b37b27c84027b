"""Random events, recounted in books of the test's own: limits hold, the queue is fair, each request is served once."""

import copy
import random
from collections.abc import Callable

import pytest

import experiments.simulator  # noqa: F401  # rules of other systems
from punica.cluster import SCHEDULING_RULES, ClusterPolicy
from tests.cluster.test_policy import queued

BATCH, PAGE = 4, 4
PAGES = (12, 10, 7)
"""KV pages of the GPUs."""


class World:
    """Random events around one policy, recounted after each of them; `closed`: share of steps without joins."""

    def __init__(self, rule: str, seed: int, page_size: int = PAGE, closed: float = 0.0) -> None:
        self.random, self.doors, self.closed = random.Random(seed), random.Random(seed), closed
        self.page_size = page_size
        self.policy = ClusterPolicy(rule, BATCH, page_size)
        self.names = iter(f"request-{i}" for i in range(10**6))
        self.order: list[str] = []  # as submitted
        self.home: dict[str, str | None] = {}  # of the unfinished
        self.kv: dict[str, int] = {}  # tokens with pages, of those that were prefilled
        self.total: dict[str, int] = {}  # prompt and generated
        self.end: dict[str, int] = {}
        self.pending: dict[str, list[str]] = {}  # per GPU, in order of placement
        self.running: dict[str, tuple[str, ...]] = {}  # of the step in flight
        self.begun: dict[str, str] = {}  # who is prefilled in it
        self.num_pages: dict[str, int] = {}  # of each GPU that there ever was
        self.alone: set[str] = set()  # the quarantined
        self.done: set[str] = set()
        self.evictions = self.crashes = self.held = self.quarantines = self.asked = self.released = 0
        for i in range(3):
            self.join(f"gpu-{i}", PAGES[i])

    def join(self, gpu: str, num_pages: int) -> None:
        self.policy.add_gpu(gpu, num_pages)
        self.num_pages[gpu] = num_pages
        self.pending[gpu] = []

    def members(self, gpu: str) -> list[str]:
        return [name for name, home in self.home.items() if home == gpu]

    def pages(self, gpu: str) -> int:
        return sum(-(-self.kv.get(name, self.total[name]) // self.page_size) for name in self.members(gpu))

    def submit(self) -> None:
        longest = max(self.num_pages[gpu] for gpu in self.policy.gpus) * self.page_size
        name, prompt = next(self.names), self.random.randint(1, min(12, longest))
        self.end[name] = min(longest, prompt + self.random.choice((1, 2, 9, 40)))
        self.policy.submit(name, prompt, self.end[name], self.random.randint(0, 3), 8)
        self.home[name], self.total[name] = None, prompt
        self.order.append(name)
        self.place()

    def place(self) -> None:
        alone, waiting = self.queued()
        placed = [(name, gpu) for name, gpu in self.policy.place()]
        for name, gpu in placed:
            assert not self.alone.intersection(self.members(gpu))
            assert name not in self.alone or not self.members(gpu)
            self.home[name] = gpu
            self.pending[gpu].append(name)
        for line, queue in ((True, alone), (False, waiting)):  # first come first served
            there = [name for name, _ in placed if (name in self.alone) == line]
            assert there == queue[: len(there)]
        left = self.queued()
        if left[1]:
            assert not any(self.has_room(gpu, left[1][0]) for gpu in self.policy.gpus)
        if left[0] and not any(self.home[name] for name in self.alone):  # one waits until a GPU is empty
            assert all(self.members(gpu) for gpu in self.policy.gpus if self.is_large_enough(gpu, left[0][0]))

    def queued(self) -> tuple[list[str], list[str]]:
        """Quarantined and other queued requests, each in the order of submission."""
        waiting = [name for name in self.order if name in self.home and self.home[name] is None]
        return [name for name in waiting if name in self.alone], [name for name in waiting if name not in self.alone]

    def is_large_enough(self, gpu: str, name: str) -> bool:
        return self.end[name] <= self.num_pages[gpu] * self.page_size

    def has_room(self, gpu: str, name: str) -> bool:
        if self.policy.gpus[gpu].reserved or not self.is_large_enough(gpu, name):
            return False
        members = len(self.members(gpu))
        spare = members + 1 if members else 0  # a page each to grow into
        free = self.num_pages[gpu] - self.pages(gpu)
        return members < BATCH and -(-self.total[name] // self.page_size) + spare <= free

    def back_to_queue(self, name: str) -> None:
        gpu = self.home[name]
        self.home[name] = None
        self.kv.pop(name, None)
        if gpu is not None and name in self.pending[gpu]:
            self.pending[gpu].remove(name)

    def begin(self) -> None:
        idle = [gpu for gpu in self.policy.gpus if gpu not in self.running]
        if not idle:
            return
        gpu = self.random.choice(sorted(idle))
        members = self.members(gpu)
        joins = self.doors.random() >= self.closed
        step = self.policy.begin_step(gpu, joins)
        for name in step.evicted:
            assert name in members
            self.back_to_queue(name)
            self.evictions += 1
        decoding = [name for name in self.members(gpu) if name in self.kv]
        assert step.num_decodes == len(decoding)
        assert list(step.prefills) == self.pending[gpu][: len(step.prefills)]
        assert joins or not step.prefills
        assert step.is_empty == (not self.members(gpu) if joins else not decoding)
        del self.pending[gpu][: len(step.prefills)]
        for name in decoding:
            self.kv[name] += 1
        for name in step.prefills:
            self.kv[name] = self.total[name]
        if not step.is_empty:
            self.running[gpu] = (*decoding, *step.prefills)
            if len(step.prefills) == 1:
                self.begun[gpu] = step.prefills[0]
        self.place()

    def finish_step(self) -> None:
        if not self.running:
            return
        gpu = self.random.choice(sorted(self.running))
        begun = self.begun.pop(gpu, None)
        if begun is not None and self.home.get(begun) == gpu and begun in self.kv and self.random.random() < 0.2:
            self.held += 1
            self.policy.end_step(gpu, deferred=begun)
            del self.kv[begun]
            self.pending[gpu].insert(0, begun)
        else:
            self.policy.end_step(gpu)
        for name in self.running.pop(gpu):
            if self.home.get(name) != gpu or name not in self.kv:
                continue  # cancelled while it ran
            self.total[name] += 1
            if self.total[name] > self.end[name]:
                self.policy.finish(name)
                self.leave(name)
        self.place()

    def leave(self, name: str) -> None:
        assert name not in self.done
        self.back_to_queue(name)
        del self.home[name]
        self.alone.discard(name)
        self.done.add(name)

    def cancel(self) -> None:
        if self.home:
            name = self.random.choice(sorted(self.home))
            self.policy.cancel(name)
            self.leave(name)
            self.place()

    def crash(self) -> None:
        if len(self.policy.gpus) > 1:
            gpu = self.random.choice(sorted(self.policy.gpus))
            members = self.members(gpu)
            assert sorted(self.policy.remove_gpu(gpu)) == sorted(members)
            for name in members:
                self.back_to_queue(name)
            self.running.pop(gpu, None)
            self.begun.pop(gpu, None)
            del self.pending[gpu]
            self.crashes += 1
            self.place()

    def repair(self) -> None:
        if len(self.policy.gpus) < 3:
            self.join(f"gpu-{self.random.randint(100, 10**6)}", self.random.choice(PAGES))
            self.place()

    def quarantine(self) -> None:
        """Quarantine any request; with two in quarantine, release one instead."""
        if self.home:
            name = self.random.choice(sorted(self.alone if len(self.alone) == 2 else self.home))
            self.quarantines += name not in self.alone
            self.policy.quarantine(name, begins=name not in self.alone)
            self.alone ^= {name}
            self.back_to_queue(name)
            self.place()

    def check(self) -> None:
        assert set(self.policy.requests) == set(self.home)
        assert set(queued(self.policy)) == {name for name, home in self.home.items() if home is None}
        alone, waiting = self.queued()
        assert queued(self.policy) == (*alone, *waiting)
        on_gpus = [name for gpu in self.policy.gpus.values() for name in gpu.members]
        assert len(on_gpus) == len(set(on_gpus))
        for uuid, gpu in self.policy.gpus.items():
            assert list(gpu.members) == sorted(self.members(uuid), key=list(gpu.members).index)
            assert len(gpu.members) <= BATCH
            assert gpu.used_pages == self.pages(uuid) <= self.num_pages[uuid]
            assert len(gpu.members) == 1 or not self.alone.intersection(gpu.members)
            assert gpu.decoding_kv_tokens == sum(self.kv.get(name, 0) for name in self.members(uuid))
        for name in self.home:
            assert self.policy.requests[name].total_tokens == self.total[name]
        self.check_signal()

    def check_signal(self) -> None:
        """Check that a GPU is wanted when a request waits, and that released ones are not wanted again at once."""
        signal, idle = self.policy.scale_signal(), [gpu for gpu in self.policy.gpus if not self.members(gpu)]
        _, waiting = self.queued()
        if waiting and not any(self.has_room(gpu, waiting[0]) for gpu in self.policy.gpus):
            assert signal.add_gpu
        assert set(signal.release) <= set(idle)
        assert not (signal.add_gpu and signal.release)
        if signal.release:
            smaller = copy.deepcopy(self.policy)
            for gpu in signal.release:
                assert smaller.remove_gpu(gpu) == ()
            smaller.place()
            assert not smaller.scale_signal().add_gpu
            self.released += 1
        self.asked += signal.add_gpu

    def act(self, event: Callable[[], None]) -> None:
        event()
        self.check()


PAPERS = ("punica", "released")
"""Rules that differ in eviction and prefills, on which the other worlds depend."""
WORLDS = ((3, 1, 0.0), (4, 5, 0.0), (5, 4, 0.1))
"""Seed, page size, share of steps without joins."""


@pytest.mark.parametrize(
    ("rule", "seed", "page_size", "closed"),
    [
        *((rule, 1, 4, 0.0) for rule in SCHEDULING_RULES.names()),
        *((PAPERS[0], *world) for world in WORLDS),
        *(pytest.param(PAPERS[1], *world, marks=pytest.mark.slow) for world in WORLDS),
    ],
)
def test_random_events(rule, seed, page_size, closed):
    world = World(rule, seed, page_size, closed)
    events = [world.submit] * 6 + [world.begin] * 30 + [world.finish_step] * 30
    events += [world.cancel, world.crash, world.repair, world.repair, world.quarantine]
    for _ in range(2500 if rule in PAPERS else 800):
        world.act(world.random.choice(events))
    if rule == "punica":  # the events reach every case; another rule may avoid some
        counts = (world.crashes, world.evictions, world.held, world.quarantines, world.asked, world.released)
        assert min(counts) > 3
    world.join("gpu-last", max(PAGES))  # all that is left fits there
    while world.home:  # and everybody who was not cancelled is served in the end
        before = sum(world.total.values()), len(world.home)
        for _ in range(100):
            world.act(world.random.choice((world.begin, world.finish_step)))
        assert (sum(world.total.values()), len(world.home)) != before
    assert world.done == set(world.order)
    assert all(gpu.used_pages == 0 for gpu in world.policy.gpus.values())
