"""Activated LoRA (`alora_invocation_tokens`), with the PEFT library as the oracle; digests of adapters' content."""

import random
import time

import peft
import pytest
import torch
from adapter_world import VOCAB, adapter, adapter_tensors, one_layer, peft_config
from peft.tuners.lora.variants import calculate_alora_offsets

from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest, PEFTHelper, activation_start
from punica.adapters.write import stage
from punica.config import LoRAConfig
from tests.parallel.thread_ranks import on_threads


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
        manager = LoRAModelManager(one_layer(2, rank), 4, 16, VOCAB, LoRAConfig(max_lora_rank=8), "cpu")
        one, other = (adapter(i, modules=("layers.0.self_attn.q_proj",)) for i in (1, 1))
        (weights,) = other.loras.values()
        weights.lora_b = torch.cat([weights.lora_b[:-1], weights.lora_b[-1:] + 1])
        packed = [manager._packer.pack(each) for each in (one, other)]
        return [stage(manager.modules, each, torch.float32, pin_memory=False).content_hash() for each in packed]

    first, second = on_threads(2, run)
    assert first == second
    assert first[0] != first[1]
