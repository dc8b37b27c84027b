"""A projection with LoRA, forward and backward, by the ways to train many adapters; for `ext_training`."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from experiments.benches.operators import grouped_product
from experiments.harness.experiment import check
from punica.metadata import LoRABatch, RowGroups
from punica.ops.gradients import lora_linear
from punica.ops.weights import LoRAWeights
from punica.wrapper import get_punica_wrapper

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 1e-2}
"""Largest relative error of the output and of each gradient."""


class Training:
    """Leaves x ``[n * tokens, K]``, A ``[n, r, K]``, B ``[n, N, r]`` (rank after rank in memory, as in layers), the
    same of each adapter; a frozen weight and the gradient of the output. ``numbers``: n, tokens, rank. All of unit
    variance.
    """

    def __init__(self, k: int, n: int, numbers: Sequence[int], like: Tensor, seed: int) -> None:
        generator, (adapters, tokens, rank) = torch.Generator(like.device).manual_seed(seed), numbers

        def normal(*shape: int, scale: int = 1) -> Tensor:
            return (torch.randn(shape, generator=generator, device=like.device) * scale**-0.5).to(like)

        self.tokens, self.weight, self.dy = tokens, normal(n, k, scale=k), normal(adapters * tokens, n)
        a, b = normal(adapters, rank, k, scale=k), normal(adapters, rank, n, scale=rank)
        whole = normal(adapters * tokens, k), a, b.mT
        parts = zip(whole[0].split(tokens), *whole[1:], strict=True)
        self.leaves, *self.own = [[one.detach().requires_grad_() for one in part] for part in (whole, *parts)]
        self.ends = torch.arange(1, adapters + 1, device=like.device, dtype=torch.int32) * tokens
        self.batch = LoRABatch(adapters * tokens, adapters, like.device)
        self.batch.fill(RowGroups.of_runs(range(adapters), [tokens] * adapters))
        self.ops = get_punica_wrapper(1, 1, like.device, max_loras=1).ops
        self.weights = LoRAWeights.of((self.leaves[1],), (self.leaves[2],))  # no views: they have a stream

    def run(self, system: str, base: bool = True, backward: bool = True) -> list[Tensor]:
        """Return the output and the gradients of x, A and B; `one by one` those of the last adapter."""
        apart = zip(self.own, self.dy.split(self.tokens), strict=True)
        runs: Iterable[Any] = apart if system == "one by one" else [(self.leaves, self.dy)]
        for leaves, dy in runs:
            y = self._output(system, leaves, (self.weight,) if base else ())
            found = [y, *(torch.autograd.grad(y, leaves, dy) if backward else ())]
        return found

    def _output(self, system: str, leaves: Sequence[Tensor], base: tuple[Tensor, ...]) -> Tensor:
        (x, a, b), product = leaves, cast(Any, grouped_product())
        if system == "SGMV":
            return lora_linear(self.ops, x, self.weights, self.batch, 1.0, base)
        if system == "grouped_mm":
            low = product(product(x, a.mT, offs=self.ends), b.mT, offs=self.ends)
        elif system == "loop":
            low = torch.cat([rows @ a.T @ b.T for rows, a, b in zip(x.split(self.tokens), a, b, strict=True)])
        else:
            low = x @ a.T @ b.T
        return linear(x, *base) + low if base else low

    def check(self, system: str) -> None:
        """`CheckFailed`: the output or a gradient is not that of the loop in float32."""
        leaves = [one.detach().float().requires_grad_() for one in self.leaves]
        y = self._output("loop", leaves, (self.weight.float(),))
        expected = y, *torch.autograd.grad(y, leaves, self.dy.float())
        for name, one, want in zip(("y", "dx", "dA", "dB"), self.run(system), expected, strict=True):
            check(f"{name} of {system}", one.detach(), want.detach(), TOLERANCE[one.dtype])
