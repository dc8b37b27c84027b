"""vLLM's operators by our kernels: what is replaced, what stays vLLM's own, and when nothing changes.

vLLM is a stand-in of a module: its wrapper's names and signatures, which count their calls.
"""

import gc
import importlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton_batches import Batch, assert_close, assert_shrunk

from punica.metadata import LoRAKernelMeta, get_captured_lora_counts
from punica.ops.absent_gpu import GpuDescription
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.step_ops import TritonOps
from punica.vllm import ahead, plugin
from punica.vllm.ops import slots
from punica.vllm.plugin import SWITCH, register

WIDTHS = (48, 16)


class Vllm:
    """The stand-in: ``calls`` of vLLM's own operators; ``wrapper``, a `PunicaWrapperGPU` of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.module = module = ModuleType("vllm.lora.punica_wrapper.punica_gpu")

        def count(name: str) -> Any:
            return lambda *args, **kwargs: self.calls.append(name)

        for name in ("lora_shrink", "lora_expand", "fused_moe_lora"):
            setattr(module, name, count(name))

        class PunicaWrapperGPU:
            lora_config = SimpleNamespace(specialize_active_lora=True)

            def add_lora_linear(self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: Any,
                                output_slices: Any, *, buffer: Any = None, **kwargs: Any) -> None:  # fmt: skip
                count("add_lora_linear")()

        module.PunicaWrapperGPU = PunicaWrapperGPU  # type: ignore[attr-defined]
        module.LoRAKernelMeta = self.meta = type("LoRAKernelMeta", (LoRAKernelMeta,), {})  # type: ignore[attr-defined]
        self.config = type("LoRAConfig", (), {"compute_hash": lambda self: "1a2b"})

        class BaseLayerWithLoRA:
            def __init__(self) -> None:
                self.calls: list[str] = []

            def set_mapping(self, wrapper: Any) -> None:
                self.wrapper = wrapper

            def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
                self.calls.append("set")

            def reset_lora(self, index: int) -> None:
                self.calls.append("reset")

        self.layer = BaseLayerWithLoRA
        self.before = dict(vars(module))

    @property
    def is_untouched(self) -> bool:
        same = all(getattr(self.module, name) is value for name, value in self.before.items())
        ours = hasattr(self.module.PunicaWrapperGPU.add_lora_linear, "by_punica")
        ours |= "prepare_tensors" in vars(self.meta)
        return same and not ours and self.config().compute_hash() == "1a2b"

    def layer_of(self, batch: Batch) -> Any:
        layer = self.layer()
        layer.lora_a_stacked, layer.lora_b_stacked = batch.a, batch.b
        return layer

    def wrapper(self, batch: Batch) -> Any:
        made = self.module.PunicaWrapperGPU()
        made.token_mapping_meta = batch.meta
        return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    made, version = Vllm(), importlib.metadata.version
    names = ("vllm", "vllm.lora", "vllm.lora.punica_wrapper", "vllm.platforms", "vllm.config", "vllm.config.lora",
             "vllm.lora.layers", "vllm.lora.layers.base")  # fmt: skip
    packages = {name: ModuleType(name) for name in names}
    packages["vllm.lora.layers.base"].BaseLayerWithLoRA = made.layer  # type: ignore[attr-defined]
    packages["vllm.config.lora"].LoRAConfig = made.config  # type: ignore[attr-defined]
    packages["vllm.platforms"].current_platform = SimpleNamespace(is_cuda=lambda: True)  # type: ignore[attr-defined]
    for name, module in {**packages, made.module.__name__: made.module}.items():
        monkeypatch.setitem(sys.modules, name, module)
    made.version = "0.26.0"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: made.version if name == "vllm" else version(name))
    monkeypatch.delenv(SWITCH, raising=False)
    return made


def batch_of(device: str, dtype: torch.dtype = torch.float16, rank: int = 8) -> Batch:
    torch.manual_seed(3)
    return Batch([1, -1, 0, 1, 2], 64, WIDTHS, rank, 3, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("add_inputs", [True, False], ids=["one stream", "two streams"])
@pytest.mark.parametrize("mapped", [False, True], ids=["unknown slots", "slots written before"])
def test_a_layer_is_one_call_of_ours(
    vllm: Vllm, device: str, dtype: torch.dtype, add_inputs: bool, mapped: bool
) -> None:
    register()
    batch, adds = batch_of(device, dtype), {} if add_inputs else {"add_inputs": False}
    y, layer, wrapper = batch.y.clone() if add_inputs else torch.zeros_like(batch.y), None, vllm.wrapper(batch)
    for one in (vllm.wrapper(batch), wrapper) if mapped else ():  # mapped again: by the last wrapper
        layer = layer or vllm.layer_of(batch)
        layer.set_mapping(one)
    wrapper.add_lora_linear(y[None], batch.x[None], batch.a, batch.b, batch.scaling, WIDTHS, **adds)
    before = batch.y if add_inputs else torch.zeros_like(batch.y)
    assert_close(y, before.cpu().double() + batch.expanded(batch.shrunk()), dtype, roundings=4)
    assert vllm.calls == []


@pytest.mark.parametrize("way", ["eager", "traced", "three dimensions", "two streams", "no adapter", "general"])
def test_slots_of_a_layer_are_known_and_read_to_their_true_ranks(vllm: Vllm, device: str, way: str) -> None:
    register()
    ranks, adds = [0, 5, 8], way != "two streams"
    torch.manual_seed(5)
    slots = [-1] * 5 if way == "no adapter" else [1, -1, 0, 1, 2]
    batch = Batch(slots, 64, WIDTHS, 8, 3, torch.float16, device, [ranks] * 2, scaling=1.0)
    layer, wrapper, y = vllm.layer_of(batch), vllm.wrapper(batch), batch.y.clone()
    layer.set_mapping(wrapper)
    for slot in (0, 1, 2):
        layer.set_lora(slot, [torch.zeros(ranks[slot], 64), None], [torch.zeros(48, ranks[slot]), None])
    layer.set_lora(0, torch.zeros(8, 64), torch.zeros(64, 8))
    layer.reset_lora(0)
    for slot, rank in enumerate(ranks):
        for a, b in zip(batch.a, batch.b, strict=True):
            a[slot, :, rank:], b[slot, ..., rank:] = torch.nan, torch.nan
    a = tuple(one.clone() for one in batch.a) if way == "general" else batch.a

    def run(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        given = {} if adds else {"add_inputs": False}
        wrapper.add_lora_linear(y, x, a, batch.b, 1.0, WIDTHS, **given)
        return y

    run = torch.compile(run, backend="eager", fullgraph=True) if way == "traced" else run
    shape = (1, *y.shape) if way == "three dimensions" else y.shape
    found = run(y.view(shape), batch.x.view(*shape[:-1], 64)).view(y.shape)
    if way == "general":  # other tensors of the same form: as wide as the slots
        assert found[0].isnan().all()
        assert torch.equal(found[1], batch.y[1])
        return
    before = batch.y.cpu().double() if adds else torch.where(batch.has_adapter, 0.0, batch.y.cpu().double())
    assert_close(found, before + batch.expanded(batch.shrunk()), torch.float16, roundings=4)
    assert (layer.calls, vllm.calls) == (["set"] * 4 + ["reset"], [])


@pytest.mark.parametrize("adapters", [1, 2, 3, 4])
@pytest.mark.parametrize("invariant", [True, False], ids=["tiles", "rows"])
def test_a_graph_of_so_many_adapters_serves_them_beside_rows_without_one(
    vllm: Vllm, device: str, adapters: int, invariant: bool
) -> None:
    """vLLM captures a step of adapters alone, and replays it for any step of as many."""
    register()
    torch.manual_seed(7)
    batch = Batch([-1, *range(adapters)] * 3, 64, WIDTHS, 8, 4, torch.float16, device)
    batch.meta = LoRAKernelMeta.make(4, batch.tokens, device, get_captured_lora_counts(4, True))
    wrapper, layer, y = vllm.wrapper(batch), vllm.layer_of(batch), batch.y.clone()
    layer.set_mapping(wrapper)
    vllm.meta.prepare_tensors(batch.meta, torch.tensor([i % adapters for i in range(batch.tokens)]))
    captured = wrapper.punica_steps.batch(batch.tokens)
    vllm.meta.prepare_tensors(batch.meta, torch.tensor(batch.slots))
    ops = TritonOps(Options(invariant, False))
    ops.linear(y, batch.x, layer.punica_slots.weights, captured, batch.scaling)
    batch.check(y)
    vllm.meta.prepare_tensors(batch.meta, torch.tensor([-1] * batch.tokens))
    assert wrapper.punica_steps.batch(batch.tokens) is None


def test_slots_end_with_their_layer(vllm: Vllm, device: str) -> None:
    register()
    batch = batch_of(device)
    layer = vllm.layer_of(batch)
    layer.set_mapping(vllm.wrapper(batch))
    assert slots.is_known(batch.a[0])
    del layer
    gc.collect()
    assert not slots.is_known(batch.a[0])


def test_products_of_other_layers_are_ours(vllm: Vllm, device: str) -> None:
    """Embeddings, logits and fully sharded layers call them by their names in the module."""
    register()
    batch = batch_of(device)
    *tensors, count = batch.meta.meta_args(batch.tokens, True)
    h = torch.empty(len(WIDTHS), batch.tokens, batch.rank, device=device)
    vllm.module.lora_shrink(batch.x, batch.a, h, *tensors, count, batch.scaling)
    assert_shrunk(h, batch.shrunk())
    y = torch.zeros_like(batch.y)
    vllm.module.lora_expand(h, batch.b, y, *tensors, count, offset_start=0, add_inputs=True)
    assert_close(y, batch.expanded(batch.shrunk()), batch.dtype, roundings=4)
    assert vllm.calls == []


@pytest.mark.parametrize("case", ["dtype", "layout", "rank", "buffer", "output"])
def test_what_ours_cannot_serve_is_vllms_own(vllm: Vllm, device: str, case: str, caplog: Any) -> None:
    register()
    batch = batch_of(device, torch.float32 if case == "dtype" else torch.float16, 8)
    a, b, y, more = batch.a, batch.b, batch.y.clone(), {}
    if case == "layout":
        a = tuple(one[..., ::2] for one in a)
    if case == "rank":
        a = tuple(torch.empty(3, 1, 1024, 1024, dtype=batch.dtype, device="meta") for _ in a)
        b = tuple(torch.empty(3, 1, 1024, 1024, dtype=batch.dtype, device="meta") for _ in b)
    if case == "buffer":
        more = {"buffer": torch.empty(2, 5, 8)}
    if case == "output":
        y = y.float()
    plugin._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "vllm.punica"):
        for _ in range(2):
            vllm.wrapper(batch).add_lora_linear(y, batch.x, a, b, 1.0, WIDTHS, **more)
    assert vllm.calls == ["add_lora_linear"] * 2
    assert len([record for record in caplog.records if "vLLM's own" in record.message]) == (case != "buffer")


def test_fully_sharded_experts_are_vllms_own(vllm: Vllm, device: str) -> None:
    register()
    batch = batch_of(device)
    arguments = [None] * 24 + [False, True, 0, True]
    vllm.module.fused_moe_lora(batch.y, batch.x, batch.a, batch.b, *arguments)
    assert vllm.calls == ["fused_moe_lora"]


@pytest.mark.parametrize("case", ["switch", "version", "platform", "no wrapper", "signature", "operator"])
def test_vllm_runs_as_it_is(vllm: Vllm, monkeypatch: pytest.MonkeyPatch, caplog: Any, case: str) -> None:
    wrapper = vllm.module.PunicaWrapperGPU
    if case == "switch":
        monkeypatch.setenv(SWITCH, "0")
    if case == "version":
        vllm.version = "0.27.1"
    if case == "platform":
        sys.modules["vllm.platforms"].current_platform = SimpleNamespace(is_cuda=lambda: False)
    if case == "no wrapper":
        monkeypatch.setitem(sys.modules, vllm.module.__name__, None)
    if case == "signature":
        wrapper.add_lora_linear = lambda self, y, x: None
    if case == "operator":
        del vllm.module.fused_moe_lora, vllm.before["fused_moe_lora"]
    with caplog.at_level(logging.INFO, "vllm.punica"):
        register()
    assert vllm.is_untouched
    assert len(caplog.records) == (case != "switch")


@pytest.mark.parametrize("case", ["dense", "dtype", "embedding"])
def test_kernels_of_a_dense_layer_are_compiled_ahead(vllm: Vllm, device: str, case: str, monkeypatch: Any) -> None:
    found: list[Any] = []
    monkeypatch.setattr(ahead.CompileAhead, "layer", lambda self, *given: found.append(given))
    register()
    batch = batch_of(device, torch.float32 if case == "dtype" else torch.float16)
    batch.meta = LoRAKernelMeta.make(3, batch.tokens, device, get_captured_lora_counts(3, True))
    layer, wrapper = vllm.layer_of(batch), vllm.wrapper(batch)
    if case == "embedding":
        layer.lora_a_stacked = batch.a[0]
    layer.set_mapping(wrapper)
    assert layer.wrapper is wrapper
    form = ahead.LayerForm(3, 8, 64, [48, 16], "float16")
    rows = wrapper.token_mapping_meta.token_lora_mapping.numel()
    assert found == ([(form, rows, [2, 3, 4])] if case == "dense" else [])


PROGRAM = """
import json, sys
from triton import knobs
from punica.vllm import ahead
hits, job = [], json.loads(sys.argv[1])
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
if "gpu" in job:
    ahead.main(sys.argv[1:])
