"""What an adapter's config says of its modules."""

import pytest

from punica.adapters import PEFTHelper


@pytest.mark.parametrize(
    ("module", "targets", "alpha", "rank"),
    [
        ("model.layers.0.mlp.experts.base_layer", ["mlp.experts.gate_up_proj", "down_proj"], 32, 8),
        ("model.layers.0.mlp.experts", ["mlp.experts.gate_up_proj", "down_proj"], 6, 4),
        ("model.layers.0.mlp.experts", ["mlp.experts.gate_up_proj"], 32, 8),
        ("model.layers.0.mlp.experts", ["layers.1.mlp.experts.gate_up_proj", "experts.down_proj"], 6, 4),
        ("model.layers.0.mlp.gate", ["gate.weight"], 7, 4),
        ("model.layers.0.mlp.gate", None, 6, 4),  # a module's name has no parameter in it
        ("model.layers.0.mlp.down_proj", ["down_proj"], 6, 4),
    ],
)
def test_patterns_of_target_parameters_are_about_the_parameter(module, targets, alpha, rank) -> None:
    """As PEFT 0.21 writes them when it turns `target_modules="all-linear"` into parameters of all experts."""
    helper = PEFTHelper.from_dict({
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": targets,
        "rank_pattern": {r".*\.gate_up_proj": 8, "experts": 2},
        "alpha_pattern": {r".*\.gate_up_proj": 32, "gate.weight": 7, "experts": 3} if targets else {"gate.weight": 7},
    })  # fmt: skip
    assert (helper.alpha_of(module), helper.rank_of(module)) == (alpha, rank)


@pytest.mark.parametrize(
    ("excluded", "missing"),
    [
        (["v_proj"], ["mlp.up_proj"]),
        (["0.self_attn.v_proj", "up_proj"], []),  # ends of targets, and names that end in one
        (["proj", "xv_proj"], ["mlp.up_proj", "v_proj"]),  # no whole parts of names
        (r".*\.v_proj", ["mlp.up_proj"]),
        (r"v_proj|mlp\.up_proj", []),
        (r".*lm_head", ["mlp.up_proj", "v_proj"]),
        (r"(.)\1", ["mlp.up_proj", "v_proj"]),  # cannot be matched in bounded time
        ([f"m{i}" for i in range(200_000)], ["mlp.up_proj", "v_proj"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_targets_without_tensors_are_those_that_no_exclusion_explains(excluded, missing) -> None:
    helper = PEFTHelper.from_dict({
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "mlp.up_proj"], "exclude_modules": excluded,
    })  # fmt: skip
    found = helper.disagreement(["model.layers.0.self_attn.q_proj"])
    assert found == (missing or None) or found.endswith(f", but there are no tensors for {missing}")
