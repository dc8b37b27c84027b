"""Whatever happens, in whatever order: limits hold, the queue is fair, and nobody is lost or served twice.

The world here keeps its own books, request by request, and never looks at the counters of the policy.
"""

import random
from collections.abc import Callable

import pytest

from punica.cluster import SCHEDULING_RULES, ClusterPolicy

BATCH, PAGES, PAGE = 4, 12, 4


class World:
    """Random events around one policy; after each of them everything is recounted."""

    def __init__(self, rule: str, seed: int, page_size: int = PAGE) -> None:
        self.random = random.Random(seed)
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
        self.done: set[str] = set()
        self.evictions = self.crashes = 0
        for i in range(3):
            self.join(f"gpu-{i}")

    def join(self, gpu: str) -> None:
        self.policy.add_gpu(gpu, PAGES)
        self.pending[gpu] = []

    def members(self, gpu: str) -> list[str]:
        return [name for name, home in self.home.items() if home == gpu]

    def pages(self, gpu: str) -> int:
        return sum(-(-self.kv.get(name, self.total[name]) // self.page_size) for name in self.members(gpu))

    def submit(self) -> None:
        name, prompt = next(self.names), self.random.randint(1, 12)
        longest = PAGES * self.page_size
        self.end[name] = min(longest, prompt + self.random.choice((1, 2, 9, 40)))
        self.policy.submit(name, prompt, self.end[name], self.random.randint(0, 3), 8)
        self.home[name], self.total[name] = None, prompt
        self.order.append(name)
        self.place()

    def place(self) -> None:
        waiting = [name for name in self.order if name in self.home and self.home[name] is None]
        placed = self.policy.place()
        assert [name for name, _ in placed] == waiting[: len(placed)]  # first come first served
        for name, gpu in placed:
            self.home[name] = gpu
            self.pending[gpu].append(name)
        if len(placed) < len(waiting):
            assert not any(self.has_room(gpu, waiting[len(placed)]) for gpu in self.policy.gpus)

    def has_room(self, gpu: str, name: str) -> bool:
        members = len(self.members(gpu))
        spare = members + 1 if members else 0  # a page each to grow into
        return members < BATCH and -(-self.total[name] // self.page_size) + spare <= PAGES - self.pages(gpu)

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
        step = self.policy.begin_step(gpu)
        for name in step.evicted:
            assert name in members
            self.back_to_queue(name)
            self.evictions += 1
        decoding = [name for name in self.members(gpu) if name in self.kv]
        assert step.num_decodes == len(decoding)
        assert list(step.prefills) == self.pending[gpu][: len(step.prefills)]
        assert step.is_empty == (not self.members(gpu))
        del self.pending[gpu][: len(step.prefills)]
        for name in decoding:
            self.kv[name] += 1
        for name in step.prefills:
            self.kv[name] = self.total[name]
        if not step.is_empty:
            self.running[gpu] = (*decoding, *step.prefills)
        self.place()

    def finish_step(self) -> None:
        if not self.running:
            return
        gpu = self.random.choice(sorted(self.running))
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
            del self.pending[gpu]
            self.crashes += 1
            self.place()

    def repair(self) -> None:
        if len(self.policy.gpus) < 3:
            self.join(f"gpu-{self.random.randint(100, 10**6)}")
            self.place()

    def check(self) -> None:
        assert set(self.policy.requests) == set(self.home)
        assert set(self.policy.queued) == {name for name, home in self.home.items() if home is None}
        assert list(self.policy.queued) == [name for name in self.order if name in set(self.policy.queued)]
        on_gpus = [name for gpu in self.policy.gpus.values() for name in gpu.members]
        assert len(on_gpus) == len(set(on_gpus))
        for uuid, gpu in self.policy.gpus.items():
            assert list(gpu.members) == sorted(self.members(uuid), key=list(gpu.members).index)
            assert len(gpu.members) <= BATCH
            assert gpu.used_pages == self.pages(uuid) <= PAGES
            assert gpu.decoding_kv_tokens == sum(self.kv.get(name, 0) for name in self.members(uuid))
        for name in self.home:
            assert self.policy.total_tokens(name) == self.total[name]

    def act(self, event: Callable[[], None]) -> None:
        event()
        self.check()


@pytest.mark.parametrize("rule", SCHEDULING_RULES.names())
@pytest.mark.parametrize(("seed", "page_size"), [(1, 4), (2, 4), (3, 1), (4, 5)])
def test_random_events(rule, seed, page_size):
    world = World(rule, seed, page_size)
    events = [world.submit] * 6 + [world.begin] * 30 + [world.finish_step] * 30
    events += [world.cancel, world.crash, world.repair, world.repair]
    for _ in range(1500):
        world.act(world.random.choice(events))
    assert world.crashes > 3
    assert world.evictions > 3
    while world.home:  # and everybody who was not cancelled is served in the end
        before = sum(world.total.values()), len(world.home)
        for _ in range(100):
            world.act(world.random.choice((world.begin, world.finish_step)))
        assert (sum(world.total.values()), len(world.home)) != before
    assert world.done == set(world.order)
    assert all(gpu.used_pages == 0 for gpu in world.policy.gpus.values())
