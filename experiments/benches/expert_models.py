"""Mixtures of experts of two published shapes, over a divisor, and adapters on all of their experts, for `ext_moe`."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import transformers

from experiments.benches.engine_steps import EngineSteps, StepShape, check_adapters_matter, steps_in_turns
from experiments.benches.model_steps import Invocation, check_rows, spans, step_tokens
from experiments.harness.experiment import check
from experiments.measure.timing import Call, Protocol
from punica.adapters import LoRAModel, LoRAModelManager, ModuleWeights
from punica.config import LoRAConfig
from punica.layers import FusedMoEWithLoRA
from punica.metadata import LoRAMapping
from punica.models import MixtureOfExpertsForCausalLM
from punica.ops import reference
from punica.ops.quant import dequantize
from punica.parallel import route

COMMON = {"head_dim": 128, "max_position_embeddings": 4096, "dtype": "float32"}
MODELS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "mixtral-8x7b": (
        "MixtralConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
         "num_key_value_heads": 4, "vocab_size": 151936},
        {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
}  # fmt: skip
"""Name -> class of its Hugging Face config, what is divided, and what is not."""
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}


def model_config(name: str, layers: int, divisor: int) -> Any:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    kind, widths, rest = MODELS[name]
    sizes = {key: max(1, value // divisor) for key, value in widths.items()}
    return getattr(transformers, kind)(**COMMON, **sizes, **rest, num_hidden_layers=layers)


class MoESizes(NamedTuple):
    """Sizes of a model (of `MODELS`), its adapters (`fp8`: format of their slots), and the largest batch."""

    model: str
    rank: int
    layers: int
    divisor: int
    batch: int
    context: int  # cached tokens of every request
    dtype: str
    fp8: str | None = None

    def random_model(self, device: str) -> MixtureOfExpertsForCausalLM:
        config = model_config(self.model, self.layers, self.divisor)
        model = MixtureOfExpertsForCausalLM(config, dtype=getattr(torch, self.dtype), device=device)
        model.init_random_weights(0)
        return model


def _fill_slots(layer: FusedMoEWithLoRA, first: int) -> None:
    """Copy the first slot into those from `first` on, on the device: adapters that no row uses."""
    families = (
        layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, layer.w2_lora_a_stacked, layer.w2_lora_b_stacked,
        layer.lora_a_scale, layer.lora_b_scale,
    )  # fmt: skip
    for stack in itertools.chain(*families):
        stack.view(torch.uint8)[first:] = stack.view(torch.uint8)[:1]
    layer.adapter_enabled[first:-1] = 1
    ranks = cast(torch.Tensor, layer.lora_ranks)
    ranks[:, first:] = ranks[:, :1]


def _random_experts(manager: LoRAModelManager, rank: int) -> LoRAModel:
    """Adapter 1 for the experts of every layer: A ~ N(0, 1/in), B ~ N(0, 1/rank), in host memory."""
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


class MoEBench:
    """A model with adapters on all experts in `slots` slots, all filled with copies of one at addresses of their own.
    Metadata is set outside the timing, except the grouping by expert, which follows the router.
    """

    def __init__(self, sizes: MoESizes, slots: int, device: str) -> None:
        self.model, self.tolerance = sizes.random_model(device), TOLERANCE[sizes.dtype]
        batch, self.context, self.top_k = sizes.batch, sizes.context, self.model.config.num_experts_per_tok
        self.invocation = Invocation(self.model, step_tokens(batch, sizes.context))
        lora = LoRAConfig(max_lora_rank=sizes.rank, max_loras=slots, target_modules=["experts"], fp8=sizes.fp8)
        self.manager = LoRAModelManager(self.model, batch, batch, self.model.config.vocab_size, lora, device)
        self.layers = [cast(FusedMoEWithLoRA, layer) for layer in self.manager.modules.values()]
        self.contexts = [layer.base_layer.routed_experts.lora_context for layer in self.layers]
        one = _random_experts(self.manager, sizes.rank)
        registered = min(slots, batch)
        for slot in range(registered):
            self.manager.add_adapter(one.clone(slot + 1))
            self.manager.activate_adapter(slot + 1)
        for layer in self.layers:
            _fill_slots(layer, registered)

    def checked_calls(self, slots: Sequence[int]) -> dict[str, list[Call]]:
        """System -> calls, per layer where one is timed; checked against the reference, and rows against rows alone."""
        rows, first = len(slots), self.layers[0]
        self._begin([slot + 1 for slot in slots])
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, first.hidden_size, generator=generator).to(self.model.lm_head.weight)
        logits = torch.randn(rows, first.global_num_experts, generator=generator).to(x.device)
        self._check_operator(x, logits, slots)
        self._check_rows(x, logits, [slot + 1 for slot in slots])
        self._begin([slot + 1 for slot in slots])
        layers = [partial(_run, one, x, logits) for one in self.layers]
        return {
            "layer": list(layers),
            "backbone layer": [partial(self._without, layer) for layer in layers],
            "w13 and w2": [self._operator(context, x, logits)[0] for context in self.contexts],
            "alignment": [self._alignment(context, logits) for context in self.contexts],
        }

    def _begin(self, adapter_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.manager.set_adapter_mapping(LoRAMapping(adapter_ids, adapter_ids))
        return self.invocation.begin(spans(len(adapter_ids), 1, self.context))

    def _without(self, call: Callable[[], Any]) -> Any:
        experts = [layer.base_layer.routed_experts for layer in self.layers]
        for one in experts:
            one.lora_context = None
        try:
            return call()
        finally:
            for one, context in zip(experts, self.contexts, strict=True):
                one.lora_context = context

    def _operator(self, context: Any, x: torch.Tensor, logits: torch.Tensor) -> tuple[Call, tuple[torch.Tensor, ...]]:
        """Both LoRA products of one layer, and (y13, y2, activated, weights, experts) that they work on."""
        weights, ids = route(logits, self.top_k, True)
        rows = x.shape[0]
        width = context.w13_num_slices * context.w13_lora_b_stacked[0].shape[-2]
        y13, y2 = x.new_zeros(rows, self.top_k, width), x.new_zeros(rows, self.top_k, x.shape[1])
        inner = torch.randn(rows * self.top_k, context.w2_lora_a_stacked[0].shape[-1],
                            generator=torch.Generator().manual_seed(5)).to(x)  # fmt: skip

        def call() -> None:
            with torch.inference_mode():
                assignment = context.assign(ids, weights, None)
                context.punica_wrapper.add_lora_experts(y13, context.rows_of_w13(x), context.w13, assignment)
                context.punica_wrapper.add_lora_experts(y2, context.as_adapters(inner), context.w2, assignment)

        return call, (y13, y2, inner, weights, ids)

    def _alignment(self, context: Any, logits: torch.Tensor) -> Call:
        _, ids = route(logits, self.top_k, True)
        sizes = ids.shape[0], 16, context.local_num_experts, context.max_loras
        align = self.manager.punica_wrapper.moe_lora_align_block_size
        return partial(align, ids, *sizes, context.adapter_enabled, pad_sorted_ids=True)

    def _check_operator(self, x: torch.Tensor, logits: torch.Tensor, slots: Sequence[int]) -> None:
        context = self.contexts[0]
        call, (y13, y2, inner, weights, ids) = self._operator(context, x, logits)
        call()
        routing = reference.Routing(ids, weights, torch.tensor(slots), context.adapter_enabled)
        for name, y, given, held, down in (("w13", y13, x, context.w13, False), ("w2", y2, inner, context.w2, True)):
            a, b = held.lora_a, held.lora_b
            if held.fp8 is not None:
                scales = held.fp8.a_scale, held.fp8.b_scale
                a, b = (list(map(dequantize, stacks, scale)) for stacks, scale in zip((a, b), scales, strict=True))
            wanted = torch.zeros_like(y, dtype=torch.float32)
            reference.fused_moe_lora(wanted, given, a, b, routing, down)
            check(name, y, wanted, self.tolerance)

    def _check_rows(self, x: torch.Tensor, logits: torch.Tensor, adapter_ids: list[int]) -> None:
        def of_row(row: int) -> tuple[torch.Tensor, torch.Tensor]:
            part = slice(row, row + 1)
            self._begin(adapter_ids[part])
            call = partial(_run, self.layers[0], x[part], logits[part])
            return call(), self._without(call)

        check_rows(_run(self.layers[0], x, logits), of_row, self.tolerance)


@torch.inference_mode()
def _run(layer: FusedMoEWithLoRA, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, layer(x, logits))


def engine_of(sizes: MoESizes, device: str) -> EngineSteps:
    """An engine for a model, with an adapter on its experts for each request of the largest batch."""
    model, rank = sizes.random_model(device), sizes.rank
    lora: dict[str, Any] = {"target_modules": ["experts"], "fp8": sizes.fp8}
    return EngineSteps(model, rank, sizes.batch, sizes.context, lambda manager: _random_experts(manager, rank), **lora)


def decode_seconds(
    engine: EngineSteps, adapters: Mapping[str, tuple[int, ...]], context: int, protocol: Protocol
) -> dict[str, list[float]]:
    """Seconds of decode steps by system, in turns, by the host; `CheckFailed` where adapters change no token."""
    shapes = {name: StepShape(len(ids), context, 0, ids) for name, ids in adapters.items()}
    check_adapters_matter(engine, list(shapes.values()))
    found = steps_in_turns(engine, shapes, protocol)
    return {name: [step.seconds for step in steps] for name, steps in found.items()}
