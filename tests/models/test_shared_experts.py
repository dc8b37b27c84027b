"""Adapters whose experts share factors: each spelling computes what merged weights compute."""

import pytest
import torch
from torch import Tensor

from punica.models import MixtureOfExpertsForCausalLM
from tests.models.moe_world import factors, loaded, logits_of, managed, merged, saved, wanted, write

OUTER = {("w1", 0), ("w3", 0), ("w2", 1)}
"""Shared factors, (projection, A or B), of the shared-outer layout."""
SHARED = {"outer": OUTER, "all": {(which, side) for which in ("w1", "w2", "w3") for side in (0, 1)}, "none": set()}


@pytest.fixture(scope="module", params=["mixtral", "qwen3"])
def world(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory.mktemp("model"))


def shared_factors(config, shared) -> dict[int, dict[str, list[Tensor]]]:
    """Factors `[E or 1, ...]` of each layer's projections."""
    return {
        layer: {
            which: [factor[:1] if (which, side) in shared else factor for side, factor in enumerate(pair)]
            for which, pair in pairs.items()
        }
        for layer, pairs in factors(config, rank=4, seed=5).items()
    }


def repeated(layers, experts: int):
    return {
        layer: {which: tuple(one.expand(experts, -1, -1) for one in pair) for which, pair in pairs.items()}
        for layer, pairs in layers.items()
    }


def write_projections(folder, layers, names: tuple[str, str, str], joined: bool):
    tensors = {}
    for layer, pairs in layers.items():
        own = dict(zip(names, (pairs[which] for which in ("w1", "w2", "w3")), strict=True))
        if joined:
            (a, gate), (_, up) = own.pop(names[0]), own.pop(names[2])
            own["gate_up_proj"] = [a, torch.cat((gate, up), dim=1)]
        for name, (a, b) in own.items():
            module = f"model.layers.{layer}.mlp.experts.{name}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return write(folder, tensors, 4, 8, target_modules=list(names))


def logits(model, folder, **config) -> Tensor:
    managed(model, folder, **config)
    return logits_of(model)


@pytest.mark.parametrize(
    ("names", "joined", "shared"),
    [(("w1", "w2", "w3"), False, "outer"), (("gate_proj", "down_proj", "up_proj"), False, "all"),
     (("gate_proj", "down_proj", "up_proj"), True, "none"), (("gate_proj", "down_proj", "up_proj"), True, "outer")],
    ids=["w, outer", "proj, all", "gate_up, none", "gate_up, outer"],
)  # fmt: skip
def test_shared_factors_equal_merged_weights(world, tmp_path, shared, names, joined):
    theirs, folder = world
    layers = shared_factors(theirs.config, SHARED[shared])
    write_projections(tmp_path, layers, names, joined)
    expected = wanted(merged(theirs, repeated(layers, theirs.config.num_local_experts), 2.0))
    assert not torch.allclose(expected, wanted(theirs), atol=1e-2)
    torch.testing.assert_close(logits(loaded(folder), tmp_path), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mixed", [False, True], ids=["3D", "mixed"])
def test_a_model_that_joins_gate_and_up(world, tmp_path, mixed):
    theirs, folder = world
    model = loaded(folder)
    model.is_3d_moe_weight = True
    layers = shared_factors(theirs.config, OUTER)
    write_projections(tmp_path, layers, ("w1", "w2", "w3"), joined=True)
    expected = wanted(merged(theirs, repeated(layers, theirs.config.num_local_experts), 2.0))
    found = logits(model, tmp_path, enable_mixed_moe_lora_format=mixed)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_refusals(world, tmp_path):
    theirs, folder = world
    layers = shared_factors(theirs.config, OUTER)

    def refused(match, change, three_d=False):
        model = MixtureOfExpertsForCausalLM(folder)
        model.is_3d_moe_weight = three_d
        own = {layer: {which: list(pair) for which, pair in pairs.items()} for layer, pairs in layers.items()}
        change(own[0])
        write_projections(tmp_path, own, ("w1", "w2", "w3"), joined=False)
        with pytest.raises(ValueError, match=match):
            logits(model, tmp_path)

    three = f"has 3 experts of rank 4, .* the model has {theirs.config.num_local_experts}"
    refused(three, lambda pairs: pairs["w1"].__setitem__(1, pairs["w1"][1][:3].clone()))
    refused("gate and up are apart", lambda pairs: None, three_d=True)
    refused("config says rank 4", lambda pairs: pairs["w1"].__setitem__(0, pairs["w1"][0][:, :3]))
    refused(r"must be \[E, r, in\] and \[E, out, r\]", lambda pairs: pairs["w1"].__setitem__(0, pairs["w1"][0][0]))


def test_two_spellings_at_once_are_refused(world, tmp_path):
    theirs, folder = world
    layers = shared_factors(theirs.config, OUTER)
    tensors = {}
    is_mixtral = theirs.config.model_type == "mixtral"
    per_expert = "block_sparse_moe.experts.2.w1" if is_mixtral else "mlp.experts.2.gate_proj"
    for name, (a, b) in (("mlp.experts.w1", layers[0]["w1"]), (per_expert, [one[0] for one in layers[0]["w1"]])):
        tensors |= {f"model.layers.0.{name}.lora_A.weight": a, f"model.layers.0.{name}.lora_B.weight": b}
    write(tmp_path, tensors, 4, 8)
    with pytest.raises(ValueError, match="two of the spellings stacked, per expert, by projection"):
        logits(MixtureOfExpertsForCausalLM(folder), tmp_path)
