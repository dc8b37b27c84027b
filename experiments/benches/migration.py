"""Migration of a running request, for `sec53_migration`: its blocks are gathered, sent in one piece and scattered; or
prompt and generated tokens are computed again by one prefill.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.benches.engine_steps import EngineSteps, StepShape
from experiments.benches.model_steps import BLOCK_SIZE, TOLERANCE
from experiments.harness.experiment import CheckFailed, check
from experiments.harness.schema import ModelConf
from experiments.measure.timing import Protocol
from punica.adapters import LoRARequest
from punica.engine import Engine, Request
from punica.engine.attention import KVCache

RECOMPUTE, COPY, COPY_HOST, COPY_PEER = "recompute", "copy", "copy_host", "copy_peer"
PEER = "cuda:1"
_ADAPTER = LoRARequest("adapter-1", 1, "registered in memory")
CHECKED = 19
"""Tokens of the request that is moved both ways before anything is timed: two blocks, the last one not full."""


class Blocks:
    """One request's place in a cache: blocks `table` of each of `parts` (keys of all layers, then values)."""

    def __init__(self, parts: Sequence[Tensor], table: Sequence[int]) -> None:
        self._parts, self.device = parts, parts[0].device
        self._table = torch.tensor(table, device=self.device)

    def room(self, device: torch.device | str, *, pinned: bool = False) -> Tensor:
        """Memory for what they hold, `[parts, blocks of the request, elements of a block]`."""
        shape = len(self._parts), len(self._table), self._parts[0].shape[1]
        return torch.empty(shape, dtype=self._parts[0].dtype, device=device, pin_memory=pinned)

    def gather(self, out: Tensor) -> Tensor:
        for part, place in zip(self._parts, out, strict=True):
            torch.index_select(part, 0, self._table, out=place)
        return out

    def scatter(self, content: Tensor) -> None:
        for part, place in zip(self._parts, content, strict=True):
            part.index_copy_(0, self._table, place)

    def content(self) -> Tensor:
        return self.gather(self.room(self.device)).cpu()


def parts_of(cache: KVCache) -> list[Tensor]:
    return [rows.view(cache.num_blocks, -1) for rows in (*cache.keys, *cache.values)]


@dataclass
class Route:
    """Way from `source` to `target` through memories `between`: the first here, the last on the target's device."""

    source: Blocks
    target: Blocks
    between: Sequence[Tensor]

    def move(self) -> None:
        self.source.gather(self.between[0])
        for here, there in itertools.pairwise(self.between):
            there.copy_(here, non_blocking=True)
        self.target.scatter(self.between[-1])


@dataclass
class Moves:
    """Seconds by system for one context, and of a decode step of a full batch; bytes of keys and values."""

    nbytes: int
    seconds: dict[str, list[float]]
    decode: list[float] = field(default_factory=list)


class Migration:
    """An engine with `batch_size` slots and adapters of `rank`, and room for what is copied out of its cache."""

    def __init__(self, model: ModelConf, rank: int, batch_size: int, longest: int, device: str) -> None:
        self.steps = EngineSteps.of_llama(model, rank, batch_size, longest, device)
        self._device, self._blocks = device, 2 * -(-longest // BLOCK_SIZE)
        self._source = parts_of(self.steps.engine.runner.attention.cache)
        self._targets: dict[str, list[Tensor]] = {}
        check_recomputed(self.steps.engine)

    def measured(self, context: int, systems: Sequence[str], protocol: Protocol) -> Moves:
        """Time each of `systems` for a request of `context` tokens, and decode steps; `CheckFailed` for a bad copy."""
        routes = {name: self.route(name, context) for name in systems if name != RECOMPUTE}
        for name, route in routes.items():
            check_moved(route, name)
        nbytes = sum(part[0].nbytes for part in self._source) * -(-context // BLOCK_SIZE)
        moves = Moves(nbytes, {name: [] for name in systems})
        for _ in protocol.turns(len(systems) + 1):
            for name in systems:
                seconds = self._recompute(context) if name == RECOMPUTE else self._copy(routes[name])
                moves.seconds[name].append(seconds)
            moves.decode.append(self._decode(context))
        return moves

    def route(self, name: str, context: int) -> Route:
        """Build the route by which the system `name` copies a request of `context` tokens."""
        count, device = -(-context // BLOCK_SIZE), PEER if name == COPY_PEER else self._device
        if device not in self._targets:
            shape = self._blocks, self._source[0].shape[1]
            self._targets[device] = [torch.empty(shape, dtype=part.dtype, device=device) for part in self._source]
        source = Blocks(self._source, scattered(count, len(self._source[0])))
        target = Blocks(self._targets[device], scattered(count, self._blocks)[::-1])
        between = [source.room(self._device)]
        if name == COPY_HOST:
            between.append(source.room("cpu", pinned=self._device != "cpu"))
        if name != COPY:
            between.append(source.room(target.device))
        return Route(source, target, between)

    def _recompute(self, context: int) -> float:
        shape = StepShape(0, context, context, (1,))
        (self.steps.settle if self.steps.on_gpu else self.steps.begin)(shape)  # a first step compiles kernels there
        return self.steps.step().seconds

    def _decode(self, context: int) -> float:
        batch = self.steps.engine.config.max_batch_size
        self.steps.settle(StepShape(batch, context, 0, tuple(range(1, batch + 1))))
        return self.steps.step().seconds

    def _copy(self, route: Route) -> float:
        self._wait()
        started = time.perf_counter()
        route.move()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        for device in self._targets:
            if device != "cpu":
                torch.cuda.synchronize(device)


def scattered(count: int, blocks: int) -> list[int]:
    """`count` of `blocks` blocks, spread out: as after hours in which requests came and went.

    >>> scattered(3, 10)
    [0, 3, 6]
    """
    return [place * (blocks // count) for place in range(count)]


def check_moved(route: Route, name: str) -> None:
    """Raise `CheckFailed` unless the target holds, bit for bit, what the source does, once it was moved."""
    route.target.scatter(torch.full_like(route.target.room(route.target.device), torch.nan))
    route.move()
    if not route.source.content().equal(route.target.content()):
        raise CheckFailed(f"{name}: keys and values do not arrive as they left")


def check_recomputed(engine: Engine) -> None:
    """Raise `CheckFailed` unless a prefill of all tokens gives the keys and values of prefill and decode."""
    first = Request("stays", [(5 * place + 3) % engine.vocab_size for place in range(CHECKED // 2)], CHECKED, _ADAPTER)
    state = engine.add_request(first)
    while state.num_tokens <= CHECKED:  # the last token has no keys and values yet
        engine.step()
    before = _held(engine, first.request_id)
    moved = Request("moves", state.token_ids[:CHECKED], 2, _ADAPTER)
    engine.abort_request(first.request_id)
    engine.add_request(moved)
    engine.step()
    after = _held(engine, moved.request_id)
    engine.abort_request(moved.request_id)
    check("a prefill of all tokens", after, before, TOLERANCE[before.dtype])


def _held(engine: Engine, request_id: str) -> Tensor:
    cache = engine.runner.attention.cache
    table = engine.blocks.block_table(request_id)[: -(-CHECKED // BLOCK_SIZE)]
    content = Blocks(parts_of(cache), table).content()
    return content.view(len(content), len(table) * BLOCK_SIZE, -1)[:, :CHECKED]
