"""Determinism: one seed, one result, in every process, batch order and form of execution."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from experiments.harness.schema import REPOSITORY
from experiments.reliability.isolation import victims_of
from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.world import World, draw_wishes, make_world
from experiments.simulator import StepCost, Trace, simulate
from experiments.workload import poisson_arrivals, popularity, scaled_lengths
from punica.cluster import ClusterPolicy

WISHES, ADAPTERS = 24, 6
ADMISSIONS = ("fcfs", "fcfs_many", "resident_first")
COST = StepCost("fixed", base=0.018, row=0.0, kv=4e-7, prefill=1e-4, rank=4e-6)
"""A step of about 20 ms; any numbers do."""


def _in_new_process(*words: str) -> str:
    """Run this module in a process with a random seed of hashes; return what it prints."""
    environment = os.environ | {"PYTHONHASHSEED": "random"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *words], capture_output=True, text=True, cwd=REPOSITORY, env=environment,
        check=True,
    )  # fmt: skip
    return done.stdout.strip().splitlines()[-1]


@trial("determinism", smoke=1, laptop=4, full=20, seconds=30)
def same_tokens(setting: Setting) -> Outcome:
    """The same requests in new processes, each with another batch order, batch size, admission rule and pages."""
    world = make_world(setting.folder, ADAPTERS, setting.seed, setting.device)
    expected = {
        wish: result.token_ids for wish, result in world.undisturbed(_wishes(world, setting.seed)).items()
    }
    outcome = Outcome()
    for number in range(setting.count):
        said = _in_new_process("tokens", str(setting.folder), setting.device, str(setting.seed), str(number))
        found = json.loads(said)
        outcome.injected += 1
        for index, wish in enumerate(_wishes(world, setting.seed)):
            outcome.expect(found[index] == expected[wish], f"process {number}, {wish}: {found[index]}")
    return outcome


def _wishes(world: World, seed: int) -> list:
    return draw_wishes(world, WISHES, random.Random(seed))


def print_tokens(folder: str, device: str, seed: str, number: str) -> None:
    """Print the tokens of all wishes, served in an order and by an engine that ``number`` chooses."""
    choose = random.Random(f"{seed} {number}")
    world = make_world(Path(folder), ADAPTERS, int(seed), device)
    wishes = _wishes(world, int(seed))
    order = choose.sample(range(len(wishes)), len(wishes))
    engine = world.engine(
        slots=choose.randint(2, 5), admission=choose.choice(ADMISSIONS), max_batch_size=choose.randint(1, 8),
        num_blocks=choose.randint(20, 60), block_size=4,
    )  # fmt: skip
    requests = [world.request(str(index), wishes[index]) for index in order]
    states = {request.request_id: engine.add_request(request) for request in requests}
    while engine.has_unfinished():
        engine.step()
    print(json.dumps([states[str(index)].output_token_ids for index in range(len(wishes))]))


@trial("determinism", smoke=1, laptop=3, full=20, seconds=15)
def same_simulation(setting: Setting) -> Outcome:
    """One seed of a simulated cluster in new processes; every number is the same."""
    outcome = Outcome()
    expected = simulated(setting.seed)
    for number in range(setting.count):
        found = _in_new_process("simulation", str(setting.seed))
        outcome.expect(found == expected, f"process {number}: {found} instead of {expected}")
    outcome.expect(simulated(setting.seed + 1) != expected, "another seed gives the same numbers")
    return outcome


def simulated(seed: int) -> str:
    """Simulate 400 requests on four GPUs; return a hash of all numbers."""
    count, policy = 400, ClusterPolicy("punica")
    for gpu in range(4):
        policy.add_gpu(f"gpu-{gpu}", 200)
    arrivals = poisson_arrivals(20.0, 10 * count / 20.0, seed)[:count]
    adapters = popularity("Skewed").requests(count, seed=seed) + 1
    trace = Trace(arrivals, scaled_lengths(count, 256, seed), adapters, np.full(count, 16))
    result = simulate(trace, policy, COST)
    numbers = (result.first_token_s, result.finish_s, result.tokens, result.batch, result.seconds_by_batch)
    found = hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in numbers))
    found.update(f"{result.steps} {result.evictions} {result.longest_queue}".encode())
    return found.hexdigest()


@trial("determinism", smoke=1, laptop=10, full=100, seconds=20, needs_gpu=True)
def graphs_and_batch_sizes(setting: Setting) -> Outcome:
    """Batch-invariant engines with CUDA graphs and without, alone and in full batches; every bit is the same."""
    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, ADAPTERS, setting.seed, setting.device)
    engines = [world.engine(batch_invariant=True, cuda_graphs=graphs) for graphs in (True, False)]
    for _ in range(setting.count):
        wishes = draw_wishes(world, 8, choose)
        alone = [victims_of(engines[0], world, [wish], [])[0] for wish in wishes]
        for engine in engines:
            for found, expected in zip(victims_of(engine, world, wishes, []), alone, strict=True):
                outcome.expect(found == expected, f"{found} instead of {expected}")
    return outcome


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "tokens":
        print_tokens(*given)
    else:
        print(simulated(int(given[0])))
