"""Check of every system's tokens against Hugging Face, one request at a time.

The reference is the Hugging Face model, unbatched and unpadded, with the request's adapter applied by PEFT (none for
systems without LoRA): one invocation over prompt and continuation gives the logits of every position (teacher forcing).

In float32 every token that a system generates must be the reference's choice given the tokens before. In half precision
rounding decides close calls, and one different token changes all later ones. There both are given the same random
tokens: at every position logits must agree within rounding, and chosen tokens nearly always.
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
"""Share of positions at which a half-precision system must choose the reference's token. The flat logits of random
weights have more close calls than a trained model's."""
WITHIN = 0.99
"""Share of positions whose logits must be within the tolerance, the others within twice of it: thousands of positions
have tails of rounding. A wrong adapter, position or block is off by half and more."""


@dataclass(frozen=True)
class Agreement:
    """Share of positions with the reference's token; largest relative error of a position's logits (0 where tokens
    alone were compared); number of positions.
    """

    tokens: float
    logit_error: float
    positions: int

    def __and__(self, other: "Agreement") -> "Agreement":
        """Merge both."""
        positions = self.positions + other.positions
        tokens = (self.tokens * self.positions + other.tokens * other.positions) / positions
        return Agreement(tokens, max(self.logit_error, other.logit_error), positions)


def check_tokens(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    """Serve `jobs` on `system` and compare. Raises `CheckFailed` with the first request that differs, or when the
    adapters change nothing, so that a wrong one could not be seen.

    A system that is not `exact` gets all jobs with one adapter, for which it must be right.
    """
    jobs = list(jobs) if system.facts.exact else [replace(job, adapter_id=jobs[0].adapter_id) for job in jobs]
    return _check_exactly(system, jobs) if system.world.dtype == torch.float32 else _check_forced(system, jobs)


def _check_exactly(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    found = [list(tokens) for tokens in system.serve(jobs).tokens]
    expected = [chosen(system.world, job, own, system.facts.lora) for job, own in zip(jobs, found, strict=True)]
    if system.facts.lora and expected == [
        chosen(system.world, job, own, lora=False) for job, own in zip(jobs, found, strict=True)
    ]:
        raise CheckFailed("the adapters change no token of the checked requests, so the check could not see them")
    agree = [ours == theirs for ours, theirs in zip(found, expected, strict=True)]
    if not all(agree):
        first = agree.index(False)
        raise CheckFailed(
            f"{system.facts.name} generates {found[first]} for request {first} (adapter {jobs[first].adapter_id}, "
            f"{len(jobs[first].prompt)} prompt tokens), Hugging Face {expected[first]} given the tokens before; "
            f"{agree.count(False)} of {len(jobs)} checked requests differ"
        )
    return Agreement(1.0, 0.0, sum(map(len, found)))


def chosen(world: World, job: Job, tokens: Sequence[int], lora: bool) -> list[int]:
    """Return the tokens that Hugging Face chooses for a job alone, each given those of `tokens` before it.

    They are computed once for all systems that generate the same.
    """
    asked = job.prompt, job.adapter_id if lora else None, tuple(tokens)
    if asked not in world.chosen:
        world.chosen[asked] = world.reference(job, tokens, lora).argmax(dim=-1).tolist()
    return world.chosen[asked]


def drawn_tokens(jobs: Sequence[Job], vocab_size: int) -> list[list[int]]:
    """Draw a continuation of each job; the same for all systems."""
    words = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (job.new_tokens,), generator=words).tolist() for job in jobs]


def _check_forced(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    world, limit = system.world, TOLERANCE[system.world.dtype]
    forced = drawn_tokens(jobs, world.vocab_size)
    expected = [world.reference(job, tokens, system.facts.lora) for job, tokens in zip(jobs, forced, strict=True)]
    plain = [world.reference(job, tokens[:1], lora=False) for job, tokens in zip(jobs, forced, strict=True)]
    changes = [difference(without, own[:1]) for without, own in zip(plain, expected, strict=True)]
    if system.facts.lora and max(changes) <= limit:  # at the first positions, which follow a prompt alone
        raise CheckFailed("the adapters change no logits of the checked requests, so the check could not see them")
    found = system.forced(jobs, forced)
    errors = [_errors(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    worst = max(range(len(jobs)), key=lambda request: float(errors[request].nan_to_num(torch.inf).max()))
    largest = float(errors[worst].max())
    within = float((torch.cat(errors) <= limit).double().mean())
    if not (within >= WITHIN and largest <= 2 * limit):
        raise CheckFailed(
            f"{system.facts.name} gives logits that differ from Hugging Face's by up to {largest:.2e} (relative; "
            f"{within:.4f} of {sum(map(len, errors))} positions are within {limit:.0e}), the most for request {worst} "
            f"(adapter {jobs[worst].adapter_id}, {len(jobs[worst].prompt)} prompt tokens), given the same tokens"
        )
    same = torch.cat([ours.argmax(-1) == theirs.argmax(-1) for ours, theirs in zip(found, expected, strict=True)])
    share = float(same.double().mean())
    if share < AGREEMENT:
        raise CheckFailed(
            f"{system.facts.name} chooses Hugging Face's token at {share:.3f} of {len(same)} positions, below "
            f"{AGREEMENT}, given the same tokens before"
        )
    return Agreement(share, largest, len(same))


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each position of `[positions, vocabulary]`."""
    return torch.tensor([difference(ours, theirs) for ours, theirs in zip(found, expected, strict=True)])
