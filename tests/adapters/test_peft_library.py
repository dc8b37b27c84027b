"""The PEFT library as the oracle: eight of its adapters, its own mixed batch, its merged models; refused folders."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_world import full_manager, unchanged
from peft_world import (
    ADAPTERS,
    SEVEN,
    VOCAB,
    Ours,
    hugging_face_model,
    lora_config,
    peft_model,
    reference_logits,
    round_to_bfloat16,
)
from safetensors.torch import load_file
from torch import nn

from punica.adapters import LoRAModel, LoRARequest, PEFTHelper, random_adapter, write_random_adapter

pytestmark = [  # said by PEFT and Transformers
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*alpha_pattern keys did not match.*:RuntimeWarning"),
]

NAMES: list[str | None] = [*ADAPTERS, None, "vocabulary", "q and v", None]
PROMPTS = [[(7 * row + 5 * i * i + 3) % VOCAB for i in range(2 + (5 * row) % 7)] for row in range(len(NAMES))]


@dataclass
class Library:
    """What PEFT built and saved: the base model, one PEFT model with all adapters, and the folders of both."""

    root: Path
    base: transformers.LlamaForCausalLM
    model: Any
    adapters: dict[str, Path]

    def ours(self) -> Ours:
        return Ours(self.root, self.adapters)


def save(root: Path, base: transformers.LlamaForCausalLM, configs: dict[str, dict[str, Any]]) -> Library:
    base.save_pretrained(root)
    model = peft_model(copy.deepcopy(base), {name: lora_config(**fields) for name, fields in configs.items()})
    model.save_pretrained(root / "adapters")
    return Library(root, base, model, {name: root / "adapters" / name for name in configs})


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    library = save(tmp_path_factory.mktemp("library"), hugging_face_model(), ADAPTERS)
    round_to_bfloat16(library.model, "all-linear", library.adapters["all-linear"])
    return library


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_a_mixed_batch_equals_the_mixed_batch_of_peft(library):
    """Logits after a prefill and of decode rows, all adapters and none together."""
    prompts, ours = library.ours().logits(PROMPTS, NAMES)
    theirs = reference_logits(library.model, prompts, adapter_names=[name or "__base__" for name in NAMES])
    assert largest_difference(ours, theirs) < 1e-4
    plain = reference_logits(library.base, prompts)
    for name, a, b in zip(NAMES, theirs, plain, strict=True):
        assert (float((a - b).abs().max()) > 0.5) is (name is not None), name  # every adapter has a large effect


@pytest.mark.parametrize("targets", [["embed_tokens", "lm_head"], ["embed_tokens"]], ids="+".join)
def test_tied_embeddings_have_separate_adapters(tmp_path, targets):
    """One table, two uses: PEFT adapts each on its own (merging would mix them up, so its forward is the oracle)."""
    base = hugging_face_model(tie_word_embeddings=True)
    library = save(tmp_path, base, {"one": {"target_modules": targets}, "two": {"r": 3, "target_modules": ["lm_head"]}})
    ours = library.ours()
    assert ours.engine.runner.model.lm_head.weight is ours.engine.runner.model.model.embed_tokens.weight
    prompts, logits = ours.logits(PROMPTS[:3], ["one", None, "two"])
    theirs = reference_logits(library.model, prompts, adapter_names=["one", "__base__", "two"])
    assert largest_difference(logits, theirs) < 1e-4
    plain = reference_logits(base, prompts)
    assert all(float((theirs[row] - plain[row]).abs().max()) > 0.5 for row in (0, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_one_adapter_of_a_tied_pair(tmp_path, recwarn, tied):
    """`ensure_weight_tying` adapts both uses with the same matrices, and names only one of them as target. A second
    adapter of a PEFT model gets one of the pair alone, and both when it is loaded: that is warned of.
    """
    base = hugging_face_model(tie_word_embeddings=tied)
    fields = {"target_modules": ["lm_head", "q_proj"], "ensure_weight_tying": True}
    library = save(tmp_path, base, {"one": fields, "two": fields})
    recwarn.clear()
    prompts, ours = library.ours().logits(PROMPTS[:3], ["one", None, "two"])
    said = [str(warning.message) for warning in recwarn]
    assert not [text for text in said if "target_modules" in text]
    assert ["adapter 'two'" in text for text in said if "ensure_weight_tying" in text] == [True] * tied
    theirs = reference_logits(library.model, prompts, adapter_names=["one", "__base__", "two"])
    assert largest_difference(ours, theirs) < 1e-4


def test_base_weights_that_are_saved_along_are_warned_of(tmp_path):
    """PEFT loads them over the base model's, so they matter if they were changed, for new tokens for example."""
    library = save(tmp_path, hugging_face_model(), {"one": {"target_modules": ["embed_tokens", "q_proj"]}})
    with pytest.warns(UserWarning, match=r"'one': \['base_model\.\S*embed_tokens\.base_layer\.weight'\] are not read"):
        library.ours().logits(PROMPTS[:1], ["one"])


