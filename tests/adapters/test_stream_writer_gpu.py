"""Slots filled beside running steps: ordered by events, never by the host, and never read half-written."""

import gc

import pytest
import torch
from adapter_world import VOCAB, PackedModel, adapter, decode, tree

from punica.adapters import LoRALayerWeights, LoRAModel, LoRAModelManager
from punica.config import LoRAConfig
from punica.parallel import ReplicatedLinear

pytestmark = pytest.mark.gpu

WIDTH = 2048
LONG = 400_000_000  # clock cycles: about 0.2 s, far longer than any copy here


def wide_manager(max_loras: int, max_cpu_loras: int) -> LoRAModelManager:
    """One large layer, so that a copy takes a while."""
    with torch.device("cuda"):
        base = ReplicatedLinear(WIDTH, WIDTH, bias=False, return_bias=False, params_dtype=torch.float16)
        base.weight.data.zero_()
        model = tree(proj=base)
    config = LoRAConfig(max_lora_rank=64, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    return LoRAModelManager(model, 8, 64, VOCAB, config, "cuda")


def constant(adapter_id: int, value: float, rank: int = 64):
    """`B A x` for x = 1 is `value * WIDTH / WIDTH * rank / rank = value` in every output."""
    a = torch.full((rank, WIDTH), 1 / WIDTH, dtype=torch.float16)
    b = torch.full((WIDTH, rank), value / rank, dtype=torch.float16)
    return LoRAModel(adapter_id, rank, {"proj": LoRALayerWeights("proj", rank, rank, a, b)})


def running(max_loras: int, values: dict[int, float], active: tuple[int, ...] = (1,)) -> tuple:
    """A manager with adapters of these values, the active ones in slots, after one step of the first; and its input."""
    manager = wide_manager(max_loras, len(values))
    x = torch.ones(4, WIDTH, dtype=torch.float16, device="cuda")
    for i, value in values.items():
        manager.add_adapter(constant(i, value))
    for i in active:
        manager.activate_adapter(i)
    manager.set_adapter_mapping(decode(*active[:1] * 4))
    manager.model.proj(x)  # compiles
    torch.cuda.synchronize()
    return manager, x


@pytest.mark.parametrize(("own_stream", "writes_there"), [(False, True), (True, True), (True, False)], ids=str)
def test_a_slot_is_overwritten_only_after_the_step_that_reads_it(own_stream, writes_there):
    """The step of adapter 1 is still waiting in its stream when adapter 2 takes the slot: it must read 1's weights,
    whatever stream is current then.
    """
    manager, x = running(1, {1: 1.0, 2: 3.0})
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        manager.set_adapter_mapping(decode(1, 1, 1, 1))
        torch.cuda._sleep(LONG)
        old = manager.model.proj(x)
        handle = manager.prefetch_adapter(2) if writes_there else None
    handle = handle or manager.prefetch_adapter(2)
    assert not handle.is_ready(), "the copy must wait for the step that reads the slot"
    new = None
    if not own_stream:
        manager.set_adapter_mapping(decode(2, 2, 2, 2))
        new = manager.model.proj(x)
        assert not handle.is_ready(), "nothing here may have waited on the host"
    torch.cuda.synchronize()
    assert handle.is_ready()
    torch.testing.assert_close(old, torch.ones_like(old), rtol=1e-2, atol=1e-2)
    if new is not None:
        torch.testing.assert_close(new, torch.full_like(new, 3.0), rtol=1e-2, atol=1e-2)


def test_a_free_slot_is_filled_while_a_step_runs():
    """Loading hides behind decoding: the copy ends while the step, which uses another slot, has not even begun."""
    manager, x = running(2, {1: 1.0, 2: 2.0, 3: 3.0}, active=(1, 2))
    for i in (2, 1):  # slot of 2 was read by a step long ago, slot of 1 is read by the next one
        manager.set_adapter_mapping(decode(i, i, i, i))
        manager.model.proj(x)
    manager.set_adapter_mapping(decode(1, 0, 1, 0))
    torch.cuda.synchronize()

    torch.cuda._sleep(5 * LONG)
    ended = torch.cuda.Event()
    old = manager.model.proj(x)
    ended.record()
    manager.activate_adapter(1)  # in use: adapter 2 is now the one that makes room
    handle = manager.prefetch_adapter(3)
    while not handle.is_ready():
        assert not ended.query(), "the copy waited for a step that does not read its slot"
    torch.cuda.synchronize()
    assert old[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_step_waits_for_the_copy_of_its_adapter():
    """The copy is held up by the old step; the new step must not start on a half-written slot."""
    manager = wide_manager(max_loras=1, max_cpu_loras=8)
    x = torch.ones(4, WIDTH, dtype=torch.float16, device="cuda")
    for i in range(1, 9):
        manager.add_adapter(constant(i, float(i)))
    outputs = []
    for i in range(1, 9):
        torch.cuda._sleep(LONG // 40)
        manager.activate_adapter(i)
        manager.set_adapter_mapping(decode(i, i, i, i))
        outputs.append(manager.model.proj(x))
    torch.cuda.synchronize()
    for i, output in enumerate(outputs, start=1):
        torch.testing.assert_close(output, torch.full_like(output, float(i)), rtol=1e-2, atol=1e-2)


def test_a_manager_that_is_dropped_waits_for_its_copies():
    manager, x = running(1, {1: 1.0, 2: 2.0})
    torch.cuda._sleep(LONG)
    manager.model.proj(x)
    handle = manager.prefetch_adapter(2)
    del manager
    gc.collect()
    assert handle.is_ready()


def test_nothing_makes_the_host_wait():
    manager, x = running(2, {1: 1.0, 2: 2.0, 3: 3.0}, active=(3, 2))
    manager.set_adapter_mapping(decode(3, 3, 2, 2))
    manager.model.proj(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in (1, 2, 3, 1):
            manager.activate_adapter(i)
            manager.set_adapter_mapping(decode(i, 0, i, 0))
            manager.model.proj(x)
            manager.prefetch_adapter(i % 3 + 1).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_source_outlives_its_adapter():
    """Removed right after activation: the copy, still waiting, must find its page-locked source untouched."""
    manager, x = running(1, {1: 1.0, 2: 2.0})
    torch.cuda._sleep(5 * LONG)
    manager.model.proj(x)
    handle = manager.prefetch_adapter(2)
    slot, size = manager.lora_index_to_id.index(2), manager.adapter_bytes(2)
    manager.remove_adapter(2)
    gc.collect()
    assert not handle.is_ready(), "the copy was to wait for the step"
    junk = [torch.full((size,), 255, dtype=torch.uint8, pin_memory=True) for _ in range(8)]  # takes memory given back
    torch.cuda.synchronize()
    layer = manager.modules["proj"]
    assert (layer.lora_b_stacked[0][slot] == 2.0 / 64).all()
    del junk  # held until here, or its memory would be handed out again


def test_registered_adapters_are_page_locked_and_counted(dense):
    with torch.device("cuda"):
        model = PackedModel(dense.to("cuda"))
    manager = LoRAModelManager(model, 8, 64, VOCAB, LoRAConfig(max_lora_rank=8, max_loras=2), "cuda")
    manager.add_adapter(adapter(1))
    weights = manager.get_adapter(1).get_lora("model.layers.0.self_attn.o_proj")
    assert weights.lora_a.is_pinned()
    assert weights.lora_b.is_pinned()
    lora = manager.get_adapter(1)
    parts = [part for name, layer in manager.modules.items() for part in layer.slot_parts(lora.slices_of(name))]
    expected = 4 * 8 * len(parts) + sum(-(-part.part.nbytes // 16) * 16 for part in parts if part.part is not None)
    assert manager.adapter_bytes(1) == expected
