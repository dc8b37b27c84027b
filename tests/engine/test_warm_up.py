"""The warm-up of an engine, which makes at once what its steps will need; their inputs, at constant addresses."""

import pytest
import torch

from punica.engine import Engine, EngineConfig, SamplingParams
from punica.engine.runner import ModelRunner, StepInputs, StepRows
from punica.scheduling import Span, StepLayout
from tests.engine.test_engine import state
from tests.world import finish, tokens_of


def build(backbone, warm_up: bool | None) -> Engine:
    config = EngineConfig(max_batch_size=3, max_model_len=32, seed=5)
    return Engine(backbone.model(), config.lora_config(16, max_loras=3), config, warm_up=warm_up)


@pytest.fixture
def forwards(monkeypatch) -> list[tuple[int, bool]]:
    """Rows of every forward, and whether all of them are sampled."""
    seen, forward = [], ModelRunner._forward

    def noted(runner, rows, *, samples_all):
        seen.append((len(rows.token_ids), samples_all))
        return forward(runner, rows, samples_all=samples_all)

    monkeypatch.setattr(ModelRunner, "_forward", noted)
    return seen


def test_steps_of_all_sizes_run_and_leave_the_engine_as_new(backbone, forwards, capsys) -> None:
    cold, warm = build(backbone, None), build(backbone, True)
    shapes = warm.runner.shapes.up_to(35, vocabulary=False)
    assert forwards == [(sum(shape[:2]), not shape.prompt_rows) for shape in shapes]
    assert {(3 + 1, True), (64 + 4, False), (64, False)} <= set(forwards)
    assert (cold.warm_up_s, warm.warm_up_s > 0) == (0.0, True)
    assert capsys.readouterr() == ("", "")
    assert state(warm) == state(cold)
    adapters = [backbone.adapters.get(i) for i in range(5)]
    params = [SamplingParams(6, temperature=0.9) for _ in adapters]  # seeds are drawn by the engine
    prompts = [[3 + i, 1, 4] for i in range(5)]
    assert tokens_of(warm.generate(prompts, adapters, params)) == tokens_of(cold.generate(prompts, adapters, params))
    expected = [backbone.generate_merged(prompt, i, 6) for i, prompt in enumerate(prompts)]
    assert tokens_of(warm.generate(prompts, adapters, 6)) == expected


def test_longest_prompts_of_a_warm_up(backbone, forwards, monkeypatch) -> None:
    monkeypatch.setattr("punica.engine.engine.WARM_UP_TOKENS", 1)
    assert max(shape.prompt_rows for shape in build(backbone, True).runner.shapes.up_to(1, vocabulary=False)) == 32
    assert max(rows for rows, _ in forwards) == 32 + 4
    monkeypatch.setattr("punica.engine.engine.WARM_UP_TOKENS", 10_000)
    forwards.clear()
    build(backbone, True)
    assert max(rows for rows, _ in forwards) == 64 + 4, "no step is longer"


def test_engines_of_a_folder_pass_it_on(backbone, forwards) -> None:
    sizes = {"device": "cpu", "max_model_len": 32, "max_batch_size": 2}
    assert Engine.from_pretrained(backbone.folder, **sizes).warm_up_s == 0.0
    assert not forwards
    assert Engine.from_pretrained(backbone.folder, backbone.adapters[1], warm_up=True, **sizes).warm_up_s > 0.0
    assert forwards


@pytest.mark.gpu
def test_on_a_gpu_the_first_requests_capture_nothing(backbone, mixed_wishes, serve) -> None:
    config = EngineConfig(max_batch_size=4, max_model_len=64)
    engine = Engine(backbone.model("cuda", torch.float16), config.lora_config(16), config)
    graphs = engine.runner.graphs
    captured = graphs.statistics.graphs
    assert captured == len(engine.runner.shapes.up_to(config.max_num_batched_tokens, vocabulary=False))
    serve(engine, mixed_wishes)
    assert graphs.statistics.graphs == captured
    assert engine.warm_up_s > graphs.statistics.seconds > 0


def test_lora_on_the_head_alone(backbone) -> None:
    config = EngineConfig(max_batch_size=2, max_model_len=32)
    lora = config.lora_config(16, max_loras=2, target_modules=["lm_head"])
    engine = Engine(backbone.model(), lora, config, warm_up=True)
    assert tokens_of(engine.generate([[3, 1]], None, 4)) == [backbone.generate_merged((3, 1), 0, 4)]


# --- inputs of steps -------------------------------------------------------------------------------------------------


def layout(token_ids: list[int], lengths: list[int]) -> StepLayout:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    spans = tuple(Span(start, length, length, (0,)) for start, length in zip(starts, lengths, strict=True))
    positions = [p for length in lengths for p in range(length)]
    return StepLayout((), spans, (-1,) * len(spans), token_ids, positions, [16 + p for p in positions], len(token_ids))


def test_views_hold_the_layout_and_stay_where_they_are() -> None:
    inputs = StepInputs(8, torch.device("cpu"))
    first = inputs.fill(layout([5, 6, 7, 8, 9, 3, 2, 1], [5, 1, 2]))
    assert StepRows(*(row.tolist() for row in first)) == (
        [5, 6, 7, 8, 9, 3, 2, 1],
        [0, 1, 2, 3, 4, 0, 0, 1],
        [16, 17, 18, 19, 20, 16, 16, 17],
        [4, 5, 7],
    )
    second = inputs.fill(layout([4], [1]))
    assert StepRows(*(row.tolist() for row in second)) == ([4], [0], [16], [0])
    for before, after in zip(first, second, strict=True):
        assert (after.data_ptr(), after.dtype, after.is_contiguous()) == (before.data_ptr(), torch.int64, True)


def test_every_step_of_an_engine_reads_the_same_memory(backbone, monkeypatch) -> None:
    engine = backbone.engine()
    seen, forward = set(), engine.runner.model.forward

    def recording(token_ids, positions, attention):
        seen.add((token_ids.data_ptr(), positions.data_ptr(), attention._kv_rows.data_ptr()))
        return forward(token_ids, positions, attention)

    monkeypatch.setattr(engine.runner.model, "forward", recording)
    for i in range(3):
        backbone.ask(engine, str(i), [1, 2, 3], i)
    finish(engine)
    assert len(seen) == 1
