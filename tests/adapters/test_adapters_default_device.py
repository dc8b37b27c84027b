"""Under a default device every tensor still is where it belongs: the host's on the CPU, a slot's beside its weights.

`meta` stands for any other device: a host tensor that is made without `device="cpu"` then has no data, and shows.
"""

import pytest
import torch
from adapter_world import VOCAB, DenseModel, PackedModel, Tenants, adapter, adapter_tensors, all_buffers, decode

from punica.adapters import LoRAModelManager, LoRARequest, random_adapter_tensors, write_random_adapter
from punica.adapters.write import stage
from punica.config import LoRAConfig


class Sizes:
    """What random adapters need of a Llama config."""

    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 24, 40, 2, 4, 2


def build(dense: DenseModel) -> LoRAModelManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=3, max_cpu_loras=4)
    return LoRAModelManager(PackedModel(dense), 8, 64, VOCAB, config, "cpu")


def serve(manager: LoRAModelManager, tenants: Tenants) -> None:
    """Adapters by the other ways that lead into a slot: from a folder, reloaded, a zero one."""
    manager.add_adapter(tenants.request(1))
    manager.add_adapter(tenants.request(1, load_inplace=True))
    manager.prefetch_adapter(2).wait()
    manager.add_dummy_lora(LoRARequest("warm-up", 3, "nowhere"), 8)


def test_adapters_on_the_cpu(dense, tenants, tmp_path):
    tenants.write(1, adapter_tensors(1), 4)
    plain, manager = build(dense), build(dense)
    for one in (plain, manager):
        one.add_adapter(adapter(2))
    serve(plain, tenants)
    lora = plain._packer.pack(adapter(1))
    image = stage(plain.modules, lora, torch.float32, pin_memory=False).image
    numbers = random_adapter_tensors(Sizes, 4, 7)
    with torch.device("meta"):
        serve(manager, tenants)
        assert torch.equal(stage(manager.modules, lora, torch.float32, pin_memory=False).image, image)
        drawn = random_adapter_tensors(Sizes, 4, 7)
        write_random_adapter(tmp_path, Sizes, 4, 7)
    assert all(torch.equal(drawn[name], tensor) for name, tensor in numbers.items())
    for found, wanted in zip(all_buffers(manager), all_buffers(plain), strict=True):
        for i in (1, 2, 3):
            assert torch.equal(found[manager.lora_index_to_id.index(i)], wanted[plain.lora_index_to_id.index(i)])
    assert all(tensor.device.type == "cpu" for i in (1, 2, 3) for tensor in manager.get_adapter(i).tensors())


@pytest.mark.gpu
def test_everything_under_a_default_device_of_cuda(dense, tenants):
    """As users work: the default device set once, then model, manager, adapters and a step."""
    tenants.write(1, adapter_tensors(1), 4)
    in_memory = adapter(2)
    with torch.device("cuda"):
        model = PackedModel(dense.to("cuda"))
        config = LoRAConfig(max_lora_rank=8, max_loras=3, max_cpu_loras=4)
        manager = LoRAModelManager(model, 8, 64, VOCAB, config, "cuda")
        manager.add_adapter(tenants.request(1))
        manager.add_adapter(in_memory)
        manager.activate_adapter(2)
        manager.add_dummy_lora(LoRARequest("warm-up", 3, "nowhere"), 8)
        manager.set_adapter_mapping(decode(1, 2, 0, 3))
        x = torch.randn(4, 24)
        output = manager.model(x)
    dense.cpu()
    for row, i in ((0, 1), (1, 2), (2, 0), (3, 0)):
        model = dense.merged(adapter_tensors(i), 2.0) if i else dense
        torch.testing.assert_close(output[row : row + 1].cpu(), model(x[row : row + 1].cpu()), rtol=1e-3, atol=1e-3)
