"""The layout of a step: rows, positions, cache rows, segments."""

import pytest

from punica.adapters import LoRARequest
from punica.engine.batch import lay_out
from punica.engine.pages import PagePool
from punica.engine.request import Request, RequestStatus
from punica.engine.scheduler import StepPlan

SLOTS = {10: 2, 20: 0, 30: 1}


def running(name: str, prompt: list[int], output: list[int], adapter_id: int, pool: PagePool) -> Request:
    adapter = LoRARequest(f"adapter-{adapter_id}", adapter_id, "unused") if adapter_id else None
    request = Request(name, prompt, 9, adapter)
    request.status = RequestStatus.RUNNING
    for token in output:
        request.append(token)
    assert pool.reserve(name, request.num_tokens)
    return request


@pytest.fixture
def pool() -> PagePool:
    return PagePool(100, 4)


@pytest.fixture
def plan(pool) -> StepPlan:
    prefill = running("p", [51, 52, 53, 54, 55], [], 30, pool)
    decodes = [
        running("a", [1, 2], [3], 10, pool),
        running("b", [4, 5, 6, 7], [8], 0, pool),
        running("c", [9], [11], 20, pool),
        running("d", [12], [13, 14], 10, pool),
    ]
    return StepPlan((prefill,), tuple(decodes), (), ())


def test_prompt_first_then_decode_rows_by_slot(plan, pool) -> None:
    batch = lay_out(plan, pool, SLOTS)
    assert [request.request_id for request in batch.requests] == ["p", "b", "c", "a", "d"]
    assert batch.token_ids == [51, 52, 53, 54, 55, 8, 11, 3, 14]
    assert batch.positions == [0, 1, 2, 3, 4, 4, 1, 2, 2]
    assert batch.adapter_ids == (30, 0, 20, 10, 10)
    assert batch.index_mapping == [30] * 5 + [0, 20, 10, 10]
    assert batch.sampled_rows == [4, 5, 6, 7, 8]
    assert batch.num_prefill_rows == 5
    assert batch.num_segments == 3  # 30, 20, and 10 once for its two rows


def test_rows_of_the_cache_follow_the_page_tables(plan, pool) -> None:
    batch = lay_out(plan, pool, SLOTS)
    for span in batch.spans:
        rows = batch.kv_rows[span.start : span.start + span.length]
        positions = batch.positions[span.start : span.start + span.length]
        assert rows == [span.pages[position // 4] * 4 + position % 4 for position in positions]
        assert span.kv_length == positions[-1] + 1
    assert len(set(batch.kv_rows)) == len(batch.kv_rows)


def test_decode_only_and_prefill_only(plan, pool) -> None:
    decode = lay_out(StepPlan((), plan.decodes, (), ()), pool, SLOTS)
    assert decode.num_prefill_rows == 0
    assert decode.sampled_rows == [0, 1, 2, 3]
    prefill = lay_out(StepPlan(plan.prefills, (), (), ()), pool, SLOTS)
    assert prefill.token_ids == [51, 52, 53, 54, 55]
    assert prefill.sampled_rows == [4]


def test_preempted_request_returns_with_its_output_as_prompt(pool) -> None:
    request = running("r", [1, 2, 3], [4, 5], 20, pool)
    batch = lay_out(StepPlan((request,), (), (), ()), pool, SLOTS)
    assert batch.token_ids == [1, 2, 3, 4, 5]
    assert batch.positions == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("output", [[7], [7, 8, 9]], ids=["one token", "three tokens"])
def test_idle_row_repeats_its_last_cached_token(pool, output) -> None:
    request = running("f", [1, 2, 3], output, 20, pool)
    batch = lay_out(StepPlan((), (running("a", [1, 2], [3], 20, pool),), (request,), ()), pool, SLOTS)
    assert batch.num_idle == 1
    cached = 3 + len(output) - 1
    assert batch.spans[1].kv_length == cached
    assert batch.token_ids[1] == [1, 2, 3, *output][cached - 1]


def test_last_admitted_rule_gives_every_row_one_adapter(plan, pool) -> None:
    batch = lay_out(plan, pool, SLOTS, "last_admitted")
    assert set(batch.adapter_ids) == {30}
    assert batch.num_segments == 1
    decode = lay_out(StepPlan((), plan.decodes, (), ()), pool, SLOTS, "last_admitted")
    assert set(decode.adapter_ids) == {10}  # d was admitted last
