"""Folders as users have them: served as by transformers, or refused by the word for what they are."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from punica.engine import Engine
from punica.models import LlamaForCausalLM, load_model
from tests.models.moe_world import CONFIGS, hugging_face, logits_of, wanted
from tests.models.test_llama import SIZES, make_config

IDS = torch.arange(20)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    hugging_face(make_config()).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, how: Any, file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    tensors = how(tensors) or tensors
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / file, metadata={"format": "pt"})


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def check_as_transformers(folder: Path, model: Any = None) -> None:
    expected = wanted(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), IDS)
    torch.testing.assert_close(logits_of(model or load_model(folder), IDS), expected, atol=1e-4, rtol=1e-4)


def test_a_head_unlike_the_embedding_is_kept(folder) -> None:
    configure(folder, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        model = load_model(folder)
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    check_as_transformers(folder, model)


@pytest.mark.parametrize("which", ["both, equal", "embedding alone", "head alone"])
def test_a_tied_model_stays_tied(tmp_path, recwarn, which) -> None:
    hugging_face(make_config(tie_word_embeddings=True)).save_pretrained(tmp_path)

    def names(tensors: dict[str, torch.Tensor]) -> None:
        table = tensors.pop(EMBEDDING)
        tensors.update({} if which == "head alone" else {EMBEDDING: table})
        tensors.update({} if which == "embedding alone" else {HEAD: table.clone()})

    change(tmp_path, names)
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not [one for one in recwarn if "differs" in str(one.message)]
    check_as_transformers(tmp_path, model)


def test_a_single_file_beside_an_older_index_is_what_counts(tmp_path) -> None:
    hugging_face(make_config()).save_pretrained(tmp_path, max_shard_size="60KB")
    change(tmp_path, lambda tensors: {name: tensor * 2 for name, tensor in tensors.items()}, sorted(
        path.name for path in tmp_path.glob("model-*.safetensors"))[0])  # fmt: skip
    hugging_face(make_config()).save_pretrained(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "model.safetensors", tmp_path)
    check_as_transformers(tmp_path)


def test_a_bare_backbone_with_a_tied_head(tmp_path) -> None:
    """As ``AutoModel.save_pretrained`` writes it."""
    whole = hugging_face(make_config(tie_word_embeddings=True))
    whole.model.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(logits_of(load_model(tmp_path), IDS), wanted(whole, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("prefix", "head"), [("model.", "v_head.summary"), ("", "value_head"), ("", "score")])
def test_heads_of_other_tasks_are_left_out_with_a_warning(folder, head, prefix) -> None:
    model = load_model(folder)

    def add(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = {prefix + name.removeprefix("model.") if name != HEAD else name: one for name, one in tensors.items()}
        return named | {f"{head}.weight": torch.ones(1, 64), f"{head}.bias": torch.ones(1)}

    change(folder, add)
    with pytest.warns(UserWarning, match=f"holds {head.partition('.')[0]} beside"):
        again = load_model(folder)
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS))


def test_a_bare_backbone_without_a_head_is_refused(folder) -> None:
    change(folder, lambda tensors: {name.removeprefix("model."): one for name, one in tensors.items() if name != HEAD})
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_model(folder)


@pytest.mark.parametrize(("kind", "prefix"), [("mixtral", ""), ("qwen3", "model."), ([*CONFIGS][2], "")])
def test_experts_that_transformers_packed(tmp_path, kind, prefix) -> None:
    reference = hugging_face(CONFIGS[kind])
    reference.save_pretrained(tmp_path)
    plain = load_model(tmp_path)
    packed = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in packed)
    named = {prefix + name.removeprefix("model.") if name != HEAD else name: one for name, one in packed.items()}
    save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize(("name", "wrong"), [("gate_up_proj", (4, 32, 48)), ("down_proj", (3, 32, 24))])
def test_packed_experts_of_another_shape(tmp_path, name, wrong) -> None:
    reference = hugging_face(CONFIGS["mixtral"])
    reference.save_pretrained(tmp_path)
    tensors = {one: tensor.clone() for one, tensor in reference.state_dict().items()}
    tensors[f"model.layers.1.mlp.experts.{name}"] = torch.zeros(wrong)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"layers\.1\.mlp\.experts\.{name} .*{re.escape(str(wrong))}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "given", [{"load_in_8bit": True}, {"quant_method": "fp8", "weight_block_size": [128, 128]}], ids=str
)
def test_a_config_of_a_quantised_base_decides_nothing(folder, given) -> None:
    """A merged QLoRA has plain tensors under the config of its base: it is served, with a warning."""
    expected = Engine.from_pretrained(folder, device="cpu").generate([[1, 2, 3]], None, 5)[0].token_ids
    configure(folder, quantization_config=given)
    with pytest.warns(UserWarning, match="quantization_config"):
        engine = Engine.from_pretrained(folder, device="cpu")
    assert engine.generate([[1, 2, 3]], None, 5)[0].token_ids == expected


@pytest.mark.parametrize(
    ("dtype", "message"),
    [(torch.float8_e5m2, "as F8_E5M2"), (torch.int8, "as I8"), (torch.int32, "as I32, as quantised weights are")],
    ids=str,
)
def test_weights_in_other_numbers_are_refused_before_any_is_read(folder, dtype, message) -> None:
    model = load_model(folder)
    before = [parameter.clone() for parameter in model.parameters()]
    name = "model.layers.1.self_attn.q_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ValueError, match=message):
        model.load_weights(folder)
    assert model.has_weights
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_in_other_floats_are_served(folder, dtype) -> None:
    change(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    model = LlamaForCausalLM(folder, torch.float32)
    model.load_weights(folder)
    expected = load_file(folder / "model.safetensors")["model.norm.weight"].float()
    assert torch.equal(model.model.norm.weight, expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "list"),
        (" " * (1 << 20) + "{}", str(1 << 20)),
        ("{}", "'None'"),
        (json.dumps({"model_type": "gpt2"}), "'gpt2'"),
        (json.dumps({"model_type": "llama", **SIZES, "num_attention_heads": 0}), "num_attention_heads"),
        (json.dumps({"model_type": "llama", **SIZES, "num_key_value_heads": 3}), "multiple"),
        (json.dumps({"model_type": "llama", **SIZES, "dtype": "float99"}), "'float99'"),
        (json.dumps({"model_type": "qwen2", **SIZES, "vocab_size": -1}), "vocab_size"),
        *((json.dumps({"model_type": "llama", **SIZES, "torch_dtype": given}), "must be float32, float16, bfloat16")
          for given in ("fp16", "int8", 16, "device", {"": "float16"})),
        (json.dumps({"model_type": "llama", **SIZES, "hidden_size": "wide"}), "hidden_size"),
    ],
    ids=lambda text: text[-30:],
)  # fmt: skip
def test_damaged_configs_are_one_clear_error(tmp_path, content, message) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        load_model(tmp_path)
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    ("key", "given", "served"),
    [
        ("dtype", "auto", torch.bfloat16), ("torch_dtype", None, torch.bfloat16), ("dtype", "half", torch.float16),
        ("torch_dtype", "torch.float16", torch.float16), ("dtype", "float32", torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_the_dtype_of_a_folder(tmp_path, key, given, served) -> None:
    """By name, or by the tensors, as transformers does."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = {name: one for name, one in json.loads(file.read_text()).items() if "dtype" not in name}
    file.write_text(json.dumps(values | {key: given}))
    assert load_model(tmp_path).config.dtype == served
    assert load_model(tmp_path, torch.float32).lm_head.weight.dtype == torch.float32


def test_a_factor_that_is_no_number(tmp_path) -> None:
    scaling = {"type": "linear", "factor": "2"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "rope_scaling": scaling}))
    with pytest.raises(ValueError, match=r"rope_parameters are .*'factor': '2'"):
        LlamaForCausalLM(tmp_path)


def test_a_transformers_model_by_mistake_says_which_class_is_meant() -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    with pytest.raises(TypeError, match=r"Qwen3ForCausalLM is the class of transformers.*Engine\.from_pretrained"):
        LlamaForCausalLM(model)
