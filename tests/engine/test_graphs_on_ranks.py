"""Graphs on several ranks: all of them capture the same shapes in the same order, or none.

The ranks are threads on a CPU. What needs a GPU (the rehearsal, the capture) is replaced; when it happens, for which
shapes, and what becomes of a failure is the code that runs there.
"""

import re
import shutil

import pytest
import torch

from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig, Request, cuda_graph
from punica.engine.cuda_graph import GraphShape, StepGraphs
from punica.parallel import collectives_can_be_captured, current_group, tensor_parallel
from tests.parallel.thread_ranks import on_threads
from tests.world import damage, torch_without_gpu

DECODE = GraphShape(0, 8, 1)


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch) -> None:
    monkeypatch.setattr(cuda_graph, "torch", torch_without_gpu())


class Recorded(StepGraphs):
    """Notes what it would run and record; the host launches every step."""

    def __init__(self, fails_in: str = "", failure: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__(lambda shape: None, lambda shape: None, torch.device("cpu"))
        self.done: list[tuple[str, GraphShape]] = []
        self._fails_in, self._failure = fails_in, failure

    def _warm_up(self, shape, stream) -> None:
        self._note("rehearsed", shape)

    def _record(self, shape, stream):
        self._note("recorded", shape)
        return shape

    def _note(self, what: str, shape: GraphShape) -> None:
        if what == self._fails_in:
            raise self._failure("no room")
        self.done.append((what, shape))


def test_ranks_capture_what_all_of_them_ask_for_and_refuse_different_shapes_before() -> None:
    def body(rank: int) -> list:
        graphs = Recorded()
        with pytest.raises(RuntimeError, match=r"\[\[0, 8, 1, 0, 0, 0\], \[0, 4, 1, 0, 0, 0\]\]"):
            graphs.prepare(GraphShape(0, 4, 1) if rank else DECODE)
        before = list(graphs.done)
        graphs.prepare(DECODE)
        graphs.prepare(DECODE)
        return [before, graphs.done, graphs.has(DECODE)]

    assert on_threads(2, body) == [[[], [("rehearsed", DECODE), ("recorded", DECODE)], True]] * 2


def test_a_capture_that_fails_on_one_rank_fails_on_all_and_may_be_tried_again() -> None:
    def body(rank: int) -> list:
        graphs = Recorded("recorded" if rank else "", ValueError)
        with pytest.raises(ValueError, match="rank 1 of 2: no room"):
            graphs.prepare(DECODE)
        before = graphs.has(DECODE)
        graphs._fails_in = ""
        return [before, graphs.prepare(DECODE), graphs.has(DECODE)]

    assert on_threads(2, body) == [[False, True, True]] * 2


def test_a_graph_without_memory_on_one_rank_is_launched_by_the_hosts_of_all() -> None:
    def body(rank: int) -> list:
        graphs = Recorded("recorded" if rank else "")
        found = [graphs.prepare(DECODE), graphs.prepare(DECODE), graphs.is_refused(DECODE)]
        graphs._fails_in = ""
        return [*found, graphs.prepare(GraphShape(0, 8, 0)), graphs.statistics.refused]

    assert on_threads(2, body) == [[False, False, True, True, 1]] * 2


def test_a_warm_up_that_fails_on_one_rank_ends_the_group() -> None:
    """It may have failed anywhere between the collectives of the step."""

    def body(rank: int) -> list:
        graphs, said = Recorded("rehearsed" if rank else ""), []
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                graphs.prepare(DECODE)
            said.append(str(caught.value))
        return [graphs.has(DECODE), *said]

    here, there = on_threads(2, body)
    assert (here[0], there[0]) == (False, False)
    for text in there[1:]:
        assert "rank 1 failed inside of a step (OutOfMemoryError: no room)" in text


def test_graphs_end_with_their_group() -> None:
    def body(rank: int) -> list:
        graphs = Recorded()
        graphs.prepare(DECODE)
        [release] = current_group().released_by
        release()
        return [graphs.has(DECODE)]

    assert on_threads(2, body) == [[False]] * 2


def test_without_nccl_nothing_is_captured() -> None:
    class Elsewhere:
        rank, world_size, can_be_captured = 0, 2, False
        all_reduce = all_gather = gather = staticmethod(lambda tensor, *_: tensor)

    assert collectives_can_be_captured()
    with tensor_parallel(Elsewhere()):
        assert not collectives_can_be_captured()


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fully sharded"])
def test_engines_of_all_ranks_want_the_same_graphs_in_order(backbone, mixed_wishes, mixed_tokens, sharded) -> None:
    """Requests that join, leave and wait for one of three slots, some with no adapter."""
    wishes = mixed_wishes[:10]

    def body(rank: int) -> list:
        config = EngineConfig(max_batch_size=8, max_model_len=64)
        lora = config.lora_config(16, max_loras=3, fully_sharded_loras=sharded)
        engine = Engine(backbone.model(), lora, config)
        graphs, wanted = Recorded(), []

        def shape_of(layout):
            slots = {slot for slot in layout.sampled_slots[bool(layout.num_prefill_rows) :] if slot >= 0}
            decodes = len(layout.spans) - bool(layout.num_prefill_rows)
            uses_lora = any(slot >= 0 for slot in layout.sampled_slots)
            shape = engine.runner.shapes.of(
                layout.num_prefill_rows, decodes, len(slots), uses_lora=uses_lora, vocabulary=False
            )
            graphs.prepare(shape)
            wanted.append(shape)

        launch = engine.runner.launch
        engine.runner.launch = lambda layout, before=None: (shape_of(layout), launch(layout, before))[1]
        tokens = backbone.serve(engine, wishes)
        return [wanted, [shape for what, shape in graphs.done if what == "recorded"], tokens]

    first, second = on_threads(2, body)
    assert first == second
    assert first[1] == list(dict.fromkeys(first[0]))
    assert len({shape.prompt_rows for shape in first[1]}) > 1
    assert {shape.adapters for shape in first[1]} > {0, 1}
    assert first[2] == mixed_tokens[:10]


def test_a_step_that_fails_on_one_rank_while_the_model_runs_is_the_last(backbone, tmp_path) -> None:
    """An adapter that one rank cannot read fails its request only: ranks agree on it between steps."""
    damage(poisoned := shutil.copytree(backbone.adapters[1].lora_path, tmp_path / "poisoned"), float("inf"))

    def body(rank: int) -> list:
        engine, said = backbone.engine(max_batch_size=2), []
        folder = backbone.adapters[1].lora_path if rank == 0 else "nowhere"
        with pytest.raises(FileNotFoundError, match="rank 1 of 2"):
            engine.add_request(Request("unread", [1], 2, LoRARequest("one", 1, str(folder))))
        state = backbone.ask(engine, "good", [5, 6], 2, 12)
        engine.step()
        folder = poisoned if rank else backbone.adapters[1].lora_path
        bad = engine.add_request(Request("poisoned", [1], 2, LoRARequest("one", 1, str(folder))))
        while not bad.has_ended:
            engine.step()
        assert re.search("rank 1 of 2.*contains NaN or inf", bad.error)
        if rank:
            engine.runner.model.compute_logits = lambda hidden: (_ for _ in ()).throw(ValueError("a bit fell over"))
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                engine.step()
            said.append(str(caught.value))
        return [len(state.output_token_ids), *said]

    here, there = on_threads(2, body)
    assert here[0] == there[0] > 1
    assert there[1] == "a bit fell over"
    assert "rank 1 failed inside of a step (ValueError: a bit fell over)" in there[2]
    assert "rank 0 failed inside of a step" in here[2]
