"""Mixtures in the engine: tokens and log-probabilities of PEFT's `add_weighted_adapter` ("cat") in float32."""

import json
import re
import shutil
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from punica.adapters import LoRARequest
from punica.checks import MOST_MIXED
from punica.engine import Engine, Mixture, Request
from punica.scheduling import SamplingParams
from tests.engine.test_activated_lora import Generated, activated, check_generated, generated
from tests.world import adapter_of_the_ends

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PROMPT = tuple(range(100, 137))
TWO, THREE, ONE = {1: 0.7, 4: 0.3}, {2: -0.5, 1: 1.5, 6: 0.25}, {3: 0.5}
WISHES = [(PROMPT, TWO), (PROMPT[:9], {1: 1.0}), (PROMPT[:5], THREE), (PROMPT[:1], {}), (PROMPT, ONE), (PROMPT, {4: 1})]


def backbone_model(backbone) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(backbone.folder).eval()


class Oracle:
    """PEFT's generation with weighted adapters, each mixture merged into one by concatenated ranks."""

    def __init__(self, backbone) -> None:
        base = backbone_model(backbone)
        self.adapters = backbone.adapters
        self._model = peft.PeftModel.from_pretrained(base, self.adapters[1].lora_path, "1").eval()
        for number in (2, 3, 4, 6):
            self._model.load_adapter(self.adapters[number].lora_path, str(number))

    def generate(self, prompt: tuple[int, ...], weights: dict[int, float], new: int, how: str = "cat") -> Generated:
        if not weights:
            with self._model.disable_adapter():
                return generated(self._model, prompt, new)
        name = how + "".join(f"_{one}_{weight:g}".replace(".", "p") for one, weight in weights.items())
        self._model.add_weighted_adapter([*map(str, weights)], [*weights.values()], name, combination_type=how)
        self._model.set_adapter(name)
        return generated(self._model, prompt, new)


@pytest.fixture(scope="module")
def oracle(backbone) -> Oracle:
    return Oracle(backbone)


@pytest.fixture(scope="module")
def expected(oracle) -> list[tuple]:
    return [oracle.generate(*wish, 6) for wish in WISHES]


def request_of(oracle: Oracle, name: str, prompt: tuple[int, ...], weights: dict[int, float]) -> Request:
    adapters = {oracle.adapters[number]: weight for number, weight in weights.items()}
    return Request(name, prompt, SamplingParams(6, logprobs=0), adapters or None)


def serve(oracle: Oracle, engine: Engine, expected: list[tuple], wishes=WISHES) -> list:
    states = [engine.add_request(request_of(oracle, str(i), *wish)) for i, wish in enumerate(wishes)]
    while engine.has_unfinished():
        engine.step()
    for pair in zip(states, expected, strict=True):
        check_generated(*pair)
    return states


@pytest.mark.parametrize(
    "sizes", [{"max_loras": 3}, {}, {"speculate": 2}, {"admission": "chunked", "prefill_chunk": 7}], ids=str
)
def test_tokens_are_those_of_merged_adapters_beside_plain_requests(backbone, oracle, expected, sizes, ahead) -> None:
    """Three slots: mixtures wait for all their adapters together, and evict others'."""
    engine = backbone.engine(**sizes)
    serve(oracle, engine, expected)
    assert not engine.manager._held, "no version is held by a request that has ended"


def test_one_adapter_is_also_pefts_linear_combination(backbone, oracle) -> None:
    """Of several, "linear" merges A and B each, with cross terms: another model, which is not served."""
    wishes = [(PROMPT, ONE), (PROMPT[:4], {1: 0.25})]
    serve(oracle, backbone.engine(), [oracle.generate(*wish, 6, "linear") for wish in wishes], wishes)


