"""Runner: the engine of one GPU, executing the scheduler's steps. No Ray.

The scheduler counts batches and pages for all runners (`gpu.py`), so a runner's engine must never decide otherwise. A
step has at most one prompt, there is a slot for every request of a batch, and the engine's admission reserve is hidden
from the scheduler. Yet a GPU engine admits a request some steps late while its adapter is read, or one step late when
the next step is launched already. Replies say so, and `dispatcher.py` compares.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from punica.adapters import LoRARequest
from punica.adapters.read import AdapterVersion
from punica.checks import clip
from punica.cluster.adapter_files import AdapterFiles, AdapterFolderCache, StoredFiles
from punica.cluster.gpu import StepWork
from punica.config import LoRAConfig
from punica.engine import Engine, EngineConfig, Request, RequestState
from punica.engine.pretrained import GenerationDefaults
from punica.engine.text import TextCodec
from punica.models import LlamaForCausalLM
from punica.scheduling.admission import FirstComeFirstServed


def random_engine(
    model: PretrainedConfig, lora_config: LoRAConfig | None = None, engine_config: EngineConfig | None = None,
    dtype: torch.dtype | None = None, device: str | None = None, seed: int = 0,
) -> Engine:  # fmt: skip
    """Build an engine on a random backbone, the same in every process; ``device=None``: the GPU where there is one."""
    backbone = LlamaForCausalLM(model, dtype, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backbone.init_random_weights(seed)
    return Engine(backbone, lora_config, engine_config)


@dataclass(frozen=True)
class RunnerDescription:
    """Sizes and settings of a runner, for the scheduler; equal if runners can be of one cluster.

    ``num_pages``: its engine's blocks without the reserve. Requests without a seed get theirs from ``seed``.
    ``versions``: of the adapters that it was started with.
    """

    max_batch_size: int
    num_pages: int = field(compare=False)
    page_size: int
    max_model_len: int
    vocab_size: int
    has_lora: bool
    seed: int
    defaults: GenerationDefaults
    codec: TextCodec | None = field(repr=False, compare=False)
    versions: Mapping[int, tuple[Hashable, AdapterVersion]] = field(repr=False, compare=False)


def described(engine: Engine) -> RunnerDescription:
    config, versions = engine.config, {} if engine.manager is None else engine.manager.folder_versions()
    return RunnerDescription(
        config.max_batch_size, config.total_blocks - _reserve(config), config.block_size, config.max_model_len,
        engine.vocab_size, engine.manager is not None or config.ignore_adapters, config.seed, engine.defaults,
        engine.codec, versions,
    )  # fmt: skip


@dataclass(frozen=True)
class JoiningRequest:
    """Request that is new to a runner. ``generated``: its tokens from other runners. ``files``: stored files of its
    adapter; ``None``: read its folder, which has to be of ``version``, or of any where no runner has loaded it.
    """

    request: Request
    generated: tuple[int, ...] = ()
    files: StoredFiles | None = None
    version: AdapterVersion | None = None


@dataclass(frozen=True)
class StepCommand:
    """Order for one step: abort the requests of ``drop``, add ``joins`` (``None``: no request), run."""

    drop: tuple[str, ...]
    joins: JoiningRequest | None


@dataclass(frozen=True)
class StepReply:
    """Result of a step.

    ``tokens``: one for each request that was served; ``logprobs`` of those that ask for them. ``waiting``: requests
    that have joined no step yet, as their adapter is still being read, or as the step was launched ahead of their
    order. ``finished``: requests that ended with this step; ``failed``: errors of those that ended with one.
    ``versions``: of the adapters' folders with which requests have begun in this step. ``used_blocks``: KV blocks of
    the tokens computed so far. ``seconds``: time in the runner.
    """

    tokens: dict[str, int]
    logprobs: dict[str, dict[int, float]]
    waiting: frozenset[str]
    finished: frozenset[str]
    failed: dict[str, str]
    versions: dict[str, AdapterVersion]
    used_blocks: int
    seconds: float


@dataclass(frozen=True)
class RunnerStep:
    """Timed step of a runner: order sent and reply received (``time.perf_counter``), ``seconds`` in the runner, and
    tokens of requests that were not aborted meanwhile.
    """

    runner: str
    work: StepWork
    begin_s: float
    end_s: float
    seconds: float
    num_tokens: int

    @property
    def is_empty(self) -> bool:
        """True for a step without requests: a probe, or one that only took requests out."""
        return not (self.work.decodes or self.work.prefill_tokens)


@dataclass(frozen=True)
class LostRunner:
    """Runner that died or could not be started, and the error."""

    runner: str
    reason: str


class Runner:
    """Engine that executes the scheduler's commands.

    ``fetch`` returns the files of an adapter from `StoredFiles.content`. Temporary folders hold as many adapters as the
    engine keeps in memory; an evicted one is fetched again. ValueError: the scheduler cannot predict the engine.
    """

    def __init__(self, build: Callable[[], Engine], fetch: Callable[[Any], AdapterFiles]) -> None:
        self.engine = engine = build()
        _check_follows(engine)
        in_memory = engine.manager.lora_config.max_cpu_loras if engine.manager is not None else None
        self.folders = AdapterFolderCache(fetch, in_memory or engine.config.max_batch_size)
        self._with_logprobs: dict[str, RequestState] = {}
        self._beginning: dict[str, int] = {}  # ids of their adapters

    def describe(self) -> RunnerDescription:
        return described(self.engine)

    def step(self, command: StepCommand) -> StepReply:
        """Run one step. An error of the joining request is in the reply; any other error is raised."""
        start = time.perf_counter()
        failed = {}
        for name in command.drop:
            self.engine.abort_request(name)
            self._with_logprobs.pop(name, None)
            self._beginning.pop(name, None)
        if command.joins is not None:
            try:
                self._join(command.joins)
            except (OSError, TypeError, ValueError, RuntimeError) as error:
                failed[command.joins.request.request_id] = f"{type(error).__name__}: {error}"
        output = self.engine.step()
        failed |= {result.request_id: str(result.error) for result in output.failed}
        finished = frozenset(result.request_id for result in output.finished)
        logprobs = {name: state.logprobs[-1] for name, state in self._with_logprobs.items() if name in output.tokens}
        begun = {name: self._beginning.pop(name) for name in {*self._beginning}.intersection(output.tokens)}
        known = self.engine.manager.folder_versions() if begun and self.engine.manager is not None else {}
        for name in (*finished, *failed):
            self._with_logprobs.pop(name, None)
            self._beginning.pop(name, None)
        versions = {name: known[adapter_id][1] for name, adapter_id in begun.items() if adapter_id in known}
        scheduler, blocks = self.engine.scheduler, self.engine.blocks
        served = [state for state in scheduler.running if state.request_id in output.tokens]
        unserved = {*scheduler.waiting, *scheduler.running}.difference(served)  # queued, or joins the step ahead
        waiting = frozenset(state.request_id for state in unserved)
        used = sum(blocks.blocks_for(state.num_tokens - 1) for state in served)
        seconds = time.perf_counter() - start
        return StepReply(output.tokens, logprobs, waiting, finished, failed, versions, used, seconds)

    def check_adapter(self, adapter: LoRARequest, files: StoredFiles | None) -> None:
        """Read all of an adapter and refuse it as the engine does. ValueError: the engine has no LoRA layers."""
        if self.engine.manager is None:
            raise ValueError("the runners' engines have no LoRA layers; build them with adapters or max_loras")
        local = adapter if files is None else self.folders.local(adapter, files)
        self.engine.manager.check_adapter(local, numbers=True)

    def _join(self, joining: JoiningRequest) -> None:
        request, version = joining.request, joining.version
        if isinstance(request.adapter, LoRARequest) and joining.files is not None:
            request = replace(request, adapter=self.folders.local(request.adapter, joining.files))
        elif isinstance(request.adapter, LoRARequest):
            self._beginning[request.request_id] = request.adapter_id
            if version is not None and self.engine.manager is not None:
                self.engine.manager.expect_version(request.adapter, version)
        state = self.engine.add_request(request, joining.generated)
        if state.params.logprobs is not None:
            self._with_logprobs[state.request_id] = state


def _reserve(config: EngineConfig) -> int:
    return config.max_batch_size + 1  # spare blocks of the engine's own admission


def _check_follows(engine: Engine) -> None:
    config, manager = engine.config, engine.manager
    if not isinstance(engine.scheduler.rule, FirstComeFirstServed):
        raise ValueError(
            f"the engine's admission rule is {type(engine.scheduler.rule).__name__}; a runner's must be 'fcfs', the "
            "scheduler of the cluster decides everything else"
        )
    if config.prefix_cache:
        raise ValueError("the engine has a prefix cache, whose blocks the scheduler cannot count; leave it out")
    if config.speculate:
        raise ValueError("the engine has speculate, the scheduler counts one token of a request a step; leave it out")
    if manager is not None and manager.lora_slots < config.max_batch_size:
        raise ValueError(
            f"the engine has {manager.lora_slots} adapter slots (max_loras) for batches of {config.max_batch_size}: a "
            "request could wait for a slot, of which the scheduler knows nothing; raise max_loras, or lower "
            "max_batch_size"
        )
    if config.total_blocks <= _reserve(config):
        raise ValueError(
            f"the engine has {clip(config.total_blocks)} KV blocks, of which max_batch_size + 1 = {_reserve(config)} "
            "stay in reserve; raise EngineConfig.num_blocks"
        )
