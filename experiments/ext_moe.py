r"""Extension: the paper's popularity sweep carried to mixtures of experts, with adapters on the experts.

Not in the paper, whose models are dense. A token meets k experts, and its adapter has weights of its own in each of
them: rows which share an adapter share its weights only where they also share an expert. Claim: batching rows of
different adapters still pays, because the experts themselves, whatever the adapter, are read once. Expected shape: what
LoRA adds to a layer grows with the (adapter, expert) pairs that the batch meets. So popularities are closer together
than in a dense layer, closest where experts are many (Qwen3-30B-A3B: 128, 8 of them per token) and a batch
hardly ever meets an expert twice; with 8 experts (Mixtral 8x7B) Identical stays cheapest. Throughput grows with the
batch, less steeply than a dense model's until every expert is met.

Timed, all systems of a batch and popularity interleaved, after checks against the reference and against rows alone: the
grouping of (token, expert) pairs by adapter and expert; both LoRA products of one layer, with that grouping where the
wrapper asks for it; the layer of experts with and without LoRA; and a decode step of a model of `layers` layers with
and without it, in tokens per second. Random weights, rank-16 adapters on all experts, in FP8 with
`figure.fp8=float8_e4m3fn`. Widths are those of the two models over `divisor` (8 at scale=laptop, 1 at scale=paper);
numbers of experts are theirs.

`figure.slots` repeats layers and models in engines of other sizes: all of so many slots hold adapters, and a batch uses
as many of them as its popularity has. Expected shape: latency follows these adapters, and is the same at all numbers of
slots. Eight adapters (Skewed, 32 rows) in 8 to 256 slots of one layer of Qwen3-30B-A3B, 9 GB of slots at most:

    python -m experiments.ext_moe scale=gpu timer=cuda_graph 'system.names=[alignment,w13 and w2,layer]' \
        'figure.models=[qwen3-30b-a3b]' figure.layers=1 'figure.batch_sizes=[32]' 'figure.slots=[8,32,64,128,256]' \
        'workload.names=[Skewed]'

A last row of axes is the engine: a decode step from `Engine.step` to the tokens, with an adapter per request as the
popularity has it (`engine`) and with none (`backbone engine`), of a model of `engine_layers` layers: `step_latency`
and `engine_throughput`, by the host's clock, so on a GPU with timer=host_clock only. FP8 adapters are panels of their
own. All of Qwen3-30B-A3B on an H200, 61 GB of weights and 53 of adapters (27 in FP8), takes half a minute, and again
with figure.fp8=float8_e4m3fn:

    python -m experiments.ext_moe scale=gpu timer=host_clock 'system.names=[engine,backbone_engine]' \
        'figure.models=[qwen3-30b-a3b]' figure.engine_layers=48 'figure.batch_sizes=[1,8,32]' figure.context=512 \
        'workload.names=[Distinct,Identical]' scale.repeats=48

Cost at scale=laptop: about 1.5 minutes on two cores, 1 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from experiments.benches.expert_models import MoESizes, fill_slots, random_experts
from experiments.harness import PROTOCOL, CheckFailed, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.schema import Count, Counts, DType
from experiments.workload.popularity import popularity

if TYPE_CHECKING:
    import torch

    from experiments.benches.engine_steps import EngineSteps, StepShape
    from experiments.measure.timing import Protocol
    from punica.layers import FusedMoEWithLoRA

LAYER, MODEL = ("layer", "backbone layer"), ("model", "backbone model")
ENGINE, BACKBONE_ENGINE = "engine", "backbone engine"
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
IN_A_ROW = 4
"""Consecutive steps of one shape through the engine, before the next shape's turn."""


class MoEConf(FigureConf):
    """Models (of `MODELS`), how much of them, and batches."""

    models: list[str] = []
    batch_sizes: Counts
    slots: Counts | None = None  # a panel for each; null: adapters.slots alone
    layers: Count
    engine_layers: Count  # of the model that the engine serves
    divisor: Count
    context: Count  # cached tokens of every request
    dtype: DType
    fp8: str | None = None  # format of the adapters' slots, as of LoRAConfig; null: dtype


