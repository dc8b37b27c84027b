"""A mixture-of-experts model with adapters on its experts, and what `ext_moe` times of it.

Every slot holds a copy of one random adapter, at its own address: speed does not depend on values. Metadata is set once
per step, outside the timing, except the grouping by expert, which follows the router and so belongs to every layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from transformers import MixtralConfig, Qwen3MoeConfig

from experiments.benches.model_steps import Invocation, difference, spans, step_tokens
from experiments.harness.experiment import CheckFailed
from punica.adapters import LoRAModel, LoRAModelManager, ModuleWeights
from punica.config import LoRAConfig
from punica.layers import FusedMoEWithLoRA
from punica.metadata import LoRAMapping
from punica.models import MixtureOfExpertsForCausalLM
from punica.ops import reference
from punica.ops.quant import dequantize
from punica.parallel import route

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
COMMON = {"head_dim": 128, "max_position_embeddings": 4096, "dtype": "float32"}


def model_config(name: str, layers: int, divisor: int) -> Any:
    """The Hugging Face config of `name` with `layers` layers, its widths, heads and vocabulary over `divisor`.

    ValueError for a name that is not in `MODELS`.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    kind, widths, rest = MODELS[name]
    sizes = {key: max(1, value // divisor) for key, value in widths.items()}
    return kind(**COMMON, **sizes, **rest, num_hidden_layers=layers)


MODELS: dict[str, tuple[Any, dict[str, int], dict[str, Any]]] = {
    "mixtral-8x7b": (
        MixtralConfig,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig,
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
         "num_key_value_heads": 4, "vocab_size": 151936},
        {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
}  # fmt: skip
"""Class of the config, what is divided, and what is not."""


class MoEBench:
    """The model with `slots` adapters of `rank` on all experts (`fp8`: in slots of that format), a cache for `batch`
    requests of `context` tokens.
    """

    def __init__(
        self, name: str, rank: int, layers: int, divisor: int, slots: int, batch: int, context: int, dtype: str,
        device: str, fp8: str | None = None,
    ) -> None:  # fmt: skip
        config, self.dtype = model_config(name, layers, divisor), getattr(torch, dtype)
        model = MixtureOfExpertsForCausalLM(config, dtype=self.dtype, device=device)
        model.init_random_weights(0)
        self.context, self.top_k = context, config.num_experts_per_tok
        self.invocation = Invocation(model, step_tokens(batch, context))
        self.model = model
        lora = LoRAConfig(max_lora_rank=rank, max_loras=slots, target_modules=["experts"], fp8=fp8)
        self.manager = LoRAModelManager(model, batch, batch, model.config.vocab_size, lora, device)
        self.layers = [cast(FusedMoEWithLoRA, layer) for layer in self.manager.modules.values()]
        self.contexts = [layer.base_layer.routed_experts.lora_context for layer in self.layers]
        one = random_experts(self.manager, rank)
        for slot in range(slots):
            self.manager.add_adapter(one.clone(slot + 1))
            self.manager.activate_adapter(slot + 1)

    def checked_calls(self, slots: Sequence[int]) -> dict[str, list[Callable[[], object]]]:
        """System -> calls on one row per entry of `slots`; one per layer, where a layer is timed.

        Raises `CheckFailed` where LoRA differs from the reference, or a row from the same row alone.
        """
        rows = len(slots)
        self._begin([slot + 1 for slot in slots])
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self.layers[0].hidden_size, generator=generator).to(self.dtype).to(self.invocation.device)
        logits = torch.randn(rows, self.layers[0].global_num_experts, generator=generator).to(x.device)
        self._check_operator(x, logits, slots)
        self._check_rows(x, logits, [slot + 1 for slot in slots])
        token_ids, positions = self._begin([slot + 1 for slot in slots])
        calls: dict[str, list[Callable[[], object]]] = {"model": [partial(self._step, token_ids, positions)]}
        calls["backbone model"] = [partial(self._step, token_ids, positions, without=True)]
        calls["layer"] = [partial(_run, layer, x, logits) for layer in self.layers]
        calls["backbone layer"] = [partial(self._without, partial(_run, layer, x, logits)) for layer in self.layers]
        calls["w13 and w2"] = [self._operator(context, x, logits)[0] for context in self.contexts]
        calls["alignment"] = [self._alignment(context, logits) for context in self.contexts]
        return calls

    def _begin(self, adapter_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.manager.set_adapter_mapping(LoRAMapping(adapter_ids, adapter_ids))
        return self.invocation.begin(spans(len(adapter_ids), 1, self.context))

    @torch.inference_mode()
    def _step(self, token_ids: torch.Tensor, positions: torch.Tensor, without: bool = False) -> torch.Tensor:
        """Next tokens of a decode step."""

        def run() -> torch.Tensor:
            hidden = self.model(token_ids, positions, self.invocation.attention)
            return self.model.compute_logits(hidden).argmax(dim=-1)

        return self._without(run) if without else run()

    def _without(self, call: Callable[[], Any]) -> Any:
        """`call` with the experts' LoRA taken off."""
        experts = [layer.base_layer.routed_experts for layer in self.layers]
        for one in experts:
            one.lora_context = None
        try:
            return call()
        finally:
            for one, context in zip(experts, self.contexts, strict=True):
                one.lora_context = context

    def _operator(
        self, context: Any, x: torch.Tensor, logits: torch.Tensor
    ) -> tuple[Callable[[], object], tuple[torch.Tensor, ...]]:
        """Both LoRA products of one layer, and (y13, y2, activated, weights, experts) that they work on."""
        weights, ids = route(logits, self.top_k, True)
        rows = x.shape[0]
        width = context.w13_num_slices * context.w13_lora_b_stacked[0].shape[-2]
        y13, y2 = x.new_zeros(rows, self.top_k, width), x.new_zeros(rows, self.top_k, x.shape[1])
        inner = torch.randn(rows * self.top_k, context.w2_lora_a_stacked[0].shape[-1],
                            generator=torch.Generator().manual_seed(5)).to(x)  # fmt: skip

        @torch.inference_mode()
        def call() -> None:
            context.add_w2(y2, inner, weights, context.add_w13(y13, x, ids, weights, None))

        return call, (y13, y2, inner, weights, ids)

    def _alignment(self, context: Any, logits: torch.Tensor) -> Callable[[], object]:
        _, ids = route(logits, self.top_k, True)
        wrapper, rows = self.manager.punica_wrapper, ids.shape[0]
        enabled, slots = context.adapter_enabled, context.max_loras
        return partial(
            wrapper.moe_lora_align_block_size, ids, rows, 16, context.local_num_experts, slots, enabled,
            pad_sorted_ids=True,
        )  # fmt: skip

    def _check_operator(self, x: torch.Tensor, logits: torch.Tensor, slots: Sequence[int]) -> None:
        context = self.contexts[0]
        call, (y13, y2, inner, weights, ids) = self._operator(context, x, logits)
        call()
        mapping = torch.tensor(slots)
        for name, y, given, held, down in (("w13", y13, x, context.w13, False), ("w2", y2, inner, context.w2, True)):
            a, b = held.lora_a, held.lora_b
            if held.fp8 is not None:
                a, b = _real(a, held.fp8.a_scale), _real(b, held.fp8.b_scale)
            wanted = torch.zeros_like(y, dtype=torch.float32)
            routing = reference.Routing(ids, weights, mapping, context.adapter_enabled)
            reference.fused_moe_lora(wanted, given, a, b, routing, down)
            error = difference(y.float(), wanted)
            if not error <= TOLERANCE[self.dtype]:
                raise CheckFailed(f"{name} differs from the reference by {error:.2e} (relative)")

    def _check_rows(self, x: torch.Tensor, logits: torch.Tensor, adapter_ids: list[int]) -> None:
        """First and last row of the batch come out as when each runs alone, and not as without its adapter."""
        layer, last = self.layers[0], len(adapter_ids) - 1
        together = _run(layer, x, logits)
        for row in {0, last}:
            part = slice(row, row + 1)
            self._begin(adapter_ids[part])
            alone = _run(layer, x[part], logits[part])
            plain = self._without(partial(_run, layer, x[part], logits[part]))
            if difference(together[part], alone) > TOLERANCE[self.dtype]:
                raise CheckFailed(f"row {row} of {last + 1} differs from the same row alone")
            if difference(plain, alone) <= TOLERANCE[self.dtype]:
                raise CheckFailed(f"row {row} of {last + 1} comes out as if it had no adapter")


def _real(stacks: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What FP8 slots stand for."""
    return [dequantize(stack, scale) for stack, scale in zip(stacks, scales, strict=True)]


@torch.inference_mode()
def _run(layer: FusedMoEWithLoRA, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return layer(x, logits)


def random_experts(manager: LoRAModelManager, rank: int) -> LoRAModel:
    """Adapter 1, for the experts of every layer: A ~ N(0, 1/in), B ~ N(0, 1/rank) of w1, w2 and w3 of every expert, in
    host memory.
    """
    loras: dict[str, Any] = {}
    for name, layer in manager.modules.items():
        experts = cast(FusedMoEWithLoRA, layer)
        dtype, device = experts.base_layer.routed_experts.w2_weight.dtype, experts.device
        generator = torch.Generator(device).manual_seed(11)
        slices = experts.zero_slices(rank, dtype)
        for one in itertools.chain(*zip(*slices, strict=True)):  # A, then B; drawn on the GPU, which is quick
            factor = cast(torch.Tensor, one)
            drawn = torch.empty(factor.shape, dtype=dtype, device=device)
            factor.copy_(drawn.normal_(0.0, factor.shape[-1] ** -0.5, generator=generator))
        loras[name] = ModuleWeights(name, rank, slices)
    return LoRAModel(1, rank, loras)
