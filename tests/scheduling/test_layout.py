"""The layout of a step: rows, positions, cache rows, segments."""

import pytest

from punica.adapters import LoRARequest
from punica.scheduling import BlockManager, Request, RequestState, RequestStatus, StepPlan, lay_out

SLOTS = {10: 2, 20: 0, 30: 1}


def running(name: str, prompt: list[int], output: list[int], adapter_id: int, blocks: BlockManager) -> RequestState:
    adapter = LoRARequest(f"adapter-{adapter_id}", adapter_id, "unused") if adapter_id else None
    request = RequestState(Request(name, prompt, 9, adapter))
    request.status = RequestStatus.RUNNING
    for token in output:
        request.append(token)
    assert blocks.reserve(name, request.num_tokens)
    return request


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(100, 4)


@pytest.fixture
def plan(blocks) -> StepPlan:
    prefill = running("p", [51, 52, 53, 54, 55], [], 30, blocks)
    decodes = [
        running("a", [1, 2], [3], 10, blocks),
        running("b", [4, 5, 6, 7], [8], 0, blocks),
        running("c", [9], [11], 20, blocks),
        running("d", [12], [13, 14], 10, blocks),
    ]
    return StepPlan({prefill: (0, 5)}, tuple(decodes), (), ())


def test_prompt_first_then_decode_rows_by_slot(plan, blocks) -> None:
    layout = lay_out(plan, blocks, SLOTS)
    assert [request.request_id for request in layout.requests] == ["p", "b", "c", "a", "d"]
    assert layout.token_ids == [51, 52, 53, 54, 55, 8, 11, 3, 14]
    assert layout.positions == [0, 1, 2, 3, 4, 4, 1, 2, 2]
    assert layout.sampled_slots == (1, -1, 0, 2, 2)
    assert layout.segments == ((1, 5), (-1, 1), (0, 1), (2, 2))
    assert [span.start + span.length - 1 for span in layout.spans] == [4, 5, 6, 7, 8]
    assert layout.num_prefill_rows == 5


def test_a_prompt_and_a_decode_row_of_one_adapter_are_one_segment(plan, blocks) -> None:
    layout = lay_out(StepPlan(plan.prefills, plan.decodes[1:3], (), ()), blocks, {30: 0, 20: 0})
    assert layout.segments == ((0, 5), (-1, 1), (0, 1))
    layout = lay_out(StepPlan(plan.prefills, plan.decodes[2:3], (), ()), blocks, {30: 0, 20: 0})
    assert layout.segments == ((0, 6),)


def test_padding_is_between_prompts_and_decode_rows_and_of_no_request(plan, blocks) -> None:
    layout = lay_out(plan, blocks, SLOTS)
    padded = layout.padded(8)
    assert padded.token_ids == [51, 52, 53, 54, 55, 0, 0, 0, 8, 11, 3, 14]
    assert padded.positions == [0, 1, 2, 3, 4, 0, 0, 0, 4, 1, 2, 2]
    assert padded.kv_rows == [*layout.kv_rows[:5], -1, -1, -1, *layout.kv_rows[5:]]
    assert padded.segments == ((1, 5), (-1, 4), (0, 1), (2, 2))
    assert [span.start + span.length - 1 for span in padded.spans] == [4, 8, 9, 10, 11]
    assert (padded.requests, padded.sampled_slots, padded.num_prefill_rows) == (
        layout.requests, layout.sampled_slots, 8,
    )  # fmt: skip
    assert [span.block_table for span in padded.spans] == [span.block_table for span in layout.spans]


def test_without_lora_no_row_has_a_slot(plan, blocks) -> None:
    layout = lay_out(plan, blocks, None)
    assert [request.request_id for request in layout.requests] == list("pabcd")  # in order of admission
    assert layout.segments == ((-1, 9),)
    with pytest.raises(KeyError):
        lay_out(plan, blocks, {10: 0, 20: 1})  # one without slot is not served as the backbone


@pytest.mark.parametrize("output", [[7], [7, 8, 9]], ids=["one token", "three tokens"])
def test_idle_row_repeats_its_last_cached_token(blocks, output) -> None:
    request = running("f", [1, 2, 3], output, 20, blocks)
    request.status = RequestStatus.FINISHED
    layout = lay_out(StepPlan({}, (running("a", [1, 2], [3], 20, blocks),), (request,), ()), blocks, SLOTS)
    assert [request.request_id for request in layout.requests] == ["a", "f"]
    cached = 3 + len(output) - 1
    assert layout.spans[1].kv_length == cached
    assert layout.token_ids[1] == [1, 2, 3, *output][cached - 1]
