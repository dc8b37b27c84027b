"""The engine on a GPU: float32 kernels, CUDA graphs, and what thousands of requests leave behind."""

import gc
import random

import pytest
import torch

from punica.engine import Engine, EngineConfig, Request
from punica.engine.config import graph_reserve
from punica.metadata import LoRABatch
from punica.scheduling import SamplingParams
from tests.world import Wish, adapter_of_the_ends, are_served, finish, logits_of, steps, tokens_of

pytestmark = pytest.mark.gpu


def engine_on_gpu(backbone, dtype: torch.dtype = torch.float32, **sizes) -> Engine:
    config = EngineConfig(**{"max_batch_size": 8, "max_model_len": 64, **sizes})
    return Engine(backbone.model("cuda", dtype), config.lora_config(16), config, warm_up=False)


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_those_of_merged_models(backbone, mixed_wishes, mixed_tokens, serve, graphs) -> None:
    assert serve(engine_on_gpu(backbone, cuda_graphs=graphs), mixed_wishes) == mixed_tokens


def test_an_adapter_of_embedding_and_head_joins_and_leaves_others_that_decode(backbone, tmp_path) -> None:
    ends, merged = adapter_of_the_ends(backbone, tmp_path)
    engine = engine_on_gpu(backbone)
    engine.manager.add_adapter(ends)  # else its folder may be read for longer than the other request lives
    replayed, replay = [], engine.runner.graphs.replay
    engine.runner.graphs.replay = lambda shape: replayed.append(shape) or replay(shape)
    long = backbone.ask(engine, "long", [3, 1], 1, 24)
    steps(engine, 4)
    short = engine.add_request(Request("short", [5, 6], 6, ends))
    finish(engine)
    assert are_served(backbone, long)
    expected = merged.generate(torch.tensor([[5, 6]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert short.output_token_ids == expected[0, 2:].tolist()
    kinds = [shape.vocabulary for shape in replayed]
    assert (kinds[0], kinds[-1]) == (False, False)
    assert True in kinds


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_graph_has_the_bits_of_the_same_step_launched_by_the_host(
    backbone, mixed_wishes, serve, dtype, monkeypatch
) -> None:
    """Launched with the kernels that the graph has: those for the step that it was captured with."""
    engine = engine_on_gpu(backbone, dtype, max_batch_size=6)
    graphs, compared, captured_with = engine.runner.graphs, [], {}
    replay, begin, batch = graphs.replay, graphs._begin, engine.manager.punica_wrapper.batch

    def begin_and_note(shape):
        begin(shape)
        captured_with[shape] = batch.shape

    def both(shape):
        captured = replay(shape)
        logits, best = captured.logits.clone(), captured.best.clone()
        with monkeypatch.context() as patch:
            patch.setattr(LoRABatch, "shape", captured_with[shape])
            launched = engine.runner._forward_shape(shape)
        rows = len(engine.scheduler.running)
        compared.append((shape, rows))
        assert logits[:rows].equal(launched.logits[:rows])
        assert best[:rows].equal(launched.best[:rows])
        return captured

    graphs.replay, graphs._begin = both, begin_and_note
    serve(engine, mixed_wishes)
    shapes = {shape for shape, _ in compared}
    assert len({shape.adapters for shape in shapes}) > 1
    assert {shape.prompt_rows for shape in shapes} == {0, 64}
    assert any(rows < shape.decode_rows for shape, rows in compared)
    assert graphs.statistics.graphs == len(shapes)


def asked(backbone, wishes: list[Wish]) -> list[Request]:
    return [Request(str(i), one.prompt, one.new, backbone.adapters.get(one.adapter_id)) for i, one in enumerate(wishes)]


def test_prompts_in_graphs_change_no_logit_beyond_rounding(backbone, mixed_wishes) -> None:
    """Padded prompts in a captured step, against those of a step launched by the host: float16."""
    prompts, logits = [wish._replace(new=1) for wish in mixed_wishes], []
    for graphs in (True, False):
        logits.append(logits_of(engine_on_gpu(backbone, torch.float16, cuda_graphs=graphs), asked(backbone, prompts)))
    torch.testing.assert_close(*logits, atol=2e-2, rtol=2e-2)


def test_sampled_tokens_are_those_without_graphs(backbone) -> None:
    params = [SamplingParams(12, temperature=0.8, top_k=20, seed=seed, logprobs=2) for seed in range(6)]
    results = []
    for graphs in (False, True):
        engine = engine_on_gpu(backbone, cuda_graphs=graphs)
        adapters = [backbone.adapters.get(i) for i in range(6)]
        results.append(tokens_of(engine.generate([[3 + i, 1, 4] for i in range(6)], adapters, params)))
    assert results[0] == results[1]


def test_requests_that_come_and_go_leave_nothing(backbone) -> None:
    """2,000 requests, a quarter of them cancelled at some step: no page, no slot, no memory is lost."""
    engine, rng = engine_on_gpu(backbone, max_batch_size=16, num_blocks=40), random.Random(5)
    engine.capture_graphs(64)
    cancel_at: dict[str, int] = {}
    memory, ended, added, step = [], 0, 0, 0
    while added < 2000 or engine.has_unfinished():
        while added < 2000 and len(engine.scheduler.waiting) < 6:
            name, length = f"r{added}", rng.randint(1, 30)
            prompt = [rng.randrange(256) for _ in range(length)]
            engine.add_request(Request(name, prompt, rng.randint(1, 30), backbone.adapters.get(rng.randrange(7))))
            if rng.random() < 0.25:
                cancel_at[name] = step + rng.randint(0, 25)
            added += 1
        for name in [name for name, when in cancel_at.items() if when <= step]:
            del cancel_at[name]
            if engine.is_in_use(name):
                engine.abort_request(name)
                ended += 1
        ended += len(engine.step().finished)
        step += 1
        if step % 100 == 0:
            memory.append(torch.cuda.memory_allocated())
    assert ended == 2000
    assert not engine.blocks._tables
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert len(engine.manager) <= engine.manager.lora_slots
    assert max(memory[len(memory) // 2 :]) <= max(memory[: len(memory) // 2])


def test_memory_of_graphs_is_within_its_reserve_and_is_given_back_with_the_engine(backbone) -> None:
    model, config = backbone.model("cuda", torch.float16), EngineConfig(max_batch_size=32, max_model_len=128)
    engine = Engine(model, config.lora_config(16), config, warm_up=False)
    graphs = engine.runner.graphs
    shapes = engine.runner.shapes.up_to(config.max_num_batched_tokens, vocabulary=False)
    taken = []
    for _ in range(3):  # the device's free memory is also that of the tests beside this one
        graphs.release()
        engine.capture_graphs(config.max_num_batched_tokens)
        assert graphs.statistics.refused == 0
        assert graphs.statistics.graphs == len(shapes) == 24 + 6 * 3
        taken.append(engine.memory.graphs)
    held = engine.memory
    assert 0 < min(taken) <= graph_reserve(model, config)
    allocated = torch.cuda.memory_allocated()
    gc.disable()
    try:
        del engine, graphs
        assert allocated - torch.cuda.memory_allocated() >= held.kv_cache
    finally:
        gc.enable()


def test_a_graph_that_finds_no_memory(backbone, mixed_wishes, mixed_tokens, serve) -> None:
    """Torch's allocator ends the capture; the stream and the next capture are none the worse for it."""
    engine = engine_on_gpu(backbone)
    graphs, forward = engine.runner.graphs, engine.runner.graphs._forward

    def too_large(shape):
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return forward(shape)

    graphs._forward = too_large
    assert serve(engine, mixed_wishes) == mixed_tokens
    assert graphs.statistics.graphs == 0 < graphs.statistics.refused
    graphs._forward = forward
    graphs.release()
    assert serve(engine, mixed_wishes) == mixed_tokens
    assert graphs.statistics.refused == 0 < graphs.statistics.graphs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_batch_invariant_logits_are_the_same_bits_in_any_company(backbone, mixed_wishes, dtype) -> None:
    """Alone, and among others that join and leave: decode rows beside prompts, in graphs of several sizes."""
    sizes = (1, 5, 16)
    engines = (engine_on_gpu(backbone, dtype, max_batch_size=size, batch_invariant=True) for size in sizes)
    alone, *others = (logits_of(engine, asked(backbone, mixed_wishes)) for engine in engines)
    for other in others:
        assert {name: len(rows) for name, rows in other.items()} == {name: len(rows) for name, rows in alone.items()}
        assert [name for name, rows in other.items() if not all(map(torch.equal, rows, alone[name]))] == []


def test_batch_invariant_logits_are_the_same_bits_with_chunks_and_cached_prefixes(backbone) -> None:
    """Prompts whole and alone, then in pieces beside others, behind tokens that requests before them computed."""
    prompt = [(7 * i + i // 50) % 256 for i in range(300)]
    wishes = [Wish((*prompt[:end], adapter), adapter, 6) for end, adapter in ((130, 1), (299, 1), (270, 2), (200, 0))]
    sizes = {"max_model_len": 384, "num_blocks": 200, "batch_invariant": True}
    found = []
    for admission, more in (("fcfs", {"max_batch_size": 1}), ("chunked", {"prefill_chunk": 128, "prefix_cache": True})):
        model, config = backbone.model("cuda", torch.float16), EngineConfig(**{"max_batch_size": 4, **sizes, **more})
        model.max_context = 384
        engine = Engine(model, config.lora_config(16), config, admission, warm_up=False)
        adopt, hits = engine.blocks.adopt, []
        engine.blocks.adopt = lambda owner, hit, n, adopt=adopt, hits=hits: hits.extend(hit) or adopt(owner, hit, n)
        found += [logits_of(engine, asked(backbone, wishes)) for _ in range(2)]
    assert len(hits) > 128 // 16
    for wish in range(len(wishes)):
        alone, *others = (each[str(wish)][-6:] for each in found)
        equal = [[row.equal(other) for row, other in zip(alone, each, strict=True)] for each in others]
        assert equal == [[True] * 6] * 3


@pytest.mark.parametrize("graphs", [False, True])
def test_mixtures_have_the_tokens_of_the_cpu(backbone, graphs) -> None:
    one = backbone.adapters
    mixtures = [{one[1]: 0.7, one[4]: 0.3}, one[2], {one[2]: -0.5, one[1]: 1.5, one[6]: 0.25}, None, {one[3]: 0.5}]
    prompts = [list(range(3 + i, 40 - 7 * i)) for i in range(5)]
    wanted = tokens_of(backbone.engine().generate(prompts, mixtures, 8))
    assert tokens_of(engine_on_gpu(backbone, cuda_graphs=graphs).generate(prompts, mixtures, 8)) == wanted