@pytest.mark.parametrize("fields", [{"bias": "all"}, {"fan_in_fan_out": True}, {"velora_config": {}}], ids=str)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True but the target module is")
def test_settings_without_effect_on_these_layers_are_served_as_peft_does(tmp_path, fields):
    """The base has no biases to train; PEFT drops `fan_in_fan_out` for linear layers, but an older one saved it; of
    VeLoRA the backward pass alone is another.
    """
    base = hugging_face_model()
    base.save_pretrained(tmp_path)
    model = peft_model(base, {"one": lora_config(target_modules=SEVEN, **fields)})
    model.save_pretrained(tmp_path)
    config = tmp_path / "one" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    prompts, ours = Ours(tmp_path, {"one": tmp_path / "one"}).logits(PROMPTS[:1], ["one"])
    assert largest_difference(ours, reference_logits(model, prompts, adapter_names=["one"])) < 1e-4


def llama_config() -> transformers.LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=VOCAB)


def test_a_random_adapter_is_a_genuine_peft_folder(tmp_path):
    folder = write_random_adapter(tmp_path / "new" / "adapter", llama_config(), rank=4, seed=3, alpha=6)
    reference = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(llama_config()), str(folder))
    saved = load_file(folder / "adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(reference)
    assert loaded.keys() == saved.keys()
    assert len(saved) == 2 * 7 * 2
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    layer = reference.base_model.model.model.layers[1].mlp.down_proj
    assert layer.scaling["default"] == 1.5


def test_random_adapters_in_memory_and_on_disk_are_the_same(tmp_path):
    kwargs = {"target_modules": ["k_proj", "o_proj"], "dtype": torch.bfloat16}
    folder = write_random_adapter(tmp_path, llama_config(), 2, 11, **kwargs)
    on_disk = LoRAModel.from_local_checkpoint(folder, SEVEN, PEFTHelper.from_local_dir(folder), lora_model_id=1)
    in_memory = random_adapter(1, llama_config(), 2, 11, **kwargs)
    assert set(in_memory.loras) == set(on_disk.loras)
    for name, weights in in_memory.loras.items():
        other = on_disk.get_lora(name)
        assert weights.lora_b.dtype == torch.bfloat16
        assert (weights.scaling, weights.rank) == (other.scaling, other.rank) == (2, 2)
        assert torch.equal(weights.lora_a, other.lora_a)
        assert torch.equal(weights.lora_b, other.lora_b)


@pytest.mark.parametrize(
    ("changes", "message"), [({"rank": 0}, "rank is 0"), ({"target_modules": ["lm_head"]}, r"\['lm_head'\]")]
)
def test_bad_random_adapters_write_nothing(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        write_random_adapter(tmp_path / "a", llama_config(), **{"rank": 4, "seed": 0, **changes})
    assert not (tmp_path / "a").exists()


# --- folders that are refused --------------------------------------------------------------------------------------


def transposed() -> nn.Module:
    """GPT-2 stores its matrices as `[in, out]`, for which PEFT sets `fan_in_fan_out`."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=VOCAB, n_positions=16)
    )


def biased() -> nn.Module:
    return hugging_face_model(attention_bias=True)


IA3 = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
REFUSED: dict[str, tuple[Any, peft.PeftConfig, str]] = {
    "bias all": (biased, lora_config(bias="all"), r"\.bias'.* is a bias, trained with bias='all'"),
    "new tokens": (hugging_face_model, lora_config(trainable_token_indices=[1, 2]), r"indices is set \(\[1, 2\]\)"),
    "transposed": (transposed, lora_config(target_modules=["c_attn"], fan_in_fan_out=True), r"c_attn.*expected names"),
    "IA3": (hugging_face_model, IA3, "peft_type is 'IA3', only 'LORA'"),
    "many things": (
        hugging_face_model, lora_config(r=10, use_dora=True, modules_to_save=["lm_head"]),
        r"use_dora.*modules_to_save.*rank 10 exceeds max_lora_rank 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*REFUSED, "whole embeddings"])
@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*|.*have invalid shape.*:UserWarning")
def test_a_folder_of_peft_is_refused(make_manager, tenants, tmp_path, case):
    """After a change of the vocabulary PEFT saves whole embeddings as they are, not as LoRA."""
    manager, whole = full_manager(make_manager, tenants), r"'base_model\.model\.\S*(embed_tokens|lm_head)\.weight'"
    base, config, message = REFUSED.get(case, (hugging_face_model, lora_config(), f"unsupported LoRA weight {whole}"))
    model, folder = peft_model(base(), {"default": copy.deepcopy(config)}), tmp_path / "stranger"
    if case == "whole embeddings":
        model.resize_token_embeddings(VOCAB + 3)
    model.save_pretrained(folder, save_embedding_layers=case == "whole embeddings")
    assert (folder / "adapter_model.safetensors").is_file()
    with unchanged(manager), pytest.raises(ValueError, match=message) as caught:
        manager.add_adapter(LoRARequest("stranger", 3, str(folder)))
    assert str(caught.value).startswith(f"cannot load adapter 'stranger' from {str(folder)!r}")


def test_an_initialisation_that_changed_the_base_model_is_served_with_a_warning(tmp_path):
    library = save(tmp_path, hugging_face_model(), {"pissa": {"init_lora_weights": "pissa"}})
    ours = library.ours()
    with pytest.warns(UserWarning, match="init_lora_weights='pissa' may have altered the base model"):
        assert ours.engine.manager.add_adapter(ours.requests["pissa"])