def test_prefixes_are_shared_by_equal_contents_and_weights_alone(backbone, oracle) -> None:
    engine = backbone.engine(prefix_cache=True, block_size=4)
    found = []
    for weights in (TWO, {1: 0.3, 4: 0.7}, {1: 1}, TWO):
        state = serve(oracle, engine, [oracle.generate(PROMPT, weights, 6)], [(PROMPT, weights)])[0]
        found.append(state.hit)
    assert found == [0, 0, 0, 36]


def test_a_preempted_mixture_continues_and_an_aborted_one_frees_its_adapters(backbone, oracle, expected) -> None:
    engine = backbone.engine(max_loras=3)
    states = [engine.add_request(request_of(oracle, str(i), *wish)) for i, wish in enumerate(WISHES[:3])]
    engine.step()
    engine.forget_next()
    engine.scheduler.preempt(states[0])
    for number in (2, 3, 6):  # others take the slots meanwhile
        engine.manager.add_adapter(oracle.adapters[number])
    engine.step()
    engine.abort_request("2")
    for number in (3, 6):  # two adapters more than the mixture leaves room for
        engine.manager.add_adapter(oracle.adapters[number])
        engine.manager.pin_adapter(number)
    while engine.has_unfinished():
        engine.step()
    assert states[1].output_token_ids == expected[1][0]
    assert "no slot for adapters [1, 4]" in states[0].error
    engine.manager.unpin_adapter(3)
    engine.manager.unpin_adapter(6)
    serve(oracle, engine, expected)
    assert not engine.manager._held
    assert not engine._residency._users


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("numbers", "weights", "error", "message"),
    [
        ((), (), ValueError, "mixes 0 adapters"),
        ((1,), (float("nan"),), ValueError, "finite"),
        ((1,), (1e39,), ValueError, "float32"),
        ((1,), (True,), TypeError, "number"),
        ((1,), ("0.5",), TypeError, "number"),
        (tuple(range(MOST_MIXED + 1)), (0.1,) * (MOST_MIXED + 1), ValueError, f"1 to {MOST_MIXED}"),
        ((1, 2, 4), (0.5, 0.5, 1), ValueError, "2 slots"),
        ((1, 1001), (0.5, 0.5), ValueError, "distinct"),
        ((1, 999), (0.5, 0.5), FileNotFoundError, "nowhere"),
        ((1, 0), (0.5, 0.5), TypeError, "LoRARequest"),
        ((1, 11), (0.5, 0.5), ValueError, r"^adapter 'activated-11' is activated .* \[5\], and cannot be m"),
        ((9, 1), (0.5, 0.5), ValueError, r"^adapter 'ends' has .*\['model.embed_tokens'\], and cannot be m"),
    ],
)
def test_refused_before_anything_changes(backbone, numbers, weights, error, message, by_hand, tmp_path) -> None:
    engine, nested = backbone.engine(max_loras=2), Mixture((backbone.adapters[3],), (0.5,))
    known = {**backbone.adapters, 999: LoRARequest("lost", 999, "/nowhere"), 0: nested if by_hand else "name"}
    known[1001] = LoRARequest("twin", 1, backbone.adapters[2].lora_path)
    known |= {11: activated(backbone, tmp_path, 11, (5,)), 9: adapter_of_the_ends(backbone, tmp_path / "ends")[0]}
    adapters = tuple(known.get(number, number) for number in numbers)
    given = Mixture(adapters, weights) if by_hand else dict(zip(adapters, weights, strict=True))
    with pytest.raises(error, match=message):
        engine.add_request(Request("a", PROMPT, 3, given))
    assert not any((engine.has_unfinished(), engine._residency._users, engine.manager.list_adapters()))
    if (number := max(numbers, default=0)) in (9, 11):  # and where it is loaded
        engine.manager.add_adapter(known[number])
        assert re.search(message, engine.generate([PROMPT], given, 3)[0].error.removeprefix("ValueError: "))
        assert [*engine.manager.list_adapters()] == [number]


