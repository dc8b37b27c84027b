"""Requests, `adapter_config.json` and tensor names."""

import math
import re

import numpy as np
import peft
import pytest

from punica.adapters import LoRARequest, PEFTHelper, parse_fine_tuned_lora_name, resolve_adapter_path
from punica.config import LoRAConfig

BASE = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
PATTERNS = {**BASE, "rank_pattern": {"q_proj": 32}, "alpha_pattern": {"layers.0.self_attn.q_proj": 64}}


@pytest.mark.parametrize(
    ("config", "module", "rank", "alpha", "scaling"),
    [
        pytest.param(BASE, "model.layers.3.mlp.up_proj", 8, 16, 2, id="global"),
        pytest.param({**BASE, "r": 16, "lora_alpha": 32, "use_rslora": True}, "any", 16, 32, 8, id="rslora"),
        pytest.param(PATTERNS, "model.layers.0.self_attn.q_proj", 32, 64, 2, id="both patterns"),
        pytest.param(PATTERNS, "model.layers.1.self_attn.my_q_proj", 8, 16, 2, id="suffix only after a dot"),
        pytest.param({**BASE, "rank_pattern": {"^model": 4}}, "model.layers.0", 8, 16, 2, id="whole name"),
        pytest.param({**BASE, "rank_pattern": {"^layers.*": 4}}, "model.layers.0", 8, 16, 2, id="anchored, no match"),
        pytest.param({**BASE, "rank_pattern": {r"^model\..*": 4}}, "model.layers.0", 4, 16, 4, id="anchored, match"),
        pytest.param({**BASE, "rank_pattern": {"^up|q": 4}}, "m.q", 4, 16, 4, id="half anchored, suffix"),
        pytest.param({**BASE, "lora_alpha": 2.5, "alpha_pattern": {"q": 0.5}}, "m.q", 8, 0.5, 1 / 16, id="float alpha"),
        pytest.param({**BASE, "r": 3, "lora_alpha": np.float16(16)}, "m.q", 3, 16, 16 / 3, id="number of numpy"),
        pytest.param({**BASE, "alpha_pattern": {"q": np.float16(0.1)}}, "m.q", 8, float(np.float16(0.1)),
                     float(np.float16(0.1)) / 8, id="number of numpy in a pattern"),
        pytest.param(
            {**BASE, "rank_pattern": {r"layers\.\d+\.mlp.*": 2, "up_proj": 4}}, "layers.11.mlp.up_proj", 2, 16, 8,
            id="first key in file order",
        ),
        pytest.param({**BASE, "rank_pattern": {"q_proj": 2}, "use_rslora": True}, "q_proj", 2, 16, 16 / math.sqrt(2),
                     id="rslora uses the module's rank"),
    ],
)  # fmt: skip
def test_rank_alpha_and_scaling_per_module(config, module, rank, alpha, scaling):
    helper = PEFTHelper.from_dict(config)
    assert helper.rank_of(module) == rank
    assert helper.alpha_of(module) == alpha
    assert helper.scaling_of(module) == pytest.approx(scaling, rel=1e-15)


def test_null_means_not_given():
    nothing = dict.fromkeys([*PEFTHelper.__dataclass_fields__, "base_model_name_or_path"])
    helper = PEFTHelper.from_dict({**nothing, **BASE, "target_modules": {"v_proj", "q_proj"}})
    assert helper == PEFTHelper.from_dict({**BASE, "target_modules": ("q_proj", "v_proj")})
    helper.validate_legal(LoRAConfig(max_lora_rank=8))


@pytest.mark.parametrize(
    ("init", "others", "message"),
    [
        ("gaussian", {}, None),
        ("mica", {}, None),
        (True, {"use_off": False, "off_config": None, "loftq_config": {1: 2}}, None),
        ("PiSSA_niter_4", {}, "init_lora_weights='PiSSA_niter_4' may have altered"),
        ("invented", {}, "init_lora_weights='invented' is not known here and may have altered"),
        (True, {"use_later": True, "later_config": {"x": 1}}, r"'later_config', 'use_later'\] of its config are not"),
    ],
)
def test_doubts(init, others, message):
    ours = peft.LoraConfig(r=8, target_modules=["q_proj"]).to_dict()
    on = {key: {"any": 1} for key in ours if key.endswith("_config")} | {"use_rslora": True}
    found = PEFTHelper.from_dict(ours | on | {"init_lora_weights": init} | others).doubts
    assert len(found) == (message is not None)
    assert not found or re.search(message, found[0])