class MixtureOfExperts(Experiment):
    """Latencies and throughput of each system per model (the panels), popularity and batch."""

    name, figure, order, conf = "ext_moe", "ext moe", 260, MoEConf
    reads = ("workload", "adapters.ranks", "adapters.slots", *PROTOCOL)
    differing, drawn_by = ("system",), "extensions.draw_moe"

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(MoEConf, cfg.figure)
        settings: dict[str, Any] = {
            "layers": figure.layers, "divisor": figure.divisor, "context": figure.context, "dtype": figure.dtype.name,
        }  # fmt: skip
        if figure.fp8 is not None:
            settings["fp8"] = figure.fp8
        through_engine = {**settings, "layers": figure.engine_layers, "slots": max(figure.batch_sizes)}
        engine = [name for name in cfg.system.names if name in (ENGINE, BACKBONE_ENGINE)]
        own = [name for name in cfg.system.names if name not in engine]
        if cfg.timer.name != "host_clock":  # the only one that times the engine's steps
            engine = []
        alone = [cfg.adapters.slots or max(figure.batch_sizes)]
        kinds = [(own, {**settings, "slots": slots}, slots if figure.slots else None)
                 for slots in figure.slots or alone]  # fmt: skip
        return [
            Point(panel_of(model, figure.fp8, slots), system, workload, model, batch, figure.context, rank, of_system)
            for model in figure.models
            for rank in cfg.adapters.ranks
            for systems, of_system, slots in [*kinds, (engine, through_engine, None)]
            for batch in figure.batch_sizes
            for workload in cfg.workload.names
            for system in systems
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.operators import microseconds

        first = points[0]
        batch = cast(int, first.batch_size)
        if first.system in (ENGINE, BACKBONE_ENGINE):
            return self._engine_steps(cfg, points)
        slots, adapters = first.settings["slots"], popularity(first.workload).number_of_adapters(batch)
        if adapters > slots:
            raise ValueError(f"figure.slots or adapters.slots is {slots}, {first.workload} has {adapters} adapters in "
                             f"a batch of {batch}; give at least as many, or another workload")  # fmt: skip
        sizes, device = _sizes(cfg, first, cast(MoEConf, cfg.figure).layers), cfg.hardware.device
        bench = self.kept((sizes, slots), lambda: MoEBench(sizes, slots, device))
        calls = bench.checked_calls([int(slot) for slot in popularity(first.workload).slots(batch)])
        samples = microseconds(cfg, {point.system: calls[point.system] for point in points})
        return [_readings(point.system, batch, samples[point.system]) for point in points]

    def _engine_steps(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches.engine_steps import StepShape
        from experiments.benches.operators import protocol

        first = points[0]
        batch, context = cast(int, first.batch_size), cast(int, first.seq_len)
        adapters = tuple(int(slot) + 1 for slot in popularity(first.workload).slots(batch))
        of_system = {ENGINE: adapters, BACKBONE_ENGINE: (0,) * batch}
        shapes = {system: StepShape(batch, context, 0, ids) for system, ids in of_system.items()}
        sizes, device = _sizes(cfg, first, cast(MoEConf, cfg.figure).engine_layers), cfg.hardware.device
        engine = self.kept((ENGINE, sizes), lambda: engine_of(sizes, device))
        seconds = decode_seconds(engine, shapes, protocol(cfg))
        found = []
        for point in points:
            latency = sampled("step_latency", [1e3 * one for one in seconds[point.system]], "ms")
            rate = sampled("engine_throughput", [batch / one for one in seconds[point.system]], "token/s")
            found.append([*latency, *rate])
        return found


def _sizes(cfg: Config, point: Point, layers: int) -> MoESizes:
    figure = cast(MoEConf, cfg.figure)
    batch, rank = max(figure.batch_sizes), cast(int, point.rank)
    return MoESizes(point.model, rank, layers, figure.divisor, batch, figure.context, figure.dtype.name, figure.fp8)


def panel_of(model: str, fp8: str | None, slots: int | None = None) -> str:
    """Name the panel of a model with adapters in slots of the format `fp8` (None: the model's dtype), in as many as the
    others have (None) or in `slots` of them.
    """
    parts = (model, fp8 and f"{fp8} adapters", slots and f"{slots} slots")
    return ", ".join(part for part in parts if part)


def _readings(system: str, batch: int, samples: Sequence[float]) -> list[Reading]:
    """The rows of one point from its microseconds."""
    if system in MODEL:
        return sampled("throughput", [batch * 1e6 / one for one in samples], "token/s")
    return sampled("layer_latency" if system in LAYER else "latency", samples, "us")


class MoEBench:
    """A model with adapters on all experts in `slots` slots, all filled, and a cache for its largest batch. Rows may
    use as many of them as that batch has rows. Every slot holds a copy of one random adapter, at its own address: speed
    does not depend on values. Metadata is set once per step, outside the timing, except the grouping by expert, which
    follows the router and so belongs to every layer.
    """

    def __init__(self, sizes: MoESizes, slots: int, device: str) -> None:
        from experiments.benches.model_steps import Invocation, step_tokens
        from punica.adapters import LoRAModelManager
        from punica.config import LoRAConfig

        self.model, self.tolerance = sizes.random_model(device), TOLERANCE[sizes.dtype]
        batch, self.context, self.top_k = sizes.batch, sizes.context, self.model.config.num_experts_per_tok
        self.invocation = Invocation(self.model, step_tokens(batch, sizes.context))
        lora = LoRAConfig(max_lora_rank=sizes.rank, max_loras=slots, target_modules=["experts"], fp8=sizes.fp8)
        self.manager = LoRAModelManager(self.model, batch, batch, self.model.config.vocab_size, lora, device)
        self.layers = [cast("FusedMoEWithLoRA", layer) for layer in self.manager.modules.values()]
        self.contexts = [layer.base_layer.routed_experts.lora_context for layer in self.layers]
        one = random_experts(self.manager, sizes.rank)
        registered = min(slots, batch)
        for slot in range(registered):
            self.manager.add_adapter(one.clone(slot + 1))
            self.manager.activate_adapter(slot + 1)
        for layer in self.layers:
            fill_slots(layer, registered)

    def checked_calls(self, slots: Sequence[int]) -> dict[str, list[Callable[[], object]]]:
        """System -> calls on one row per entry of `slots`; one per layer, where a layer is timed.

        Raises `CheckFailed` where LoRA differs from the reference, or a row from the same row alone.
        """
        import torch

        rows, first = len(slots), self.layers[0]
        self._begin([slot + 1 for slot in slots])
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, first.hidden_size, generator=generator).to(self.model.lm_head.weight)
        logits = torch.randn(rows, first.global_num_experts, generator=generator).to(x.device)
        self._check_operator(x, logits, slots)
        self._check_rows(x, logits, [slot + 1 for slot in slots])
        token_ids, positions = self._begin([slot + 1 for slot in slots])
        step, layers = partial(self._step, token_ids, positions), [partial(_run, one, x, logits) for one in self.layers]
        return {
            "model": [step],
            "backbone model": [partial(self._without, step)],
            "layer": list(layers),
            "backbone layer": [partial(self._without, layer) for layer in layers],
            "w13 and w2": [self._operator(context, x, logits)[0] for context in self.contexts],
            "alignment": [self._alignment(context, logits) for context in self.contexts],
        }

    def _begin(self, adapter_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        from experiments.benches.model_steps import spans
        from punica.metadata import LoRAMapping

        self.manager.set_adapter_mapping(LoRAMapping(adapter_ids, adapter_ids))
        return self.invocation.begin(spans(len(adapter_ids), 1, self.context))

    def _step(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Next tokens of a decode step."""
        import torch

        with torch.inference_mode():
            hidden = self.model(token_ids, positions, self.invocation.attention)
            return self.model.compute_logits(hidden).argmax(dim=-1)

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
        import torch

        from punica.parallel import route

        weights, ids = route(logits, self.top_k, True)
        rows = x.shape[0]
        width = context.w13_num_slices * context.w13_lora_b_stacked[0].shape[-2]
        y13, y2 = x.new_zeros(rows, self.top_k, width), x.new_zeros(rows, self.top_k, x.shape[1])
        inner = torch.randn(rows * self.top_k, context.w2_lora_a_stacked[0].shape[-1],
                            generator=torch.Generator().manual_seed(5)).to(x)  # fmt: skip

        def call() -> None:
            with torch.inference_mode():
                context.add_w2(y2, inner, weights, context.add_w13(y13, x, ids, weights, None))

        return call, (y13, y2, inner, weights, ids)

    def _alignment(self, context: Any, logits: torch.Tensor) -> Callable[[], object]:
        from punica.parallel import route

        _, ids = route(logits, self.top_k, True)
        sizes = ids.shape[0], 16, context.local_num_experts, context.max_loras
        align = self.manager.punica_wrapper.moe_lora_align_block_size
        return partial(align, ids, *sizes, context.adapter_enabled, pad_sorted_ids=True)

    def _check_operator(self, x: torch.Tensor, logits: torch.Tensor, slots: Sequence[int]) -> None:
        import torch

        from experiments.benches.model_steps import difference
        from punica.ops import reference
        from punica.ops.quant import dequantize

        context = self.contexts[0]
        call, (y13, y2, inner, weights, ids) = self._operator(context, x, logits)
        call()
        mapping = torch.tensor(slots)
        for name, y, given, held, down in (("w13", y13, x, context.w13, False), ("w2", y2, inner, context.w2, True)):
            a, b = held.lora_a, held.lora_b
            if held.fp8 is not None:
                scales = held.fp8.a_scale, held.fp8.b_scale
                a, b = (list(map(dequantize, stacks, scale)) for stacks, scale in zip((a, b), scales, strict=True))
            wanted = torch.zeros_like(y, dtype=torch.float32)
            routing = reference.Routing(ids, weights, mapping, context.adapter_enabled)
            reference.fused_moe_lora(wanted, given, a, b, routing, down)
            error = difference(y.float(), wanted)
            if not error <= self.tolerance:
                raise CheckFailed(f"{name} differs from the reference by {error:.2e} (relative)")

    def _check_rows(self, x: torch.Tensor, logits: torch.Tensor, adapter_ids: list[int]) -> None:
        from experiments.benches.model_steps import check_rows

        layer = self.layers[0]

        def of_row(row: int) -> tuple[torch.Tensor, torch.Tensor]:
            part = slice(row, row + 1)
            self._begin(adapter_ids[part])
            call = partial(_run, layer, x[part], logits[part])
            return call(), self._without(call)

        check_rows(_run(layer, x, logits), of_row, self.tolerance)


def engine_of(sizes: MoESizes, device: str) -> EngineSteps:
    """An engine for a model, with an adapter on its experts for each request of the largest batch."""
    from experiments.benches.engine_steps import EngineSteps

    model, rank = sizes.random_model(device), sizes.rank
    lora: dict[str, Any] = {"target_modules": ["experts"], "fp8": sizes.fp8}
    return EngineSteps(model, rank, sizes.batch, sizes.context, lambda manager: random_experts(manager, rank), **lora)


def decode_seconds(engine: EngineSteps, shapes: Mapping[str, StepShape], protocol: Protocol) -> dict[str, list[float]]:
    """Time decode steps of all `shapes`, which take turns, by the host's clock, in seconds.

    `CheckFailed` where adapters change no token, or the engine makes another step.
    """
    from experiments.benches.engine_steps import check_adapters_matter, turns

    check_adapters_matter(engine, list(shapes.values()))
    found: dict[str, list[float]] = {name: [] for name in shapes}
    for _ in turns(len(shapes), IN_A_ROW, protocol):
        for name, shape in shapes.items():
            engine.settle(shape)
            found[name] += [engine.step().seconds for _ in range(IN_A_ROW)]
    return found


def _run(layer: FusedMoEWithLoRA, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        return cast("torch.Tensor", layer(x, logits))


EXPERIMENT = MixtureOfExperts()

if __name__ == "__main__":
    main(EXPERIMENT)
