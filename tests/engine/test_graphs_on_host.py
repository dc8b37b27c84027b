"""Capture and replay of graphs by an engine on a CPU, where a replay launches the step again."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from punica.engine import Engine, EngineConfig, Request, cuda_graph
from punica.engine import runner as runner_module
from punica.engine.attention import KernelAttention, PagedAttention
from punica.engine.cuda_graph import GraphShape, StepGraphs, StepShapes, _Captured, decode_sizes, prompt_sizes
from punica.ops.backbone import PackedHeads
from tests.world import adapter_of_the_ends, are_served, finish, torch_without_gpu


class OnHost(StepGraphs):
    """Notes what it captures; `lacks`: there is no memory for these shapes."""

    lacks: frozenset[GraphShape] = frozenset()

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.tried: list[GraphShape] = []
        self.replayed: list[GraphShape] = []

    def _warm_up(self, shape, stream) -> None:
        self._begin(shape)
        self._forward(shape)

    def _record(self, shape, stream) -> _Captured:
        self.tried.append(shape)
        if shape in self.lacks:
            raise torch.OutOfMemoryError("no room")
        forward, replayed = self._forward, self.replayed

        def replay() -> None:
            replayed.append(shape)
            forward(shape)

        return _Captured(SimpleNamespace(replay=replay), forward(shape))


class Padded(KernelAttention):
    """Plain torch on the rows of requests, zeros for those that pad a step."""

    def begin(self, spans, kv_rows, num_prompt_rows=None, most_rows=None) -> None:
        self._real, starts, plain = (kv_rows >= 0).nonzero().flatten(), 0, []
        for span in spans:
            plain.append(span._replace(start=starts))
            starts += span.length
        self._plain = PagedAttention(self.cache)
        self._plain.begin(plain, kv_rows[self._real])

    def attend(self, layer_index, packed) -> torch.Tensor:
        heads, kv_heads, cos, sin, norms = packed
        output = heads.new_zeros(heads.shape[0], packed.num_heads, heads.shape[2])
        real = PackedHeads(heads[self._real], kv_heads, cos[self._real], sin[self._real], norms)
        output[self._real] = self._plain.attend(layer_index, real)
        return output


@pytest.fixture(autouse=True)
def graphs_on_host(monkeypatch) -> None:
    monkeypatch.setattr(cuda_graph, "torch", torch_without_gpu())
    monkeypatch.setattr(runner_module, "StepGraphs", OnHost)
    monkeypatch.setattr(runner_module, "attention_for", Padded)


def build(backbone, warm_up: bool = False) -> Engine:
    config = EngineConfig(max_batch_size=2, max_model_len=32)
    return Engine(backbone.model(), config.lora_config(16), config, warm_up=warm_up)


@pytest.fixture
def engine(backbone) -> Engine:
    return build(backbone)


def serve(engine: Engine, backbone, each_step=lambda step: None) -> None:
    """Two requests, in five steps (the first alone, the second beside it, both, the second), and their tokens."""
    states = [backbone.ask(engine, f"r{i}", [3 + i, 1], i, 4) for i in range(2)]
    for step in range(5):
        each_step(step)
        engine.step()
    assert not engine.has_unfinished()
    assert are_served(backbone, *states)


def test_a_step_that_finds_no_memory_for_its_graph_is_launched_by_the_host_and_not_tried_again(
    engine, backbone, monkeypatch
) -> None:
    shape = GraphShape(0, 2, 1)
    monkeypatch.setattr(OnHost, "lacks", frozenset({shape}))
    graphs = engine.runner.graphs
    serve(engine, backbone)
    others = [GraphShape(32, 0, 0), GraphShape(32, 2, 1), GraphShape(0, 1, 1)]
    assert graphs.tried == [*others[:2], shape, others[2]]
    assert graphs.replayed == others, "and two steps of that shape without"
    assert (graphs.statistics.graphs, graphs.statistics.refused) == (3, 1)
    monkeypatch.setattr(OnHost, "lacks", frozenset())
    graphs.release()
    serve(engine, backbone)
    assert shape in graphs.replayed
    assert graphs.statistics.refused == 0


def test_graphs_released_under_a_step_that_was_launched_ahead_are_captured_again(engine, backbone) -> None:
    def release(step: int) -> None:
        if step == 2:
            assert engine.is_ahead
            engine.runner.graphs.release()

    serve(engine, backbone, release)
    assert engine.runner.graphs.tried.count(GraphShape(0, 2, 1)) == 2


def test_all_graphs_beforehand_are_all_that_steps_need_and_share_their_results(engine, backbone) -> None:
    engine.capture_graphs()
    graphs = engine.runner.graphs
    decodes = [GraphShape(0, *rest) for rest in ((2, 2), (2, 1), (2, 0), (1, 1), (1, 0))]
    assert graphs.tried == decodes
    engine.capture_graphs(32)
    longer, prompts = (
        [GraphShape(rows, *rest) for rest in ((2, 2), (2, 1), (2, 0), (0, 1), (0, 0))] for rows in (64, 32)
    )
    assert graphs.tried == decodes + prompts
    assert engine.runner.shapes.up_to(10_000, vocabulary=False) == longer + prompts + decodes, "no step is longer"
    serve(engine, backbone)
    assert {GraphShape(32, 0, 0), GraphShape(32, 2, 1)} < set(graphs.replayed), "the first request has no adapter"
    assert len(graphs.tried) == 10
    for part in ("logits", "best"):
        found = [getattr(captured.result, part) for captured in graphs._captured.values()]
        assert len({one.untyped_storage().data_ptr() for one in found}) == 1 < len({len(one) for one in found})
    graphs.statistics.bytes = 7
    assert engine.memory.graphs == 7
    for wrong, kind in ((-1, ValueError), ("many", TypeError)):
        with pytest.raises(kind, match="prompt_tokens"):
            engine.capture_graphs(wrong)


def test_a_warm_engine_has_all_graphs_that_steps_need(backbone, monkeypatch) -> None:
    """What finds no memory runs once without a graph, and then in every step."""
    refused = GraphShape(32, 2, 2)
    monkeypatch.setattr(OnHost, "lacks", frozenset({refused}))
    engine = build(backbone, warm_up=True)
    graphs, shapes = engine.runner.graphs, engine.runner.shapes.up_to(64, vocabulary=False)
    assert graphs.tried == shapes
    assert (graphs.statistics.graphs, graphs.statistics.refused) == (len(shapes) - 1, 1)
    serve(engine, backbone)
    assert graphs.tried == shapes


def test_steps_have_graphs_of_their_own_while_an_adapter_is_for_embedding_and_head(engine, backbone, tmp_path) -> None:
    ends, merged = adapter_of_the_ends(backbone, tmp_path)
    graphs, plain = engine.runner.graphs, backbone.adapters[1]
    states = [engine.add_request(Request(f"r{i}", [3, 1], 5, ends if i else plain)) for i in range(2)]
    engine.step()  # the plain one alone; the other joins the next step, launched already
    assert graphs.replayed[0] == GraphShape(32, 0, 1)
    assert graphs.replayed[-1] == GraphShape(32, 2, 1, vocabulary=True)
    finish(engine)
    assert graphs.replayed[-1].vocabulary
    assert are_served(backbone, states[0])
    expected = merged.generate(torch.tensor([[3, 1]]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert states[1].output_token_ids == expected[0, 2:].tolist()
    graphs.replayed.clear()
    serve(engine, backbone)
    assert not any(shape.vocabulary for shape in graphs.replayed), "it lies in a slot, but no row has it"
    shapes = engine.runner.shapes
    assert shapes.of(0, 2, 0, uses_lora=False, vocabulary=True) == GraphShape(0, 2, 0), "without any adapter, one"
    with_lora = [shape for shape in shapes.up_to(64, vocabulary=False) if shape.adapters]
    assert {*shapes.up_to(64, vocabulary=True)} - {*shapes.up_to(64, vocabulary=False)} == {
        shape._replace(vocabulary=True) for shape in with_lora
    }


def test_a_dropped_engine_frees_its_cache_at_once(backbone) -> None:
    engine = build(backbone)
    serve(engine, backbone)
    cache, graphs = weakref.ref(engine.runner.attention.cache), weakref.ref(engine.runner.graphs)
    gc.disable()
    try:
        del engine
        assert (cache(), graphs()) == (None, None)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("sizes_of", "most", "least", "part"),
    [*((decode_sizes, most, 8, 1) for most in (1, 3, 8, 9, 33)), *((prompt_sizes, most, 64, 8) for most in (64, 2080))],
)
def test_rows_are_padded_little(sizes_of, most, least, part) -> None:
    """By fewer rows than `least`, or by a part of them; few decode rows by fewer than they are."""
    sizes = sizes_of(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= most
    for rows in range(1, most + 1):
        padding = min(size for size in sizes if size >= rows) - rows
        assert padding < (max(1, min(rows, least)) if part == 1 else max(least, rows / part))
    assert len(sizes) < 40


@pytest.mark.parametrize("drafts", [0, 1])
def test_a_prompt_as_long_as_the_batch_is_wide_is_no_step_of_drafts(drafts) -> None:
    sizes = StepShapes(64, 64, 2, drafts)
    shapes = sizes.up_to(64, vocabulary=False)
    assert sizes.of(64, 64, 2, uses_lora=True, vocabulary=False) in shapes
    assert {shape.verifies for shape in shapes if shape.decode_rows} == {False}


def test_mixtures_have_graphs_of_their_own_padded_to_powers_of_two(engine, backbone) -> None:
    graphs, adapters = engine.runner.graphs, backbone.adapters
    wishes = [([3, 1], {adapters[1]: 0.5, adapters[2]: 0.25, adapters[4]: 1.0}), ([4, 1], None)]
    states = [engine.add_request(Request(f"m{i}", prompt, 4, wish)) for i, (prompt, wish) in enumerate(wishes)]
    finish(engine)
    assert [shape.mixed for shape in graphs.replayed] == [4, 4, 4, 4, 0]
    plain = backbone.engine(cuda_graphs=False).generate(*map(list, zip(*wishes, strict=True)), 4)
    assert [state.output_token_ids for state in states] == [result.token_ids for result in plain]
    serve(engine, backbone)


def test_steps_with_drafts_have_graphs_of_their_own(backbone) -> None:
    config = EngineConfig(max_batch_size=2, max_model_len=32, speculate=3)
    engine = Engine(backbone.model(), config.lora_config(16), config, warm_up=True)
    graphs, shapes = engine.runner.graphs, engine.runner.shapes.up_to(64, vocabulary=False)
    assert [shape[:3] for shape in shapes if shape.verifies and shape.adapters == 2] == [(n, 0, 2) for n in (8, 4, 2)]

    def draft(request, most):
        known = backbone.generate_merged(request.prompt_token_ids, request.adapter_id, 12)
        return known[request.num_generated :][:most]

    engine.scheduler.draft = draft
    states = [backbone.ask(engine, f"r{i}", [3 + i, 1], i, 12) for i in range(1, 3)]
    finish(engine)
    assert are_served(backbone, *states)
    assert graphs.tried == shapes, "none is captured later"
    drafts = {GraphShape(*rest, verifies=True) for rest in ((8, 0, 2), (4, 0, 1))}
    assert drafts | {GraphShape(32, 0, 1)} <= set(graphs.replayed), "the second prompt has drafts beside it"
