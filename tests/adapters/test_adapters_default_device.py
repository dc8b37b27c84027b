"""Under a default device every tensor still is where it belongs: the host's on the CPU, a slot's beside its weights."""

import pytest
import torch
from adapter_world import VOCAB, PackedModel, adapter, adapter_tensors, decode

from punica.adapters import LoRAModelManager, LoRARequest
from punica.config import LoRAConfig


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