def test_settings_that_other_layers_need_are_not_legal():
    helper = PEFTHelper.from_dict({**BASE, "bias": "all", "fan_in_fan_out": True})
    with pytest.raises(ValueError, match=r"fan_in_fan_out.*bias is 'all'|bias is 'all'.*fan_in_fan_out"):
        helper.validate_legal(LoRAConfig(max_lora_rank=16))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", ("model.layers.0.mlp.up_proj", True)),
        ("base_model.model.m.q_proj.lora_B.my tenant.weight", ("m.q_proj", False)),
        ("q_proj.lora_B.weight", ("q_proj", False)),
        ("model.embed_tokens.lora_embedding_A", ("model.embed_tokens", True)),
        ("base_model.model.model.embed_tokens.lora_embedding_B.default", ("model.embed_tokens", False)),
        ("base_model.model.m.q_proj.lora_magnitude_vector.default.weight", "DoRA"),
        ("base_model.model.model.embed_tokens.weight", "unsupported LoRA weight"),
        ("base_model.model.m.q_proj.lora_B.bias", "unsupported LoRA weight"),
        ("lora_A.weight", "unsupported LoRA weight"),
        ("m.q_proj.lora_A", "unsupported LoRA weight"),
    ],
)
def test_tensor_names(name, expected):
    if isinstance(expected, tuple):
        assert parse_fine_tuned_lora_name(name) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            parse_fine_tuned_lora_name(name)


@pytest.mark.parametrize("mapper", [None, {"a.": ""}, lambda name: name.replace("a.", "")], ids=["", "dict", "call"])
def test_a_module_of_too_many_parts_is_refused_before_its_ends_are_looked_up(mapper):
    deep = "a." * 31 + "q_proj"
    module, _ = parse_fine_tuned_lora_name(f"{deep}.lora_A.weight", mapper)
    assert module == (deep if mapper is None else "q_proj")
    with pytest.raises(ValueError, match="has 5001 parts, a module's name at most 32; rename it"):
        parse_fine_tuned_lora_name("a." * 5000 + "q_proj.lora_A.weight", mapper)
    with pytest.raises(TypeError, match="weights_mapper"):
        parse_fine_tuned_lora_name("m.lora_A.weight", 3)


def test_request_of_a_path_without_an_id(tmp_path, monkeypatch):
    request = LoRARequest("sql", lora_path=tmp_path / "sql")
    assert request.lora_path == request.absolute_path == str(tmp_path / "sql")
    monkeypatch.chdir(tmp_path)
    assert 0 < request.lora_int_id == LoRARequest("sql", lora_path="./sql").lora_int_id <= 2**62
    others = {LoRARequest(name, lora_path=path).lora_int_id for name in "ab" for path in "cd"}
    assert len(others | {request.lora_int_id}) == 5
    assert (request.adapter_id, request.name, request.path) == (request.lora_int_id, "sql", str(tmp_path / "sql"))
    assert request == LoRARequest("sql", 4, "elsewhere") != LoRARequest("chat", 4, "elsewhere")
    assert len({request, LoRARequest("sql", 4, "elsewhere")}) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").mkdir()
    assert resolve_adapter_path("a") == resolve_adapter_path("~/a") == (tmp_path / "a").resolve()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        resolve_adapter_path("nowhere")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (("", 1, "p"), ValueError, "lora_name"),
        ((None, 1, "p"), TypeError, "lora_name"),
        (("a", 0, "p"), ValueError, "lora_int_id is 0"),
        (("a", True, "p"), TypeError, "lora_int_id"),
        (("a", 1), ValueError, "lora_path must not be empty"),
        (("a", 1, 7), TypeError, "lora_path"),
        (("a", 1, "p", None, "yes"), TypeError, "load_inplace must be a bool, got 'yes'"),
    ],
)
def test_bad_requests(fields, error, message):
    with pytest.raises(error, match=message):
        LoRARequest(*fields)


@pytest.mark.parametrize(
    ("module", "targets", "alpha", "rank"),
    [
        ("model.layers.0.mlp.experts.base_layer", ["mlp.experts.gate_up_proj", "down_proj"], 32, 8),
        ("model.layers.0.mlp.experts", ["mlp.experts.gate_up_proj", "down_proj"], 6, 4),
        ("model.layers.0.mlp.experts", ["mlp.experts.gate_up_proj"], 32, 8),
        ("model.layers.0.mlp.experts", ["layers.1.mlp.experts.gate_up_proj", "experts.down_proj"], 6, 4),
        ("model.layers.0.mlp.gate", ["gate.weight"], 7, 4),
        ("model.layers.0.mlp.gate", None, 6, 4),  # a module's name has no parameter in it
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
