"""Trials of isolation and determinism: whatever the company, order or process, a tenant gets the same."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from punica.adapters import LoRARequest
from punica.engine import Engine, Request, SamplingParams
from tests.reliability.trial import Trial, sized
from tests.reliability.world import Wish, World, make_world

ADAPTERS, VICTIMS = 6, 4


def victims_of(
    engine: Engine, world: World, wishes: Sequence[Wish], beside: Sequence[LoRARequest] = (),
    arrived: Callable[[], object] = lambda: None,
) -> list[tuple[object, ...]]:  # fmt: skip
    """Serve wishes with one request of each adapter ``beside`` them; return tokens and log-probabilities, bit for bit.
    Neighbours leave after one token, finished or failed: equal batches. ``arrived`` is called before the first step.
    """
    requests = [world.request(f"victim-{number}", wish, logprobs=5) for number, wish in enumerate(wishes)]
    states = [engine.add_request(request) for request in requests]
    for number, adapter in enumerate(beside):
        engine.add_request(Request(f"neighbour-{number}", [1, 2, 3], SamplingParams(1, ignore_eos=True), adapter))
    arrived()
    while engine.has_unfinished():
        engine.step()
    return [(state.output_token_ids, state.finish_reason, state.logprobs) for state in states]


def two_engines(world: World) -> list[Engine]:
    """Build engines of equal bits in any batch; on a CPU last bits depend on the order of rows, which follows slots."""
    sizes: dict[str, Any] = {} if world.trial.device == "cpu" else {"batch_invariant": True}
    return [world.engine(**sizes), world.engine(**sizes)]


def resident(world: World) -> LoRARequest:
    """Return a healthy adapter of the same slot size and layers as one that is `World.written`."""
    return replace(world.adapters[2], lora_name="resident", lora_int_id=20_000)


def compare(trial: Trial, found: Sequence[object], expected: Sequence[object], what: str) -> None:
    trial.injected += 1
    for one, other in zip(found, expected, strict=True):
        trial.expect(one == other, f"{what}: {one} instead of {other}")


@sized("isolation", 2, 60, 1_000, seconds=20, tiny=1)
def test_overflowing_neighbours(trial: Trial) -> None:
    """Neighbours whose activations are inf and NaN, beside those of healthy ones; no bit of others changes."""
    world = make_world(trial, ADAPTERS)
    neighbours, engines = (world.written("overflow", 10_000, 0, 1e38), resident(world)), two_engines(world)
    for _ in range(trial.count):
        wishes = world.wishes(VICTIMS)
        found = [victims_of(engine, world, wishes, [one]) for engine, one in zip(engines, neighbours, strict=True)]
        compare(trial, *found, "overflow")


@sized("isolation", 3, 60, 1_000, seconds=20, tiny=3)
def test_loading_neighbours(trial: Trial) -> None:
    """A neighbour whose adapter is loaded, reloaded with other weights, or gone when read; no token of others changes.

    On a GPU, batch-invariant, no bit either.
    """
    world = make_world(trial, ADAPTERS)
    engine, quiet = two_engines(world)
    judged = 2 if trial.device == "cpu" else 3
    for turn in range(trial.count):
        wishes, kind = world.wishes(VICTIMS), ("loaded", "reloaded", "gone")[turn % 3]
        number = 30_000 if kind == "reloaded" else 30_001 + turn
        neighbour = replace(world.written(f"neighbour-{number}", number, turn), load_inplace=kind == "reloaded")
        arrived = partial(shutil.rmtree, neighbour.lora_path) if kind == "gone" else int
        beside = [] if kind == "gone" else [resident(world)]
        found = victims_of(engine, world, wishes, [neighbour], arrived), victims_of(quiet, world, wishes, beside)
        compare(trial, *([one[:judged] for one in victims] for victims in found), kind)


@pytest.mark.gpu
@sized("determinism", 1, 10, 100, seconds=20, tiny=1)
def test_graphs_and_batch_sizes(trial: Trial) -> None:
    """Batch-invariant engines with CUDA graphs and without, alone and in full batches; every bit is the same."""
    world = make_world(trial, ADAPTERS)
    engines = [world.engine(batch_invariant=True, cuda_graphs=graphs) for graphs in (True, False)]
    for _ in range(trial.count):
        wishes = world.wishes(8)
        alone = [victims_of(engines[0], world, [wish])[0] for wish in wishes]
        for engine in engines:
            for found, expected in zip(victims_of(engine, world, wishes), alone, strict=True):
                trial.expect(found == expected, f"{found} instead of {expected}")
