"""Pipelines for `ext_prefix_cache`: the base reads a context, then adapters continue it, each in a request of its own.

The engines of three ways share weights and adapters, and differ in what they compute again. One exists at a time.
"""

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ModelConf
from experiments.systems.weights import Limits, Weights
from punica.adapters import LoRAModelManager, LoRARequest
from punica.engine import Engine, Request
from punica.scheduling import RequestState, SamplingParams

INVOCATION = (3, 4, 5)
"""Tokens that switch an activated adapter on; no context has them."""
FIRST_TOKEN = 16
QUESTION, ANSWER = 16, 32
"""Tokens of an adapter's turn: what it is asked behind the invocation, and what it generates."""
AGREEMENT = 0.75
"""Share of first tokens that must be as without a cache; 16 bits round sums of other lengths differently. On an
H200 two of 16 first tokens of random weights differed.
"""


@dataclass(frozen=True)
class Way:
    activated: bool
    cached: bool


WAYS = {"recompute": Way(True, False), "plain_lora_cached": Way(False, True), "activated_cached": Way(True, True)}


class Turns(NamedTuple):
    """One pipeline: seconds in all, and to the first token of each adapter; most blocks in use; first tokens."""

    seconds: float
    first_tokens: list[float]
    blocks: int
    tokens: list[int]


class Pipelines:
    """The engines of all ways, for contexts and numbers of adapters up to the largest of a figure. ``cache_tokens``:
    what keys and values have room for; where it is too little for all turns, some wait.
    """

    def __init__(
        self, model: ModelConf, device: str, contexts: Sequence[int], adapters: int, rank: int, seed: int,
        cache_tokens: int,
    ) -> None:  # fmt: skip
        longest = max(contexts) + 1 + len(INVOCATION) + QUESTION + ANSWER
        model = model.model_copy(update={"max_position_embeddings": max(longest, model.max_position_embeddings)})
        self._limits = Limits(adapters, longest)
        size = self._limits.block_size
        blocks = min(adapters * (-(-longest // size) + 1), cache_tokens // size)
        self._limits = replace(self._limits, num_blocks=blocks)
        self._weights = Weights(model, device, self._limits, rank, seed=seed)
        self._rank, self._engines = rank, dict[str, Engine]()
        self._expected: dict[tuple[int, int, int], list[int]] = {}

    def run(self, name: str, context: int, adapters: int, seed: int) -> Turns:
        """Serve one pipeline; equal seeds give equal contexts and questions."""
        engine, draw = self._engine(name), random.Random(seed)
        prompt = self._tokens(draw, context)
        base = engine.add_request(Request("base", prompt, _greedy(1)))
        asked = [
            Request(
                f"turn-{i}", (*prompt, *INVOCATION, *self._tokens(draw, QUESTION)), _greedy(ANSWER),
                LoRARequest(f"adapter-{i}", i, "registered in memory"),
            )
            for i in range(1, adapters + 1)
        ]  # fmt: skip
        while engine.has_unfinished():
            engine.step()
        states, blocks = [engine.add_request(request) for request in asked], 0
        while engine.has_unfinished():
            blocks = max(blocks, engine.blocks.num_blocks - engine.blocks.num_free)
            engine.step()
        firsts = [_first(state) - state.arrival_s for state in states]
        ended = max(state.last_token_s or 0.0 for state in states)
        return Turns(ended - base.arrival_s, firsts, blocks, [state.output_token_ids[0] for state in states])

    def check(self, name: str, context: int, adapters: int, seed: int) -> None:
        """Warm up, and compare first tokens with those of an engine without cache. `CheckFailed`: too few are equal."""
        case, way = (context, adapters, seed), WAYS[name]
        if way.cached and way.activated and case not in self._expected:
            self.check("recompute", *case)
        found = self.run(name, *case).tokens
        if not way.cached:
            self._expected[case] = found
        if not (way.cached and way.activated):
            return
        share = sum(map(int.__eq__, found, self._expected[case])) / adapters
        if share < AGREEMENT:
            raise CheckFailed(f"{name}: {share:.2f} of the first tokens are as without a cache, must be {AGREEMENT}")

    def _engine(self, name: str) -> Engine:
        if name not in self._engines:
            self._engines.clear()
            gc.collect()  # a manager refers to itself
            way = WAYS[name]
            config = replace(self._limits.engine_config(lora=True), prefix_cache=way.cached)
            lora = config.lora_config(self._rank, max_loras=config.max_batch_size)
            engine = Engine(self._weights.backbone(), lora, config, warm_up=False)
            fields = {"alora_invocation_tokens": list(INVOCATION)} if way.activated else {}
            for adapter in range(1, config.max_batch_size + 1):
                cast(LoRAModelManager, engine.manager).add_adapter(self._weights.adapter(adapter, **fields))
            self._engines[name] = engine
        return self._engines[name]

    def _tokens(self, draw: random.Random, count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_TOKEN, self._weights.vocab_size) for _ in range(count))


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, ignore_eos=True)


def _first(state: RequestState) -> float:
    if state.first_token_s is None:
        raise CheckFailed(f"{state.request_id} has no token: {state.error}")
    return state.first_token_s
