"""`Engine`: serves requests for many adapters on one backbone, one model invocation per step.

Sections 5 and 6 of the paper.

    step:  schedule -> activate adapters -> layout -> stage, launch -> [the same for the next] -> read tokens, deliver

Continuous batching: requests join and leave between steps, whatever their adapters. On a GPU scheduling overlaps
execution (`overlap.py`): the next step, joining requests included, is launched while the tokens of the current one are
still on the device. A request that arrives after the launch joins one step later.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from punica.adapters import LoRAModelManager, LoRARequest
from punica.checks import check_count, clip
from punica.config import LoRAConfig
from punica.engine.attention import KVCache
from punica.engine.config import EngineConfig, EngineMemory, blocks_for, cache_for, check_parts, check_rule
from punica.engine.generation import Generation, exclusive
from punica.engine.overlap import BegunStep, Overlap
from punica.engine.pretrained import GenerationDefaults, as_requests, load_pretrained
from punica.engine.requests import GenerationResult, StateFactory, StepOutput, StepStatistics, check_request
from punica.engine.residency import AdapterResidency
from punica.engine.runner import ModelRunner, StepTokens
from punica.engine.sampler import NO_TOKEN, no_token_error
from punica.engine.text import TextCodec
from punica.models import LlamaForCausalLM
from punica.parallel import (
    all_ranks_agree,
    check_batch_invariant,
    check_in_step,
    current_group,
    dense_layers,
    set_batch_invariant,
)
from punica.progress import shown
from punica.scheduling import ADMISSION_RULES, Request, RequestState, RequestStatus, Scheduler, StepLayout

WARM_UP_TOKENS = 1024
"""Most rows of prompts in the steps of a warm-up, whose time grows with it; longer prompts are rarer."""
_log = logging.getLogger(__name__)


class Engine(Generation):
    """One model on one device, or one tensor-parallel rank of it (all ranks take the same steps).

    :meth:`from_pretrained` builds one from a checkpoint folder.

    Requests are served first come, first served, without starvation. Let L be the longest ``max_new_tokens``: a request
    with n unfinished ones before it joins within (n + 1) L steps, whatever the adapters, slots and pins. Preempted
    requests keep their place and tokens. ``"resident_first"`` allows 32 overtakes, so its bound is (n + 33) L. On a
    GPU, reading an adapter's folder takes further time in the queue, during which other requests keep running.

    Args:
        model: a backbone with its weights. With LoRA its layers are replaced in place: it belongs to this engine.
        lora_config: slots and ranks, e.g. ``engine_config.lora_config(max_lora_rank=16)``; ``None``: no LoRA layers.
        admission: name of an admission rule: ``"fcfs"`` (Punica), ``"fcfs_many"``, ``"resident_first"`` (more adapters
            than slots), ``"single_adapter"``, ``"static"``, ``"chunked"`` (with ``EngineConfig.prefill_chunk``).
        tokenizer: a transformers tokenizer, for text in and text out.
        defaults: the model's end tokens and default sampling; without it no end tokens, and greedy decoding.
        cache: keys and values; ``None`` allocates ``engine_config``'s size. Engines on one CUDA stream may share one if
            only one of them has requests at a time.
        warm_up: capture now the CUDA graphs of all decode steps and of steps with up to ``WARM_UP_TOKENS`` rows of
            prompts, and compile their kernels; without it the first step of each size does so. ``None``: on a GPU only,
            with its progress. :meth:`capture_graphs` adds longer prompts. All ranks must agree.

    Attributes:
        warm_up_s: seconds of the warm-up, 0 without.
        on_step: called with layout and output of every step that ran; ``None``: no observer.

    Raises TypeError, ValueError: parts that do not fit each other; cache and slots beyond free memory, on any rank.
    """

    def __init__(
        self, model: LlamaForCausalLM, lora_config: LoRAConfig | None = None, engine_config: EngineConfig | None = None,
        admission: str = "fcfs", tokenizer: Any = None, defaults: GenerationDefaults | None = None,
        cache: KVCache | None = None, warm_up: bool | None = None,
    ) -> None:  # fmt: skip
        alone = current_group().world_size == 1
        super().__init__(one_thread=not alone)
        rule = ADMISSION_RULES.get(admission)()
        self.config = config = check_parts(model, lora_config, engine_config, warm_up)
        check_rule(rule, config)
        self.vocab_size = model.config.vocab_size
        device, max_tokens = model.lm_head.weight.device, config.max_num_batched_tokens
        with all_ranks_agree():  # first: a refusal on one rank must change nothing on any
            cache = cache_for(model, lora_config, config, cache)
        layers = dense_layers(model)
        if config.batch_invariant:
            check_batch_invariant(layers)
        self.manager: LoRAModelManager | None = None
        self._residency: AdapterResidency | None = None
        if lora_config is not None:
            rows = config.max_step_rows
            self.manager = LoRAModelManager(model, config.max_batch_size, rows, self.vocab_size, lora_config, device)
            if config.adapter_index_rule == "per_request":
                self.manager.accept_activated_lora()
            self._residency = AdapterResidency(self.manager, alone and device.type == "cuda", config.prefix_cache)
        set_batch_invariant(layers, config.batch_invariant)
        self.blocks = blocks_for(config)
        self.runner = ModelRunner(model, cache, self.manager, config)
        max_adapters = None if self.manager is None else self.manager.lora_slots
        sizes = config.max_batch_size, max_tokens, max_adapters, config.prefill_chunk, config.prompt_grain
        self.scheduler = Scheduler(rule, self.blocks, *sizes, most_drafts=config.speculate)
        if self._residency is not None:
            if config.prefix_cache:
                self.scheduler.key_of = self._residency.prefix_key
            self.scheduler.on_leave, self.scheduler.is_resident = self._residency.release, self._residency.is_resident
            self.scheduler.is_loaded = self._residency.is_loaded
        self._overlap = Overlap(self.runner, self.scheduler, self._residency, config.adapter_index_rule)
        self._next: BegunStep | None = None  # launched already
        self._is_torn = False  # true while a call changes the requests, and after an error in it
        self.on_step: Callable[[StepLayout, StepOutput], object] | None = None
        self._requests: dict[str, RequestState] = {}  # waiting and running
        self.codec = None if tokenizer is None else TextCodec(tokenizer, config.adapter_templates)
        self.defaults, self.max_model_len = defaults or GenerationDefaults(), config.max_model_len
        self._states = StateFactory(config.seed, self.defaults, self.codec)
        self.warm_up_s = 0.0
        if device.type == "cuda" if warm_up is None else warm_up:
            self.warm_up_s = self._warm_up(min(WARM_UP_TOKENS, max_tokens))

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, adapters: LoRARequest | Iterable[LoRARequest] = (), *,
        dtype: torch.dtype | str | None = None, device: torch.device | str | None = None,
        max_model_len: int | None = None, memory_fraction: float = 0.9, max_batch_size: int = 32, block_size: int = 16,
        num_blocks: int | None = None, fp8_weights: bool = False, fp8_kv_cache: bool = False, cuda_graphs: bool = True,
        batch_invariant: bool = False, prefill_chunk: int | None = None, prefix_cache: bool = False,
        adapter_templates: bool = False, seed: int = 0, speculate: int = 0, admission: str = "fcfs",
        warm_up: bool | None = None, **lora: Any,
    ) -> "Engine":  # fmt: skip
        """Build an engine for the checkpoint in ``folder`` (nothing is downloaded), and load ``adapters``.

        The folder is in transformers' format: ``config.json`` and safetensors of a Llama, Mistral, Qwen2, Qwen3,
        Mixtral or Qwen3-MoE, and optionally ``generation_config.json`` and a tokenizer.

        Args:
            adapters: adapters to size the engine for; others may be served later as far as they fit.
            dtype: of weights and cache; ``None``: the checkpoint's.
            fp8_weights: as `LlamaForCausalLM`: one byte per weight of linear layers; tokens may differ.
            device: ``None``: the current GPU, else the CPU.
            max_model_len: most tokens of a request; ``None``: the least of the model's positions or sliding window,
                8192, and what the cache holds.
            memory_fraction: fraction of the memory free after loading weights for slots and cache; less on a GPU if
                CUDA graphs would not fit beside them.
            max_batch_size to speculate: as in :class:`EngineConfig`; ``num_blocks=None``: full length, or what fits.
            warm_up: as in :class:`Engine`.
            lora: fields of a :class:`LoRAConfig`. Defaults: ``max_lora_rank`` of the widest adapter, ``max_loras`` the
                number of adapters, at most ``max_batch_size + 1``. Without adapters and fields: no LoRA layers.

        The memory taken is in :attr:`memory`. A slot takes ``max_lora_rank`` times the sum of all inputs and outputs of
        the adapted layers, whatever its adapter's rank.

        Raises FileNotFoundError, ValueError, TypeError (folder, adapters, arguments), RuntimeError (memory).
        """
        requests = as_requests(adapters)
        sizes = {
            "max_batch_size": max_batch_size, "block_size": block_size, "num_blocks": num_blocks,
            "fp8_kv_cache": fp8_kv_cache, "cuda_graphs": cuda_graphs, "batch_invariant": batch_invariant,
            "prefill_chunk": prefill_chunk, "prefix_cache": prefix_cache, "adapter_templates": adapter_templates,
            "seed": seed, "speculate": speculate,
        }  # fmt: skip
        weights = {"dtype": dtype, "device": device, "fp8_weights": fp8_weights}
        parts = load_pretrained(folder, requests, weights, max_model_len, memory_fraction, sizes, lora)
        model, lora_config, engine_config, tokenizer, defaults = parts
        engine = cls(model, lora_config, engine_config, admission, tokenizer, defaults, warm_up=warm_up)
        if engine.manager is not None:
            for request in requests if current_group().rank else shown(requests, "loading adapters", "adapter"):
                engine.manager.add_adapter(request)
        return engine

    @exclusive
    def add_request(self, request: Request, generated: Sequence[int] = ()) -> RequestState:
        """Queue a request; return its state, which holds status and output from now on.

        ``generated``: tokens already generated by another engine. They are recomputed with the prompt, as after a
        preemption, and generation continues identically if the request has a seed. They get no log-probabilities.

        All checks are made here, before anything changes. If the adapter's files are damaged later, before they are
        loaded, the request ends as FAILED.

        Raises TypeError: not a Request; its adapter is no LoRARequest. ValueError: its id is in use; a token outside
        the vocabulary; stop strings without a tokenizer; too long; an adapter for an engine without LoRA; an illegal
        adapter; generated tokens that would have ended it. FileNotFoundError: its adapter is neither registered nor in
        a folder. RuntimeError: its adapter needs a slot, and every slot is pinned for another one.
        """
        return self._add(request, generated, ())

    @exclusive
    def add_or_fail(self, request: Request) -> RequestState:
        """Queue a request as :meth:`add_request` does, but return it as FAILED if its adapter's folder is refused."""
        return self._add(request, (), (OSError, TypeError, ValueError))

    def is_in_use(self, request_id: str) -> bool:
        """Check for a request of this name that has not left, or whose ``generate`` or ``stream`` call is open."""
        return request_id in self._requests or request_id in self._own or bool(self.blocks.block_table(request_id))

    def has_unfinished(self) -> bool:
        """Check for requests that wait or run, and for results kept for the next :meth:`step`."""
        return bool(self._requests or self._kept)

    @exclusive
    def abort_request(self, request_id: str) -> GenerationResult:
        """Remove an unfinished request; return its result, with its output so far. ValueError for an unknown id."""
        self._mend()
        if not isinstance(request_id, str) or request_id not in self._requests:
            raise ValueError(f"no unfinished request {clip(request_id)}; unfinished: {clip(sorted(self._requests))}")
        self._is_torn = True
        request = self._requests[request_id]
        request.abort()
        self.scheduler.remove(request)
        del self._requests[request_id]
        self._is_torn = False
        return self.result_of(request)

    @exclusive
    def step(self) -> StepOutput:
        """Run one model invocation over all runnable requests; without any, return an empty output.

        These requests end as FAILED, with the error and without effect on others: one whose adapter cannot be loaded;
        one whose logits hold NaN (e.g. by an adapter's huge weights); the head of the queue, if nothing runs and pinned
        adapters leave it no slot.

        After any other error (out of memory, an interrupt) no request has lost anything: the next ``step`` computes
        those again that were joining, and returns the results not returned yet. With several tensor-parallel ranks, a
        rank whose model failed is out of step: it raises RuntimeError from then on, and needs new processes.
        """
        check_in_step()
        self._mend()
        start, upcoming, self._next, self._is_torn = time.perf_counter(), self._next, None, True
        pinned = frozenset[int]() if self.manager is None else self.manager.pinned_adapters
        failed: list[RequestState] = []
        current = (upcoming and self._overlap.take_up(upcoming, failed)) or self._overlap.begin(pinned, failed)
        in_flight = current.in_flight
        if in_flight is None:
            output = self._with_results(StepOutput({}, (), current.statistics(start, {})), self._results_of(failed))
        else:
            if self.scheduler.waiting:
                self._overlap.prefetch(pinned)
            following = self._overlap.prepare_next(current, pinned, failed)
            tokens, layout = in_flight.tokens(), in_flight.layout
            if self.config.prefix_cache:
                self._overlap.register(layout, tokens.token_ids)
            statistics = current.statistics(start, {**self.blocks.take_counts(), **tokens.counts})
            output = self._deliver(layout, tokens, statistics, failed)
            self._next = following
        self._kept, self._is_torn = {}, False  # last: an error before leaves the results to the next step
        if in_flight is not None and self.on_step is not None:
            try:
                self.on_step(layout, output)
            except BaseException:
                self._keep((*output.finished, *output.failed))
                raise
        return output

    def _restore(self) -> None:
        """Give each request one place again, wherever an error ended a call: kept result, queue or batch."""
        self._next, self._is_torn = None, True
        for request in self._requests.values():
            request.restore()
        self._results_of([request for request in self._requests.values() if request.has_ended])
        self.scheduler.restore(self._requests.values())
        if self._residency is not None:
            self._residency.restore(self._requests.values())
        self._is_torn = False

    def _mend(self) -> None:
        if self._is_torn:
            self._restore()

    @property
    def is_ahead(self) -> bool:
        return self._next is not None

    @exclusive
    def forget_next(self) -> None:
        """Drop the step that was launched ahead; its requests compute it again, and idle ones leave."""
        self._restore()

    @property
    def memory(self) -> EngineMemory:
        graphs = 0 if self.runner.graphs is None else self.runner.graphs.statistics.bytes
        return EngineMemory.of(self.runner.model, self.manager, self.config, graphs)

    @exclusive
    def capture_graphs(self, prompt_tokens: int = 0) -> None:
        """Capture now, on a GPU, the CUDA graphs of all decode steps and of steps with up to ``prompt_tokens`` tokens.

        Otherwise the first step of each shape captures its graph: two steps launched by the host, and the compilation
        of new kernels. With LoRA there are up to four graphs for each of ``decode_sizes(max_batch_size)`` and six for
        each of ``prompt_sizes(prompt_tokens)``, without LoRA one and two; those for adapters of embedding or head if
        one is active. When memory ends, the host launches the remaining shapes. All ranks must call it.
        """
        count = check_count("prompt_tokens", prompt_tokens, 0)
        if self.runner.graphs is not None:
            self.forget_next()
            self.runner.warm_up(count, progress=False)

    @exclusive
    def capture_step(self, prompt_rows: int, decode_rows: int, adapters: int, *, uses_lora: bool) -> None:
        """Capture the graph of one shape of step now; ``adapters``: of decode rows, ``uses_lora``: any row has one."""
        self.forget_next()
        shape = self.runner.shapes.of(prompt_rows, decode_rows, adapters, uses_lora=uses_lora, vocabulary=False)
        self.runner.capture(shape)

    def _warm_up(self, prompt_tokens: int) -> float:
        start = time.perf_counter()
        self.runner.warm_up_slots()
        on_gpu = self.runner.model.lm_head.weight.is_cuda
        self.runner.warm_up(prompt_tokens, progress=on_gpu and current_group().rank == 0)
        seconds = time.perf_counter() - start
        _log.info("warm-up of steps with up to %d prompt tokens: %.1f s", prompt_tokens, seconds)
        return seconds

    def _results_of(self, ended: Iterable[RequestState]) -> list[GenerationResult]:
        results = [self.result_of(request) for request in ended]
        self._keep(results)
        for result in results:
            self._requests.pop(result.request_id, None)
        return results

    def _deliver(
        self, layout: StepLayout, tokens: StepTokens, statistics: StepStatistics, failed: list[RequestState]
    ) -> StepOutput:
        pairs = zip(layout.requests, tokens.token_ids, strict=True)
        served = {request: token for request, token in pairs if request.status is RequestStatus.RUNNING}  # not idle
        if layout.partial is not None:
            served.pop(layout.partial, None)
            layout.partial.num_read = layout.spans[layout.requests.index(layout.partial)].kv_length
        if NO_TOKEN in tokens.token_ids:
            for request in [request for request, token in served.items() if token == NO_TOKEN]:
                del served[request]
                if request in layout.drafts:  # perhaps the cause: it has another step without them
                    request.may_draft = False
                else:
                    failed += self._overlap.fail(request, no_token_error(request))
        chosen = {layout.requests[row]: logprobs for row, logprobs in tokens.logprobs.items()}
        earlier: dict[str, list[int]] = {}
        new_tokens, finished = {}, []
        for request, token in served.items():
            try:
                request.append(token, chosen.get(request) if chosen else None)
                if request in tokens.further:
                    request.accept(tokens.further[request], earlier.setdefault(request.request_id, []))
            except Exception as error:  # any exception of a tokenizer
                failed += self._overlap.fail(request, f"{type(error).__name__}: {error}")
            new_tokens[request.request_id] = request.output_token_ids[-1]
            if request.status is RequestStatus.FINISHED:
                finished.append(request)
        if finished:
            self.scheduler.retire_finished()
        output = StepOutput(new_tokens, (), statistics, earlier=earlier)
        ended = self._results_of((*finished, *failed)) if finished or failed else ()
        return self._with_results(output, ended) if ended or self._kept else output

    def _add(self, request: Request, generated: Sequence[int], refusals: tuple[type[Exception], ...]) -> RequestState:
        """Check and queue a request; ``refusals``: errors of its adapter's folder that only make it FAILED."""
        limits = self.vocab_size, self.max_model_len
        check_request(request, self.is_in_use, *limits, has_tokenizer=self.codec is not None, generated=generated)
        name, needed = clip(request.request_id), self.blocks.blocks_for(request.final_kv_length)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"request {name} with {len(request.prompt_token_ids)} prompt tokens and {request.max_new_tokens} new "
                f"ones needs {needed} KV blocks, the whole cache has {self.blocks.num_blocks} (of "
                f"{self.blocks.block_size} tokens); shorten it or raise EngineConfig.num_blocks"
            )
        if request.adapter is not None and not self.config.ignore_adapters:
            if self._residency is None:
                raise ValueError(
                    f"request {name} names an adapter, but this engine has no LoRA layers; pass lora_config to "
                    "Engine, or set EngineConfig.ignore_adapters to serve the backbone alone"
                )
            self._residency.check(request.adapter)
        try:
            if self._residency is not None:
                self._residency.check_folder(request.adapter)
        except refusals as error:
            state = self._states.make(request)
            state.fail(f"{type(error).__name__}: {error}")
            return state
        state = self._states.make(request)
        state.resume(generated)
        was_torn, self._is_torn = self._is_torn, True
        if self._residency is not None:
            self._residency.add(state)
        self.scheduler.add(state)
        self._requests[request.request_id] = state
        self._is_torn = was_torn
        return state
