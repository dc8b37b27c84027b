"""Ray runners that are killed while they serve; needs the extra cluster."""

import os
import random
import signal
from collections import Counter
from functools import partial
from typing import Any

from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.world import BATCH, MAX_LEN, MAX_RANK, draw_wishes, make_world

ADAPTERS, REQUESTS = 6, 12


@trial("faults", smoke=1, laptop=3, full=100, seconds=80)
def killed_runner(setting: Setting) -> Outcome:
    """A runner of two that is killed at a random token; the other finishes its requests, and it is started again."""
    import ray

    from punica.cluster.ray_cluster import RayCluster
    from punica.engine import Engine

    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, ADAPTERS, setting.seed, setting.device)
    expected = world.undisturbed(draw_wishes(world, 24, choose))
    build = partial(
        Engine.from_pretrained, world.checkpoint, dtype="float32", max_batch_size=BATCH, max_model_len=MAX_LEN,
        max_lora_rank=MAX_RANK, max_loras=BATCH + 1, device=setting.device,
    )  # fmt: skip
    with RayCluster(build, 2) as cluster:
        for turn in range(setting.count):
            wishes = {f"{turn}-{number}": choose.choice(list(expected)) for number in range(REQUESTS)}
            for name, wish in wishes.items():
                cluster.add_request(world.request(name, wish))
            results: dict[str, Any] = {}
            ended, at, seen = Counter[str](), choose.randrange(1, 40), 0
            while cluster.has_unfinished():
                output = cluster.step()
                found = {result.request_id: result for result in (*output.finished, *output.failed)}
                results |= found
                ended.update(found.keys())
                before, seen = seen, seen + len(output.tokens)
                if before < at <= seen:
                    actor = choose.choice(list(cluster.runners.values())).actors[0]
                    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
                    outcome.injected += 1
            for name, wish in wishes.items():
                result = results.get(name)
                right = result is not None and ended[name] == 1 and result.token_ids == expected[wish].token_ids
                outcome.expect(right, f"{name} ended {ended[name]} times: {result}")
            while len(cluster.working_sets) < 2:
                cluster.step()
    return outcome
