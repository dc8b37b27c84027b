"""Activated LoRA in the engine, with the PEFT library in float32 as the oracle of tokens and log-probabilities."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import peft
import pytest
import torch
import transformers

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import Engine, GenerationResult, Request, RequestState
from punica.engine.runner import ModelRunner
from punica.scheduling import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
INVOCATIONS = {11: (5, 6), 12: (7,), 13: (8, 8, 9)}
CONTEXT = tuple(range(100, 137))


def activated(backbone, folder, number: int, invocation: tuple[int, ...]) -> LoRARequest:
    """Write a random adapter that is active from these tokens on."""
    path = write_random_adapter(folder / str(number), backbone.config, 4, number)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": invocation}))
    return LoRARequest(f"activated-{number}", number, str(path))


Generated = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""


def generated(model: Any, prompt: Sequence[int], new: int) -> Generated:
    """Continue a prompt by a model of transformers or PEFT."""
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        made = model.generate(
            input_ids=torch.tensor([prompt]), output_logits=True, return_dict_in_generate=True, **options
        )
    tokens = made.sequences[0, len(prompt) :].tolist()
    rows = [row[0].log_softmax(-1) for row in made.logits]
    return tokens, [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def check_generated(state: RequestState | GenerationResult, expected: Generated) -> None:
    tokens, logprobs = expected
    assert (state.error, state.logprobs and [next(iter(one)) for one in state.logprobs]) == (None, tokens)
    assert [one[token] for one, token in zip(state.logprobs, tokens, strict=True)] == pytest.approx(logprobs, abs=2e-4)


class Oracle:
    """PEFT's generation with each of three activated adapters, with a plain one, and without."""

    def __init__(self, backbone, folder) -> None:
        self.adapters = {1: backbone.adapters[1], 4: backbone.adapters[4]}
        for number, invocation in INVOCATIONS.items():
            self.adapters[number] = activated(backbone, folder, number, invocation)
        base = transformers.LlamaForCausalLM.from_pretrained(backbone.folder).eval()
        self._models = {0: base}
        for number, adapter in self.adapters.items():
            own = transformers.LlamaForCausalLM.from_pretrained(backbone.folder).eval()
            self._models[number] = peft.PeftModel.from_pretrained(own, adapter.lora_path)
        self._known: dict[tuple, tuple] = {}

    def generate(self, prompt: tuple[int, ...], number: int, new: int) -> Generated:
        key = prompt, number, new
        if key not in self._known:
            self._known[key] = generated(self._models[number], prompt, new)
        return self._known[key]


@pytest.fixture(scope="module")
def oracle(backbone, tmp_path_factory) -> Oracle:
    return Oracle(backbone, tmp_path_factory.mktemp("activated"))


def check(oracle: Oracle, engine: Engine, *wishes: tuple[tuple[int, ...], int, int]) -> list:
    """Serve wishes (prompt, adapter, new tokens) together; compare with PEFT; return the statistics of the steps."""
    states, steps = [], []
    for place, (prompt, number, new) in enumerate(wishes):
        adapter = oracle.adapters.get(number)
        states.append(engine.add_request(Request(str(place), prompt, SamplingParams(new, logprobs=0), adapter)))
    while engine.has_unfinished():
        steps.append(engine.step().statistics)
    for state, wish in zip(states, wishes, strict=True):
        check_generated(state, oracle.generate(*wish))
    return steps


def test_the_oracle_tells_a_beginning_from_the_whole(oracle) -> None:
    prompt = (*CONTEXT, *INVOCATIONS[11], 3, 4)
    outputs = {tuple(oracle.generate(prompt, number, 8)[0]) for number in (0, 1, 11, 12)}
    assert len(outputs) == 3, "12 has no occurrence: it is the base"


