"""Adapters that must be refused, with both caches full or pinned: nothing may change."""

from pathlib import Path

import pytest
import torch
from adapter_world import QKV, VOCAB, Tenants, adapter, adapter_tensors, decode, full_manager, unchanged

from punica.adapters import LoRALayerWeights, LoRAModel

TENSORS = adapter_tensors(seed=3)
UP_A = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
UP_B = UP_A.replace("lora_A", "lora_B")
UNKNOWN_A, UNKNOWN_B = UP_A.replace("layers.0", "layers.9"), UP_B.replace("layers.0", "layers.9")
INF = torch.randn(40, 4).index_put_((torch.tensor(9), torch.tensor(3)), torch.tensor(float("-inf")))
BAD_TENSORS = {
    "A without B": ({UP_B: None}, "up_proj.*A without B"),
    "B without A": ({UP_A: None}, "up_proj.*B without A"),
    "nothing": (dict.fromkeys(TENSORS), "no LoRA tensors"),
    "1-D": ({UP_A: torch.ones(4)}, r"2-D.*\(4,\)"),
    "A and B disagree": ({UP_A: torch.ones(3, 24)}, "rank 3.*rank 4"),
    "config": ({UP_A: torch.ones(2, 24), UP_B: torch.ones(40, 2)}, r"rank 2.*config says 4 \(r\)"),
    "NaN": ({UP_A: torch.full((4, 24), float("nan"))}, "up_proj.*A contains NaN"),
    "inf": ({UP_B: INF}, "up_proj.*B contains NaN or inf"),
    "twice A": ({UP_A.replace("lora_A", "lora_A.default"): torch.ones(4, 24)}, "both A"),
    "other name": ({"m.q_proj.weight": torch.ones(1)}, "unsupported LoRA weight"),
    "unexpected modules": (
        {f"m.{name}.lora_A.weight": torch.ones(4, 2) for name in ("router", "gate")}, r"\['m.gate', 'm.router'\]",
    ),
    "unknown layer": ({UNKNOWN_A: torch.ones(4, 24), UNKNOWN_B: torch.ones(40, 4)}, r"layers\.9\.mlp"),
    "A too wide": ({UP_A: torch.ones(4, 25)}, "gate_up_proj.*24 columns, got 25"),
    "integers": ({UP_A: torch.ones(4, 24, dtype=torch.int8)}, "I8"),
    "FP8": ({name: t.to(torch.float8_e4m3fn) for name, t in TENSORS.items()}, "F8_E4M3; LoRA tensors must be float16"),
}  # fmt: skip
OFF = (
    "lora_bias", "trainable_token_indices", "layer_replication", "use_qalora", "use_bdlora", "kasa_config",
    "arrow_config", "monteclora_config",
)  # fmt: skip
BAD_CONFIGS = {
    "no r": ({"r": None}, "'r'"),
    "no r of IA3": ({"r": None, "peft_type": "PeftType.IA3"}, "'IA3', only 'LORA'.*lacks"),
    "XLORA": ({"r": None, "peft_type": "XLORA"}, "'XLORA', whose router.*mixture"),
    "IA3": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "two missing": ({"lora_alpha": None, "target_modules": None}, "alpha.*target_mod"),
    "no targets": ({"target_modules": []}, "target_modules"),
    "targets int": ({"target_modules": 5}, "target_modules must be a str or a list.*5"),
    "rslora str": ({"use_rslora": "false"}, "use_rslora must be a bool.*'false'"),
    "rank 0": ({"r": 0}, "r is 0"),
    "rank bool": ({"r": True}, "r must be an int.*True"),
    "alpha str": ({"lora_alpha": "x"}, "lora_alpha must be a number.*'x'"),
    "alpha inf": ({"lora_alpha": float("inf")}, "lora_alpha must be finite.*inf"),
    "alpha huge": ({"lora_alpha": 10**400}, "lora_alpha must be finite.*inf"),
    "pattern rank 0": ({"rank_pattern": {"q": 0}}, r"rank_pattern\['q'\] is 0"),
    "pattern no dict": ({"rank_pattern": [4]}, "rank_pattern must be a dict"),
    "bad regex": ({"alpha_pattern": {"(": 1}}, r"'\(' is not a regular expression"),
    "DoRA": ({"use_dora": True}, "use_dora"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is set \(\['lm_head'\]\)"),
    "activated": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "all that is not served": (dict.fromkeys(OFF, True), ".*".join(OFF)),
    "rank too large": ({"r": 9}, "rank 9 exceeds max_lora_rank 8"),
    "other rank by a pattern": ({"rank_pattern": {".*": 7, "q": 4}}, r"rank 4.*says 7 \(rank_pattern\['\.\*'\]"),
    "rank of a pattern": ({"rank_pattern": {".*q_proj": 64}}, "rank 64 exceeds max_lora_rank 8"),
    "scaled B overflows": ({"lora_alpha": 1e40}, "after scaling"),
}
ACTIVATED: dict[str, tuple[object, dict[str, object], str]] = {
    "no invocation": ([], {}, "is empty"),
    "a long invocation": ([1] * 257, {}, "257 tokens, at most 256"),
    "a negative token": ([3, -1], {}, "negative token -1"),
    "an unknown token": ([VOCAB], {}, f"token {VOCAB}, the model's vocabulary {VOCAB} ids"),
    "bool token": ([True], {}, "list of token ids"),
    "invocation str": ("ab", {}, "list of token ids"),
    "parameters": ([1], {"target_parameters": ["experts.down_proj"]}, "target_parameters do not go together"),
    "VeLoRA": ([1], {"velora_config": {"num_groups": 2}}, "velora_config do not go together"),
    "MiCA": ([1], {"init_lora_weights": "mica"}, "'mica' do not go together"),
}
TYPES = (
    "integers", "FP8", "targets int", "rslora str", "rank bool", "alpha str", "pattern no dict", "bool token",
    "invocation str",
)  # fmt: skip


@pytest.mark.parametrize("case", [*BAD_TENSORS, *BAD_CONFIGS, *ACTIVATED])
def test_a_bad_folder_changes_nothing(make_manager, tenants, case):
    manager = full_manager(make_manager, tenants)
    changes, message = BAD_TENSORS.get(case, ({}, ""))
    config, message = BAD_CONFIGS.get(case, ({}, message))
    if case in ACTIVATED:
        manager.accept_activated_lora()
        tokens, others, message = ACTIVATED[case]
        config = {"alora_invocation_tokens": tokens, **others}
    tensors = {name: tensor for name, tensor in {**TENSORS, **changes}.items() if tensor is not None}
    tenants.write(3, tensors, **config)
    with unchanged(manager):
        with pytest.raises(TypeError if case in TYPES else ValueError, match=message) as caught:
            manager.set_active_adapters([tenants.request(2), tenants.request(3)], decode(2, 3))
        assert str(caught.value).count("cannot load adapter 'tenant 3' from") == 1
        assert str(tenants.root) in str(caught.value)
        assert caught.value.__cause__ is not None


def test_folders_that_lack_a_file_or_cannot_be_read_change_nothing(make_manager, tenants: Tenants) -> None:
    manager = full_manager(make_manager, tenants)
    folder = tenants.write(3, TENSORS)
    config, weights, pickled = (
        folder / name for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
    )

    def refused(error: type[Exception], message: str, path: Path = folder) -> None:
        with unchanged(manager), pytest.raises(error, match=message):
            manager.add_adapter(tenants.request(3, lora_path=str(path)))

    refused(FileNotFoundError, "nowhere", folder / "nowhere")
    refused(FileNotFoundError, r"adapter_config\.json; a folder inside has one, pass that", folder.parent)
    good = config.read_bytes()
    for content in (b"{not json", b"\xff\xfe{"):
        config.write_bytes(content)
        refused(ValueError, r"adapter_config\.json.*not valid JSON")
    config.write_bytes(b"[1]")
    refused(TypeError, "JSON object, got list")
    config.unlink()
    refused(FileNotFoundError, r"adapter_config\.json")
    config.write_bytes(good)
    for content in (b"", b"garbage that is no header"):
        weights.write_bytes(content)
        refused(ValueError, "not a valid safetensors file")
    weights.rename(pickled)
    refused(ValueError, r"convert the adapter to adapter_model\.safetensors")
    pickled.unlink()
    refused(FileNotFoundError, folder.name)


@pytest.mark.parametrize(
    ("loras", "error", "message"),
    [
        ({}, ValueError, "no modules"),
        ({"m.x": LoRALayerWeights("m.x", 1, 1, torch.ones(1, 2), torch.ones(2, 1))}, ValueError, r"\['m.x'\]"),
        ({QKV: LoRALayerWeights(QKV, 4, 4, torch.ones(4, 24), torch.ones(47, 4))}, ValueError, "47 rows"),
        ({QKV: LoRALayerWeights(QKV, 9, 9, torch.ones(9, 24), torch.ones(48, 9))}, ValueError, "rank 9 exceeds"),
        ({QKV: LoRALayerWeights(QKV, 4, 4, None, None)}, RuntimeError, "not set"),
        ({QKV: LoRALayerWeights(QKV, 4, 4, torch.ones(4, 24, device="meta"), torch.ones(48, 4))}, TypeError, "meta"),
    ],
    ids=["empty", "unknown", "rows", "rank", "shell", "meta"],
)
def test_a_bad_model_in_memory_changes_nothing(make_manager, tenants, loras, error, message):
    manager = full_manager(make_manager, tenants)
    with unchanged(manager):
        with pytest.raises(error, match=message):
            manager.add_adapter(LoRAModel(3, 4, loras))
        with pytest.raises(TypeError, match="LoRAModel or a LoRARequest, got dict"):
            manager.add_adapter(loras)


def test_modules_outside_the_target_filter_are_refused(make_manager):
    manager = make_manager(target_modules=["q_proj", "o_proj"])
    assert manager.add_adapter(adapter(1, modules=("q_proj", "o_proj")))
    with pytest.raises(ValueError, match=r"k_proj.*target_modules"):
        manager.add_adapter(adapter(2, modules=("q_proj", "k_proj")))
    with pytest.raises(ValueError, match=r"down_proj.*target_modules"):
        manager.add_adapter(adapter(2, modules=("down_proj",)))


def test_what_is_broken_is_named_before_the_pins(make_manager, tenants):
    """First an adapter is loaded and checked, then room is made for it."""
    manager = full_manager(make_manager, tenants)
    manager.pin_adapter(1)
    manager.pin_adapter(2)
    tenants.write(3, use_dora=True)
    tenants.write(4)
    with unchanged(manager):
        with pytest.raises(ValueError, match="use_dora"):
            manager.set_active_adapters([tenants.request(1), tenants.request(3)], decode(1, 3))
        with pytest.raises(RuntimeError, match=r"no slot for adapters .*: all .* pinned \(\[1, 2\], of 2 slots\)"):
            manager.add_dummy_lora(tenants.request(4), 8)
        with pytest.raises(RuntimeError, match=r"no place for adapter 3: all 2 .* pinned \(\[1, 2\]\)"):
            manager.add_adapter(adapter(3))
