"""Requests with tensors: what they take, and what they refuse before anything is loaded."""

import pickle
from dataclasses import replace

import pytest
import torch
from adapter_world import adapter_tensors, peft_config

from punica.adapters import LoRARequest

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
O_PROJ = "model.layers.0.self_attn.o_proj"


def in_memory(adapter_id: int, rank: int = 4, **fields: object) -> LoRARequest:
    given = {"tensors": adapter_tensors(adapter_id, rank), "config": peft_config(rank, target_modules=ALL), **fields}
    return LoRARequest(f"tenant {adapter_id}", adapter_id, **given)


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
