"""Under a default device every tensor still is where it belongs: the host's on the CPU, a slot's beside its weights.

`meta` stands for any other device: a host tensor that is made without `device="cpu"` then has no data, and shows.
"""

import pytest
import torch
from adapter_world import VOCAB, DenseModel, PackedModel, Tenants, adapter, adapter_tensors, all_buffers, decode

from punica.adapters import LoRAModelManager, LoRARequest, random_adapter, random_adapter_tensors, write_random_adapter
from punica.adapters.write import stage
from punica.config import LoRAConfig
from punica.ops.slot_image import SlotMatrix, image_matrices, pack_image, write_slot


class Sizes:
    """What random adapters need of a Llama config."""

    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 24, 40, 2, 4, 2


def build(dense: DenseModel, device: str = "cpu") -> LoRAModelManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=3, max_cpu_loras=4)
    return LoRAModelManager(PackedModel(dense).to(device), 8, 64, VOCAB, config, device)


def serve(manager: LoRAModelManager, tenants: Tenants) -> list[torch.Tensor]:
    """Adapters by all ways that lead into a slot: from a folder, from memory, reloaded, a zero one."""
    manager.add_adapter(tenants.request(1))
    manager.add_adapter(tenants.request(1, load_inplace=True))
    manager.add_adapter(adapter(2))
    manager.prefetch_adapter(2).wait()
    manager.add_dummy_lora(LoRARequest("warm-up", 3, "nowhere"), 8)
    return [buffer.cpu() for buffer in all_buffers(manager)]


def test_adapters_on_the_cpu(dense, tenants):
    tenants.write(1, adapter_tensors(1), 4)
    plain = build(dense)
    expected = serve(plain, tenants)
    manager = build(dense)
    numbers = adapter(2)  # made outside: `adapter` is the test's own
    manager.add_adapter(numbers)
    with torch.device("meta"):
        manager.add_adapter(tenants.request(1))
        manager.add_adapter(tenants.request(1, load_inplace=True))
        manager.prefetch_adapter(2).wait()
        manager.add_dummy_lora(LoRARequest("warm-up", 3, "nowhere"), 8)
        assert manager.adapter_bytes(1) == plain.adapter_bytes(1)
    slots = {i: manager.lora_index_to_id.index(i) for i in (1, 2, 3)}
    for found, wanted in zip(all_buffers(manager), expected, strict=True):
        for i, slot in slots.items():
            assert torch.equal(found[slot], wanted[plain.lora_index_to_id.index(i)])
    for i in (1, 2, 3):
        for weights in manager.get_adapter(i).loras.values():
            factors = [*weights.lora_a, *weights.lora_b] if weights.is_packed else [weights.lora_a, weights.lora_b]
            assert all(factor.device.type == "cpu" for factor in factors if factor is not None)


def test_images(dense):
    manager = build(dense)
    lora = manager._packer.pack(adapter(1))
    expected = stage(manager.modules, lora, torch.float32, pin_memory=False).image
    parts = [torch.randn(3, 5), None]
    slots, ranks = [torch.zeros(2, 4, 6), torch.ones(2, 4, 6)], [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    with torch.device("meta"):
        staged = stage(manager.modules, lora, torch.float32, pin_memory=False)
        image = pack_image([SlotMatrix(parts[0], 3), SlotMatrix(parts[1], 0)], torch.float32)
        found = image_matrices(image, 2, torch.float32)
        write_slot(image, slots, ranks, 1)
    assert torch.equal(staged.image, expected)
    assert torch.equal(found[0], parts[0])
    assert torch.equal(slots[0][1, :3, :5], parts[0])


def test_random_adapters(tmp_path):
    expected = random_adapter_tensors(Sizes, 4, 7)
    with torch.device("meta"):
        tensors = random_adapter_tensors(Sizes, 4, 7)
        lora = random_adapter(1, Sizes, 4, 7)
        write_random_adapter(tmp_path, Sizes, 4, 7)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    weights = lora.get_lora("model.layers.1.mlp.up_proj")
    assert torch.equal(weights.lora_a, expected["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"])


@pytest.mark.gpu
def test_everything_under_a_default_device_of_cuda(dense, tenants):
    """As users work: the default device set once, then model, manager, adapters and a step."""
    tenants.write(1, adapter_tensors(1), 4)
    expected = serve(build(dense), tenants)
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
    torch.cuda.synchronize()
    for found, wanted in zip(all_buffers(manager), expected, strict=True):
        assert torch.equal(found.cpu(), wanted)
    dense.cpu()
    for row, i in ((0, 1), (1, 2), (2, 0), (3, 0)):
        model = dense.merged(adapter_tensors(i), 2.0) if i else dense
        torch.testing.assert_close(output[row : row + 1].cpu(), model(x[row : row + 1].cpu()), rtol=1e-3, atol=1e-3)
