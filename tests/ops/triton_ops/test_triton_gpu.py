"""What only a GPU can show: launches, graphs, guard regions, 64-bit addresses, memory, devices, early starts."""

import random

import pytest
import torch
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile
from triton_batches import EXPANDS, SHRINKS, Batch, assert_close, random_slots

from punica.capture import capture
from punica.metadata import LoRAMapping
from punica.ops.triton_ops import lora_linear, lora_shrink, moe_align, moe_rules
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.launch import supports_pdl
from punica.ops.triton_ops.moe_ops import fused
from punica.ops.triton_ops.moe_plan import How
from punica.wrapper import PunicaWrapperGPU
from tests.ops.helpers import captured
from tests.ops.moe_cases import E4M3, E5M2, Case, World, add_w2, add_w13, narrow

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


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "fp8"),
    [(8, 64, 2, E4M3), (24, 8, 2, None), (24, 8, 2, E5M2), (64, 32, 8, None), (64, 32, 8, E4M3)],
)
def test_a_graph_replays_other_mappings_and_routings(tokens, experts, top_k, fp8, alone, monkeypatch):
    """w13, an activation and w2 through the wrapper."""
    monkeypatch.setattr(moe_rules, "most_naive", lambda *call: 10**6 if alone else 0)
    case = Case(tokens, top_k, experts, 4, 16, 256, 128, 2, torch.float16, ranks=(16, 8, 0, 5))
    case = case if fp8 is None else case.but(fp8="channel", fp8_dtype=fp8)
    up, down = World(case, "cuda", False), World(case.but(slices=1, down=True, hidden=128, width=256), "cuda", False)
    wrapper = PunicaWrapperGPU(tokens, tokens, "cuda", max_loras=4)

    def begin(mapping: list[int], seed: int) -> None:
        ids = [slot + 1 for slot in mapping]
        wrapper.update_metadata(LoRAMapping(ids, ids), [1, 2, 3, 4], 5, 100)
        scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
        up.topk_ids.copy_(scores.topk(top_k, dim=1).indices)

    def run() -> torch.Tensor:
        y13, y2 = narrow(up), narrow(down)
        aligned = add_w13(wrapper, up, y13)
        gate, linear = y13.chunk(2, dim=-1)
        down.x = (torch.nn.functional.silu(gate) * linear).flatten(0, 1)
        add_w2(wrapper, down, y2, aligned)
        return y2

    begin([row % 3 for row in range(tokens)], 0)
    graph, output = captured(run)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        mapping = torch.randint(-1, 4, (tokens - seed % 3,), generator=generator).tolist()
        begin([-1] * tokens if seed == 7 else mapping, seed)
        graph.replay()
        # eager, the rules may choose another form for other numbers of adapters
        torch.testing.assert_close(output, run(), rtol=4e-3, atol=4e-3)


@triton.jit
def _late_writer(from_ptr, to_ptr, size, nanoseconds, BLOCK: tl.constexpr):
    """Lets the kernel behind it start, and copies only after a while."""
    tl.extra.cuda.gdc_launch_dependents()
    now = tl.extra.cuda.globaltimer()
    until = now + nanoseconds
    while now < until:
        now = tl.extra.cuda.globaltimer()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + offsets, tl.load(from_ptr + offsets, mask=offsets < size), mask=offsets < size)


def needs_early_starts() -> None:
    if not supports_pdl(torch.device("cuda")):
        pytest.skip("only GPUs of compute capability 9.0 and newer let kernels start early")


@pytest.mark.parametrize("pairs", [2, 16])
@pytest.mark.parametrize("written", ["output", "x"])
def test_kernels_that_start_early_wait_for_the_one_in_front(pairs, written):
    """The alignment is older than that kernel, as it is after an activation."""
    needs_early_starts()
    world = World(Case(16 * pairs, 2, 16, 2, 16, 512, 256, 1, torch.float16, down=True, seed=pairs), "cuda")
    given, results = world.given(moe_align.moe_lora_align_block_size), []
    for pdl in (False, True):
        one = given._replace(output=given.output.clone(), x=given.x.clone())
        how = How(early=True, options=Options(pdl=pdl))
        fused(one._replace(output=one.output.clone()), 16, 2, world.switches, how)  # compiled before it is watched
        target = getattr(one, written)
        source = target.clone()
        if pdl:
            target.fill_(float("nan"))
            torch.cuda.synchronize()
            block = 4096
            _late_writer[(triton.cdiv(target.numel(), block),)](source, target, target.numel(), 200_000, BLOCK=block)
        fused(one, 16, 2, world.switches, how)
        results.append(one.output)
    for result in results:
        world.check(result)
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
