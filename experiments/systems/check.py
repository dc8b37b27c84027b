"""No throughput without the right tokens: every system against Hugging Face, one request at a time.

The reference is the plain Hugging Face model, unbatched and unpadded, with the request's adapter applied by PEFT (or
with none, for systems without LoRA): one invocation over the prompt and all tokens after it, which gives the logits of
every position of the sequence given the tokens before (teacher forcing).

In float32 the tokens are the system's own, and each has to be the one that the reference chooses there; so they are
what Hugging Face would have generated. In half precision rounding decides close calls between tokens, and one different
token changes all later ones; there both go on with the same tokens, drawn at random, and are compared at every
position: the logits must agree within rounding, and the tokens that they choose nearly always.

How much of a request is compared is what `jobs` ask for: `StreamBench` has a few requests cut short for each workload,
and whole ones, or as long as a scale has time for, once for each system on our engine.
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
WITHIN = 0.99
"""Share of positions whose logits must be within the tolerance, the others within twice of it: rounding has tails, and
whole requests have thousands of positions. A wrong adapter, position or block is off by half and more."""


@dataclass(frozen=True)
class Agreement:
    """Share of the positions with the reference's token, and the largest relative error of a position's logits (0 where
    tokens were compared alone); and how many positions.
    """

    tokens: float
    logit_error: float
    positions: int

    def __and__(self, other: "Agreement") -> "Agreement":
        """Of both together."""
        positions = self.positions + other.positions
        tokens = (self.tokens * self.positions + other.tokens * other.positions) / positions
        return Agreement(tokens, max(self.logit_error, other.logit_error), positions)


def check_tokens(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    """Serve `jobs` on `system` and compare. Raises `CheckFailed` with the first request that differs, or when the
    adapters change nothing, so that applying the wrong one could not be seen.

    A system that is not `exact` gets all jobs with one adapter, the case in which even it must be right.
    """
    jobs = list(jobs) if system.exact else [replace(job, adapter_id=jobs[0].adapter_id) for job in jobs]
    return _check_exactly(system, jobs) if system.world.dtype == torch.float32 else _check_forced(system, jobs)


def _check_exactly(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    found = [list(tokens) for tokens in system.serve(jobs).tokens]
    expected = [chosen(system.world, job, own, system.lora) for job, own in zip(jobs, found, strict=True)]
    if system.lora and expected == [
        chosen(system.world, job, own, lora=False) for job, own in zip(jobs, found, strict=True)
    ]:
        raise CheckFailed("the adapters change no token of the checked requests, so the check could not see them")
    agree = [ours == theirs for ours, theirs in zip(found, expected, strict=True)]
    if not all(agree):
        first = agree.index(False)
        raise CheckFailed(
            f"{type(system).__name__} generates {found[first]} for request {first} (adapter {jobs[first].adapter_id}, "
            f"{len(jobs[first].prompt)} prompt tokens), Hugging Face {expected[first]} given the tokens before; "
            f"{agree.count(False)} of {len(jobs)} checked requests differ"
        )
    return Agreement(1.0, 0.0, sum(map(len, found)))


def chosen(world: World, job: Job, tokens: Sequence[int], lora: bool) -> list[int]:
    """The tokens that Hugging Face chooses for a job alone, each given those of `tokens` before it."""
    best: list[int] = world.reference(job, tokens, lora).argmax(dim=-1).tolist()
    return best


def drawn_tokens(jobs: Sequence[Job], vocab_size: int) -> list[list[int]]:
    """Tokens to go on with, as many as each job wants; the same whatever the system."""
    words = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (job.new_tokens,), generator=words).tolist() for job in jobs]


def _check_forced(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    world, limit = system.world, TOLERANCE[system.world.dtype]
    forced = drawn_tokens(jobs, world.vocab_size)
    expected = [world.reference(job, tokens, system.lora) for job, tokens in zip(jobs, forced, strict=True)]
    plain = [world.reference(job, tokens[:1], lora=False) for job, tokens in zip(jobs, forced, strict=True)]
    changes = [difference(without, own[:1]) for without, own in zip(plain, expected, strict=True)]
    if system.lora and max(changes) <= limit:  # at the first positions, which go on from nothing but a prompt
        raise CheckFailed("the adapters change no logits of the checked requests, so the check could not see them")
    found = system.forced(jobs, forced)
    errors = [_errors(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    worst = max(range(len(jobs)), key=lambda request: float(errors[request].nan_to_num(torch.inf).max()))
    largest = float(errors[worst].max())
    within = float((torch.cat(errors) <= limit).double().mean())
    if not (within >= WITHIN and largest <= 2 * limit):
        raise CheckFailed(
            f"{type(system).__name__} gives logits that differ from Hugging Face's by up to {largest:.2e} (relative; "
            f"{within:.4f} of {sum(map(len, errors))} positions are within {limit:.0e}), the most for request {worst} "
            f"(adapter {jobs[worst].adapter_id}, {len(jobs[worst].prompt)} prompt tokens), given the same tokens"
        )
    same = torch.cat([ours.argmax(-1) == theirs.argmax(-1) for ours, theirs in zip(found, expected, strict=True)])
    share = float(same.double().mean())
    if share < AGREEMENT:
        raise CheckFailed(
            f"{type(system).__name__} chooses Hugging Face's token at {share:.3f} of {len(same)} positions, below "
            f"{AGREEMENT}, given the same tokens before"
        )
    return Agreement(share, largest, len(same))


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative, of each of the positions of `[positions, vocabulary]`."""
    return torch.tensor([difference(ours, theirs) for ours, theirs in zip(found, expected, strict=True)])
