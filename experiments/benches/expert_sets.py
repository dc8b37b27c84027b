"""Inputs for timing the LoRA of experts: rotating sets, which together exceed the caches, as in `operator_sets`."""

from functools import partial
from typing import NamedTuple

import torch

from experiments.benches.operator_sets import ROTATING_BYTES, Call, captured, median_us
from experiments.benches.operators import begun
from experiments.harness.experiment import check_error
from punica.ops import reference
from punica.ops.experts import Assignment, ExpertLoRAWeights, Switches
from punica.parallel import route
from punica.wrapper import PunicaWrapperGPU

DTYPE, TOLERANCE = torch.bfloat16, 8e-3  # type of everything, and its largest relative error
MOST_STACK_BYTES = 16 << 30  # memory for the stacks of one operator


class MoELayer(NamedTuple):
    """Sizes of a mixture of experts: w13 is two products hidden -> intermediate, w2 one back."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


class Product(NamedTuple):
    """Inputs of w13 or w2, set i in ``x[i]`` and ``y[i]``; A and B of every slice, of fewer sets where memory ends."""

    x: torch.Tensor
    y: torch.Tensor
    stacks: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]
    ranks: torch.Tensor


class ExpertSets:
    """Both LoRA products of a layer for `tokens` rows, row t with adapter ``t % adapters``; none aligned if naive."""

    def __init__(
        self, layer: MoELayer, tokens: int, adapters: int, rank: int, device: str = "cuda",
        rotating_bytes: int = ROTATING_BYTES,
    ) -> None:  # fmt: skip
        self.generator = torch.Generator(device).manual_seed(0)
        hidden, inner, experts, top_k = layer
        per_pair = 2 * rank * (3 * hidden + 3 * inner)
        pairs = min(tokens * top_k, adapters * experts)
        self.count = max(2, -(-rotating_bytes // (pairs * per_pair)))
        stacks = max(1, min(self.count, MOST_STACK_BYTES // (per_pair * adapters * experts)))

        def product(slices: int, rows: int, k: int, n: int) -> Product:
            a = [self._normal(stacks, adapters, experts, rank, k, scale=k**-0.5) for _ in range(slices)]
            b = [self._normal(stacks, adapters, experts, n, rank, scale=rank**-0.5) for _ in range(slices)]
            x = self._normal(self.count, rows, k)
            y = torch.zeros(self.count, tokens, top_k, slices * n, device=device, dtype=DTYPE)
            pairs = [(tuple(one[i] for one in a), tuple(one[i] for one in b)) for i in range(stacks)]
            return Product(x, y, pairs, torch.full((slices, adapters), rank, dtype=torch.int32, device=device))

        self.products = {"w13": product(2, tokens, hidden, inner), "w2": product(1, tokens * top_k, inner, hidden)}
        logits = torch.empty(self.count, tokens, experts, device=device).normal_(generator=self.generator)
        self.routing = [route(one, top_k, True) for one in logits]
        self.enabled = torch.ones(adapters + 1, dtype=torch.int32, device=device)
        slots = [t % adapters for t in range(tokens)]
        self.mapping = torch.tensor(slots, dtype=torch.int32, device=device)
        self.wrapper = begun(PunicaWrapperGPU, slots, adapters, rank, device)
        self.aligned = [self._align(i) for i in range(self.count)]

    def columns(self) -> dict[str, Call]:
        """Name -> call on set i; those whose name ends in ``delta`` overwrite their outputs, others accumulate."""
        calls: dict[str, Call] = {
            "w13": partial(self._add, "w13"),
            "w2": partial(self._add, "w2"),
            "w13, delta": partial(self._add, "w13", add=False),
            "w2, delta": partial(self._add, "w2", add=False),
            "alignment and w13": lambda i: self._add("w13", i, self._align(i)),
        }
        return calls if self.aligned[0].ids is None else {**calls, "alignment": self._align}

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        out = torch.empty(shape, device=self.generator.device, dtype=DTYPE)
        return out.normal_(generator=self.generator).mul_(scale)

    def _align(self, i: int) -> Assignment:
        weights, ids = self.routing[i]
        return self.wrapper.assign_pairs(ids, weights, None, self._weights("w13", i), every_slot=True)

    def _weights(self, site: str, i: int, add: bool = True) -> ExpertLoRAWeights:
        own, switches = self.products[site], Switches(mul_routed_weight=site == "w2", add_inputs=add)
        return ExpertLoRAWeights(*own.stacks[i % len(own.stacks)], self.enabled, own.ranks, None, switches, site)

    def _add(self, site: str, i: int, aligned: Assignment | None = None, add: bool = True) -> None:
        own = self.products[site]
        self.wrapper.add_lora_experts(own.y[i], own.x[i], self._weights(site, i, add), aligned or self.aligned[i])

    def error(self, name: str) -> float:
        """Relative error of what one call adds, the worse of the first and the last set; 0 for the alignment."""
        if name == "alignment":
            return 0.0
        for i in (0, self.count - 1):
            self._product_of(name).y[i].zero_()
            self.columns()[name](i)
        return self.error_now(name)

    def error_now(self, name: str) -> float:
        """Return the same error of the outputs as they are, left by a call that overwrites them."""
        own, errors = self._product_of(name), []
        for i in (0, self.count - 1):
            wanted = torch.zeros_like(own.y[i], dtype=torch.float32)
            weights, ids = self.routing[i]
            routing = reference.Routing(ids, weights, self.mapping, self.enabled)
            stacks = own.stacks[i % len(own.stacks)]
            reference.fused_moe_lora(wanted, own.x[i], *stacks, routing, name.startswith("w2"))
            errors.append(float((own.y[i].float() - wanted).norm() / wanted.norm()))
        return max(errors)

    def _product_of(self, name: str) -> Product:
        return self.products["w2" if name.startswith("w2") else "w13"]


def checked_us(sets: ExpertSets, name: str, calls: int, replays: int) -> float:
    """Median microseconds in a graph; `CheckFailed` where a call is wrong, or one that overwrites after a replay."""
    check_error(name, sets.error(name), TOLERANCE)
    run, total = captured(sets.columns()[name], sets.count, calls)
    if name.endswith("delta"):
        run()
        check_error(f"{name}, after a graph replay", sets.error_now(name), TOLERANCE)
    return median_us(run, total, replays)
