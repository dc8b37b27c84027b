"""Block-diagonal adapters on tensor-parallel ranks: each keeps its own blocks, and no collective is for LoRA."""

import peft
import pytest
import torch
from managed_world import PROMPTS, serve
from peft_world import SEVEN, hugging_face_model, lora_config, peft_model, reference_logits

from punica.adapters import LoRAModel
from punica.adapters.pack import AdapterPacker
from punica.adapters.weights import ModuleWeights
from punica.adapters.wrap import NamedLayer
from punica.layers import MergedQKVParallelLinearWithLoRA, RowParallelLinearWithLoRA
from punica.layers.packing import Blocks, ranks_of_blocks
from punica.ops.quant import Fp8Matrix
from punica.parallel import QKVParallelLinear, spawn_tensor_parallel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning"),
]
RANK = 8
SIDES = {
    "target_modules_bd_a": ["o_proj", "down_proj"],
    "target_modules_bd_b": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
}
ADAPTERS = {"four blocks": {"use_bdlora": peft.BdLoraConfig(nblocks=4, **SIDES)},
            "two blocks": {"use_bdlora": peft.BdLoraConfig(nblocks=2, **SIDES)},
            "dense": {}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [2, 4])
def test_each_rank_keeps_its_blocks_and_no_collective_is_for_lora(tmp_path, tp_size):
    base = hugging_face_model()
    base.save_pretrained(tmp_path)
    configs = {name: lora_config(r=RANK, target_modules=SEVEN, **fields) for name, fields in ADAPTERS.items()}
    model = peft_model(base, configs)
    model.save_pretrained(tmp_path / "adapters")
    folders = {name: tmp_path / "adapters" / name for name in ADAPTERS}
    theirs = []
    for name, prompt in zip(ADAPTERS, PROMPTS, strict=True):
        model.set_adapter(name)
        theirs += reference_logits(model, [prompt])
    own = [RANK // min(tp_size, 4), RANK // min(tp_size, 2), RANK]
    # two key-value heads, so four ranks have two of the four blocks, or one of two
    of_kv = own if tp_size == 2 else [RANK // 2, RANK // 2, RANK]
    for found in spawn_tensor_parallel(serve, tp_size, tmp_path, folders, backend="gloo"):
        (steps, ranks), (sharded, all_ranks) = found["plain"], found["fully sharded"]
        for logits in (steps["adapters"][0], sharded["adapters"][0]):
            assert all(float((a - b).abs().max()) < 1e-4 for a, b in zip(logits, theirs, strict=True))
        assert steps["adapters"][1] == steps["none"][1] == sharded["none"][1]
        assert sum(sharded["adapters"][1].values()) > sum(steps["none"][1].values()) > 0
        for name, of_adapters in ranks.items():
            wanted = zip(own, of_kv, of_kv, strict=True) if "qkv" in name else zip(own, own, strict=True)
            wanted = wanted if "down" not in name and "o_proj" not in name else zip(own, strict=True)
            if any(part in name for part in ("qkv", "gate_up", "o_proj", "down")):
                assert of_adapters == [list(each) for each in wanted], name
                assert all_ranks[name] == [[RANK] * len(each) for each in of_adapters], name


@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(("blocks", "count"), [(4, 2), (2, 4), (3, 2), (1, 2), (6, 1)])
def test_ranks_of_own_blocks_make_the_own_part_of_the_product(blocks, count, fp8):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(12, 5, generator=generator)
    b = torch.block_diag(*torch.randn(blocks, 12 // blocks, 12 // blocks, generator=generator))
    pair = tuple(matrix if fp8 is None else Fp8Matrix.of(matrix, fp8) for matrix in (a, b))
    whole_a, whole_b = (matrix if fp8 is None else matrix.real() for matrix in pair)
    height = 12 // count
    for index in range(count):
        own_a, own_b = (part if fp8 is None else part.real() for part in ranks_of_blocks(pair, blocks, index, count))
        rows = slice(index * height, (index + 1) * height)
        torch.testing.assert_close(own_b[rows] @ own_a, whole_b[rows] @ whole_a)
        least = max(1, -(-blocks // count))
        assert least * 12 // blocks <= len(own_a) <= min(12, (least + 1) * 12 // blocks)
    assert ranks_of_blocks((None, None), blocks, 0, count) == (None, None)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_packs_the_blocks_of_its_own_heads(rank):
    """Four query heads, and two key-value heads that two ranks each have."""
    layer = MergedQKVParallelLinearWithLoRA(QKVParallelLinear(6, 3, 4, 2, bias=False, tp_rank=rank, tp_size=4))
    parts = ["q_proj", "k_proj", "v_proj"]
    packer = AdapterPacker([NamedLayer(layer, ["qkv_proj"], parts)], {"qkv_proj": parts}, None)
    loras = {}
    for name, height in zip(parts, (12, 6, 6), strict=True):
        pair = torch.randn(RANK, 6), torch.block_diag(*torch.randn(2, height // 2, RANK // 2))
        loras[name] = ModuleWeights(name, RANK, [pair], blocks=[Blocks(b=2)])
    packed = packer.pack(LoRAModel(1, RANK, loras), fits=True).loras["qkv_proj"].slices
    for name, (a, b), start in zip(parts, packed, (3 * rank, 3 * (rank // 2), 3 * (rank // 2)), strict=True):
        [(whole_a, whole_b)] = loras[name].slices
        assert a.shape == (RANK // 2, 6)
        rows = slice(start, start + 3)
        torch.testing.assert_close(b[rows] @ a, whole_b[rows] @ whole_a)
    loras["q_proj"].lora_b = torch.randn(12, RANK)
    dense = packer.pack(LoRAModel(1, RANK, loras), fits=True).loras["qkv_proj"].slices[0]
    assert dense == loras["q_proj"].slices[0], "a matrix given later has no blocks"
    loras["k_proj"].lora_a = torch.randn(RANK, 6)
    assert not loras["k_proj"].blocks


def test_a_module_with_blocks_on_its_other_side_is_whole():
    """A of a column layer, or B of a row layer: each rank needs all ranks of them."""
    pair = (torch.ones(4, 8), torch.ones(8, 4))
    row = RowParallelLinearWithLoRA.__new__(RowParallelLinearWithLoRA)
    row.__dict__.update(tp_rank=1, tp_size=2)
    assert row.own_ranks(0, pair, Blocks(b=2)) is pair
    assert row.own_ranks(0, pair, Blocks(a=2))[0].shape == (2, 8)
