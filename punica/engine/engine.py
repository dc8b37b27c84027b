"""`Engine`: serves requests for many adapters on one backbone, one model invocation per step.

Sections 5 and 6 of the paper.

    step:  schedule -> activate adapters -> lay out rows -> metadata, model, argmax -> deliver, retire the finished

Continuous batching: requests join and leave between steps, whatever their adapters are.
"""

import itertools
import time
from collections.abc import Collection, Sequence
from typing import Any

from punica.adapters import LoRAModelManager, LoRARequest
from punica.config import LoRAConfig
from punica.engine.attention import PagedAttention
from punica.engine.config import EngineConfig
from punica.engine.kv_cache import KVCache
from punica.engine.output import StepOutput, StepStatistics
from punica.engine.residency import AdapterResidency
from punica.engine.runner import ModelRunner
from punica.models import LlamaForCausalLM
from punica.scheduling import (
    ADMISSION_RULES,
    BlockManager,
    Request,
    RequestStatus,
    Scheduler,
    StepLayout,
    StepPlan,
    lay_out,
)


class Engine:
    """One model on one device (or one tensor-parallel rank of it; all ranks take the same steps).

    Args:
        model: a backbone with its weights. With LoRA its layers are replaced in place, so it belongs to this engine.
        lora_config: slots and ranks, e.g. ``engine_config.lora_config(max_lora_rank=16)``; ``None`` serves the
            backbone alone, with no LoRA layer at all.
        engine_config: sizes.
        admission: name of an admission rule: ``"fcfs"`` (Punica), ``"single_adapter"``, ``"static"``.

    Decoding is greedy. Raises TypeError for a model or config of another class, ValueError for an unknown rule or a
    ``max_model_len`` beyond the model's positions.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        lora_config: LoRAConfig | None = None,
        engine_config: EngineConfig | None = None,
        admission: str = "fcfs",
    ) -> None:
        rule = ADMISSION_RULES.get(admission)()
        _check_types(model, lora_config, engine_config)
        self.config = config = engine_config or EngineConfig()
        _check_fits(config, lora_config, model)
        self.vocab_size = model.config.vocab_size
        device, max_tokens = model.lm_head.weight.device, config.max_num_batched_tokens
        self.manager: LoRAModelManager | None = None
        self._residency: AdapterResidency | None = None
        if lora_config is not None:
            self.manager = LoRAModelManager(
                model, config.max_batch_size, max_tokens, self.vocab_size, lora_config, device
            )
            self._residency = AdapterResidency(self.manager)
        self.blocks = BlockManager(config.total_blocks, config.block_size)
        cache = KVCache(model, config.total_blocks, config.block_size)
        self.runner = ModelRunner(model, PagedAttention(cache), self.manager, max_tokens)
        max_adapters = None if self.manager is None else self.manager.lora_slots
        self.scheduler = Scheduler(rule, self.blocks, config.max_batch_size, max_tokens, max_adapters)
        self._requests: dict[str, Request] = {}  # waiting and running
        self._counter = itertools.count()

    def add_request(self, request: Request) -> None:
        """Queue a request.

        All checks are made here and change nothing when they fail, so that a queued request can always run.

        Raises:
            TypeError: not a Request; its adapter is no LoRARequest.
            ValueError: its id is in use or it was served before; a token outside the vocabulary; longer than
                ``max_model_len`` or than the whole KV cache; an adapter for an engine without LoRA; an adapter that is
                not legal here.
            FileNotFoundError: its adapter is neither registered nor in a folder.
            RuntimeError: its adapter would need a slot, and every slot is pinned for another one.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {type(request).__name__}")
        self._check_new(request)
        self._check_length(request)
        self._check_adapter(request)
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def has_unfinished(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._requests)

    def abort_request(self, request_id: str) -> Request:
        """Take an unfinished request out, with the output it has so far. ValueError for an unknown id."""
        if request_id not in self._requests:
            raise ValueError(f"no unfinished request {request_id!r}; unfinished: {sorted(self._requests)[:20]}")
        request = self._requests.pop(request_id)
        self.scheduler.take_out(request)
        return request

    def step(self) -> StepOutput:
        """One model invocation over everything that can run; with nothing to run, an empty output.

        If an adapter turns out to be unloadable, the requests that were to join with it are taken out (running ones
        too, if somebody removed it from the manager) and the error is raised. After any error (out of memory, an
        interrupt) no other request has lost anything: those that were to join wait again at the head of the queue, and
        the next ``step`` goes on.

        Pinned adapters keep their slots. When they leave none for the head of the queue, it waits for the running
        requests; when nothing runs either, no later step would change that, so it is a RuntimeError: unpin an adapter
        or abort the request, which stays queued, and go on.
        """
        start = time.perf_counter()
        pinned = frozenset[int]() if self.manager is None else self.manager.pinned_adapters
        plan = self.scheduler.schedule(pinned)
        if plan.is_empty:
            self._check_not_shut_out(pinned)
            idle = StepStatistics(num_preempted=len(plan.preempted), schedule_s=time.perf_counter() - start)
            return StepOutput({}, (), idle)
        try:
            slots = None if self._residency is None else self._activate(self._residency, plan)
            layout = lay_out(plan, self.blocks, slots, self.config.adapter_index_rule)
            scheduled = time.perf_counter()
            tokens, metadata_s, model_s = self.runner.run(layout, lambda: self._prefetch(pinned))
        except BaseException:
            for request in reversed(plan.prefills):  # the keys and values of their prompts are not in the cache
                if request.request_id in self._requests:
                    self.scheduler.put_back(request)
            raise
        statistics = StepStatistics(
            batch_size=len(layout.requests),
            num_idle=len(plan.idle),
            num_prefill_tokens=layout.num_prefill_rows,
            num_segments=layout.num_segments,
            num_preempted=len(plan.preempted),
            schedule_s=scheduled - start,
            metadata_s=metadata_s,
            model_s=model_s,
        )
        return self._deliver(layout, tokens, statistics)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[LoRARequest | None] | None = None,
        max_new_tokens: int | Sequence[int] = 16,
    ) -> list[list[int]]:
        """Continue every prompt with its adapter; the new tokens, in the order of the prompts.

        ``adapters``: one per prompt (``None`` for the backbone), or ``None`` for the backbone everywhere.
        ``max_new_tokens``: one number, or one per prompt. Other requests of the engine go on meanwhile. Raises what
        :meth:`add_request` and :meth:`step` raise, and ValueError when the lengths differ; none of these requests is
        left behind then.
        """
        prompts = _per_prompt("prompts", prompts)
        adapters = [None] * len(prompts) if adapters is None else _per_prompt("adapters", adapters)
        one_length = isinstance(max_new_tokens, int)
        lengths = [max_new_tokens] * len(prompts) if one_length else _per_prompt("max_new_tokens", max_new_tokens)
        if not len(prompts) == len(adapters) == len(lengths):
            raise ValueError(
                f"one adapter and one max_new_tokens per prompt: got {len(prompts)} prompts, {len(adapters)} "
                f"adapters, {len(lengths)} max_new_tokens"
            )
        requests = [
            Request(f"generate-{next(self._counter)}", prompt, length, adapter)
            for prompt, adapter, length in zip(prompts, adapters, lengths, strict=True)
        ]
        try:
            for request in requests:
                self.add_request(request)
            while any(request.request_id in self._requests for request in requests):
                self.step()
        finally:
            for request in requests:
                if request.request_id in self._requests:
                    self.abort_request(request.request_id)
        return [request.output_token_ids for request in requests]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _activate(self, residency: AdapterResidency, plan: StepPlan) -> dict[int, int]:
        """Make the adapters of the step active; the slot of every active adapter.

        Those of running requests come first, so that none of them makes room for one that joins. Requests whose adapter
        cannot be loaded leave.
        """
        running = (*plan.decodes, *plan.idle)
        for request in (*residency.running_first(running), *plan.prefills):
            joins = request in plan.prefills
            try:
                residency.activate(request, resumed=not joins or request.preemptions > 0)
            except Exception:
                for other in plan.prefills if joins else (*plan.idle, *plan.decodes, *plan.prefills):
                    if _same_adapter(other.adapter, request.adapter):
                        self._requests.pop(other.request_id, None)  # idle members have left it
                        self.scheduler.take_out(other)
                raise
        return residency.slots()

    def _prefetch(self, pinned: Collection[int]) -> None:
        """Load the adapter of the head of the queue if there is a slot to spare.

        On a GPU this happens while the device computes the step: reading, checking and copying hide behind it (section
        5.2 of the paper).
        """
        waiting = self.scheduler.waiting
        if self._residency is not None and waiting and self.scheduler.has_slot(waiting[0], pinned):
            self._residency.prefetch(waiting[0])

    def _check_not_shut_out(self, pinned: Collection[int]) -> None:
        """With nothing running, RuntimeError if pins keep the head of the queue out."""
        scheduler = self.scheduler
        if scheduler.running or not scheduler.waiting or scheduler.has_slot(scheduler.waiting[0], pinned):
            return
        head = scheduler.waiting[0]
        raise RuntimeError(
            f"request {head.request_id!r} waits for a slot for adapter {head.adapter_id}, but all {len(pinned)} slots "
            f"are pinned for adapters {sorted(pinned)} and nothing runs; call manager.unpin_adapter or abort_request"
        )

    def _deliver(self, layout: StepLayout, tokens: list[int], statistics: StepStatistics) -> StepOutput:
        pairs = zip(layout.requests, tokens, strict=True)
        served = {request: token for request, token in pairs if request.status is RequestStatus.RUNNING}  # not idle
        for request, token in served.items():
            request.append(token)
        finished = tuple(request for request in served if request.status is RequestStatus.FINISHED)
        for request in finished:
            del self._requests[request.request_id]
        self.scheduler.retire_finished()
        return StepOutput({request.request_id: token for request, token in served.items()}, finished, statistics)

    def _check_new(self, request: Request) -> None:
        name = request.request_id
        if name in self._requests or self.blocks.block_table(name):
            raise ValueError(f"request_id {name!r} is in use by an unfinished request; choose another id")
        if request.output_token_ids or request.status is not RequestStatus.WAITING:
            raise ValueError(
                f"request {name!r} was served before ({request.status.value}); make a new Request for every generation"
            )
        highest = max(request.prompt_token_ids)
        if highest >= self.vocab_size:
            raise ValueError(
                f"prompt of request {name!r} contains token {highest}, the vocabulary has {self.vocab_size} ids; "
                "check the tokenizer"
            )

    def _check_length(self, request: Request) -> None:
        name, prompt, new = request.request_id, len(request.prompt_token_ids), request.max_new_tokens
        if prompt + new > self.config.max_model_len:
            raise ValueError(
                f"request {name!r} has {prompt} prompt tokens and {new} new ones, max_model_len is "
                f"{self.config.max_model_len}; shorten it or raise EngineConfig.max_model_len"
            )
        needed = self.blocks.blocks_for(request.final_kv_length)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"request {name!r} with {prompt} prompt tokens and {new} new ones needs {needed} KV blocks, the whole "
                f"cache has {self.blocks.num_blocks} (of {self.blocks.block_size} tokens); shorten it or raise "
                "EngineConfig.num_blocks"
            )

    def _check_adapter(self, request: Request) -> None:
        if request.adapter is None or self.config.ignore_adapters:
            return
        if self._residency is None:
            raise ValueError(
                f"request {request.request_id!r} names an adapter, but this engine has no LoRA layers; pass "
                "lora_config to Engine, or set EngineConfig.ignore_adapters to serve the backbone alone"
            )
        self._residency.check(request.adapter)


