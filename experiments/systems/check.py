"""No throughput without the right tokens: every system against Hugging Face, one request at a time.

The reference is the plain Hugging Face model, unbatched and unpadded, with the request's adapter applied by PEFT (or
with none, for systems without LoRA). In float32 all tokens must agree. In half precision, where rounding decides close
calls between tokens and one different token changes all later ones, three quarters of the first tokens must.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from experiments.harness.experiment import CheckFailed
from experiments.systems.serving import ServingSystem
from experiments.systems.stream import Job
from experiments.systems.world import World

HALF_PRECISION_AGREEMENT = 0.75


def check_tokens(system: ServingSystem, jobs: Sequence[Job]) -> None:
    """Serve `jobs` on `system` and compare. Raises `CheckFailed` with the first request that differs, or when the
    adapters change nothing, so that applying the wrong one could not be seen.

    A system that is not `exact` gets all jobs with one adapter, the case in which even it must be right.
    """
    jobs = list(jobs) if system.exact else [replace(job, adapter_id=jobs[0].adapter_id) for job in jobs]
    expected = reference_tokens(system.world, jobs, system.lora)
    if system.lora and expected == reference_tokens(system.world, jobs, lora=False):
        raise CheckFailed("the adapters change no token of the checked requests, so the check could not see them")
    found = [list(tokens) for tokens in system.serve(jobs).tokens]
    exactly = system.world.dtype == torch.float32
    pairs = list(zip(found, expected, strict=True))
    agree = [ours == theirs if exactly else ours[0] == theirs[0] for ours, theirs in pairs]
    if sum(agree) >= len(agree) * (1.0 if exactly else HALF_PRECISION_AGREEMENT):
        return
    first = agree.index(False)
    raise CheckFailed(
        f"{type(system).__name__} generates {found[first]} for request {first} (adapter {jobs[first].adapter_id}, "
        f"{len(jobs[first].prompt)} prompt tokens), Hugging Face {expected[first]}; {agree.count(False)} of "
        f"{len(jobs)} checked requests differ"
    )


def reference_tokens(world: World, jobs: Sequence[Job], lora: bool) -> list[list[int]]:
    """Tokens of each job, generated alone by Hugging Face; computed once per world and job."""
    for job in jobs:
        if (job, lora) not in world.references:
            with world.peft.adapter(job.adapter_id if lora else None):
                world.references[job, lora] = world.peft.generate([job.prompt], job.new_tokens).tokens[0]
    return [world.references[job, lora] for job in jobs]