@pytest.mark.parametrize("chunk", [None, 1, 7, 38])
def test_two_adapters_beside_the_base(backbone, oracle, chunk, ahead) -> None:
    """An occurrence at the end, at the beginning, twice, none, and one that is generated only; 38: cut inside of it."""
    sizes = {} if chunk is None else {"admission": "chunked", "prefill_chunk": chunk}
    wishes = [
        ((*CONTEXT, 5, 6), 11, 6), ((*CONTEXT, 7, 1, 2), 12, 6), (CONTEXT, 0, 6), ((5, 6, *CONTEXT[:9]), 11, 6),
        ((5, 6, 1, 5, 6, 2), 11, 6), (CONTEXT[:20], 11, 6), ((*CONTEXT[:8], 8, 8, 9), 13, 6), (CONTEXT[:9], 4, 6),
    ]  # fmt: skip
    check(oracle, backbone.engine(**sizes), *wishes)


SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 5 else []) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_scenarios_with_and_without_a_prefix_cache(backbone, oracle, monkeypatch, seed) -> None:
    chance = Random(seed)
    monkeypatch.setattr(ModelRunner, "works_ahead", chance.random() < 0.5)
    chunk, size = chance.choice((None, *range(1, 40))), chance.choice((2, 4, 5, 16))
    sizes = {} if chunk is None else {"admission": "chunked", "prefill_chunk": chunk}
    engine = backbone.engine(**sizes, prefix_cache=chance.random() < 0.8, block_size=size, num_blocks=600 // size)
    wishes = []
    for _ in range(chance.randint(3, 8)):
        number = chance.choice((0, 1, 4, *INVOCATIONS, *INVOCATIONS))
        invocation, digit = chance.choice([(), *INVOCATIONS.values()]), chance.randint(1, 9)  # 0 is PEFT's padding here
        parts = CONTEXT[: chance.randint(0, 37)], invocation, (digit,)
        prompt = sum(chance.choices(parts, k=chance.randint(0, 3)), CONTEXT[: chance.randint(1, 37)])
        wishes.append((prompt[-58:], number, chance.randint(1, 6)))
    for _ in range(2):  # the second time some of it is cached
        check(oracle, engine, *chance.sample(wishes, len(wishes)))


def test_an_invocation_that_is_generated_does_not_activate(backbone, oracle) -> None:
    """Nor where the request is preempted and computed again with its output."""
    prompt = CONTEXT[:5]
    tokens, _ = oracle.generate(prompt, 0, 8)
    engine = backbone.engine(block_size=2, num_blocks=14)
    state = engine.add_request(Request("a", prompt, 8, oracle.adapters[11]))
    engine.step()
    engine.forget_next()
    engine.scheduler.preempt(state)
    while engine.has_unfinished():
        engine.step()
    assert state.output_token_ids == tokens


def test_a_prefix_of_the_base_serves_16_adapters_and_is_held_once(backbone, oracle, tmp_path, ahead) -> None:
    engine = backbone.engine("fcfs_many", prefix_cache=True, block_size=4, max_batch_size=16, num_blocks=100)
    check(oracle, engine, (CONTEXT, 0, 1))
    adapters = [activated(backbone, tmp_path, number, (5,)) for number in range(20, 36)]
    prompt = (*CONTEXT[:36], 5, 6)
    states = [engine.add_request(Request(a.lora_name, prompt, 4, a)) for a in adapters]
    output = engine.step()
    assert output.statistics.num_hit_tokens == 16 * 36
    assert output.statistics.num_prefill_tokens == 16 * 2
    in_use = engine.blocks.num_blocks - engine.blocks.num_free
    assert in_use == 9 + 16, "one copy of the prefix, and a block each"
    while engine.has_unfinished():
        engine.step()
    assert len({tuple(state.output_token_ids) for state in states}) > 8
    steps = check(
        oracle, engine, ((*CONTEXT[:36], 5, 6), 11, 5), ((*CONTEXT[:33], 7), 12, 5), ((*CONTEXT[:36], 5), 1, 5)
    )
    assert sum(step.num_hit_tokens for step in steps) == 36 + 32, "a plain adapter has its own prefix"
