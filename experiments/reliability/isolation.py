"""Isolation: what other tenants do, or left behind, changes no bit and opens no adapter."""

import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx2
from transformers import AutoConfig

from experiments.conformance.weights import Tenant, write_adapter
from experiments.reliability.faults import finish
from experiments.reliability.server import BASE, serving
from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.world import MAX_RANK, Wish, World, draw_wishes, make_world, poisoned
from punica.adapters import LoRARequest
from punica.engine import Engine, Request, SamplingParams

VICTIMS = 4
LOGPROBS = 5


def victims_of(
    engine: Engine, world: World, wishes: Sequence[Wish], beside: Sequence[LoRARequest],
    arrived: Callable[[], object] = lambda: None,
) -> list[tuple[object, ...]]:  # fmt: skip
    """Serve wishes with one request of each adapter ``beside`` them; return tokens and log-probabilities, bit for bit.

    A neighbour leaves after its first token, whether it finishes or fails, so that batches have the same sizes.
    ``arrived`` is called once before the first step.
    """
    states = []
    for number, wish in enumerate(wishes):
        params = SamplingParams(wish.new, ignore_eos=True, logprobs=LOGPROBS)
        states.append(engine.add_request(Request(f"victim-{number}", list(wish.prompt), params, world.adapter(wish))))
    for number, adapter in enumerate(beside):
        engine.add_request(Request(f"neighbour-{number}", [1, 2, 3], SamplingParams(1, ignore_eos=True), adapter))
    arrived()
    finish(engine)
    return [(state.output_token_ids, state.logprobs, state.finish_reason) for state in states]


@trial("isolation", smoke=2, laptop=60, full=1_000, seconds=20)
def overflowing_neighbours(setting: Setting) -> Outcome:
    """Neighbours whose activations are inf and NaN, beside those of healthy ones; no bit of others changes."""
    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, 6, setting.seed, setting.device)
    huge = poisoned(world)[-1]
    healthy = LoRARequest("healthy", 20_000, world.adapters[2].lora_path)  # of the same slot size and layers
    sizes: dict[str, Any] = {} if setting.device == "cpu" else {"batch_invariant": True}
    engines = [world.engine(**sizes), world.engine(**sizes)]
    for _ in range(setting.count):
        wishes = draw_wishes(world, VICTIMS, choose)
        found = [victims_of(engine, world, wishes, [one]) for engine, one in zip(engines, (huge, healthy), strict=True)]
        outcome.injected += 1
        for poisoned_one, expected in zip(*found, strict=True):
            outcome.expect(poisoned_one == expected, f"{poisoned_one} instead of {expected}")
    return outcome


@trial("isolation", smoke=3, laptop=60, full=1_000, seconds=20)
def loading_neighbours(setting: Setting) -> Outcome:
    """A neighbour whose adapter is loaded, reloaded with other weights, or gone when read; no token of others changes.

    On a GPU, batch-invariant, no bit either. On a CPU last bits depend on the order of rows, which follows the slots.
    """
    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, 6, setting.seed, setting.device)
    config, tenant = AutoConfig.from_pretrained(world.checkpoint), Tenant("changing", MAX_RANK, "all")
    sizes: dict[str, Any] = {} if setting.device == "cpu" else {"batch_invariant": True}
    engine, quiet = world.engine(**sizes), world.engine(**sizes)
    resident = LoRARequest("resident", 20_000, world.adapters[2].lora_path)  # of the same slot size and layers
    for turn in range(setting.count):
        wishes, kind = draw_wishes(world, VICTIMS, choose), ("loaded", "reloaded", "gone")[turn % 3]
        number = 30_000 if kind == "reloaded" else 30_001 + turn
        folder = write_adapter(world.folder / f"neighbour-{number}", config, tenant, turn)
        neighbour = LoRARequest(f"neighbour-{number}", number, str(folder), load_inplace=kind == "reloaded")
        if kind == "gone":
            found = victims_of(engine, world, wishes, [neighbour], partial(shutil.rmtree, folder))
            expected = victims_of(quiet, world, wishes, [])
        else:
            found = victims_of(engine, world, wishes, [neighbour])
            expected = victims_of(quiet, world, wishes, [resident])
        outcome.injected += 1
        for one, other in zip(found, expected, strict=True):
            same = one == other if sizes else (one[0], one[2]) == (other[0], other[2])
            outcome.expect(same, f"{kind}: {one} instead of {other}")
    return outcome


@trial("isolation", smoke=2, laptop=60, full=1_000, seconds=20)
def evicted_adapters(setting: Setting) -> Outcome:
    """One slot that held an adapter of rank 16, then one of a smaller rank; its bits are those of a new engine."""
    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, 8, setting.seed, setting.device)
    large = [adapter for number, adapter in enumerate(world.adapters) if number % 4 == 2]
    small = [number for number in range(len(world.adapters)) if number % 4 != 2]
    used = world.engine(slots=1)
    for turn in range(setting.count):
        number = small[turn % len(small)]
        wish = Wish(draw_wishes(world, 1, choose)[0].prompt, number, 6)
        before = choose.choice(large)
        used.generate([[1, 2, 3]], before, 2)
        outcome.injected += 1
        found, expected = (victims_of(engine, world, [wish], []) for engine in (used, world.engine(slots=1)))
        outcome.expect(found == expected, f"{found} instead of {expected}")
    return outcome


@trial("isolation", smoke=20, laptop=500, full=5_000, seconds=20)
def adapter_keys(setting: Setting) -> Outcome:
    """Calls with right, wrong and other tenants' API keys; a key opens and lists its own adapter alone."""
    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, 4, setting.seed, setting.device)
    names = [adapter.lora_name for adapter in world.adapters]
    options = [word for name in names for word in ("--adapter-key", f"{name}=key of {name}")]
    own = {BASE: "server", **{name: f"key of {name}" for name in names}}
    with serving(world, "--api-key", "server", *options) as served, httpx2.Client(
        base_url=served.url, timeout=60, trust_env=False
    ) as client:
        for _ in range(setting.count):
            model, key = choose.choice(list(own)), choose.choice([*own.values(), "wrong", ""])
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            body = {"model": model, "prompt": [1, 2], "max_tokens": 1}
            status = client.post("/v1/completions", json=body, headers=headers).status_code
            right = own[model] == key
            outcome.injected += not right
            expected = 200 if right else 404 if key in own.values() else 401
            outcome.expect(status == expected, f"{model} with {key!r}: {status} instead of {expected}")
            listed = client.get("/v1/models", headers=headers)
            shown = [one["id"] for one in listed.json()["data"]] if listed.status_code == 200 else []
            outcome.expect(shown == [name for name in own if own[name] == key], f"{key!r} lists {shown}")
    return outcome
