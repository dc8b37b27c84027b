"""The packed adapter fills a slot with the same bits as `set_lora`, on one rank and on each of several."""

import pytest
import torch
from adapter_world import adapter, all_buffers, one_layer

from punica.adapters import LayerSlotWriter, LoRAModel, LoRAModelManager
from punica.adapters.write import stage
from punica.config import LoRAConfig
from punica.ops.slot_image import write_slot

SLOT = 1


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "modules", "options"),
    [
        (1, 0, None, {"lora_dtype": torch.float32}),
        (2, 1, ("q_proj", "v_proj"), {"lora_dtype": torch.bfloat16}),
        (2, 0, None, {"lora_dtype": torch.bfloat16, "fully_sharded_loras": True}),
        (4, 3, ("q_proj", "v_proj"), {"lora_dtype": torch.float32, "fully_sharded_loras": True}),
        (1, 0, None, {"fp8": torch.float8_e4m3fn}),
        (4, 3, None, {"fp8": torch.float8_e4m3fn, "fully_sharded_loras": True}),
    ],
    ids=str,
)
def test_an_image_fills_a_slot_as_set_lora_does(tp_size, tp_rank, modules, options):
    config = LoRAConfig(max_lora_rank=8, max_loras=3, **options)
    manager = LoRAModelManager(one_layer(tp_size, tp_rank), 4, 16, 50, config, "cpu")
    loras = adapter(3, rank=5, modules=modules).loras
    lora = manager._packer.pack(LoRAModel(3, 5, {name: own for name, own in loras.items() if "layers.0" in name}))
    LayerSlotWriter(manager.modules).write(SLOT, lora)
    expected = [buffer.clone() for buffer in all_buffers(manager)]
    staged = stage(manager.modules, lora, options.get("lora_dtype", torch.uint8), pin_memory=False)
    for buffer in all_buffers(manager):
        buffer[SLOT].fill_(3)
    empty = [part.stored() for layer in manager.modules.values() for part in layer.slot_parts()]
    write_slot(staged.image, [part.slots for part in empty], [part.ranks for part in empty], SLOT)
    for found, wanted in zip(all_buffers(manager), expected, strict=True):
        assert torch.equal(found.float(), wanted.float())
    if "fp8" in options and tp_size == 1:  # the staged adapter is the adapter
        for name, weights in lora.loras.items():
            for (a, _), (b, _) in zip(weights.slices, staged.loras[name].slices, strict=True):
                assert torch.equal(a.real(), b.real())


def test_a_staged_adapter_is_the_adapter(make_manager):
    """On one rank its tensors are the whole matrices, as views of the image, so it can be added anywhere again."""
    manager = make_manager(max_loras=2)
    lora = manager._packer.pack(adapter(3, rank=5))
    staged = stage(manager.modules, lora, torch.float32, pin_memory=False)
    assert staged.image is not None
    assert (staged.id, staged.rank, set(staged.loras)) == (lora.id, lora.rank, set(lora.loras))
    storage = staged.image.untyped_storage().data_ptr()
    for name, weights in lora.loras.items():
        own = staged.loras[name]
        for pair, views in zip(weights.slices, own.slices, strict=True):
            for wanted, found in zip(pair, views, strict=True):
                assert torch.equal(found, wanted)
                assert found.untyped_storage().data_ptr() == storage
            assert views[1].T.is_contiguous(), "it lies as its slot does"
    manager.add_adapter(staged)
    manager.activate_adapter(3)
    down = manager.modules["model.layers.1.mlp.down_proj"]
    assert torch.equal(down.lora_b_stacked[0][0, 0, :, :5], lora.get_lora("model.layers.1.mlp.down_proj").lora_b)
