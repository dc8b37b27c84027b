"""The direct launch and the plans: what is shared, what is looked at once, what falls back to Triton's own way."""

import gc
import inspect
import weakref
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from triton_batches import EXPANDS, SHRINKS, Batch, expand, linear, random_slots, shrink

from punica.metadata import LoRABatch, RowGroups
from punica.ops import weights
from punica.ops.triton_ops import Options, TritonOps, configs
from punica.ops.triton_ops import launch as launching
from tests.ops.helpers import step as step_of
from tests.ops.triton_ops import kernel_calls

FP16 = torch.float16


def jitted() -> MagicMock:
    """Stands in for a jitted kernel: ``kernel[grid](...)`` gives the compiled one, whose ``run`` starts it."""
    kernel = MagicMock(arg_names=("x_ptr", "stride_t", "stride_k", "BLOCK"))
    compiled = kernel.__getitem__.return_value.return_value
    compiled.function, compiled.packed_metadata = "function", "metadata"
    return kernel


def started(kernel: MagicMock) -> tuple[int, list[tuple]]:
    """How often Triton was asked, and the arguments of direct launches."""
    launch = kernel.__getitem__.return_value
    return launch.call_count, [call.args for call in launch.return_value.run.call_args_list]


def launch_of(kernel: Any, grid: int = 2, strides: tuple = (64, 1), block: int = 16, pdl: bool = False) -> Any:
    where = {"num_warps": 4, "pdl": pdl, "device": torch.device("cuda:0")}
    return launching.Launch(kernel, (grid, 1, 1), (FP16,), strides, {"BLOCK": block}, **where)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)


def test_this_triton_starts_kernels_as_a_direct_launch_does():
    """When this fails, read `triton.runtime.jit.JITFunction.run` anew: until then every launch takes the public way."""
    assert launching.launches_directly()


