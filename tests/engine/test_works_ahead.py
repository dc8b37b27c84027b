"""Laying out and sending the next step while the device is at this one: what was foreseen wrongly costs no token."""

import pytest

from punica.engine import Request
from punica.engine.runner import ModelRunner


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(ModelRunner, "works_ahead", True)


@pytest.fixture
def foreseen(monkeypatch) -> list:
    """The steps that were sent ahead, and whether each was the next one."""
    steps, ahead, run = [], ModelRunner.stage_ahead, ModelRunner.run

    def noted(runner, layout, meanwhile):
        if steps and steps[-1][1] is None:
            steps[-1][1] = steps[-1][0] is layout.spans
        return run(runner, layout, meanwhile)

    monkeypatch.setattr(ModelRunner, "stage_ahead", lambda *of: steps.append([of[1].spans, None]) or ahead(*of))
    monkeypatch.setattr(ModelRunner, "run", noted)
    return steps


def test_tokens_of_requests_that_join_leave_and_go_on(backbone, mixed_wishes, serve, foreseen) -> None:
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in mixed_wishes]
    assert serve(backbone.engine(max_batch_size=4), mixed_wishes) == expected
    assert sum(bool(came_true) for _, came_true in foreseen) > 5


def test_static_batches_with_idle_members(backbone, mixed_wishes, serve, foreseen) -> None:
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in mixed_wishes]
    engine, idle = backbone.engine("static_mixed", max_batch_size=4), []
    step = engine.step

    def counted():
        output = step()
        idle.append(output.statistics.num_idle)
        return output

    engine.step = counted
    assert serve(engine, mixed_wishes) == expected
    assert sum(bool(came_true) for _, came_true in foreseen) > len(idle) // 2
    assert sum(number > 0 for number in idle) > len(idle) // 2


def test_cancelled_preempted_and_new_requests(backbone, foreseen) -> None:
    engine = backbone.engine(block_size=4, num_blocks=12)
    for i in range(6):
        engine.add_request(Request(f"r{i}", [i + 1] * 3, 20, backbone.adapters.get(i % 4)))
    served, step = {}, 0
    while engine.has_unfinished():
        if step == 9:
            engine.abort_request("r2")
        if step == 11:
            engine.add_request(Request("late", [9, 9], 20, backbone.adapters[5]))
        served |= {result.request_id: result.token_ids for result in engine.step().finished}
        step += 1
    assert served.pop("late") == backbone.generate_merged((9, 9), 5, 20)
    for name, tokens in served.items():
        i = int(name[1:])
        assert tokens == backbone.generate_merged((i + 1,) * 3, i % 4, 20)
    assert sorted(served) == ["r0", "r1", "r3", "r4", "r5"]
    assert not engine.blocks.owners()
    assert {came_true for _, came_true in foreseen} >= {True, False}
