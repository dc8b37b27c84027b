"""What only a GPU can show: launches, graphs, guard regions around every operand, 64-bit addresses, memory, devices."""

import random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from triton_batches import EXPANDS, SHRINKS, Batch, assert_close, random_slots

from punica.capture import capture
from punica.ops.triton_ops import lora_linear, lora_shrink
from tests.ops.helpers import captured

pytestmark = pytest.mark.gpu
FP16 = torch.float16


def kernel_names(call) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize(
    "slots", [random_slots(33, 64), random_slots(300, 64), [-1] * 8], ids=["rows", "tiles", "none"]
)
def test_a_launch_for_each_product_whatever_the_slices_and_slots(slots):
    batch = Batch(slots, 256, (128, 64, 64), 16, 64, FP16, "cuda")
    h, launches = torch.zeros(3, len(slots), 16, device="cuda"), int(max(slots) >= 0)
    calls = lambda: batch.linear(batch.y), lambda: batch.shrink(h), lambda: batch.expand(h, batch.y, add_inputs=True)
    for call, count in zip(calls, (2, 1, 1), strict=True):
        names = kernel_names(call)
        assert len(names) == count * launches, names
        assert all("lora" in name for name in names)


def test_no_synchronisation():
    batch = Batch(random_slots(33, 4), 256, (128,), 16, 4, FP16, "cuda")
    batch.linear(batch.y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.linear(batch.y)
        batch.meta.prepare_tensors(torch.tensor(random_slots(33, 4, seed=3)))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pdl", [True, False], ids=["pdl", "plain"])
@pytest.mark.parametrize(
    ("shrink", "expand"), [("rows", "rows"), ("tiles", "tiles"), ("tiles", "walk"), ("default", "default")]
)
def test_one_graph_replays_over_any_mapping(shrink, expand, pdl, use_schedules):
    if shrink != "default":
        use_schedules(shrink=SHRINKS[shrink]._replace(split_k=2), expand=EXPANDS[expand])
    tokens, slot_count = 24, 6
    batch = Batch([0] * 8 + [1] * 8 + [2] * 8, 512, (256, 128), 16, slot_count, FP16, "cuda")
    args = batch.meta.meta_args(tokens, False)[:6]
    y, h = batch.y.clone(), torch.empty(2, tokens, 16, device="cuda")

    def step() -> None:
        y.copy_(batch.y)
        lora_linear(y, batch.x, batch.a, batch.b, *args, 0.5, pdl=pdl)
        lora_linear(y, batch.x, batch.a, batch.b, *args, 0.5, pdl=pdl)
        lora_shrink(batch.x, batch.a, h, *args, 0.5)

    graph, _ = captured(step)
    numbers = random.Random(0)
    for i in range(20):
        length = numbers.choice([tokens, tokens, 5, 1])
        slots = [-1] * tokens if i == 7 else [numbers.randint(-1, slot_count - 1) for _ in range(length)]
        batch.meta.prepare_tensors(torch.tensor(slots))
        graph.replay()
        replayed, replayed_h = y.clone(), h.clone()
        full = [*slots, *[-1] * (tokens - len(slots))]
        batch.slots, batch.has_adapter = full, (torch.tensor(full) >= 0)[:, None]
        want = torch.where(
            batch.has_adapter, batch.y.cpu().double() + 2 * batch.expanded(batch.shrunk()), batch.y.cpu().double()
        )
        assert_close(replayed, want, FP16)
        torch.testing.assert_close(replayed_h.cpu().double(), batch.shrunk(), rtol=1e-4, atol=1e-4)
        bare = [t for t, slot in enumerate(full) if slot < 0]
        assert torch.equal(replayed[bare], batch.y[bare])
        assert not replayed_h[:, bare].any()
        if max(slots) >= 0:
            step()
            assert torch.equal(y, replayed)
            assert torch.equal(h, replayed_h)


def test_capture_without_warm_up():
    batch = Batch(random_slots(9, 3), 272, (144,), 16, 3, FP16, "cuda")
    y = batch.y.clone()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        batch.linear(y)
    graph.replay()
    batch.check(y)


@pytest.mark.parametrize("expand", ["default", "walk"])
def test_early_start_never_changes_a_bit(expand, use_schedules):
    """Chains of ops on one y: each reads what the one before wrote, also where lines of y are fetched before that."""
    if expand != "default":
        use_schedules(shrink=SHRINKS["tiles"]._replace(split_k=2), expand=EXPANDS[expand])
    batch = Batch(random_slots(32, 8), 1024, (2048,), 16, 8, FP16, "cuda")
    results = []
    for pdl in (True, False):
        for _ in range(3):
            y = batch.y.clone()
            for _ in range(20):
                batch.linear(y, pdl=pdl)
            results.append(y)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_addresses_beyond_32_bits():
    slots, rank, k = 70, 64, 512 * 1024
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free GPU memory")
    a = torch.zeros(slots, rank, k, dtype=FP16, device="cuda")
    b = torch.zeros(slots, k, rank, dtype=FP16, device="cuda")
    last, used = slots - 1, [0, slots - 1]
    for slot in used:
        a[slot], b[slot] = torch.randn(rank, k, device="cuda") / k**0.5, torch.randn(k, rank, device="cuda") / 8
    for tokens in (2, 40):
        small = Batch([last] * tokens, 16, (16,), rank, slots, FP16, "cuda")
        x, y = torch.randn(tokens, k, device="cuda").half(), torch.zeros(tokens, k, device="cuda", dtype=FP16)
        lora_linear(y, x, (a,), (b,), *small.args, 1.0, **small.count)
        want = x.float() @ a[last].float().T @ b[last].float().T
        torch.testing.assert_close(y.float(), want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rank", [16, 64, 256])
@pytest.mark.parametrize("dtype", [FP16, torch.float32], ids=str)
def test_long_segments_fit_into_shared_memory(dtype, rank, invariant):
    tokens, k = 2048, 1024
    batch = Batch([0] * 1500 + [1] * 548, 16, (16,), rank, 2, dtype, "cuda")
    x = torch.randn(tokens, k, device="cuda").to(dtype)
    a = (torch.randn(2, rank, k, device="cuda") / k**0.5).to(dtype)
    b = (torch.randn(2, k, rank, device="cuda") / rank**0.5).to(dtype)
    y = torch.zeros(tokens, k, device="cuda", dtype=dtype)
    lora_linear(y, x, (a,), (b,), *batch.args, 1.0, **batch.count, batch_invariant=invariant)
    x64, a64, b64 = x.double(), a.double(), b.double()
    want = torch.cat([x64[:1500] @ a64[0].T @ b64[0].T, x64[1500:] @ a64[1].T @ b64[1].T])
    assert_close(y, want.cpu(), dtype)


def test_memory_stays_constant_over_many_steps():
    batch = Batch(random_slots(64, 8), 256, (128,), 16, 8, FP16, "cuda")
    numbers = torch.Generator().manual_seed(0)
    before = None
    for i in range(10_000):
        tokens = int(torch.randint(1, 65, (1,), generator=numbers))
        batch.meta.prepare_tensors(torch.randint(-1, 8, (tokens,), generator=numbers))
        *args, count = batch.meta.meta_args(tokens, True)
        lora_linear(batch.y[:tokens], batch.x[:tokens], batch.a, batch.b, *args, 0.5, num_active_loras=count)
        if i == 2000:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.multi_gpu
def test_ops_follow_the_tensors_device():
    batch = Batch(random_slots(9, 3), 272, (144,), 16, 3, FP16, "cuda:1")
    y = batch.y.clone()
    with torch.cuda.device(0):
        batch.linear(y)
    batch.check(y)
