"""No throughput without the right tokens: every system against Hugging Face, one request at a time.

The reference is the plain Hugging Face model, unbatched and unpadded, with the request's adapter applied by PEFT (or
with none, for systems without LoRA). In float32 all tokens of all checked requests must agree. In half precision
rounding decides close calls between tokens, and one different token changes all later ones; there system and reference
go on with the same tokens (teacher forcing, over the whole sequences) and are compared at every position: the logits
must agree within rounding, and the tokens that they choose nearly always.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from experiments.benches.model_steps import TOLERANCE, difference
from experiments.harness.experiment import CheckFailed
from experiments.systems.serving import ServingSystem
from experiments.systems.stream import Job
from experiments.systems.world import World

AGREEMENT = 0.9
"""Share of positions at which a half-precision system must choose the reference's token. Random weights give flat
logits, so that more calls are close than with a trained model."""


@dataclass(frozen=True)
class Agreement:
    """Share of the positions with the reference's token, and the largest relative error of a position's logits (0 where
    tokens were compared alone).
    """

    tokens: float
    logit_error: float


def check_tokens(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    """Serve `jobs` on `system` and compare. Raises `CheckFailed` with the first request that differs, or when the
    adapters change nothing, so that applying the wrong one could not be seen.

    A system that is not `exact` gets all jobs with one adapter, the case in which even it must be right.
    """
    jobs = list(jobs) if system.exact else [replace(job, adapter_id=jobs[0].adapter_id) for job in jobs]
    return _check_exactly(system, jobs) if system.world.dtype == torch.float32 else _check_forced(system, jobs)


def _check_exactly(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    expected = reference_tokens(system.world, jobs, system.lora)
    if system.lora and expected == reference_tokens(system.world, jobs, lora=False):
        raise CheckFailed("the adapters change no token of the checked requests, so the check could not see them")
    found = [list(tokens) for tokens in system.serve(jobs).tokens]
    agree = [ours == theirs for ours, theirs in zip(found, expected, strict=True)]
    if not all(agree):
        first = agree.index(False)
        raise CheckFailed(
            f"{type(system).__name__} generates {found[first]} for request {first} (adapter {jobs[first].adapter_id}, "
            f"{len(jobs[first].prompt)} prompt tokens), Hugging Face {expected[first]}; {agree.count(False)} of "
            f"{len(jobs)} checked requests differ"
        )
    return Agreement(1.0, 0.0)


def _check_forced(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    world, limit = system.world, TOLERANCE[system.world.dtype]
    tokens = reference_tokens(world, jobs, system.lora)
    expected = [reference_logits(world, job, own, system.lora) for job, own in zip(jobs, tokens, strict=True)]
    plain = [reference_logits(world, job, own, lora=False) for job, own in zip(jobs, tokens, strict=True)]
    if system.lora and max(map(difference, plain, expected)) <= limit:
        raise CheckFailed("the adapters change no logits of the checked requests, so the check could not see them")
    found = system.forced(jobs, tokens)
    errors = [_largest_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    worst = max(range(len(jobs)), key=errors.__getitem__)
    if not errors[worst] <= limit:
        raise CheckFailed(
            f"{type(system).__name__} gives logits that differ from Hugging Face's by {errors[worst]:.2e} (relative, "
            f"above {limit:.0e}) for request {worst} (adapter {jobs[worst].adapter_id}, {len(jobs[worst].prompt)} "
            "prompt tokens), given the same tokens"
        )
    same = torch.cat([ours.argmax(-1) == theirs.argmax(-1) for ours, theirs in zip(found, expected, strict=True)])
    share = float(same.double().mean())
    if share < AGREEMENT:
        raise CheckFailed(
            f"{type(system).__name__} chooses Hugging Face's token at {share:.3f} of {len(same)} positions, below "
            f"{AGREEMENT}, given the same tokens before"
        )
    return Agreement(share, errors[worst])


def _largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Over the positions of `[positions, vocabulary]`."""
    return max(difference(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def reference_tokens(world: World, jobs: Sequence[Job], lora: bool) -> list[list[int]]:
    """Tokens of each job, generated alone by Hugging Face; computed once per world and job."""
    for job in jobs:
        if (job, lora) not in world.references:
            with world.peft.adapter(job.adapter_id if lora else None):
                world.references[job, lora] = world.peft.generate([job.prompt], job.new_tokens).tokens[0]
    return [world.references[job, lora] for job in jobs]


def reference_logits(world: World, job: Job, tokens: Sequence[int], lora: bool) -> torch.Tensor:
    """Logits `[its tokens, vocabulary]` of a job alone in Hugging Face's model, going on with `tokens`."""
    with world.peft.adapter(job.adapter_id if lora else None):
        return world.peft.forced([job.prompt], [list(tokens)])[0]
