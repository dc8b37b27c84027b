"""Adapters that are read during steps, as on a GPU: their requests join later, the others continue."""

import threading
from dataclasses import replace

import pytest

from punica.engine import Request
from punica.engine.runner import ModelRunner
from tests.cluster.runner_world import LocalRunners, requests, run, undisturbed

NAME = "runner-0"


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "ahead"])
def works_ahead(request, monkeypatch) -> bool:
    """Steps one after the other, as on a CPU, and launched ahead, as on a GPU."""
    monkeypatch.setattr(ModelRunner, "works_ahead", request.param)
    return request.param


class SlowWorld:
    """One runner with `first` in it; other adapters are read when `disk` is set."""

    def __init__(self, adapters, monkeypatch) -> None:
        named = (("first", 1), ("second", 2), ("third", 1))
        self.asked = [Request(name, [5, 6, i], 16, adapters[i]) for name, i in named]
        self.expected = undisturbed(self.asked)
        self.world, self.disk = LocalRunners.of(1, beside=True), threading.Event()
        self.first = self.world.dispatcher.add(self.asked[0])
        self.world.step(NAME)
        manager = self.world.runners[NAME].engine.manager
        real = manager.read_adapter

        def read(adapter):
            assert self.disk.wait(60)
            return real(adapter)

        monkeypatch.setattr(manager, "read_adapter", read)
        self.second = self.world.dispatcher.add(self.asked[1])


def test_the_batch_goes_on_and_the_scheduler_counts_right(adapters, monkeypatch) -> None:
    slow = SlowWorld(adapters, monkeypatch)
    third = slow.world.dispatcher.add(slow.asked[2])
    gpu = slow.world.dispatcher.policy.gpus[NAME]
    for held in range(5):
        ended = slow.world.step(NAME)
        assert ended.tokens.keys() == {"first"}
        assert (ended.work.decodes, ended.work.prefill_tokens) == (1, 0)
        assert slow.first.num_generated == 2 + held
        assert [name.partition("#")[0] for name in gpu.pending] == ["second", "third"], "it stays before who came later"
        assert gpu.decoding_kv_tokens == 3 + 1 + held
    slow.disk.set()
    assert run(slow.world) == {}
    for state in (slow.first, slow.second, third):
        assert state.output_token_ids == slow.expected[state.request_id]
    assert slow.second.first_token_s < third.first_token_s
    assert gpu.used_pages == 0


def test_an_adapter_that_breaks_while_it_is_read_fails_its_own_request(adapters, monkeypatch) -> None:
    slow = SlowWorld(adapters, monkeypatch)

    def read(adapter):
        raise ValueError("damaged meanwhile")

    monkeypatch.setattr(slow.world.runners[NAME].engine.manager, "read_adapter", read)
    assert run(slow.world) == {"second": "ValueError: damaged meanwhile"}
    assert slow.first.output_token_ids == slow.expected["first"]


class Queue:
    """One runner that decodes `request-0`, and others that wait for it: one prompt joins with each step."""

    def __init__(self, adapters) -> None:
        self.asked = [Request(f"request-{i}", [5, 6, i], 16, adapters.get(i)) for i in range(4)]
        self.expected = undisturbed(self.asked)
        self.world = LocalRunners.of(1)
        self.states = {one.request_id: self.world.dispatcher.add(one) for one in self.asked[:1]}
        self.world.step(NAME)
        self.states |= {one.request_id: self.world.dispatcher.add(one) for one in self.asked[1:]}

    def num_tokens(self) -> list[int]:
        return [state.num_generated for state in self.states.values()]


def test_one_prompt_joins_with_every_step(adapters, works_ahead) -> None:
    """Also where engines launch steps ahead: the next prompt is in the runner before the one that waits has joined."""
    queue = Queue(adapters)
    late = [queue.world.step(NAME) for _ in range(int(works_ahead))]
    assert [ended.work.prefill_tokens for ended in late] == [0] * works_ahead
    for joined in range(3):
        assert queue.world.step(NAME).work.prefill_tokens == 3
        assert queue.num_tokens()[1:] == [*range(joined + 1, 0, -1), *[0] * (2 - joined)]
    assert run(queue.world) == {}
    assert {name: state.output_token_ids for name, state in queue.states.items()} == queue.expected


def test_a_token_before_its_turn_is_a_contradiction(adapters, works_ahead) -> None:
    if not works_ahead:
        pytest.skip("no prompt waits in line in a runner")
    queue = Queue(adapters)
    queue.world.step(NAME)
    reply = queue.world.runners[NAME].step(queue.world.dispatcher.begin(NAME))
    behind = next(iter(reply.waiting))
    assert behind.startswith("request-2")
    tokens = {**reply.tokens, behind: 7}
    with pytest.raises(RuntimeError, match="tokens before their turn"):
        queue.world.dispatcher.end(NAME, replace(reply, tokens=tokens, waiting=frozenset()))


def test_nobody_else_may_wait_in_a_runner(adapters) -> None:
    world = LocalRunners.of(1)
    for request in requests(adapters, 2, seeded=True):
        world.dispatcher.add(request)
    world.step(NAME)
    reply = world.runners[NAME].step(world.dispatcher.begin(NAME))
    decoding = next(name for name in reply.tokens if name.startswith("request-0"))
    tokens = {name: token for name, token in reply.tokens.items() if name != decoding}
    with pytest.raises(RuntimeError, match="requests that may wait"):
        world.dispatcher.end(NAME, replace(reply, tokens=tokens, waiting=frozenset({decoding})))
