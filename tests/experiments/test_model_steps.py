"""Steps of Figures 1 and 10: right or not timed, a decode step that is begun again follows, what is warmed up."""

import pytest
import torch
from fakes import measured
from tiny import TINY

from experiments.benches import model_steps
from experiments.benches.model_steps import Invocation, check_decode, random_llama, spans
from experiments.fig01_batching import EXPERIMENT as FIG01
from experiments.harness import CheckFailed
from experiments.harness.experiment import difference
from experiments.harness.schema import DType


@pytest.fixture
def invocation() -> Invocation:
    return Invocation(random_llama(TINY, "cpu"), 96)


def test_a_step_with_the_wrong_blocks_is_not_timed(invocation, monkeypatch):
    check_decode(invocation)
    right = model_steps.Span.kv_rows
    monkeypatch.setattr(model_steps.Span, "kv_rows", lambda span, size: [row // 2 for row in right(span, size)])
    with pytest.raises(CheckFailed, match="through KV blocks differs"):
        check_decode(invocation)


def test_a_step_that_keeps_an_earlier_context_is_not_timed(invocation, monkeypatch):
    """As a captured graph would whose buffers are not refilled."""
    right, first = invocation.decode_step, []

    def stale(batch_size, kv_length):
        first.append(right(batch_size, kv_length)())
        return lambda: first[0]

    monkeypatch.setattr(invocation, "decode_step", stale)
    with pytest.raises(CheckFailed, match="a decode step differs"):
        check_decode(invocation)


@pytest.mark.gpu
def test_on_a_gpu_a_decode_step_is_a_graph_that_follows_its_context():
    wide = TINY.model_copy(update=dict(hidden_size=512, intermediate_size=1024, dtype=DType.float16))
    invocation = Invocation(random_llama(wide, "cuda"), 4096)
    check_decode(invocation)
    assert invocation.decode_step(2, 30)().isfinite().all()  # whose graph the check has captured
    short = invocation.decode_step(3, 17)
    expected = short().clone()
    assert invocation.decode_step(3, 900) is short
    assert difference(short(), expected) > 1e-2
    invocation.decode_step(3, 17)
    assert torch.equal(short(), expected)
    launched = invocation.forward(*invocation.begin(spans(3, 1, 17)))
    assert difference(launched, expected) < 2e-2


def test_one_short_request_leaves_room_for_the_check(tmp_path):
    words = ("scale=smoke", "figure.batch_sizes=[1]", "figure.seq_lens=[8]", "figure.prefill_seq_lens=[8]")
    assert measured(tmp_path, FIG01, *words)[1]
