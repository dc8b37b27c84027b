"""Mixed batches against the dense merged model, and folders written by the PEFT library itself."""


import peft
import pytest
import torch
from adapter_world import INTER, VOCAB
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from punica.adapters import LoRAModel, PEFTHelper, random_adapter, write_random_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # inside transformers

EXPECTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama_config() -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": INTER, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=VOCAB)


def test_a_random_adapter_is_a_genuine_peft_folder(tmp_path):
    folder = write_random_adapter(tmp_path / "new" / "adapter", llama_config(), rank=4, seed=3, alpha=6)
    reference = peft.PeftModel.from_pretrained(LlamaForCausalLM(llama_config()), str(folder))
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
    on_disk = LoRAModel.from_local_checkpoint(folder, EXPECTED, PEFTHelper.from_local_dir(folder), lora_model_id=1)
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
