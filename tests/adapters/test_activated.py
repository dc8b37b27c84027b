"""Activated LoRA (`alora_invocation_tokens`), with the PEFT library as the oracle; digests of adapters' content."""

import json
import random
import time
from pathlib import Path

import peft
import pytest
import torch
from adapter_world import VOCAB as DENSE_VOCAB
from adapter_world import adapter, adapter_tensors, one_layer, peft_config
from managed_world import VOCAB, Ours
from peft.tuners.lora.variants import calculate_alora_offsets
from peft_world import SEVEN, hugging_face_model, lora_config, peft_model

from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest, PEFTHelper, activation_start
from punica.adapters.write import stage
from punica.config import LoRAConfig
from tests.parallel.thread_ranks import on_threads

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*|.*generation flags.*:UserWarning"),
]
INVOCATION = (7, 9)


def peft_start(tokens: list[int], invocation: tuple[int, ...]) -> int | None:
    """The offset that PEFT counts from the end, as an index."""
    config = {"one": peft.LoraConfig(alora_invocation_tokens=list(invocation), task_type="CAUSAL_LM")}
    (offset,) = calculate_alora_offsets(config, "one", torch.tensor([tokens], dtype=torch.long))
    return None if offset is None else len(tokens) - offset


def test_the_start_is_that_of_peft() -> None:
    draw = random.Random(3)
    cases = [([], (1,)), ([1], (1, 1)), ([1, 1, 1], (1, 1)), ([2, 1], (1,)), ([1, 2], (1,)), ([0, 0], (0, 0))]
    for _ in range(300):
        invocation = tuple(draw.choices(range(3), k=draw.randint(1, 4)))
        cases.append((draw.choices(range(3), k=draw.randint(0, 12)), invocation))
    found = [activation_start(*case) for case in cases]
    assert found == [peft_start(*case) for case in cases]
    assert None in found
    assert 0 in found


def test_a_long_prompt_is_searched_at_once() -> None:
    """Also one that a tenant wrote so that every place looks like a beginning."""
    start = time.process_time()
    assert activation_start([7] * 32_768, [7] * 255 + [8]) is None
    assert time.process_time() - start < 2


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, peft.PeftModel, dict[str, Path]]:
    root, base = tmp_path_factory.mktemp("activated"), hugging_face_model()
    base.save_pretrained(root)
    config = lora_config(target_modules=[*SEVEN, "lm_head"], alora_invocation_tokens=list(INVOCATION))
    model = peft_model(base, {"one": config})
    model.save_pretrained(root / "adapters")
    return root, model, {"one": root / "adapters" / "one"}


