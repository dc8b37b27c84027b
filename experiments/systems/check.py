"""Check of every system's logits against Hugging Face with PEFT, one request at a time. Both are given the same random
tokens (teacher forcing): logits must agree within rounding at every position, and nearly always the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from experiments.benches.model_steps import TOLERANCE
from experiments.harness.experiment import CheckFailed, difference
from experiments.systems.serving import ServingSystem
from experiments.systems.stream import Job

AGREEMENT = 0.9
"""Share of positions at which a system must choose the reference's token. In half precision the flat logits of random
weights have more close calls than a trained model's."""
WITHIN = 0.99
"""Share of positions whose logits must be within the tolerance, the others within twice of it: thousands of positions
have tails of rounding. A wrong adapter, position or block is off by half and more."""


@dataclass(frozen=True)
class Agreement:
    """Share of positions with the reference's token; largest relative error of a position's logits; positions."""

    tokens: float
    logit_error: float
    positions: int

    def __and__(self, other: "Agreement") -> "Agreement":
        positions = self.positions + other.positions
        tokens = (self.tokens * self.positions + other.tokens * other.positions) / positions
        return Agreement(tokens, max(self.logit_error, other.logit_error), positions)


def check_tokens(system: ServingSystem, jobs: Sequence[Job]) -> Agreement:
    """Force tokens on `jobs` of `system` and compare; `CheckFailed` names the request that differs most, or says that
    adapters change nothing. One that is not `exact` gets one adapter for all.
    """
    facts, world, limit = system.facts, system.world, TOLERANCE[system.world.dtype]
    jobs = list(jobs) if facts.exact else [replace(job, adapter_id=jobs[0].adapter_id) for job in jobs]
    words = torch.Generator().manual_seed(0)  # the same continuations for all systems
    forced = [torch.randint(world.vocab_size, (job.new_tokens,), generator=words).tolist() for job in jobs]
    expected = [world.reference(job, tokens, facts.lora) for job, tokens in zip(jobs, forced, strict=True)]
    plain = [world.reference(job, tokens[:1], lora=False) for job, tokens in zip(jobs, forced, strict=True)]
    changes = [difference(without, own[:1]) for without, own in zip(plain, expected, strict=True)]
    if facts.lora and max(changes) <= limit:  # at the first positions, which follow a prompt alone
        raise CheckFailed("the adapters change no logits of the checked requests, so the check could not see them")
    logits = system.forced(jobs, forced)
    errors = [
        torch.tensor([difference(*rows) for rows in zip(ours, theirs, strict=True)])
        for ours, theirs in zip(logits, expected, strict=True)
    ]
    every = torch.cat(errors)
    worst = max(range(len(jobs)), key=lambda request: float(errors[request].nan_to_num(torch.inf).max()))
    largest, within = float(errors[worst].max()), float((every <= limit).double().mean())
    same = torch.cat([ours.argmax(-1) == theirs.argmax(-1) for ours, theirs in zip(logits, expected, strict=True)])
    share = float(same.double().mean())
    if not (within >= WITHIN and largest <= 2 * limit and share >= AGREEMENT):
        raise CheckFailed(
            f"{facts.name} gives logits that differ from Hugging Face's by up to {largest:.2e} (relative; {within:.4f} "
            f"of {len(every)} positions are within {limit:.0e}), the most for request {worst} (adapter "
            f"{jobs[worst].adapter_id}, {len(jobs[worst].prompt)} prompt tokens), and chooses its token at {share:.3f} "
            "of them, given the same tokens"
        )
    return Agreement(share, largest, len(same))