@pytest.mark.parametrize("changed", ["kernel.run(grid_0, stream, *bound_args.values())", "kernel.start(grid_0)", None])
def test_another_launch_interface_is_noticed(changed: str | None, monkeypatch: pytest.MonkeyPatch):
    def source(function: Any) -> str:
        if changed is None:
            raise OSError("no source")
        return f"def run(self):\n    {changed}\n"

    monkeypatch.setattr(inspect, "getsource", source)
    assert not launching.launches_directly.__wrapped__()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_second_launch_is_direct_with_addresses_counts_strides_and_constants():
    """An operand that the kernel does not read is None."""
    kernel, x, weights = jitted(), torch.zeros(4), (torch.zeros(4), torch.zeros(4))
    launch = launch_of(kernel)
    launch((x, None, weights), (5, 0.5), True)
    assert started(kernel) == (1, [])
    launch((x, None, weights), (6, 0.25), True)
    addresses = (x.data_ptr(), None, tuple(weight.data_ptr() for weight in weights))
    expected = (2, 1, 1, 77, "function", "metadata", None, None, None, *addresses, 6, 0.25, 64, 1, 16)
    assert started(kernel) == (1, [expected])
    launch((x, None, weights), (6, 0.25), False)  # an address that the kernel was not compiled for
    assert started(kernel) == (2, [expected])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("is_rocm", "capability", "pdl"), [(False, 9, True), (False, 12, True), (False, 8, False), (True, 9, False)]
)
def test_pdl_needs_hopper_or_newer_and_no_rocm(is_rocm: bool, capability: int, pdl: bool, monkeypatch):
    monkeypatch.setattr(launching, "IS_ROCM", is_rocm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert launching.supports_pdl.__wrapped__(torch.device("cuda:0")) == pdl


@pytest.mark.parametrize("is_rocm", [False, True])
def test_shared_memory_is_what_a_program_may_use(is_rocm: bool, monkeypatch):
    kinds = {"shared_memory_per_block": 64 << 10} | ({} if is_rocm else {"shared_memory_per_block_optin": 227 << 10})
    monkeypatch.setattr(launching, "IS_ROCM", is_rocm)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**kinds))
    assert launching.shared_memory.__wrapped__(torch.device("cuda:0")) == max(kinds.values())


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_unknown_triton_is_always_asked_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launching, "launches_directly", lambda: False)
    kernel = jitted()
    launch = launch_of(kernel)
    for _ in range(3):
        launch((torch.zeros(4),), (), True)
    assert started(kernel) == (3, [])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_launches_share_a_kernel_that_triton_would_not_compile_anew():
    kernel = jitted()
    first = launch_of(kernel)
    assert launch_of(kernel, grid=9).binary is first.binary
    assert launch_of(kernel, strides=(4096, 1)).binary is first.binary  # still a multiple of 16
    others = [launch_of(kernel, strides=strides) for strides in ((65, 1), (64, 2), (1 << 40, 1))]
    others += [launch_of(kernel, block=32), launch_of(jitted())]
    assert all(other.binary is not first.binary for other in others)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often weights were checked (A and B apart) and calls planned."""
    counts = {"weights": 0, "plan": 0}
    monkeypatch.setattr(weights, "_FORMS", {})
    weights.forget_plans()
    for owner, name, what in ((weights, "_checked", "weights"), (TritonOps, "_plan_linear", "plan")):
        original = getattr(owner, name)

        def counted(*arguments: Any, what: str = what, original: Any = original) -> Any:
            counts[what] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counted)
    yield counts
    weights.forget_plans()


def test_prefills_of_new_lengths_check_the_weights_once(looked_at, device, use_schedules):
    use_schedules(shrink=SHRINKS["tiles"], expand=EXPANDS["tiles"])
    batch = Batch([0] * 40, 32, (16,), 16, 2, FP16, device)
    step = LoRABatch(64, 2, device)
    owned = weights.LoRAWeights.of(batch.a, batch.b)
    for length in (33, 34, 40, 33):
        step.fill(RowGroups.of_runs([1], [length]))
        TritonOps().linear(batch.y[:length], batch.x[:length], owned, step)
    binaries = {id(part.launch.binary) for plan in owned.plans.values() for part in (plan.shrink, plan.expand)}
    assert looked_at == {"weights": 2, "plan": 3}
    assert len(binaries) == 2  # one shrink, one expand, whatever the length


def test_a_full_table_of_plans_starts_anew(monkeypatch):
    monkeypatch.setattr(weights, "_MOST_KEPT", 2)
    table: dict[tuple[int], int] = {}
    assert [weights.kept(table, (key,), key) for key in range(3)] == [0, 1, 2]
    assert table == {(2,): 2}


def test_plans_keep_no_weights_alive(looked_at, device):
    batch = Batch([0, 1], 32, (16,), 4, 2, FP16, device)
    linear(batch.y, batch.x, batch.a, batch.b, filled(batch))
    freed = [weakref.ref(weight) for weight in (*batch.a, *batch.b)]
    batch.a = batch.b = ()
    gc.collect()
    assert all(reference() is None for reference in freed)


def test_layers_of_one_shape_share_their_plans(looked_at, device):
    batch = Batch([0, 1], 32, (16,), 4, 2, FP16, device)
    step = filled(batch)
    for _ in range(5):
        batch.a, batch.b = (tuple(weight.clone() for weight in group) for group in (batch.a, batch.b))
        linear(batch.y, batch.x, batch.a, batch.b, step)
    assert looked_at == {"weights": 2, "plan": 1}


@pytest.mark.parametrize("scale", [1, 2])
def test_an_integer_scale_is_a_number_like_any_other(scale, device):
    """Triton would compile a kernel of its own for it, and the next launch would find that one."""
    batch = Batch([0, 1, 1], 32, (16,), 4, 2, FP16, device)
    step, results = filled(batch), []
    for value in (scale, float(scale), 0.5, scale):
        y = torch.zeros_like(batch.y)
        linear(y, batch.x, batch.a, batch.b, step, value)
        results.append(y)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[3])
    torch.testing.assert_close(results[2].float(), results[0].float() * (0.5 / scale), rtol=4e-3, atol=4e-3)


def filled(batch: Batch) -> LoRABatch:
    return step_of(batch.slots, batch.device, batch.slot_count)


def test_the_tuned_folder_and_the_invariant_switch_reach_the_choice(device, monkeypatch):
    """Flat and on a step."""
    batch, asked = Batch([0, 1, -1], 32, (16,), 4, 2, FP16, device), []

    def choose(*arguments: Any, **rest: Any) -> Any:
        asked.append(next(one for one in arguments if isinstance(one, Options)))
        plain = [one._replace(tuned_dir=None) if one is asked[-1] else one for one in arguments]
        return configs.choose(*plain, **rest)

    for name in ("step_ops", "lora_linear"):
        monkeypatch.setattr(import_module(f"punica.ops.triton_ops.{name}"), "choose", choose)
    h, y, step = torch.zeros(1, 3, 4, device=device), batch.y.clone(), filled(batch)
    flat, options = {"batch_invariant": True, "tuned_dir": "folder"}, Options(batch_invariant=True, tuned_dir="folder")
    for call in (
        lambda: batch.shrink(h, **flat),
        lambda: shrink(batch.x, batch.a, h, step, options=options),
        lambda: batch.expand(h, y, **flat),
        lambda: expand(h, batch.b, y, step, options=options),
        lambda: batch.linear(y, **flat),
        lambda: linear(y, batch.x, batch.a, batch.b, step, options=options),
    ):
        weights.forget_plans()
        asked.clear()
        call()
        assert {(one.tuned_dir, one.batch_invariant) for one in asked} == {("folder", True)}


@pytest.mark.parametrize("slots", [random_slots(9, 3), [-1, -1], [1]], ids=["mixed", "none", "one"])
def test_a_step_and_its_tensors_give_the_same_bits(slots, device):
    batch = Batch(slots, 48, (24, 8), 16, 3, FP16, device)
    step, y = filled(batch), batch.y.clone()
    linear(y, batch.x, batch.a, batch.b, step, 0.5)
    assert torch.equal(batch.linear(), y)
    h, other = (torch.zeros(2, len(slots), 16, device=device) for _ in range(2))
    shrink(batch.x, batch.a, other, step, 0.5)
    assert torch.equal(batch.shrink(h), other)
    expand(h, batch.b, y, step)
    assert torch.equal(batch.expand(h, batch.linear(), add_inputs=True), y)


def test_a_step_without_adapters_shrinks_to_zero(device):
    batch = Batch([-1, -1], 16, (16,), 16, 2, FP16, device)
    h = torch.ones(1, 2, 16, device=device)
    shrink(batch.x, batch.a, h, filled(batch), accumulate=True)
    assert h.all()
    shrink(batch.x, batch.a, h, filled(batch))
    assert not h.any()


def test_every_kernel_of_the_package_is_in_kernel_calls(device, capsys):
    """Which runs under tools that watch kernels."""
    kernel_calls.main(device)
    assert capsys.readouterr().out.split() == sorted(kernel_calls.kernels())