def _same_adapter(one: object, other: object) -> bool:
    """Whether two requests load the same folder under the same name."""
    return isinstance(one, LoRARequest) and isinstance(other, LoRARequest) and one.source == other.source


def _per_prompt(name: str, values: Any) -> list[Any]:
    """``values`` as a list; TypeError when there is nothing to iterate over."""
    try:
        return list(values)
    except TypeError:
        raise TypeError(
            f"{name} must be a list with one entry per prompt, got {type(values).__name__} {values!r}"
        ) from None


def _check_types(model: object, lora_config: object, engine_config: object) -> None:
    for name, value, wanted, optional in (
        ("model", model, LlamaForCausalLM, False),
        ("lora_config", lora_config, LoRAConfig, True),
        ("engine_config", engine_config, EngineConfig, True),
    ):
        if not isinstance(value, wanted) and not (optional and value is None):
            suffix = " or None" if optional else ""
            raise TypeError(f"{name} must be of class {wanted.__name__}{suffix}, got {type(value).__name__} {value!r}")


def _check_fits(config: EngineConfig, lora_config: LoRAConfig | None, model: LlamaForCausalLM) -> None:
    limit = model.config.max_position_embeddings
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, the model has {limit} positions (max_position_embeddings); "
            "lower max_model_len"
        )
    if config.ignore_adapters and lora_config is not None:
        raise ValueError("ignore_adapters=True is for an engine without LoRA; leave it out, or pass lora_config=None")