@pytest.mark.parametrize(
    "prompt", [[5, 7, 9, 3, 7, 9, 4, 4], [7, 9, 9], [1, 2, 3, 7, 9], [4, 3, 2, 7]], ids=["last", "first", "end", "none"]
)
def test_prompt_and_generated_tokens_are_those_of_peft(world, prompt) -> None:
    """The adapter stays on while tokens are generated, and off where the prompt has no invocation."""
    root, model, folders = world
    ours = Ours(root, folders)
    ours.manager.accept_activated_lora()
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        made = model.generate(input_ids=torch.tensor([prompt]), pad_token_id=0, eos_token_id=VOCAB, **options)
        whole = model(input_ids=torch.tensor([prompt])).logits[0]
    tokens = made.sequences[0].tolist()
    start = activation_start(prompt, INVOCATION)
    assert start == peft_start(prompt, INVOCATION)
    [mine] = ours.logits([tokens[:-1]], ["one"], [len(tokens) if start is None else start])
    theirs = torch.cat([whole, *made.logits[1:]])
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert (mine - ours.logits([tokens[:-1]], ["one"])[0]).abs().max() > 0.1 or start == 0
    assert ours.manager.get_adapter(1).invocation == INVOCATION


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"alora_invocation_tokens": []}, ValueError, "is empty"),
        ({"alora_invocation_tokens": [1] * 257}, ValueError, "257 tokens, at most 256"),
        ({"alora_invocation_tokens": [3, -1]}, ValueError, "negative token -1"),
        ({"alora_invocation_tokens": [VOCAB]}, ValueError, f"token {VOCAB}, the model's vocabulary {VOCAB} ids"),
        ({"alora_invocation_tokens": [True]}, TypeError, "list of token ids"),
        ({"alora_invocation_tokens": "ab"}, TypeError, "list of token ids"),
        ({"target_parameters": ["experts.down_proj"]}, ValueError, "target_parameters do not go together"),
        ({"velora_config": {"num_groups": 2}}, ValueError, "velora_config do not go together"),
        ({"init_lora_weights": "mica"}, ValueError, "'mica' do not go together"),
        ({}, ValueError, "accept_activated_lora"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_refused_at_the_load(world, tmp_path, changes, error, message) -> None:
    root, _, folders = world
    config = json.loads((folders["one"] / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").symlink_to(folders["one"] / "adapter_model.safetensors")
    ours = Ours(root, {"one": tmp_path})
    if changes:
        ours.manager.accept_activated_lora()
    for call in (ours.manager.check_adapter, ours.manager.add_adapter):
        with pytest.raises(error, match=message):
            call(ours.requests["one"])
    assert ours.manager.list_adapters() == {}


def test_an_embedding_cannot_be_activated() -> None:
    tensors = {f"embed_tokens.lora_embedding_{side}": torch.ones(4, 4) for side in "AB"}
    helper = PEFTHelper(4, 8, ["embed_tokens"], alora_invocation_tokens=[5])
    with pytest.raises(ValueError, match="do not go together"):
        LoRAModel.from_lora_tensors(1, tensors, helper)


def loaded(manager: LoRAModelManager, request: LoRARequest) -> LoRAModel:
    manager.accept_activated_lora()
    manager.add_adapter(request)
    return manager.get_adapter(request.lora_int_id)


@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn], ids=str)
def test_the_digest_of_an_adapter_is_of_its_content(make_manager, tenants, fp8) -> None:
    manager = make_manager(max_loras=9, fp8=fp8)
    tenants.write(1, adapter_tensors(1))
    first = loaded(manager, tenants.request(1))
    dtype = torch.float32 if fp8 is None else torch.uint8
    digest = first.content_hash()
    tenants.write(2, adapter_tensors(1))
    same = tenants.request(2), LoRARequest("x", 3, tensors=adapter_tensors(1), config=peft_config())
    assert {loaded(manager, request).content_hash() for request in same} == {digest}
    staged = stage(manager.modules, first, dtype, pin_memory=False)
    assert {staged.content_hash(), first.clone(9).content_hash()} == {digest}
    flipped = {name: t.clone() for name, t in adapter_tensors(1).items()}
    next(iter(flipped.values()))[0, 0] += 1
    one_layer_of = adapter_tensors(1, modules=("0.self_attn.o_proj",))
    moved = {name.replace("layers.0", "layers.1"): tensor for name, tensor in one_layer_of.items()}
    changes = [
        (flipped, {}), (one_layer_of, {}), (moved, {}), (adapter_tensors(1, 2), {"r": 2}),
        *((adapter_tensors(1), {"alora_invocation_tokens": tokens}) for tokens in ([1, 2], [12])),
    ]  # fmt: skip
    requests = [
        LoRARequest("tenant 1", i, tensors=tensors, config=peft_config(4, **config))
        for i, (tensors, config) in enumerate(changes, 4)
    ]
    others = {loaded(manager, request).content_hash() for request in requests}
    assert len(others | {digest}) == len(changes) + 1
    assert first.content_hash() is digest
    assert stage(manager.modules, manager.get_adapter(9), dtype, pin_memory=False).invocation == (12,)
    helpers = [PEFTHelper(4, alpha, ["q_proj"]) for alpha in (4, 5)]
    assert len({LoRAModel.from_lora_tensors(1, adapter_tensors(1), each).content_hash() for each in helpers}) == 2


def test_ranks_have_one_digest_of_what_each_holds() -> None:
    """Adapters that differ in the rows of one rank alone differ on all ranks."""

    def run(rank: int) -> list[bytes]:
        manager = LoRAModelManager(one_layer(2, rank), 4, 16, DENSE_VOCAB, LoRAConfig(max_lora_rank=8), "cpu")
        one, other = (adapter(i, modules=("layers.0.self_attn.q_proj",)) for i in (1, 1))
        (weights,) = other.loras.values()
        weights.lora_b = torch.cat([weights.lora_b[:-1], weights.lora_b[-1:] + 1])
        packed = [manager._packer.pack(each) for each in (one, other)]
        return [stage(manager.modules, each, torch.float32, pin_memory=False).content_hash() for each in packed]

    first, second = on_threads(2, run)
    assert first == second
    assert first[0] != first[1]
