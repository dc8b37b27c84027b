"""vLLM's operators by our kernels: what is replaced, what stays vLLM's own, and when nothing changes.

vLLM is a stand-in of a module: its wrapper's names and signatures, which count their calls.
"""

import gc
import importlib.metadata
import json
import logging
import subprocess
import sys
import tomllib
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
    """The stand-in: ``calls`` of vLLM's own operators; ``module``, that of its wrapper."""

    def __init__(self) -> None:
        self.calls, self.module, self.version = list[str](), ModuleType("vllm.lora.punica_wrapper.punica_gpu"), "0.26.0"
        self.meta = type("LoRAKernelMeta", (LoRAKernelMeta,), {})
        self.config = type("LoRAConfig", (), {"compute_hash": lambda self: "1a2b"})

        def own(name: str) -> Any:
            return lambda *args, **kwargs: self.calls.append(name)

        def add_lora_linear(self: Any, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: Any,
                            output_slices: Any, *, buffer: Any = None, **kwargs: Any) -> None:  # fmt: skip
            own("add_lora_linear")()

        fields = {"lora_config": SimpleNamespace(specialize_active_lora=True), "add_lora_linear": add_lora_linear}
        names = {name: own(name) for name in ("lora_shrink", "lora_expand", "fused_moe_lora")}
        names |= {"PunicaWrapperGPU": type("PunicaWrapperGPU", (), fields), "LoRAKernelMeta": self.meta}
        vars(self.module).update(names)
        methods = {name: lambda self, *given, n=name: self.calls.append(n) for name in ("set_lora", "reset_lora")}
        methods["set_mapping"] = lambda self, wrapper: setattr(self, "wrapper", wrapper)
        self.layer = type("BaseLayerWithLoRA", (), methods)

    def state(self) -> list[dict[str, Any]]:
        owners = self.module, self.module.PunicaWrapperGPU, self.meta, self.config, self.layer
        return [dict(vars(one)) for one in owners]

    def layer_of(self, batch: Batch) -> Any:
        layer = self.layer()
        layer.calls, layer.lora_a_stacked, layer.lora_b_stacked = [], batch.a, batch.b
        return layer

    def wrapper(self, batch: Batch) -> Any:
        made = self.module.PunicaWrapperGPU()
        made.token_mapping_meta = batch.meta
        return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    made, version = Vllm(), importlib.metadata.version
    contents: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.lora": {}, "vllm.lora.punica_wrapper": {}, "vllm.config": {}, "vllm.lora.layers": {},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: True)},
        "vllm.config.lora": {"LoRAConfig": made.config}, "vllm.lora.layers.base": {"BaseLayerWithLoRA": made.layer},
    }  # fmt: skip
    for name, content in contents.items():
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        vars(module).update(content)
    monkeypatch.setitem(sys.modules, made.module.__name__, made.module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: made.version if name == "vllm" else version(name))
    monkeypatch.delenv(SWITCH, raising=False)
    return made


