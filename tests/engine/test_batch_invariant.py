"""Requirements and effects of `batch_invariant`; equal bits are shown on a GPU (`test_gpu_engine.py`)."""

from types import SimpleNamespace

import pytest

from punica.engine import Engine, EngineConfig, config, engine
from punica.engine.config import check_parts
from punica.parallel import dense_layers, set_batch_invariant
from punica.parallel.linear import BatchInvariantLinearMethod, UnquantizedLinearMethod

CONFIG = EngineConfig(max_batch_size=2, max_model_len=64, batch_invariant=True)


def methods(model) -> set[type]:
    return {type(layer.quant_method) for layer in dense_layers(model).values()}


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(engine, "check_batch_invariant", lambda layers: None)


def test_products_are_those_of_the_engine_that_was_built_last(backbone, as_on_a_gpu) -> None:
    model = backbone.model()
    for wanted, method in (
        (True, BatchInvariantLinearMethod), (True, BatchInvariantLinearMethod), (False, UnquantizedLinearMethod),
    ):  # fmt: skip
        Engine(model, None, EngineConfig(max_batch_size=2, max_model_len=64, batch_invariant=wanted))
        assert methods(model) == {method}


def test_an_engine_that_is_refused_changes_nothing(backbone, monkeypatch) -> None:
    model = backbone.model()
    with pytest.raises(ValueError, match="plain linear layers on a GPU"):
        Engine(model, None, CONFIG)
    monkeypatch.setattr(engine, "check_batch_invariant", lambda layers: None)
    monkeypatch.setattr(engine, "LoRAModelManager", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine(model, CONFIG.lora_config(4), CONFIG)
    assert methods(model) == {UnquantizedLinearMethod}


def test_adapters_blocks_and_ranks_that_prevent_it(backbone, monkeypatch) -> None:
    model = backbone.model()
    with pytest.raises(ValueError, match=r"LoRAConfig\(batch_invariant=True\)"):
        check_parts(model, CONFIG.lora_config(16, batch_invariant=False), CONFIG, None)
    few = EngineConfig(max_batch_size=2, max_model_len=64, num_blocks=7, batch_invariant=True)
    with pytest.raises(ValueError, match="needs 8 KV blocks, got 7"):
        check_parts(model, None, few, None)
    for size in (1, 2):
        monkeypatch.setattr(config, "current_group", lambda size=size: SimpleNamespace(world_size=size))
        check_parts(model, None, CONFIG, None)
    monkeypatch.setattr(config, "current_group", lambda: SimpleNamespace(world_size=3))
    with pytest.raises(ValueError, match="at most 2 tensor-parallel ranks, got 3"):
        check_parts(model, None, CONFIG, None)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_from_pretrained_takes_it_for_the_engine_and_its_adapters(backbone, as_on_a_gpu, with_adapter) -> None:
    adapters = [backbone.adapters[2]] if with_adapter else []
    built = Engine.from_pretrained(backbone.folder, adapters, max_batch_size=2, batch_invariant=True, cuda_graphs=False)
    assert (built.config.batch_invariant, built.config.cuda_graphs) == (True, False)
    assert with_adapter == (built.manager is not None and built.manager.lora_config.batch_invariant)


def test_other_products_stay_what_they_are(backbone) -> None:
    model = backbone.model()
    layers = dense_layers(model)
    next(iter(layers.values())).quant_method = object()
    set_batch_invariant(layers, True)
    assert methods(model) == {object, BatchInvariantLinearMethod}
