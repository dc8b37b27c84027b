"""Inputs for timing the LoRA of experts: rotating sets, which together exceed the caches, as in `operator_sets`."""

from functools import partial
from typing import Any, NamedTuple

import torch

from experiments.benches.operator_sets import ROTATING_BYTES, Call, captured, check_error, median_us
from experiments.benches.operators import begun
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


class ExpertSets:
    """Both LoRA products of a layer for `tokens` rows, row t with adapter ``t % adapters``; none aligned if naive."""

    def __init__(
        self, layer: MoELayer, tokens: int, adapters: int, rank: int, device: str = "cuda",
        rotating_bytes: int = ROTATING_BYTES,
    ) -> None:  # fmt: skip
        self.layer, self.tokens, self.adapters, self.rank = layer, tokens, adapters, rank
        self.generator = torch.Generator(device).manual_seed(0)
        hidden, inner, experts, top_k = layer
        per_pair = 2 * rank * (3 * hidden + 3 * inner)
        pairs = min(tokens * top_k, adapters * experts)
        self.count = max(2, -(-rotating_bytes // (pairs * per_pair)))
        stacks = max(1, min(self.count, MOST_STACK_BYTES // (per_pair * adapters * experts)))
        a13 = [self._stack(stacks, adapters, experts, rank, hidden) for _ in range(2)]
        b13 = [self._stack(stacks, adapters, experts, inner, rank) for _ in range(2)]
        a2 = self._stack(stacks, adapters, experts, rank, inner)
        b2 = self._stack(stacks, adapters, experts, hidden, rank)
        self.w13 = [(tuple(a[i] for a in a13), tuple(b[i] for b in b13)) for i in range(stacks)]
        self.w2 = [((a2[i],), (b2[i],)) for i in range(stacks)]
        self.x13 = self._normal(self.count, tokens, hidden)
        self.x2 = self._normal(self.count, tokens * top_k, inner)
        self.y13 = torch.zeros(self.count, tokens, top_k, 2 * inner, device=device, dtype=DTYPE)
        self.y2 = torch.zeros(self.count, tokens, top_k, hidden, device=device, dtype=DTYPE)
        logits = torch.empty(self.count, tokens, experts, device=device).normal_(generator=self.generator)
        self.routing = [route(one, top_k, True) for one in logits]
        self.enabled = torch.ones(adapters + 1, dtype=torch.int32, device=device)
        slots = [t % adapters for t in range(tokens)]
        self.mapping = torch.tensor(slots, dtype=torch.int32, device=device)
        self.wrapper = begun(PunicaWrapperGPU, slots, adapters, rank, device)
        self.ranks = [torch.full((n, adapters), rank, dtype=torch.int32, device=device) for n in (2, 1)]
        self.shape = torch.empty(experts, 1, 1)
        self.aligned = [self._w13_aligned(i) for i in range(self.count)]

    def columns(self) -> dict[str, Call]:
        """Name -> call on set i; those whose name ends in ``delta`` overwrite their outputs, others accumulate."""
        calls: dict[str, Call] = {
            "w13": partial(self._w13, add=True),
            "w2": partial(self._w2, add=True),
            "w13, delta": partial(self._w13, add=False),
            "w2, delta": partial(self._w2, add=False),
            "alignment and w13": self._w13_aligned,
        }
        return calls if self.aligned[0][0] is None else {**calls, "alignment": self._align}

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        out = torch.empty(shape, device=self.generator.device, dtype=DTYPE)
        return out.normal_(generator=self.generator).mul_(scale)

    def _stack(self, *shape: int) -> torch.Tensor:
        return self._normal(*shape, scale=shape[-1] ** -0.5)

    def _w13_aligned(self, i: int) -> Any:
        """Run a layer's first call; return its alignment, for `_w2`."""
        weights, ids = self.routing[i]
        (a, b), (_, _, experts, top_k) = self.w13[i % len(self.w13)], self.layer
        return self.wrapper.add_lora_w13(
            self.y13[i], self.x13[i], a, b, ids, weights, None, self.shape, self.shape, self.tokens, top_k,
            self.adapters, self.enabled, experts, top_k, 2, False, True, lora_ranks=self.ranks[0],
        )  # fmt: skip

    def _align(self, i: int) -> None:
        _, ids = self.routing[i]
        active = self.wrapper._active(self.wrapper._slots_of_tokens(None, self.tokens), self.adapters)
        tokens, top_k = ids.shape
        block = self.wrapper._expert_ops("the alignment").block_size(tokens, top_k, active, self._weights(0, "w13"))
        self.wrapper.moe_lora_align_block_size(
            ids, self.tokens, block, self.layer.experts, self.adapters, self.enabled, None, True, False
        )

    def _w13(self, i: int, add: bool) -> None:
        ids, experts, counts, mapping = self.aligned[i]
        if ids is not None:
            ids, experts = ids.view(self.adapters, -1), experts.view(self.adapters, -1)
        assignment = Assignment(self.routing[i][0], ids, experts, counts, mapping)
        self.wrapper.add_lora_experts(self.y13[i], self.x13[i], self._weights(i, "w13", add), assignment)

    def _weights(self, i: int, site: str, add: bool = True) -> ExpertLoRAWeights:
        a, b = self.w13[i % len(self.w13)]
        return ExpertLoRAWeights(a, b, self.enabled, self.ranks[0], None, Switches(add_inputs=add), site)

    def _w2(self, i: int, add: bool) -> None:
        (a, b), top_k = self.w2[i % len(self.w2)], self.layer.top_k
        ids, experts, counts, mapping = self.aligned[i]
        self.wrapper.add_lora_w2(
            self.y2[i], self.x2[i], a, b, self.routing[i][0], ids, experts, counts, mapping, self.tokens, self.shape,
            self.shape, top_k, self.adapters, self.enabled, top_k, False, 0, True, add, lora_ranks=self.ranks[1],
        )  # fmt: skip

    def error(self, name: str) -> float:
        """Relative error of what one call adds, the worse of the first and the last set; 0 for the alignment."""
        if name == "alignment":
            return 0.0
        for i in (0, self.count - 1):
            (self.y2 if name.startswith("w2") else self.y13)[i].zero_()
            self.columns()[name](i)
        return self.error_now(name)

    def error_now(self, name: str) -> float:
        """Return the same error of the outputs as they are, left by a call that overwrites them."""
        down = name.startswith("w2")
        y, x, stacks = (self.y2, self.x2, self.w2) if down else (self.y13, self.x13, self.w13)
        errors = []
        for i in (0, self.count - 1):
            wanted = torch.zeros_like(y[i], dtype=torch.float32)
            weights, ids = self.routing[i]
            routing = reference.Routing(ids, weights, self.mapping, self.enabled)
            reference.fused_moe_lora(wanted, x[i], *stacks[i % len(stacks)], routing, down)
            errors.append(float((y[i].float() - wanted).norm() / wanted.norm()))
        return max(errors)


def checked_us(sets: ExpertSets, name: str, calls: int, replays: int) -> float:
    """Median microseconds in a graph; `CheckFailed` where a call is wrong, or one that overwrites after a replay."""
    check_error(name, sets.error(name), TOLERANCE)
    run, total = captured(sets.columns()[name], sets.count, calls)
    if name.endswith("delta"):
        run()
        check_error(f"{name}, after a graph replay", sets.error_now(name), TOLERANCE)
    return median_us(run, total, replays)