def batch_of(device: str, dtype: torch.dtype = torch.float16) -> Batch:
    torch.manual_seed(3)
    return Batch([1, -1, 0, 1, 2], 64, WIDTHS, 8, 3, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("add_inputs", [True, False], ids=["one stream", "two streams"])
@pytest.mark.parametrize("mapped", [False, True], ids=["unknown slots", "slots written before"])
def test_a_layer_is_one_call_of_ours(vllm: Vllm, device: str, dtype: Any, add_inputs: bool, mapped: bool) -> None:
    register()
    batch, adds = batch_of(device, dtype), {} if add_inputs else {"add_inputs": False}
    before = batch.y if add_inputs else torch.zeros_like(batch.y)
    y, layer, wrapper = before.clone(), vllm.layer_of(batch), vllm.wrapper(batch)
    for one in (vllm.wrapper(batch), wrapper) if mapped else ():  # mapped again: by the last wrapper
        layer.set_mapping(one)
    assert slots.is_known(batch.a[0]) == mapped
    wrapper.add_lora_linear(y[None], batch.x[None], batch.a, batch.b, batch.scaling, WIDTHS, **adds)
    assert_close(y, before.cpu().double() + batch.expanded(batch.shrunk()), dtype, roundings=4)
    assert vllm.calls == []
    del layer
    gc.collect()
    assert not slots.is_known(batch.a[0])


@pytest.mark.parametrize("way", ["eager", "traced", "three dimensions", "two streams", "no adapter", "general"])
def test_slots_of_a_layer_are_known_and_read_to_their_true_ranks(vllm: Vllm, device: str, way: str) -> None:
    register()
    ranks, adds = [0, 5, 8], way != "two streams"
    torch.manual_seed(5)
    of_rows = [-1] * 5 if way == "no adapter" else [1, -1, 0, 1, 2]
    batch = Batch(of_rows, 64, WIDTHS, 8, 3, torch.float16, device, [ranks] * 2, scaling=1.0)
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

    given, run = {} if adds else {"add_inputs": False}, wrapper.add_lora_linear
    run = torch.compile(run, backend="eager", fullgraph=True) if way == "traced" else run
    shape = (1, *y.shape) if way == "three dimensions" else y.shape
    run(y.view(shape), batch.x.view(*shape[:-1], 64), a, batch.b, 1.0, WIDTHS, **given)
    if way == "general":  # other tensors of the same form: as wide as the slots
        assert y[0].isnan().all()
        assert torch.equal(y[1], batch.y[1])
        return
    before = batch.y.cpu().double() if adds else torch.where(batch.has_adapter, 0.0, batch.y.cpu().double())
    assert_close(y, before + batch.expanded(batch.shrunk()), torch.float16, roundings=4)
    assert (layer.calls, vllm.calls) == (["set_lora"] * 4 + ["reset_lora"], [])


@pytest.mark.parametrize("adapters", [1, 2, 3, 4])
@pytest.mark.parametrize("invariant", [True, False], ids=["tiles", "rows"])
def test_a_graph_serves_adapters_beside_plain_rows(vllm: Vllm, device: str, adapters: int, invariant: Any) -> None:
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
    TritonOps(Options(invariant, False)).linear(y, batch.x, layer.punica_slots.weights, captured, batch.scaling)
    batch.check(y)
    vllm.meta.prepare_tensors(batch.meta, torch.tensor([-1] * batch.tokens))
    assert wrapper.punica_steps.batch(batch.tokens) is None


def test_products_of_other_layers_are_ours(vllm: Vllm, device: str) -> None:
    """Embeddings, logits and fully sharded layers call them by their names in the module."""
    register()
    batch = batch_of(device)
    *tensors, count = batch.meta.meta_args(batch.tokens, True)
    h, y = torch.empty(len(WIDTHS), batch.tokens, batch.rank, device=device), torch.zeros_like(batch.y)
    vllm.module.lora_shrink(batch.x, batch.a, h, *tensors, count, batch.scaling)
    assert_shrunk(h, batch.shrunk())
    vllm.module.lora_expand(h, batch.b, y, *tensors, count, offset_start=0, add_inputs=True)
    assert_close(y, batch.expanded(batch.shrunk()), batch.dtype, roundings=4)
    assert vllm.calls == []


@pytest.mark.parametrize("case", ["dtype", "layout", "rank", "output", "buffer", "traced", "fully sharded experts"])
def test_what_ours_cannot_serve_is_vllms_own(vllm: Vllm, device: str, case: str, caplog: Any) -> None:
    register()
    batch = batch_of(device, torch.float32 if case in ("dtype", "traced") else torch.float16)
    a, b, y = batch.a, batch.b, batch.y.float() if case == "output" else batch.y.clone()
    rest, own, linear = (1.0, WIDTHS), "add_lora_linear", vllm.wrapper(batch).add_lora_linear
    options = {"buffer": torch.empty(2, 5, 8)} if case == "buffer" else {}
    if case == "layout":
        a = tuple(one[..., ::2] for one in a)
    if case == "rank":
        a = b = (torch.empty(3, 1, 1024, 1024, dtype=batch.dtype, device="meta"),) * 2
    if case == "traced":  # one graph
        linear = torch.compile(linear, backend="eager", fullgraph=True)
    if case == "fully sharded experts":
        own, rest = "fused_moe_lora", (*[None] * 24, False, True, 0, True)
        linear = vllm.module.fused_moe_lora
    plugin._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "vllm.punica"):
        for _ in range(2):
            linear(y, batch.x, a, b, *rest, **options)
    assert set(vllm.calls) == {own} if case == "traced" else vllm.calls == [own] * 2
    assert torch.equal(y, batch.y.to(y.dtype))
    said = [record for record in caplog.records if "vLLM's own" in record.message]
    assert len(said) == (case in ("dtype", "layout", "rank", "output"))


REASONS = {"switch": "", "version": "none of 0.26, 0.33", "platform": "no NVIDIA GPU", "no wrapper": "NotFound",
           "signature": "another signature", "operator": "AttributeError"}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_vllm_runs_as_it_is(vllm: Vllm, monkeypatch: pytest.MonkeyPatch, caplog: Any, case: str) -> None:
    monkeypatch.setenv(SWITCH, "0" if case == "switch" else "1")
    vllm.version = "0.27.1" if case == "version" else "0.33.2"
    if case == "platform":
        sys.modules["vllm.platforms"].current_platform = SimpleNamespace(is_cuda=lambda: False)
    if case == "no wrapper":
        monkeypatch.setitem(sys.modules, vllm.module.__name__, None)
    if case == "signature":
        vllm.module.PunicaWrapperGPU.add_lora_linear = lambda self, y, x: None
    if case == "operator":
        del vllm.module.fused_moe_lora
    before = vllm.state()
    with caplog.at_level(logging.INFO, "vllm.punica"):
        register()
    assert vllm.state() == before
    assert [REASONS[case] in record.message for record in caplog.records] == [True] * (case != "switch")


def test_compiled_graphs_are_told_from_vllms_own_and_registered_twice_is_once(vllm: Vllm) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["punica"].split(":")
    getattr(importlib.import_module(module), name)()
    first = vllm.state()
    assert vllm.config().compute_hash() not in ("1a2b", "")
    register()
    assert vllm.state() == first


@pytest.mark.parametrize("case", ["dense", "dtype", "embedding"])
def test_kernels_of_a_dense_layer_are_compiled_ahead(vllm: Vllm, device: str, case: str, monkeypatch: Any) -> None:
    found: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: found.append(json.loads(command[3])["form"]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ahead.GpuDescription, "of_this_machine", lambda: GpuDescription("none", *range(6)))
    monkeypatch.setattr(ahead, "_processes", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", "cache")
    register()
    batch = batch_of(device, torch.float32 if case == "dtype" else torch.float16)
    batch.meta = LoRAKernelMeta.make(3, batch.tokens, device, get_captured_lora_counts(3, True))
    layer, wrapper = vllm.layer_of(batch), vllm.wrapper(batch)
    layer.lora_a_stacked = batch.a[0] if case == "embedding" else batch.a
    for _ in range(2):
        layer.set_mapping(wrapper)
    assert layer.wrapper is wrapper
    assert found == ([[3, 8, 64, [48, 16], "float16", batch.tokens, [2, 3, 4]]] if case == "dense" else [])
