"""Block-diagonal adapters (`use_bdlora`), with the PEFT library as the oracle."""

import json

import peft
import pytest
import torch
from managed_world import Ours
from peft_world import SEVEN, hugging_face_model, lora_config, peft_model, reference_logits
from safetensors.torch import load_file, save_file

from punica.adapters import LoRAModel, PEFTHelper
from punica.adapters.blocks import dense
from punica.ops.quant import Fp8Matrix

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning"),
]
ROWS, COLUMNS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["o_proj", "down_proj"]
BLOCKS = {
    "megatron": {"nblocks": 4, "target_modules_bd_a": COLUMNS, "target_modules_bd_b": ROWS},
    "one layer": {"nblocks": 2, "target_modules_bd_b": ["layers.1.self_attn"], "match_strict": False},
    "one block": {"nblocks": 1, "target_modules_bd_a": SEVEN},
}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved by PEFT: its model with the three adapters, and their folders."""
    root, base = tmp_path_factory.mktemp("blocks"), hugging_face_model()
    base.save_pretrained(root)
    configs = {
        name: lora_config(r=8, target_modules=SEVEN, use_bdlora=peft.BdLoraConfig(**fields))
        for name, fields in BLOCKS.items()
    }
    model = peft_model(base, configs)
    model.save_pretrained(root / "adapters")
    return root, model, {name: root / "adapters" / name for name in BLOCKS}


def test_a_batch_of_block_diagonal_adapters_equals_peft(saved):
    root, model, folders = saved
    ours = Ours(root, folders)
    mine = ours.logits(PROMPTS, list(BLOCKS))
    for name, prompt, row in zip(BLOCKS, PROMPTS, mine, strict=True):
        model.set_adapter(name)
        [theirs] = reference_logits(model, [prompt])
        assert float((row - theirs).abs().max()) < 1e-4, name
        with model.disable_adapter():
            assert float((theirs - reference_logits(model, [prompt])[0]).abs().max()) > 0.5


def test_refusals_name_module_and_remedy(saved, tmp_path):
    _, _, folders = saved
    helper = PEFTHelper.from_local_dir(folders["megatron"])
    config = helper.use_bdlora
    tensors = load_file(folders["megatron"] / "adapter_model.safetensors")
    full = json.loads((folders["megatron"] / "adapter_config.json").read_text())

    def load(**changes):
        LoRAModel.from_lora_tensors(1, tensors, PEFTHelper.from_dict(full | {"use_bdlora": config | changes}))

    with pytest.raises(ValueError, match=r"down_proj' has rank 8, which use_bdlora.nblocks = 3 does not divide"):
        load(nblocks=3)
    with pytest.raises(ValueError, match=r"rank 8, which use_bdlora.nblocks = 40 does not divide"):
        load(nblocks=40)  # as many as B has rows
    with pytest.raises(ValueError, match=r"layers.0.self_attn.o_proj' matches neither .*, which match_strict demands"):
        load(target_modules_bd_a=["down_proj"])
    with pytest.raises(ValueError, match=r"o_proj' matches both"):
        load(target_modules_bd_b=["o_proj", *ROWS])
    with pytest.raises(ValueError, match=r"use_bdlora\.nblocks is 0"):
        load(nblocks=0)
    with pytest.raises(TypeError, match="target_modules_bd_a must be a list of str, got 'o_proj'"):
        load(target_modules_bd_a="o_proj")
    with pytest.raises(TypeError, match="use_bdlora must be an object with nblocks, got True"):
        PEFTHelper.from_dict(full | {"use_bdlora": True})


def test_another_number_of_blocks_does_not_fit_the_model(saved, tmp_path):
    """Four blocks read as two: matrices of half the width, refused before a slot changes."""
    root, _, folders = saved
    folder = tmp_path / "halved"
    folder.mkdir()
    config = json.loads((folders["megatron"] / "adapter_config.json").read_text())
    config["use_bdlora"]["nblocks"] = 2
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(load_file(folders["megatron"] / "adapter_model.safetensors"), folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"layers.0"):
        Ours(root, {"halved": folder}).logits(PROMPTS[:1], ["halved"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_dense_puts_the_blocks_on_the_diagonal(dtype):
    stored = torch.arange(1, 13, dtype=torch.float32).view(6, 2).to(dtype)
    factor = Fp8Matrix(stored, torch.full((6,), 0.5)) if dtype.itemsize == 1 else stored
    full = dense("A", factor, 3)
    real = full.real() * 2 if isinstance(full, Fp8Matrix) else full.float()
    assert torch.equal(real, torch.block_diag(*stored.float().chunk(3)))
    assert dense("A", factor, 1) is factor
    assert dense("A", torch.empty(6, 2, device="meta"), 3).shape == (6, 6)
