"""Folders written by the PEFT library that must be refused, with the words that say why; nothing may change."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
from adapter_world import unchanged
from managed_world import MAX_RANK, VOCAB, Ours
from peft_world import hugging_face_model, lora_config, peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from punica.adapters import LoRARequest
from punica.metadata import LoRAMapping

pytestmark = [  # said by PEFT and Transformers
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lora_bias=True.*|.*have invalid shape.*:UserWarning"),
]


def transposed() -> nn.Module:
    """GPT-2 stores its matrices as `[in, out]`, for which PEFT sets `fan_in_fan_out`."""
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=VOCAB, n_positions=16))


def biased() -> nn.Module:
    return hugging_face_model(attention_bias=True)


IA3 = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
REFUSED: dict[str, tuple[Any, peft.PeftConfig, str]] = {
    "bias all": (biased, lora_config(bias="all"), r"\.bias'.* is a bias, trained with bias='all'"),
    "new tokens": (hugging_face_model, lora_config(trainable_token_indices=[1, 2]), r"indices is set \(\[1, 2\]\)"),
    "transposed": (transposed, lora_config(target_modules=["c_attn"], fan_in_fan_out=True), r"c_attn.*expected names"),
    "IA3": (hugging_face_model, IA3, "peft_type is 'IA3', only 'LORA'"),
    "many things": (
        hugging_face_model, lora_config(r=MAX_RANK + 2, use_dora=True, modules_to_save=["lm_head"]),
        rf"use_dora.*modules_to_save.*rank {MAX_RANK + 2} exceeds max_lora_rank {MAX_RANK}",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Ours:
    """Both caches full and a mapping set, so that any refusal has something to destroy; every test leaves it as is."""
    root = tmp_path_factory.mktemp("serving")
    base = hugging_face_model()
    base.save_pretrained(root)
    names = ["tenant one", "tenant two"]
    peft_model(base, {name: lora_config() for name in names}).save_pretrained(root)
    ours = Ours(root, {name: root / name for name in names}, max_cpu_loras=2)
    ours.manager.set_active_adapters(ours.requests.values(), LoRAMapping((1, 0, 2), (1, 0, 2)))
    return ours


def check_refused(serving: Ours, folder: Path, message: str) -> None:
    manager = serving.manager
    with unchanged(manager):
        request = LoRARequest("stranger", 3, str(folder))
        with pytest.raises(ValueError, match=message) as caught:
            manager.add_adapter(request)
        assert str(caught.value).startswith(f"cannot load adapter 'stranger' from {str(folder)!r}")


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_of_peft_is_refused(serving, tmp_path, case):
    base, config, message = REFUSED[case]
    peft_model(base(), {"default": copy.deepcopy(config)}).save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    check_refused(serving, tmp_path, message)


def test_whole_embeddings_saved_along_are_refused(serving, tmp_path):
    """After a change of the vocabulary PEFT saves the new tables as they are, not as LoRA."""
    model = peft_model(hugging_face_model(), {"default": lora_config()})
    model.resize_token_embeddings(VOCAB + 3)
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    check_refused(serving, tmp_path, r"unsupported LoRA weight 'base_model\.model\.\S*(embed_tokens|lm_head)\.weight'")


def test_an_initialisation_that_changed_the_base_model_is_served_with_a_warning(serving, tmp_path):
    peft_model(hugging_face_model(), {"default": lora_config(init_lora_weights="pissa")}).save_pretrained(tmp_path)
    ours = Ours(serving.root, {"pissa": tmp_path})
    with pytest.warns(UserWarning, match="init_lora_weights='pissa' may have altered the base model"):
        assert ours.manager.add_adapter(ours.requests["pissa"])
