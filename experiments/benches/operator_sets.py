"""Inputs and clock of the LoRA operator for the operator tables: one graph rotates through *sets* (x, y, A, B) of more
bytes than any cache has, so that weights come from HBM.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from experiments.benches.operator_lines import Operator
from experiments.benches.operators import MAX_LORAS, kernel_meta_args
from experiments.measure.timing import CapturedRun, captured_rounds, seconds_between_events

ROTATING_BYTES = 256 << 20  # bytes of all sets together; the L2 cache of an H200 holds 60 MB
Call = Callable[[int], object]  # a call on one of the sets


class OperatorSets:
    """Rotating inputs of one operator, set i in ``x[i]``, ``y[i]``, ``a[i]``, ``b[i]``; ``stacked_*``: a layer's
    stacks, the adapters of set i in the first slots, B rank after rank, and true ranks, 0 in the rest.
    """

    def __init__(
        self, operator: Operator, device: torch.device | str = "cuda", rotating_bytes: int = ROTATING_BYTES
    ) -> None:
        self.operator = operator
        adapters, tokens, slices = len(operator.sizes), operator.tokens, len(operator.widths)
        slots = max(MAX_LORAS, adapters)
        generator = torch.Generator(device).manual_seed(0)
        per_set = 2 * (tokens * (operator.k + sum(operator.widths)))
        per_set += 2 * adapters * operator.rank * (operator.k * slices + sum(operator.widths))
        self.count = max(2, -(-rotating_bytes // per_set))

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            out = torch.empty(shape, device=device, dtype=torch.float16)
            return out.normal_(generator=generator).mul_(scale)

        self.x = normal(self.count, tokens, operator.k)
        self.y = torch.zeros(self.count, tokens, sum(operator.widths), device=device, dtype=torch.float16)
        total = self.count * adapters + slots - adapters
        a = [normal(total, operator.rank, operator.k, scale=operator.k**-0.5) for _ in operator.widths]
        b = [normal(total, n, operator.rank, scale=operator.rank**-0.5) for n in operator.widths]
        stored = [weight.mT.contiguous().mT for weight in b]
        self.a, self.b = self.windows(a, adapters), self.windows(b, adapters)
        self.stacked_a, self.stacked_b = (self.windows(bank, slots) for bank in (a, stored))
        self.slots = torch.repeat_interleave(torch.arange(adapters), torch.tensor(operator.sizes))
        self.meta_args = kernel_meta_args(self.slots, slots, self.x.device)
        self._references: dict[int, torch.Tensor] = {}
        true = torch.tensor(operator.ranks or [operator.rank] * adapters, dtype=torch.int32, device=device)
        self.lora_ranks = true.repeat(slices, 1) if operator.ranks else None
        self.stacked_ranks = torch.zeros(slices, slots, dtype=torch.int32, device=device)
        self.stacked_ranks[:, :adapters] = true

    def windows(self, bank: Sequence[torch.Tensor], length: int) -> list[tuple[torch.Tensor, ...]]:
        """Return ``length`` slots of `bank` (one tensor per slice) for each set, the set's adapters first."""
        adapters = len(self.operator.sizes)
        starts = range(0, self.count * adapters, adapters)
        return [tuple(weight[start : start + length] for weight in bank) for start in starts]

    def reference(self, i: int) -> torch.Tensor:
        """Return the float32 reference of one call on set i; computed once."""
        if i not in self._references:
            ranks = self.operator.ranks or [self.operator.rank] * len(self.operator.sizes)
            parts = zip(ranks, self.x[i].float().split(self.operator.sizes), strict=True)
            self._references[i] = torch.cat([self._delta(i, slot, *part) for slot, part in enumerate(parts)])
        return self._references[i]

    def _delta(self, i: int, slot: int, rank: int, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.a[i], self.b[i], strict=True)
        return torch.cat([x @ a[slot, :rank].float().T @ b[slot, :, :rank].float().T for a, b in pairs], 1)

    def _error(self, i: int, calls: int = 1) -> float:
        """``|added - reference| / |reference|`` after `calls` calls on set i; infinite where that is not a number."""
        expected = self.reference(i) * calls
        error = float((self.y[i].float() - expected).norm() / expected.norm())
        return error if error == error else float("inf")

    def relative_error(self, call: Call) -> float:
        """``|added - reference| / |reference|``, the worse of the first and the last set, from y = 0."""
        errors = []
        for i in (0, self.count - 1):
            self.y[i].zero_()
            call(i)
            errors.append(self._error(i))
            self.y[i].zero_()
        return max(errors)

    def time_graph(self, call: Call, *, calls: int = 200, replays: int = 9) -> tuple[float, float]:
        """Median microseconds per call of a graph of `calls` calls or more, and the error after a replay from y = 0."""
        run, total = captured(call, self.count, calls)
        self.y.zero_()
        run()
        torch.cuda.synchronize()
        error = max(self._error(i, total // self.count) for i in (0, self.count - 1))
        us = median_us(run, total, replays)
        self.y.zero_()
        return us, error


def captured(call: Call, sets: int, calls: int) -> tuple[CapturedRun, int]:
    """Capture `calls` calls or one for each of `sets`, every set in turn; return the graph and its number of calls."""
    return captured_rounds([partial(call, i) for i in range(sets)], calls)


def median_us(run: CapturedRun, calls: int, replays: int) -> float:
    return statistics.median(seconds_between_events(run) * 1e6 / calls for _ in range(replays))
