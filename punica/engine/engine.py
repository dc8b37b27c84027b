"""`Engine`: serves requests for many adapters on one backbone, one model invocation per step.

Sections 5 and 6 of the paper.

    step:  schedule -> activate adapters -> lay out rows -> stage, launch -> [prepare next step] -> read tokens, deliver

Continuous batching: requests join and leave between steps, whatever their adapters. On a GPU scheduling overlaps
execution: the next decode step is laid out, staged and, unless a request could join, launched while the tokens of the
current one are still on the device. A request that arrives after such a launch joins one step later.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from punica.adapters import LoRAModelManager, LoRARequest
from punica.checks import check_count, clip
from punica.config import LoRAConfig
from punica.engine.config import EngineConfig, check_fits, check_types
from punica.engine.generation import Generation
from punica.engine.intake import Intake
from punica.engine.kv_cache import KVCache
from punica.engine.outputs import GenerationResult, StepOutput, StepStatistics, no_token_error
from punica.engine.pretrained import GenerationDefaults, as_requests, load_pretrained
from punica.engine.residency import AdapterResidency
from punica.engine.runner import InFlight, ModelRunner, StagedStep, StepTokens, max_step_rows
from punica.engine.sampler import NO_TOKEN
from punica.engine.sizes import EngineMemory, check_cache, check_memory, memory_of
from punica.engine.text import TextCodec
from punica.models import LlamaForCausalLM
from punica.parallel import (
    all_ranks_agree,
    check_batch_invariant,
    check_in_step,
    dense_layers,
    get_tensor_model_parallel_world_size,
    set_batch_invariant,
)
from punica.scheduling import (
    ADMISSION_RULES,
    BlockManager,
    Request,
    RequestState,
    RequestStatus,
    Scheduler,
    StepLayout,
    StepPlan,
    lay_out,
    next_decode_step,
)


class NextStep(NamedTuple):
    """Decode step prepared while the device computes the one before it; valid until a step fails or graphs change.

    ``layout`` has no token ids yet. ``staged``: its inputs, unless its graph has to be captured first. ``in_flight``:
    set once it is launched. ``adapter_uses``: ``manager.uses`` at that time.
    """

    layout: StepLayout
    staged: StagedStep | None
    in_flight: InFlight | None
    adapter_uses: int


class Engine(Generation):
    """One model on one device (or one tensor-parallel rank of it; all ranks take the same steps).

    :meth:`from_pretrained` builds one from a checkpoint folder, :meth:`generate` and :meth:`stream` are what most users
    call; :meth:`add_request`, :meth:`step` and :meth:`abort_request` are what those are made of.

    Requests are served first come, first served, and nobody overtakes. So none starves: with L the longest
    ``max_new_tokens``, one that has n unfinished requests before it when it arrives joins within (n + 1) L steps,
    however many adapters, slots and pins there are (a preempted request keeps its place and its tokens). Under
    ``"resident_first"`` at most 32 later ones overtake it, and the bound is (n + 33) L. On a GPU the time comes on top
    in which folders are read that are not in host memory: it passes in the queue, the steps of others go on.

    Args:
        model: a backbone with its weights. With LoRA its layers are replaced in place, so it belongs to this engine.
        lora_config: slots and ranks, e.g. ``engine_config.lora_config(max_lora_rank=16)``; ``None`` serves the
            backbone alone, with no LoRA layer at all.
        engine_config: sizes.
        admission: name of an admission rule: ``"fcfs"`` (Punica), ``"fcfs_many"``, ``"resident_first"`` (more adapters
            than slots), ``"single_adapter"``, ``"static"``.
        tokenizer: a transformers tokenizer, for text in and text out.
        defaults: end tokens of the model, and how tokens are chosen where ``generate`` is not told; without it there
            are no end tokens, and decoding is greedy.
        cache: keys and values; ``None`` makes one of ``engine_config``'s size. Engines that take turns, none of which
            has requests while another one serves, may share one, on one CUDA stream: give each the same.

    Raises TypeError for a model or config of another class, ValueError for an unknown rule or a
    ``max_model_len`` beyond the model's positions, for a cache and slots that take more memory than is free (on any
    rank: then all of them raise), for a given ``cache`` of other blocks or of too few.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        lora_config: LoRAConfig | None = None,
        engine_config: EngineConfig | None = None,
        admission: str = "fcfs",
        tokenizer: Any = None,
        defaults: GenerationDefaults | None = None,
        cache: KVCache | None = None,
    ) -> None:
        super().__init__()
        rule = ADMISSION_RULES.get(admission)()
        check_types(model, lora_config, engine_config)
        self.config = config = engine_config or EngineConfig()
        check_fits(config, lora_config, model)
        self.vocab_size = model.config.vocab_size
        device, max_tokens = model.lm_head.weight.device, config.max_num_batched_tokens
        with all_ranks_agree():  # first: what does not fit on one rank changes nothing on any
            if cache is None:
                check_memory(model, lora_config, config)
                cache = KVCache(model, config.total_blocks, config.block_size, fp8=config.fp8_kv_cache)
            check_cache(cache, model, config)
        layers = dense_layers(model)
        if config.batch_invariant:
            check_batch_invariant(layers)
        self.manager: LoRAModelManager | None = None
        self._residency: AdapterResidency | None = None
        if lora_config is not None:
            rows = max_step_rows(config)
            self.manager = LoRAModelManager(model, config.max_batch_size, rows, self.vocab_size, lora_config, device)
            alone = get_tensor_model_parallel_world_size() == 1
            self._residency = AdapterResidency(self.manager, reads_beside=alone and device.type == "cuda")
        set_batch_invariant(layers, config.batch_invariant)
        self.blocks = BlockManager(config.total_blocks, config.block_size)
        self.runner = ModelRunner(model, cache, self.manager, config)
        max_adapters = None if self.manager is None else self.manager.lora_slots
        self.scheduler = Scheduler(rule, self.blocks, config.max_batch_size, max_tokens, max_adapters)
        if self._residency is not None:
            self.scheduler.on_leave, self.scheduler.is_resident = self._residency.release, self._residency.is_resident
            self.scheduler.is_loaded = self._residency.is_loaded
        self._next: NextStep | None = None
        self._requests: dict[str, RequestState] = {}  # waiting and running
        self.codec = None if tokenizer is None else TextCodec(tokenizer)
        self.defaults = defaults or GenerationDefaults()
        self._intake = Intake(config, self.vocab_size, self.blocks, self._residency, self.defaults, self.codec)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, adapters: LoRARequest | Iterable[LoRARequest] = (), *,
        dtype: torch.dtype | str | None = None, device: torch.device | str | None = None,
        max_model_len: int | None = None, memory_fraction: float = 0.9, max_batch_size: int = 32, block_size: int = 16,
        num_blocks: int | None = None, fp8_kv_cache: bool = False, cuda_graphs: bool = True,
        batch_invariant: bool = False, seed: int = 0, admission: str = "fcfs", **lora: Any,
    ) -> "Engine":  # fmt: skip
        """An engine for the checkpoint in ``folder`` (nothing is downloaded), with these adapters loaded.

        The folder is one that transformers writes: ``config.json`` and safetensors (one file or several with an index)
        of a Llama, Mistral, Qwen2, Qwen3, Mixtral or Qwen3-MoE; ``generation_config.json`` (end tokens, default
        sampling) and the tokenizer (text in, text out, chats) where it has them.

        Args:
            adapters: those that will be served, for which room is made; others may come later as far as they fit.
            dtype: of weights and cache; ``None``: the checkpoint's.
            device: ``None``: the current GPU, or the CPU where there is none.
            max_model_len: most tokens of a request; ``None``: what the model means (its positions, its sliding window),
                8192 and what the cache holds, whichever is least.
            memory_fraction: how much of the memory that is free once the weights are loaded slots and cache may take;
                less on a GPU where CUDA graphs would not fit beside them.
            max_batch_size, block_size, num_blocks, fp8_kv_cache, cuda_graphs, batch_invariant, seed: as in
                :class:`EngineConfig`; ``num_blocks=None``: enough for all requests of a full batch at full length, or
                what fits.
            lora: fields of a :class:`LoRAConfig`. Unless given, ``max_lora_rank`` is that of the widest adapter and
                ``max_loras`` the number of adapters, at most one more than ``max_batch_size``. Without adapters and
                without any of these the engine has no LoRA layers.

        What it costs is in :attr:`memory`: a slot takes ``max_lora_rank`` times the sum of all inputs and outputs of
        the adapted layers, whatever the rank of what it holds.

        Raises FileNotFoundError, ValueError, TypeError (folder, adapters, arguments), RuntimeError (memory).
        """
        requests = as_requests(adapters)
        sizes = {
            "max_batch_size": max_batch_size, "block_size": block_size, "num_blocks": num_blocks,
            "fp8_kv_cache": fp8_kv_cache, "cuda_graphs": cuda_graphs, "batch_invariant": batch_invariant, "seed": seed,
        }  # fmt: skip
        parts = load_pretrained(folder, requests, dtype, device, max_model_len, memory_fraction, sizes, lora)
        tokenizer = None if parts.codec is None else parts.codec.tokenizer
        engine = cls(parts.model, parts.lora_config, parts.engine_config, admission, tokenizer, parts.defaults)
        if engine.manager is not None:
            for request in requests:
                engine.manager.add_adapter(request)
        return engine

    def add_request(self, request: Request, generated: Sequence[int] = ()) -> RequestState:
        """Queue a request; returns what the engine knows about it from now on: its status and its output so far.

        ``generated``: tokens that it has generated already, in another engine. They are computed again with its prompt
        and generation goes on behind them, as after a preemption; with a seed of its own it goes on as it would have
        there. Log-probabilities are only of what is generated here.

        All checks are made here and change nothing when they fail, so that a queued request can always run. If its
        adapter breaks all the same before it is loaded (its files are damaged meanwhile), the request ends as FAILED.

        Raises:
            TypeError: not a Request; its adapter is no LoRARequest.
            ValueError: its id is in use; a token or stop token outside the vocabulary; stop strings without a
                tokenizer; longer than ``max_model_len`` or than the whole KV cache; an adapter for an engine without
                LoRA; an adapter that is not legal here; generated tokens with which it would have ended.
            FileNotFoundError: its adapter is neither registered nor in a folder.
            RuntimeError: its adapter would need a slot, and every slot is pinned for another one.
        """
        self._check(request, generated)
        self._intake.check_folder(request)
        return self._queue(request, generated)

    def add_or_fail(self, request: Request, generated: Sequence[int] = ()) -> RequestState:
        """Queue a request as :meth:`add_request` does, but return it as FAILED if its adapter's folder is refused."""
        self._check(request, generated)
        try:
            self._intake.check_folder(request)
        except (OSError, TypeError, ValueError) as error:
            return self._intake.refuse(request, error)
        return self._queue(request, generated)

    def is_in_use(self, request_id: str) -> bool:
        """Whether a request of this name has not left yet, or belongs to a call that is not over."""
        return request_id in self._requests or request_id in self._own or bool(self.blocks.block_table(request_id))

    def has_unfinished(self) -> bool:
        """True while :meth:`step` has something to bring: a request waits or runs, or a result is kept for it."""
        return bool(self._requests or self._kept)

    def abort_request(self, request_id: str) -> GenerationResult:
        """Take an unfinished request out; its result, with the output it has so far. ValueError for an unknown id."""
        if not isinstance(request_id, str) or request_id not in self._requests:
            raise ValueError(f"no unfinished request {clip(request_id)}; unfinished: {clip(sorted(self._requests))}")
        request = self._requests.pop(request_id)
        self.scheduler.remove(request)
        request.abort()
        return self.result_of(request)

    def step(self) -> StepOutput:
        """One model invocation over everything that can run; with nothing to run, an empty output.

        A request whose adapter turns out to be unloadable ends as FAILED, with the error, and costs nobody else
        anything. So does one whose logits hold NaN, as those of an adapter with huge weights may, and the head of the
        queue when pinned adapters leave it no slot and nothing runs that could give its own up: no later step would
        change that. While others run it waits for them.

        After any other error (out of memory, an interrupt) no request has lost anything: those that were to join wait
        again at the head of the queue, and the next ``step`` goes on. Its output begins with results that nobody has
        seen yet, see :class:`StepOutput`. Only on several tensor-parallel ranks one that failed while the model ran is
        out of step with the others: every further ``step`` is a RuntimeError there; restart the processes.
        """
        check_in_step()
        start = time.perf_counter()
        upcoming, self._next = self._next, None
        pinned = frozenset[int]() if self.manager is None else self.manager.pinned_adapters
        plan, layout = self._schedule(upcoming, pinned)
        failed = self._fail_unschedulable(pinned) if plan.is_empty else []
        try:
            plan = self._activate(plan, failed)
            if plan.is_empty:
                idle = StepStatistics(num_preempted=len(plan.preempted), schedule_s=time.perf_counter() - start)
                return self._with_kept(StepOutput({}, (), idle, tuple(map(self.result_of, failed))))
            if layout is None:
                slots = None if self._residency is None else self._residency.slots()
                expected = None if upcoming is None else upcoming.layout
                layout = lay_out(plan, self.blocks, slots, self.config.adapter_index_rule, expected)
            scheduled = time.perf_counter()
            current = self._launch(layout, upcoming)
            upcoming = self._prepare_next(current, plan, pinned)
            tokens = current.tokens()
        except BaseException:
            self._requeue(plan, failed)
            raise
        ready = max(scheduled, current.metadata_ready_s)
        statistics = StepStatistics(
            batch_size=len(layout.requests),
            num_idle=len(layout.requests) - len(plan.prefills) - len(plan.decodes),
            num_prefill_tokens=layout.num_prefill_rows,
            num_segments=layout.num_segments,
            num_preempted=len(plan.preempted),
            schedule_s=scheduled - start,
            metadata_s=ready - scheduled,
            model_s=time.perf_counter() - ready,
        )
        output = self._deliver(layout, tokens, statistics, failed)
        self._next = upcoming
        return output

    @property
    def is_ahead(self) -> bool:
        """The next step is launched already."""
        return self._next is not None and self._next.in_flight is not None

    def forget_next(self) -> None:
        """Drop the step that was prepared or launched ahead; its requests compute it again."""
        self._next = None

    @property
    def memory(self) -> EngineMemory:
        """Bytes that this engine holds on its device."""
        graphs = self.runner.graphs
        return memory_of(self.runner.model, self.manager, self.config, 0 if graphs is None else graphs.statistics.bytes)

    def capture_graphs(self, prompt_tokens: int = 0) -> None:
        """On a GPU, capture now the CUDA graphs that steps would else capture when the first of them needs each: those
        of all steps that only decode, and of all with up to ``prompt_tokens`` tokens of prompts (with ``"fcfs_many"``
        and the static rules, those of several prompts together), beside decodes and alone.

        It costs two steps launched by the host for each graph, and the time to compile kernels that are new. With LoRA
        there are up to four for each of ``decode_sizes(max_batch_size)`` and up to six for each of
        ``prompt_sizes(prompt_tokens)`` (`punica.engine.cuda_graph`): 24 and 48 for 32 requests and 512 tokens; without,
        one and two. Steps with an adapter of the embedding or the head have graphs of their own: to have those, too,
        activate such an adapter first. What they hold is in :attr:`memory`; where that ends, the host launches
        those steps. Nothing happens without graphs. All ranks must come here. TypeError, ValueError: not an integer of
        at least 0.
        """
        count = check_count("prompt_tokens", prompt_tokens, 0)
        self.forget_next()
        self.runner.capture_graphs(count)

    def capture_step(self, prompt_rows: int, decode_rows: int, adapters: int, *, uses_lora: bool) -> None:
        """Capture the CUDA graph of one shape of step now; arguments as of :meth:`ModelRunner.capture_step`."""
        self.forget_next()
        self.runner.capture_step(prompt_rows, decode_rows, adapters, uses_lora=uses_lora)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _schedule(self, upcoming: NextStep | None, pinned: Collection[int]) -> tuple[StepPlan, StepLayout | None]:
        """Return the plan of this step: of the one launched ahead, with its layout, or a new one, without.

        A launched step is continued unless adapters were used since: a pin may need the slot of a running request.
        """
        if upcoming is not None and upcoming.in_flight is not None and upcoming.adapter_uses == self._adapter_uses():
            plan = self.scheduler.continue_batch(upcoming.layout.requests)
            if not plan.is_empty:
                return plan, upcoming.layout
        return self.scheduler.schedule(pinned), None

    def _activate(self, plan: StepPlan, failed: list[RequestState]) -> StepPlan:
        """Activate the adapters of the step; return the plan without requests that failed, appended to ``failed``.

        Adapters of running requests come first, so that none of them is evicted for one that joins.
        """
        residency, wanted = self._residency, [*plan.decodes, *plan.idle, *plan.prefills]
        if residency is None or residency.are_active(wanted):
            return plan
        for request in (*residency.running_first((*plan.decodes, *plan.idle)), *plan.prefills):
            if request not in self.scheduler.running:
                continue  # it left with the last unfinished member of its batch
            try:
                residency.activate(request)
            except (OSError, TypeError, ValueError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise  # not caused by the adapter
                failed += self._fail(request, f"{type(error).__name__}: {error}")
        if not failed:
            residency.note_active(wanted)
            return plan
        return plan.without({*wanted} - {*self.scheduler.running})

    def _launch(self, layout: StepLayout, upcoming: NextStep | None) -> InFlight:
        """Return the step in flight: launched ahead, staged ahead and launched now, or staged and launched now."""
        if upcoming is not None and upcoming.layout.is_same_step(layout):
            if upcoming.in_flight is not None:
                return upcoming.in_flight
            if upcoming.staged is not None and self.runner.can_launch(upcoming.staged):
                return self.runner.launch(upcoming.staged)
        return self.runner.launch(self.runner.stage(layout))

    def _prepare_next(self, current: InFlight, plan: StepPlan, pinned: Collection[int]) -> NextStep | None:
        """Prepare what follows while the device computes ``current``: load the next adapter, stage the next decode step.

        The step is launched, too, if no request can join it and no choice of a token waits for the host. A request that
        finishes now still has a row in it, whose output is discarded.
        """
        self._prefetch(pinned)
        is_complete = plan.num_requests == len(current.layout.requests) == len(self.scheduler.running)
        layout = next_decode_step(current.layout, self.blocks) if self.runner.works_ahead and is_complete else None
        if layout is None:
            return None
        staged, in_flight = self.runner.stage_ahead(layout, current.device_tokens), None
        if not self.scheduler.can_admit(pinned) and staged is not None and layout.is_greedy:
            in_flight = self.runner.launch(staged)
        return NextStep(layout, staged, in_flight, self._adapter_uses())

    def _adapter_uses(self) -> int:
        return 0 if self.manager is None else self.manager.uses

    def _prefetch(self, pinned: Collection[int]) -> None:
        """Load the adapter of the head of the queue into a spare slot (section 5.2 of the paper).

        On a GPU reading, checking and copying overlap with the step.
        """
        waiting = self.scheduler.waiting
        if self._residency is not None and waiting and self.scheduler.has_slot(waiting[0], pinned):
            self._residency.prefetch(waiting[0])

    def _requeue(self, plan: StepPlan, failed: list[RequestState]) -> None:
        """Queue the prompts of a step that raised again, as their keys and values are not cached; keep its failures."""
        for request in reversed(plan.prefills):
            if request.request_id in self._requests:
                self.scheduler.requeue(request)
        self._keep(map(self.result_of, failed))

    def _fail(self, request: RequestState, error: str) -> list[RequestState]:
        """Take a request out for good, as failed unless it is a finished member of the batch; those that failed."""
        unfinished = self._requests.pop(request.request_id, None)
        self.scheduler.remove(request)
        if unfinished is None:
            return []
        request.fail(error)
        return [request]

    def _fail_unschedulable(self, pinned: Collection[int]) -> list[RequestState]:
        """Fail the head of the queue if nothing runs and pins leave it no slot."""
        scheduler = self.scheduler
        if scheduler.running or not scheduler.waiting or scheduler.has_slot(scheduler.waiting[0], pinned):
            return []
        head = scheduler.waiting[0]
        return self._fail(
            head,
            f"RuntimeError: no slot for adapter {head.adapter_id}: all {len(pinned)} slots were pinned, for adapters "
            f"{sorted(pinned)}, while the request waited; call manager.unpin_adapter and ask again",
        )

    def _deliver(
        self, layout: StepLayout, tokens: StepTokens, statistics: StepStatistics, failed: list[RequestState]
    ) -> StepOutput:
        pairs = zip(layout.requests, tokens.token_ids, strict=True)
        served = {request: token for request, token in pairs if request.status is RequestStatus.RUNNING}  # not idle
        for request in [request for request, token in served.items() if token == NO_TOKEN]:
            del served[request]
            failed += self._fail(request, no_token_error(request))
        for row, logprobs in tokens.logprobs.items():
            if layout.requests[row] in served:
                layout.requests[row].logprobs.append(logprobs)
        for request, token in served.items():
            try:
                request.append(token)
            except Exception as error:  # whatever a tokenizer raises
                failed += self._fail(request, f"{type(error).__name__}: {error}")
        finished = [request for request in served if request.status is RequestStatus.FINISHED]
        for request in finished:
            del self._requests[request.request_id]
        self.scheduler.retire_finished()
        ended = [self.result_of(request) for request in (*finished, *failed)]
        results = tuple(result for result in ended if result.error is None)
        failures = tuple(result for result in ended if result.error is not None)
        new_tokens = {request.request_id: token for request, token in served.items()}
        return self._with_kept(StepOutput(new_tokens, results, statistics, failures))

    def _check(self, request: Request, generated: Sequence[int]) -> None:
        """Check everything that is refused on arrival except the adapter's folder."""
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {type(request).__name__}")
        name = request.request_id
        if self.is_in_use(name):
            raise ValueError(f"request_id {clip(name)} is in use by an unfinished request; choose another id")
        self._intake.check(request, generated)

    def _queue(self, request: Request, generated: Sequence[int]) -> RequestState:
        state = self._requests[request.request_id] = self._intake.accept(request, generated)
        self.scheduler.add(state)
        return state
