"""Cost models: a fit recovers the coefficients behind the times, and its residuals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.cluster.costs import model_bytes
from experiments.simulator import StepCost, TimedStep, fit_step_cost, residuals
from punica.cluster import StepWork

TRUE = StepCost("true", base=0.011, row=2e-5, kv=4e-7, prefill=1e-4, rank=4e-6)
LLAMA_7B = model_bytes("llama2-7b")


def timed(cost: StepCost, noise: float = 0.0) -> list[TimedStep]:
    stream = np.random.default_rng(0)
    works = [
        StepWork(decodes, decodes * context, prefill, 16 * adapters)
        for decodes in (1, 5, 32)
        for context in (128, 2048)
        for prefill in (0, 24, 500)
        for adapters in (1, 5)
    ]
    return [TimedStep(work, cost.seconds(work) * math.exp(noise * stream.standard_normal())) for work in works]


@pytest.mark.parametrize(
    ("cost", "known", "joins"),
    [(TRUE, {}, False), (replace(TRUE, join=3e-3), {}, True), (TRUE, {"prefill": 1e-4, "base": 0.011}, False)],
    ids=["all", "a constant of steps with a prompt", "around known ones"],
)
def test_a_fit_finds_the_coefficients_that_made_the_times(cost, known, joins):
    steps = timed(cost)
    found = fit_step_cost("fitted", steps, known, joins)
    for key in ("base", "row", "kv", "prefill", "rank", "join"):
        assert getattr(found, key) == pytest.approx(getattr(cost, key), rel=1e-6)
    assert residuals(found, steps).largest < 1e-9
    assert {key: getattr(found, key) for key in known} == known


def test_residuals_tell_the_noise_and_are_never_better_on_steps_that_were_not_fitted():
    steps = timed(TRUE, noise=0.05)
    found = fit_step_cost("fitted", steps)
    assert 0.03 < residuals(found, steps).rms < 0.06
    assert residuals(found, steps).rms <= residuals(TRUE, steps).rms
    assert residuals(found, timed(TRUE)).largest < 0.05
    uneven = residuals(TRUE, [TimedStep(StepWork(), TRUE.base * factor) for factor in (1.0, 0.8, 2.0)])
    assert uneven.largest == pytest.approx(0.5)


def test_a_step_is_the_sum_of_its_parts_and_steps_in_a_row_take_what_each_takes_to_the_bit():
    assert TRUE.seconds(StepWork(3, 1000, 24, 32)) == pytest.approx(0.011 + 6e-5 + 4e-4 + 2.4e-3 + 1.28e-4)
    cost = StepCost("odd", base=0.0171, row=3e-5, kv=4.1e-7, prefill=1.03e-4, rank=4.3e-6, join=1e-3)
    found = cost.decode_seconds(7, 1000, 48, steps=50)
    assert found == [cost.seconds(StepWork(7, 1000 + 7 * step, 0, 48)) for step in range(50)]


def test_no_coefficient_is_negative():
    falling = [TimedStep(StepWork(n, n * 100, n, n), 0.03 - n * 1e-4) for n in range(1, 30)]
    found = fit_step_cost("falling", falling)
    assert min(found.base, found.row, found.kv, found.prefill, found.rank) >= 0


def test_bytes_and_pages_of_llama_7b():
    assert LLAMA_7B.weights + LLAMA_7B.head == 6_738_149_376  # the published 6.74 billion parameters, without norms
    assert LLAMA_7B.kv * 2 * 16 == 8_388_608  # the released code's page of 8.39 MB
    assert LLAMA_7B.lora * 16 * 2 == 79_953_920  # the paper's adapter of rank 16
    pages = LLAMA_7B.pages(32e9, 16, adapters=32, rank=16)
    taken = 2 * (LLAMA_7B.weights + LLAMA_7B.head) + 32 * 79_953_920
    assert pages * 8_388_608 <= 32e9 - taken < (pages + 1) * 8_388_608


def test_a_slower_gpu_and_slower_memory_cost_the_factor_and_the_bytes_that_are_read():
    slow, moved = TRUE.slowed(1.5, "slow"), TRUE.at_bandwidth(LLAMA_7B, before=2e12, after=1e12, name="slower")
    for work in (StepWork(1, 100), StepWork(32, 30_000, 0, 512), StepWork(3, 0, 70, 16)):
        assert slow.seconds(work) == pytest.approx(1.5 * TRUE.seconds(work))
        elements = LLAMA_7B.weights + work.kv_tokens * LLAMA_7B.kv + work.adapter_ranks * LLAMA_7B.lora
        assert moved.seconds(work) - TRUE.seconds(work) == pytest.approx(2 * elements * (1e-12 - 5e-13))