def test_a_mixture_behind_a_reload_is_judged_by_what_is_loaded_then(backbone, tmp_path) -> None:
    engine, old = backbone.engine(), activated(backbone, tmp_path, 11, (5,))
    engine.manager.add_adapter(old)
    shutil.copytree(backbone.adapters[1].lora_path, old.lora_path, dirs_exist_ok=True)
    engine.add_request(Request("reload", PROMPT, 3, replace(old, load_inplace=True)))
    state = engine.add_request(Request("mixed", PROMPT, 3, {old: 0.5}))
    while engine.has_unfinished():
        engine.step()
    (expected,) = engine.generate([PROMPT], {backbone.adapters[1]: 0.5}, 3)
    assert (state.error, state.output_token_ids) == (None, expected.token_ids)


def test_mixtures_made_by_hand_are_taken_as_dicts_are(backbone) -> None:
    engine = backbone.engine(max_loras=3)
    with pytest.raises(ValueError, match="2 adapters by 1 weights"):
        engine.add_request(Request("a", PROMPT, 3, Mixture((backbone.adapters[1], backbone.adapters[2]), (0.5,))))
    given = {backbone.adapters[1]: 0.7, backbone.adapters[4]: 0.3}
    mixture, plain = Mixture((*given,), (*given.values(),)), Mixture((backbone.adapters[1],), (1,))
    one, two, three = engine.generate([PROMPT] * 3, [mixture, given, plain], 3)
    assert one.token_ids == two.token_ids == engine.generate([PROMPT], mixture, 3)[0].token_ids != three.token_ids


def test_a_mixture_without_slots_or_layers_that_take_it_is_refused_on_arrival(backbone) -> None:
    engine = backbone.engine(max_loras=3)
    for number in (2, 3):
        engine.manager.add_adapter(backbone.adapters[number])
        engine.manager.pin_adapter(number)
    ask = {backbone.adapters[1]: 0.5}
    with pytest.raises(RuntimeError, match=r"'adapter-1', 'adapter-4' \(id 1, 4\): 2 of 3 slots are pinned.*\[2, 3\]"):
        engine.add_request(Request("a", PROMPT, 3, ask | {backbone.adapters[4]: 0.5}))
    assert not engine._residency._users
    config = engine.config.lora_config(16, max_loras=3, fp8=torch.float8_e4m3fn)
    narrow = Engine(backbone.model(), config, engine.config)
    with pytest.raises(ValueError, match="serves no mixtures"):
        narrow.add_request(Request("a", PROMPT, 3, ask))
    assert engine.generate([PROMPT], ask | {backbone.adapters[2]: 0.5}, 2)[0].error is None


def test_head_is_mixed_embedding_is_refused_alone(backbone, oracle, expected, tmp_path) -> None:
    ends, _ = adapter_of_the_ends(backbone, tmp_path / "ends")
    settings, tensors = tmp_path / "ends/adapter_config.json", tmp_path / "ends/adapter_model.safetensors"
    engine = backbone.engine()
    with pytest.raises(ValueError, match="embed_tokens"):
        engine.add_request(Request("a", PROMPT, 3, {ends: 0.5, backbone.adapters[1]: 1}))
    serve(oracle, engine, expected)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"target_modules": ["lm_head"]}))
    save_file({name: one for name, one in load_file(tensors).items() if "lm_head" in name}, tensors)
    head = LoRARequest("head", 10, str(tmp_path / "ends"))
    (found,) = engine.generate([PROMPT], {head: 0.5, backbone.adapters[1]: 0.7}, SamplingParams(4, logprobs=0))
    model = peft.PeftModel.from_pretrained(backbone_model(backbone), head.lora_path, "a")
    model.load_adapter(backbone.adapters[1].lora_path, "b")
    model.add_weighted_adapter(["a", "b"], [0.5, 0.7], "c", combination_type="cat")
    model.set_adapter("c")
    check_generated(found, generated(model, PROMPT, 4))
