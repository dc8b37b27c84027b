"""Steps of an engine of a chosen shape: decoding requests, their context, a prompt or none, adapters. `EngineSteps` is
an engine with full slots, whose cache holds noise, so that a step at any context can start at once.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from experiments.benches.model_steps import fill_with_noise, random_llama
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import Config, ModelConf
from experiments.measure.timing import Protocol
from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest, random_adapter
from punica.engine import Engine, EngineConfig, Request
from punica.engine.requests import StepStatistics
from punica.models import LlamaForCausalLM
from punica.scheduling import RequestState, RequestStatus

IN_A_ROW = 2  # consecutive timed steps of a case
ROOM = 64  # new tokens of a request before it ends, and steps get smaller


@dataclass(frozen=True)
class StepShape:
    """`decodes` requests of `context` tokens with this one; a prompt of `prompt` (0: none); its adapter is first."""

    decodes: int
    context: int
    prompt: int
    adapters: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.decodes + self.prompt

    @property
    def num_adapters(self) -> int:
        return len({*self.adapters} - {0})


class TimedStep(NamedTuple):
    """Seconds of a step, since the one before ended where the device began it then; statistics; tokens."""

    seconds: float
    statistics: StepStatistics
    tokens: tuple[int, ...]


class EngineSteps:
    """An engine with `batch_size` adapters of `rank` in its slots (copies of one), for requests of up to `longest`
    tokens. `switches`: further fields of the `EngineConfig`; `lora`: of the `LoRAConfig`.
    """

    def __init__(
        self, model: LlamaForCausalLM, rank: int, batch_size: int, longest: int,
        make_adapter: Callable[[LoRAModelManager], LoRAModel], switches: Mapping[str, Any] | None = None, **lora: Any,
    ) -> None:  # fmt: skip
        config = EngineConfig(max_batch_size=batch_size, max_model_len=longest + ROOM, **(switches or {}))
        sizes = {"max_loras": batch_size, "max_cpu_loras": batch_size}  # no spare slot: no request joins
        self.engine = Engine(model, config.lora_config(rank, **sizes, **lora), config, warm_up=False)
        fill_with_noise(self.engine.runner.attention.cache)
        self._names = itertools.count()
        self._shape: StepShape | None = None
        self._ran: set[StepShape] = set()
        self._ended = 0.0  # the step before, which matters while the device is ahead
        manager = cast(LoRAModelManager, self.engine.manager)
        manager.add_adapter(make_adapter(manager))
        registered = manager.list_adapters()[1]
        for adapter_id in range(1, batch_size + 1):
            if adapter_id > 1:
                manager.restore_adapter(registered.clone(adapter_id), None)  # in one copy of host memory
            manager.activate_adapter(adapter_id)

    @classmethod
    def of_llama(
        cls, model: ModelConf, rank: int, batch_size: int, longest: int, device: str,
        fp8_weights: bool = False, fp8_slots: bool = False, **switches: Any,
    ) -> "EngineSteps":  # fmt: skip
        """Build one for a Llama with random weights; `switches`: fields of `EngineConfig`."""
        llama = random_llama(model, device, fp8_weights=fp8_weights)
        adapter = random_adapter(1, llama.config, rank, 0, dtype=llama.lm_head.weight.dtype)
        slots = {"fp8": "float8_e4m3fn"} if fp8_slots else {}
        return cls(llama, rank, batch_size, longest, lambda _: adapter, switches, **slots)

    def begin(self, shape: StepShape) -> None:
        """Run nothing but the decoding requests of `shape`, for fewer than `ROOM` steps."""
        clear(self.engine)
        self._shape = shape
        cached = max(1, shape.context - self.steps_each(shape))
        for adapter in shape.adapters[bool(shape.prompt) :]:
            put(self.engine, self._request(cached, adapter), 1)

    def steps_each(self, shape: StepShape) -> int:
        """Steps of the engine for one of `shape`: one that works ahead launches a prompt beside the step before."""
        return 3 if shape.prompt and shape.decodes and self.engine.runner.works_ahead else 1

    def settle(self, shape: StepShape) -> None:
        """Begin, and run the step before: decodes share its tables, and a shape's first step compiles and captures."""
        self.begin(shape)
        if not shape.prompt or shape not in self._ran:
            self.step()
            self._ran.add(shape)

    @property
    def on_gpu(self) -> bool:
        return self.engine.runner.model.lm_head.weight.is_cuda

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def step(self) -> TimedStep:
        """The next step of the shape that was begun. `CheckFailed` when the engine made another one of it."""
        shape = self._shape
        if shape is None:
            raise RuntimeError("no step was begun; call begin(shape) first")
        joining = self._request(shape.prompt, shape.adapters[0]) if shape.prompt else None
        ahead = self.steps_each(shape) > 1
        if ahead:
            self.engine.step()
        if joining is not None:
            self.engine.add_request(joining)
        if ahead:
            self.engine.step()
            self._ended = time.perf_counter()
        started = self._ended if self.engine.is_ahead else time.perf_counter()
        output = self.engine.step()
        self._ended = time.perf_counter()
        seconds = self._ended - started
        if joining is not None:
            self.engine.abort_request(joining.request_id)
        done = output.statistics
        made = done.batch_size, done.num_prefill_tokens, done.num_segments > 0
        wanted = shape.decodes + bool(shape.prompt), shape.prompt, shape.num_adapters > 0
        if made != wanted:
            raise CheckFailed(f"the engine ran a step of (requests, prompt rows, LoRA) {made}, wanted is {wanted}")
        return TimedStep(seconds, done, tuple(output.tokens.values()))

    def _request(self, tokens: int, adapter: int) -> Request:
        number = next(self._names)
        prompt = [(11 * place + 7) % self.engine.vocab_size for place in range(tokens)]
        named = LoRARequest(f"adapter-{adapter}", adapter, "registered in memory") if adapter else None
        return Request(f"request-{number}", prompt, ROOM, named)


