"""Requirements and effects of `batch_invariant`; equal bits are shown on a GPU (`test_gpu_engine.py`)."""

import pytest
import torch

from punica.engine import Engine, EngineConfig, engine
from punica.engine.attention import KVCache
from punica.engine.config import check_parts
from punica.parallel import dense_layers, set_batch_invariant
from punica.parallel.linear import BatchInvariantLinearMethod, UnquantizedLinearMethod


def methods(model) -> set[type]:
    return {type(layer.quant_method) for layer in dense_layers(model).values()}


def test_products_are_those_of_the_engine_that_was_built_last(backbone, monkeypatch) -> None:
    monkeypatch.setattr(engine, "check_batch_invariant", lambda layers: None)  # there is no GPU here
    model = backbone.model()
    for wanted, method in (
        (True, BatchInvariantLinearMethod), (True, BatchInvariantLinearMethod), (False, UnquantizedLinearMethod),
    ):  # fmt: skip
        Engine(model, None, EngineConfig(max_batch_size=2, max_model_len=64, batch_invariant=wanted))
        assert methods(model) == {method}


def test_an_engine_that_is_refused_changes_nothing(backbone, monkeypatch) -> None:
    model, config = backbone.model(), EngineConfig(max_batch_size=2, max_model_len=64, batch_invariant=True)
    with pytest.raises(ValueError, match="plain linear layers on a GPU"):
        Engine(model, None, config)
    monkeypatch.setattr(engine, "check_batch_invariant", lambda layers: None)
    monkeypatch.setattr(engine, "LoRAModelManager", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine(model, config.lora_config(4), config)
    assert methods(model) == {UnquantizedLinearMethod}


def test_adapters_need_it_too(backbone) -> None:
    config = EngineConfig(max_batch_size=2, max_model_len=64, batch_invariant=True)
    with pytest.raises(ValueError, match=r"LoRAConfig\(batch_invariant=True\)"):
        Engine(backbone.model(), config.lora_config(16, batch_invariant=False), config)


def test_nobody_may_be_preempted(backbone) -> None:
    config = EngineConfig(max_batch_size=2, max_model_len=64, num_blocks=7, batch_invariant=True)
    with pytest.raises(ValueError, match="needs 8 KV blocks, got 7: a request that is preempted"):
        Engine(backbone.model(), None, config)


def test_at_most_two_ranks_add_in_one_order(backbone, monkeypatch) -> None:
    config = EngineConfig(max_batch_size=2, max_model_len=64, batch_invariant=True)
    for size in (1, 2, 3):
        monkeypatch.setattr("punica.engine.config.get_tensor_model_parallel_world_size", lambda size=size: size)
        if size < 3:
            check_parts(backbone.model(), None, config, None)
            continue
        with pytest.raises(ValueError, match="at most 2 tensor-parallel ranks, got 3"):
            check_parts(backbone.model(), None, config, None)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_from_pretrained_takes_it_for_the_engine_and_its_adapters(backbone, monkeypatch, with_adapter) -> None:
    monkeypatch.setattr(engine, "check_batch_invariant", lambda layers: None)
    adapters = [backbone.adapters[2]] if with_adapter else []
    built = Engine.from_pretrained(
        backbone.folder, adapters, max_batch_size=2, batch_invariant=True, cuda_graphs=False
    )  # fmt: skip
    assert (built.config.batch_invariant, built.config.cuda_graphs) == (True, False)
    assert (built.manager is not None) == with_adapter
    if built.manager is not None:
        assert built.manager.lora_config.batch_invariant


def test_other_products_stay_what_they_are(backbone) -> None:
    model = backbone.model()
    layers = dense_layers(model)
    first = next(iter(layers.values()))
    first.quant_method = object()
    set_batch_invariant(layers, True)
    assert methods(model) == {object, BatchInvariantLinearMethod}


def test_a_cache_of_another_model_is_refused(backbone) -> None:
    config, model = EngineConfig(max_batch_size=2, max_model_len=64), backbone.model()
    shallow = KVCache(model, config.total_blocks, config.block_size)
    del shallow.keys[1:], shallow.values[1:]
    for cache in (KVCache(backbone.model(dtype=torch.bfloat16), config.total_blocks, config.block_size), shallow):
        with pytest.raises(ValueError, match=r"cache has layers, kv heads.*, the model \(.*make one for this model"):
            Engine(model, None, config, cache=cache)
