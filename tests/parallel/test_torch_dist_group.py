"""Two real ranks over gloo: collectives, base layers and LoRA layers equal one rank (L2 not fully sharded, B1)."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from punica.config import LoRAConfig
from punica.layers import from_layer
from punica.parallel import (
    ColumnParallelLinear,
    LogitsProcessor,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    TorchDistGroup,
    VocabParallelEmbedding,
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_gather,
    tensor_parallel,
)
from punica.segments import LoRAMapping
from punica.wrapper import PunicaWrapperCPU

pytestmark = pytest.mark.slow

SLOTS = [0, -1, 1, 1, 2]
RANKS = {0: 8, 1: 5, 2: 1}


def collectives():
    rank = get_tensor_model_parallel_rank()
    mine = torch.full((2, 3), float(rank + 1))
    assert (tensor_model_parallel_all_reduce(mine.clone()) == 3).all()
    assert tensor_model_parallel_all_gather(mine)[0].tolist() == [1, 1, 1, 2, 2, 2]
    assert tensor_model_parallel_all_gather(mine, dim=0)[:, 0].tolist() == [1, 1, 2, 2]
    assert torch.equal(tensor_model_parallel_all_gather(mine, dim=-2), tensor_model_parallel_all_gather(mine, dim=0))
    gathered = tensor_model_parallel_gather(mine, dst=1)
    assert gathered is None if rank == 0 else gathered.shape == (2, 6)
    with pytest.raises(ValueError, match="one shape on all ranks"):
        tensor_model_parallel_all_gather(torch.ones(2, 3 + rank))


def vocabulary():
    table, hidden, ids = torch.randn(6, 4), torch.randn(3, 4), torch.tensor([[0, 5], [3, 4]])
    embedding = VocabParallelEmbedding(6, 4, org_num_embeddings=4, padding_size=4)
    embedding.weight_loader(embedding.weight, table)
    torch.testing.assert_close(embedding(ids), table[ids])
    head = ParallelLMHead(6, 4, org_num_embeddings=4, padding_size=4)
    head.weight_loader(head.weight, table)
    processor = LogitsProcessor(6)
    torch.testing.assert_close(processor(head, hidden), hidden @ table.T)
    processor.use_all_gather = False
    logits = processor(head, hidden)
    assert logits is None if get_tensor_model_parallel_rank() else logits.shape == (3, 6)


def lora_layer(build, packed, sizes, columns_of, tp):
    """Output of a wrapped layer on ``tp`` ranks, gathered into the order of one rank; same seed on all ranks."""
    torch.manual_seed(1)
    place = {} if tp else {"tp_rank": 0, "tp_size": 1}
    base = build(bias=True, return_bias=False, **place)
    base.weight_loader(base.weight, torch.randn(sum(sizes), 8))
    base.weight_loader(base.bias, torch.randn(sum(sizes)))
    config = LoRAConfig(max_lora_rank=8, max_loras=4, lora_dtype=torch.float32)
    layer = from_layer(base, 4, config, ["m"] * packed)
    wrapper = PunicaWrapperCPU(8, 8, "cpu", max_loras=4)
    ids = [slot + 1 for slot in SLOTS]
    wrapper.update_metadata(LoRAMapping(ids, ids), [1, 2, 3, 4], 4, 32)
    layer.set_mapping(wrapper)
    for slot, rank in RANKS.items():
        a, b = [torch.randn(rank, 8) for _ in sizes], [torch.randn(size, rank) for size in sizes]
        layer.set_lora(slot, a if packed else a[0], b if packed else b[0])
    output = layer(torch.randn(len(SLOTS), 8))
    return output[:, columns_of] if tp else output


LAYERS = {
    "column": (lambda **kw: ColumnParallelLinear(8, 12, gather_output=True, **kw), 0, (12,), list(range(12))),
    "merged": (
        lambda **kw: MergedColumnParallelLinear(8, [4, 8], gather_output=True, **kw),
        2,
        (4, 8),
        [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11],
    ),
    "row": (lambda **kw: RowParallelLinear(8, 12, input_is_parallel=False, **kw), 0, (12,), list(range(12))),
}


def lora_layers():
    for build, packed, sizes, columns in LAYERS.values():
        together = lora_layer(build, packed, sizes, columns, tp=True)
        alone = lora_layer(build, packed, sizes, columns, tp=False)
        torch.testing.assert_close(together, alone, rtol=2e-4, atol=2e-4)
    place_taken_from_the_group = QKVParallelLinear(8, 2, 4, 2)
    assert place_taken_from_the_group.tp_rank == get_tensor_model_parallel_rank()


def on_rank(rank, address):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        with tensor_parallel(TorchDistGroup()):
            collectives()
            vocabulary()
            lora_layers()
    finally:
        dist.destroy_process_group()


def test_two_ranks_over_gloo(tmp_path):
    mp.spawn(on_rank, args=(f"file://{tmp_path / 'rendezvous'}",), nprocs=2)