def steps_in_turns(
    bench: EngineSteps, shapes: Mapping[str, StepShape], protocol: Protocol, begin: Callable[[str], object] = id
) -> dict[str, list[TimedStep]]:
    """Timed steps of each of `shapes`, in turns, so that a drift affects all alike; `begin` is called before a turn."""
    found: dict[str, list[TimedStep]] = {name: [] for name in shapes}
    for _ in protocol.turns(len(shapes), IN_A_ROW):
        for name, shape in shapes.items():
            begin(name)
            bench.settle(shape)
            found[name] += [bench.step() for _ in range(IN_A_ROW)]
    return found


def check_adapters_matter(steps: EngineSteps, shapes: Sequence[StepShape]) -> None:
    """`CheckFailed` when the first steps of `shapes`, with adapters and without, give the same tokens."""
    tokens = {}
    for shape in shapes:
        steps.begin(shape)
        tokens[shape.num_adapters > 0] = steps.step().tokens
    if len(tokens) == 2 and tokens[False] == tokens[True]:
        raise CheckFailed("a step comes out as if its rows had no adapters")


def checked_bench(cfg: Config, rank: int, most: int, context: int, **form: Any) -> EngineSteps:
    """Build an engine with `most` adapters, which must change its tokens; `form`: of `EngineSteps.of_llama`."""
    bench = EngineSteps.of_llama(cfg.model, rank, most, context, cfg.hardware.device, **form)
    adapters = (0,) * most, tuple(range(1, most + 1))
    check_adapters_matter(bench, [StepShape(most, context, 0, each) for each in adapters])
    return bench


def bytes_moved(
    model: ModelConf, rank: int, shape: StepShape,
    fp8_weights: bool = False, fp8_cache: bool = False, fp8_adapters: bool = False,
) -> int:  # fmt: skip
    """Bytes that a step must read, without the embedding; in FP8 one per element, and four per row of a matrix."""
    wide, layers = model.dtype.bytes, model.num_hidden_layers
    rows = layers * (3 * model.hidden_size + 2 * model.intermediate_size) + model.kv_elements()
    others = (model.vocab_size + 2 * layers + 1) * model.hidden_size  # head and norms
    linear = model.backbone_parameters() - model.vocab_size * model.hidden_size - others
    base = wide * others + (linear + 4 * rows if fp8_weights else wide * linear)
    cached = shape.decodes * shape.context * model.kv_elements() * (1 if fp8_cache else wide)
    each = model.lora_parameters(rank)
    each = each + 4 * (rows + 7 * layers * rank) if fp8_adapters else wide * each
    return base + cached + each * shape.num_adapters


def put(engine: Engine, request: Request, generated: int) -> None:
    """Add a running request with `generated` tokens; with all its new tokens it is an idle member of a fixed batch."""
    if generated == request.max_new_tokens:
        state = RequestState(request)
        state.status, state.finish_reason = RequestStatus.FINISHED, "length"
    else:
        state = engine.add_request(request)
        engine.scheduler.waiting.remove(state)
        state.status = RequestStatus.RUNNING
    state.output_token_ids += [(7 * place + 1) % engine.vocab_size for place in range(generated)]
    whole = engine.scheduler.rule.inseparable
    engine.blocks.adopt(request.request_id, [], 0)
    engine.blocks.reserve(request.request_id, request.final_kv_length if whole else state.num_tokens)
    engine.scheduler.running.append(state)


def clear(engine: Engine) -> None:
    for state in [*engine.scheduler.running, *engine.scheduler.waiting]:
        if not state.has_ended:
            engine.abort_request(state.request_id)
    engine.forget_next()
    if engine.runner.model.lm_head.weight.is_cuda:
        torch.cuda.synchronize()  # a step that it had begun is not to be part of what is timed next
