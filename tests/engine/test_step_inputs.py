"""Inputs of a step: values of the layout, at constant addresses."""

import torch

from punica.engine import Request
from punica.engine.runner import StepInputs, StepRows
from punica.scheduling import Span, StepLayout


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
        engine.add_request(Request(str(i), [1, 2, 3], 4, backbone.adapters.get(i)))
    while engine.has_unfinished():
        engine.step()
    assert len(seen) == 1
