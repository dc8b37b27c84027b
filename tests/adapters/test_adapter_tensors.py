"""Requests with tensors: what they take, and what they refuse before anything is loaded."""

import pickle
from dataclasses import replace

import pytest
import torch
from adapter_world import adapter_tensors, full_manager, peft_config, unchanged

from punica.adapters import LoRARequest

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
O_PROJ = "model.layers.0.self_attn.o_proj"


def in_memory(adapter_id: int, rank: int = 4, **fields: object) -> LoRARequest:
    given = {"tensors": adapter_tensors(adapter_id, rank), "config": peft_config(rank, target_modules=ALL), **fields}
    return LoRARequest(f"tenant {adapter_id}", adapter_id, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_in_memory_is_that_of_the_folder(make_manager, tenants, dtype) -> None:
    manager = make_manager(max_loras=2)
    tensors = {name: tensor.to(dtype) for name, tensor in adapter_tensors(1).items()}
    tenants.write(1, tensors, target_modules=ALL)
    manager.add_adapter(tenants.request(1))
    manager.add_adapter(in_memory(2, tensors=tensors))
    for name, weights in manager.get_adapter(1).loras.items():
        for (a, b), (own_a, own_b) in zip(weights.slices, manager.get_adapter(2).loras[name].slices, strict=True):
            assert torch.equal(a, own_a)
            assert torch.equal(b, own_b)


def test_the_config_is_copied_too(make_manager) -> None:
    manager, config = make_manager(), peft_config(4, target_modules=ALL, alpha_pattern={"o_proj": 4})
    request = in_memory(1, config=config)
    config["alpha_pattern"]["o_proj"] = 8
    config["lora_alpha"] = request.config["lora_alpha"] = 400
    manager.add_adapter(request)
    b = adapter_tensors(1)[f"base_model.model.{O_PROJ}.lora_B.weight"]
    assert torch.equal(manager.get_adapter(1).loras[O_PROJ].lora_b, b)


def test_copies_of_a_request_share_tensors_and_source() -> None:
    request = in_memory(1)
    for other in (replace(request, load_inplace=True), pickle.loads(pickle.dumps(request))):
        assert other.source == request.source
        assert all(torch.equal(other.tensors[name], tensor) for name, tensor in request.tensors.items())
    assert replace(request, load_inplace=True).tensors is request.tensors
    others = in_memory(1), replace(request, config=peft_config(4, lora_alpha=4, target_modules=ALL))
    assert request.source not in [other.source for other in others]
    named = [LoRARequest(name, tensors=request.tensors, config=request.config).lora_int_id for name in "aab"]
    assert named[0] == named[1] != named[2]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"lora_path": "somewhere"}, ValueError, "has tensors and lora_path 'somewhere'; give one of the two"),
        ({"tensors": None, "lora_path": "x"}, ValueError, "config comes with tensors; a folder has its own"),
        ({"config": None}, TypeError, "config must be the content of an adapter_config.json"),
        ({"tensors": {}}, ValueError, "tensors are empty"),
        ({"tensors": [1]}, TypeError, "must be a dict of PEFT name to tensor, got list"),
        ({"tensors": {"a": [1.0]}}, TypeError, "must map PEFT names to tensors, got 'a': list"),
        ({"tensors": {1: torch.zeros(1)}}, TypeError, "must map PEFT names to tensors, got 1: Tensor"),
        ({"tensors": {"a": torch.zeros(1, device="meta")}}, TypeError, "'a' must be a dense tensor with data"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_what_is_refused_when_the_request_is_made(fields, error, message) -> None:
    with pytest.raises(error, match=message):
        in_memory(1, **fields)


@pytest.mark.parametrize(
    ("changes", "config", "error", "message"),
    [
        ({f"base_model.model.{O_PROJ}.lora_A.weight": torch.zeros(4, 3)}, {}, ValueError, "24 columns, got 3"),
        ({f"base_model.model.{O_PROJ}.lora_A.weight": torch.zeros(4, 24).int()}, {}, TypeError, "dtype torch.int32"),
        ({}, {"r": 2}, ValueError, "tensors have rank 4, the adapter's config says 2"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_what_is_refused_on_arrival(make_manager, tenants, changes, config, error, message) -> None:
    manager = full_manager(make_manager, tenants)
    with unchanged(manager):
        given = peft_config(4, **{"target_modules": ALL, **config})
        request = in_memory(3, tensors={**adapter_tensors(3), **changes}, config=given)
        for call in (manager.check_adapter, manager.add_adapter):
            with pytest.raises(error, match=f"cannot load adapter 'tenant 3' from 'tensors .*{message}"):
                call(request)
