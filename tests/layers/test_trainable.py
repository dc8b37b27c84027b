"""`TrainableLinear` against PEFT's layers, and its parameters as views of slots."""

import copy
import io

import numpy as np
import pytest
import torch
from layer_cases import on_devices
from peft import LoraConfig, get_peft_model
from torch import nn

from punica.layers import TrainableLinear
from punica.metadata import RowGroups
from punica.wrapper import PunicaWrapperCPU, PunicaWrapperGPU

SLOTS = (0, 2, 2, -1, 0, 1, -1, 2)
ADAPTERS = {0: (4, 8.0), 1: (8, 8.0), 2: (3, 1.0), 3: (2, 4.0)}  # rank and alpha; slot 3 has no rows


def made(make=PunicaWrapperCPU, device="cpu") -> TrainableLinear:
    wrapper, rows = make(16, 8, device, max_loras=4), RowGroups.of_rows(np.array(SLOTS))
    wrapper.begin_step(rows, rows, 100)
    layer = TrainableLinear(nn.Linear(10, 6), wrapper, 4, 8).to(device)
    for slot, (rank, alpha) in ADAPTERS.items():
        nn.init.normal_(layer.add_adapter(slot, rank, alpha / rank)[1])
    return layer


@on_devices
@pytest.mark.parametrize("make", [PunicaWrapperCPU, PunicaWrapperGPU])
def test_gradients_are_those_of_peft(make, device):
    layer = made(make, device)
    x, dy = (torch.randn(2, 4, width, device=device) for width in (10, 6))
    y = layer(x.requires_grad_())
    y.backward(dy)
    for slot, (rank, alpha) in ADAPTERS.items():
        rows = torch.tensor(SLOTS, device=device) == slot
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["0"])
        theirs = get_peft_model(nn.Sequential(copy.deepcopy(layer.base_layer)), config)
        lora, own = theirs.get_submodule("base_model.model.0"), (layer.lora_a[str(slot)], layer.lora_b[str(slot)])
        factors = lora.lora_A["default"].weight, lora.lora_B["default"].weight
        for one, value in zip(factors, own, strict=True):
            one.data = value.data.clone()
        source = x.detach().view(8, 10)[rows].requires_grad_()
        out = theirs(source)
        out.backward(dy.view(8, 6)[rows])
        assert [value.grad is None for value in own] == [slot == 3] * 2
        pairs = [(x.grad.view(8, 10)[rows], source.grad)]
        pairs += [(value.grad, one.grad) for one, value in zip(factors, own, strict=True) if slot != 3]
        for found, expected in [(y.view(8, 6)[rows], out), *pairs]:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_update_of_parameters_is_one_of_slots():
    layer = made()
    for one in (layer, copy.deepcopy(layer), copy.deepcopy(layer).double()):
        one.load_state_dict({name: 2 * value for name, value in one.state_dict().items()}, assign=True)
        x = torch.randn(8, 10).to(one.lora_a["0"])
        optimizer, loss = torch.optim.SGD(one.parameters(), 1e-5), one(x).square().sum()
        loss.backward()
        optimizer.step()
        assert 0.5 * loss < one(x).square().sum() < 0.9999 * loss
    held, values = layer.lora_a["0"], layer.lora_a["0"].clone()
    assert not layer.add_adapter(0, 2)[1].any()  # in place of the one before
    assert torch.equal(held, values)


def through_a_file(layer: TrainableLinear) -> TrainableLinear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(RuntimeError, match="call update_metadata first"):
        loaded(torch.randn(8, 10))
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_takes_part_in_later_steps(copied):
    layer, x = made(), torch.randn(8, 10)
    layer(x)  # scalings differ by row, so the step's tensors are made
    one, slots = copied(layer), (2, 0, 0, 0, -1, 2, 1, 2)
    rows = RowGroups.of_rows(np.array(slots))
    for wrapper in (layer.punica_wrapper, one.punica_wrapper):
        wrapper.begin_step(rows, rows, 100)
    assert (one.punica_wrapper is layer.punica_wrapper) == (copied is copy.deepcopy)
    terms = [one.lora_b[f"{slot}"] @ (one.lora_a[f"{slot}"] @ row) * one.scalings[slot] if slot >= 0 else torch.zeros(6)
             for slot, row in zip(slots, x, strict=True)]  # fmt: skip
    torch.testing.assert_close(one(x), one.base_layer(x) + torch.stack(terms), rtol=1e-5, atol=1e-5)


def test_refuses_rows_without_adapter_and_updates_before_backward():
    layer, x = made(), torch.randn(8, 10)
    y = layer(x)
    torch._foreach_add_([layer.lora_b["3"].detach()], 1)  # of no row
    y.sum().backward(retain_graph=True)
    torch._foreach_add_([layer.lora_b["2"].detach()], 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(ValueError, match="rank is 9, above max_rank=8"):
        layer.add_adapter(1, 9)
    with pytest.raises(ValueError, match="rows use slot 0, which has no adapter"):
        TrainableLinear(nn.Linear(10, 6), layer.punica_wrapper, 4, 8)(x)


def test_a_parameter_that_leaves_its_slot_keeps_its_values_and_no_gradient_is_of_others():
    layer, x = made(), torch.randn(8, 10)
    others = {name: nn.Parameter(2 * value) for name, value in layer.named_parameters() if value.requires_grad}
    for leave in (lambda: torch.func.functional_call(layer, others, (x,)), lambda: layer.add_adapter(0, 2)):
        held, values, y = layer.lora_a["0"], layer.lora_a["0"].clone(), layer(x)
        leave()
        assert torch.equal(held, values)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    with pytest.raises(TypeError, match=r"give an nn\.Parameter"):
        torch.func.functional_call(layer, {"lora_a.0": torch.ones(2, 10)}, (x,))


def test_float64_and_autocast_round_nothing():
    layer, x = made().double(), torch.randn(8, 10, dtype=torch.float64)
    for y, row, slot in zip(layer(x), x, SLOTS, strict=True):
        rank, alpha = ADAPTERS.get(slot, (1, 0.0))
        a, b = (factors[str(max(slot, 0))] for factors in (layer.lora_a, layer.lora_b))
        torch.testing.assert_close(y, layer.base_layer(row) + alpha / rank * (b @ (a @ row)), rtol=1e-13, atol=1e-13)
    layer, x, found = made(), torch.randn(8, 10, requires_grad=True), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(layer(x).square().sum(), [x, layer.lora_a["0"], layer.lora_b["0"]]))
    torch.testing.assert_close(*found, rtol=0.0, atol=0.0)
