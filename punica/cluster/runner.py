"""A runner: the engine of one GPU (or of one tensor-parallel rank), taking the steps that the scheduler decided on.

It decides nothing. The scheduler counts batches and pages for all runners (`gpu.py`), so a runner's engine must never
come to another decision than it: a step has at most one prompt, a slot is there for every request of a batch, and the
engine has more blocks than the scheduler knows of, by what it wants to see free before somebody joins. One thing it
cannot foresee: on a GPU a request joins some steps later, while the others go on, if its adapter is not in memory
(`punica.engine.residency`), or one later, if the next step has begun. Every reply says what really happened, and
`dispatch.py` compares.

No Ray in here: what an actor wraps can be run in any process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from punica.adapters import LoRARequest
from punica.checks import clip
from punica.cluster.folders import AdapterFiles, AdapterFolders, StoredFiles
from punica.config import LoRAConfig
from punica.engine import Engine, EngineConfig, Request, RequestState
from punica.engine.folder import GenerationDefaults
from punica.models import LlamaForCausalLM
from punica.scheduling.admission import FirstComeFirstServed


def random_engine(
    model: PretrainedConfig, lora_config: LoRAConfig | None = None, engine_config: EngineConfig | None = None,
    dtype: torch.dtype | None = None, device: str | None = None, seed: int = 0,
) -> Engine:  # fmt: skip
    """An engine on a random backbone, the same in every process, as experiments measure; ``device=None``: the GPU where
    there is one. Of a checkpoint folder it is ``Engine.from_pretrained``.
    """
    backbone = LlamaForCausalLM(model, dtype, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backbone.init_random_weights(seed)
    return Engine(backbone, lora_config, engine_config)


@dataclass(frozen=True)
class RunnerDescription:
    """What the scheduler has to know of a runner.

    ``num_pages`` of ``page_size`` tokens are its engine's blocks without the reserve; ``seed`` is the engine's, from
    which requests without a seed get theirs; ``tokenizer`` and ``defaults`` are its engine's.
    """

    max_batch_size: int
    num_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int
    has_lora: bool
    seed: int
    defaults: GenerationDefaults
    tokenizer: Any = field(repr=False)

    @property
    def kind(self) -> tuple:
        """What runners of one cluster must have in common."""
        return (
            self.max_batch_size, self.page_size, self.max_model_len, self.vocab_size, self.has_lora, self.seed,
            self.defaults,
        )  # fmt: skip


@dataclass(frozen=True)
class JoiningRequest:
    """A request that is new to a runner. ``generated``: its tokens from elsewhere. ``files``: where the files of its
    adapter are to be had; ``None``: in the folder that it names.
    """

    request: Request
    generated: tuple[int, ...] = ()
    files: StoredFiles | None = None


@dataclass(frozen=True)
class StepCommand:
    """What to do next: forget the requests of ``drop``, let ``joins`` join (``None``: nobody), make one step."""

    drop: tuple[str, ...]
    joins: JoiningRequest | None


@dataclass(frozen=True)
class StepReply:
    """What a step did.

    Attributes:
        tokens: one for each request that was served; ``logprobs`` of those that ask for them.
        waiting: the one that was to begin, if its adapter is still being read beside the steps of the others: it
            begins as soon as it can, and nobody else before it.
        finished: those that ended with it. ``failed``: those that ended with an error, which is the value.
        used_blocks: of the KV cache, by what is computed after the step; a GPU has reserved the next tokens' already.
        seconds: that it took in the runner.
    """

    tokens: dict[str, int]
    logprobs: dict[str, dict[int, float]]
    waiting: frozenset[str]
    finished: frozenset[str]
    failed: dict[str, str]
    used_blocks: int
    seconds: float


class Runner:
    """An engine under orders.

    Args:
        build: makes the engine; called once, here.
        fetch: the files of an adapter from `StoredFiles.content`. They are written to a temporary folder; there are as
            many of these as the engine keeps adapters in memory, and who comes back later is fetched again.

    ValueError for an engine whose decisions the scheduler could not foresee.
    """

    def __init__(self, build: Callable[[], Engine], fetch: Callable[[Any], AdapterFiles]) -> None:
        self.engine = engine = build()
        _check_follows(engine)
        in_memory = engine.manager.lora_config.max_cpu_loras if engine.manager is not None else None
        self.folders = AdapterFolders(fetch, in_memory or engine.config.max_batch_size)
        self._with_logprobs: dict[str, RequestState] = {}

    def describe(self) -> RunnerDescription:
        """For the scheduler."""
        engine, config = self.engine, self.engine.config
        return RunnerDescription(
            config.max_batch_size, config.total_blocks - _reserve(config), config.block_size, config.max_model_len,
            engine.vocab_size, engine.manager is not None or config.ignore_adapters, config.seed, engine.defaults,
            None if engine.codec is None else engine.codec.tokenizer,
        )  # fmt: skip

    def step(self, command: StepCommand) -> StepReply:
        """One step. What is wrong with the request that joins is in the reply; any other error is the runner's."""
        start = time.perf_counter()
        failed = {}
        for name in command.drop:
            self.engine.abort_request(name)
            self._with_logprobs.pop(name, None)
        if command.joins is not None:
            try:
                self._join(command.joins)
            except (OSError, TypeError, ValueError, RuntimeError) as error:
                failed[command.joins.request.request_id] = f"{type(error).__name__}: {error}"
        output = self.engine.step()
        failed |= {result.request_id: str(result.error) for result in output.failed}
        finished = frozenset(result.request_id for result in output.finished)
        logprobs = {
            name: state.logprobs[-1] for name, state in self._with_logprobs.items() if name in output.tokens
        }
        for name in (*finished, *failed):
            self._with_logprobs.pop(name, None)
        running = self.engine.scheduler.running
        used = sum(self.engine.blocks.blocks_for(state.num_tokens - 1) for state in running)
        waiting = frozenset(state.request_id for state in self.engine.scheduler.waiting)
        return StepReply(output.tokens, logprobs, waiting, finished, failed, used, time.perf_counter() - start)

    def _join(self, joining: JoiningRequest) -> None:
        request = joining.request
        if joining.files is not None and isinstance(request.adapter, LoRARequest):
            request = replace(request, adapter=self.folders.local(request.adapter, joining.files))
        state = self.engine.add_request(request, joining.generated)
        if state.params.logprobs is not None:
            self._with_logprobs[state.request_id] = state


def _reserve(config: EngineConfig) -> int:
    """Blocks that the engine's own admission wants to see free beside those that it uses: one for each request of a
    full batch, and one.
    """
    return config.max_batch_size + 1


def _check_follows(engine: Engine) -> None:
    config, manager = engine.config, engine.manager
    if not isinstance(engine.scheduler.rule, FirstComeFirstServed):
        raise ValueError(
            f"the engine's admission rule is {type(engine.scheduler.rule).__name__}; a runner's must be 'fcfs', the "
            "scheduler of the cluster decides everything else"
        )
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