else:
    ahead.launch_all(ahead.LayerForm(*job["form"]), job["rows"], job["counts"])
print(hits.count(False), hits.count(True))
"""
"""Compile the job for a GPU that it describes, or launch it on this one; print the misses and hits of the cache."""


def compiled_and_found(job: dict[str, Any], cache: Path) -> tuple[int, int]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(job)], capture_output=True, text=True,
                          env=environment, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    new, found = done.stdout.split()
    return int(new), int(found)


JOB = {"form": [4, 16, 64, [48, 32], "float16"], "rows": 40, "counts": [1, 5]}


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    job = {**JOB, "gpu": asdict(GpuDescription("an H200", 9, 0, 132, 227 << 10, 3_201_000, 6144))}
    new, found = compiled_and_found(job, tmp_path)
    assert (new > 4, found) == (True, 0)
    assert compiled_and_found(job, tmp_path) == (0, new)


@pytest.mark.gpu
def test_a_gpu_finds_what_was_compiled_without_it(tmp_path: Path) -> None:
    job = {**JOB, "gpu": asdict(GpuDescription.of_this_machine())}
    new, _ = compiled_and_found(job, tmp_path)
    assert compiled_and_found(JOB, tmp_path) == (0, new)


def test_compiled_graphs_are_told_from_vllms_own_and_registered_twice_is_once(vllm: Vllm) -> None:
    register()
    first = dict(vars(vllm.module))
    assert vllm.config().compute_hash() not in ("1a2b", "")
    register()
    assert dict(vars(vllm.module)) == first


def test_a_traced_call_of_vllms_own_is_one_graph(vllm: Vllm, device: str) -> None:
    register()
    batch = batch_of(device, torch.float32)
    wrapper, y = vllm.wrapper(batch), batch.y.clone()

    @torch.compile(backend="eager", fullgraph=True)
    def layer(y: torch.Tensor, x: torch.Tensor) -> None:
        wrapper.add_lora_linear(y, x * 1, batch.a, batch.b, batch.scaling, WIDTHS)

    layer(y, batch.x)
    assert torch.equal(y, batch.y)


def test_the_entry_point_names_the_function() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (place,) = project["entry-points"]["vllm.general_plugins"].values()
    module, name = place.split(":")
    assert getattr(importlib.import_module(module), name) is register
