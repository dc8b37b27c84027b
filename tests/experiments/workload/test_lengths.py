"""Request lengths, against the exact totals of the released generator and the count that the paper states."""

import csv
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from experiments.workload import released_lengths, scaled_lengths, stated_lengths

REFERENCE = Path(__file__).parents[3] / "paper_results" / "workload_reference.csv"
QUANTITIES = {
    "prompt_tokens": lambda r: r.prompt.sum(),
    "new_tokens": lambda r: r.new_tokens,
    "total_tokens": lambda r: r.total_tokens,
    "mean_prompt_len": lambda r: r.prompt.mean(),
    "median_prompt_len": lambda r: np.median(r.prompt),
    "max_prompt_len": lambda r: r.prompt.max(),
    "mean_output_len": lambda r: r.output.mean(),
    "min_output_len": lambda r: r.output.min(),
    "max_total_len": lambda r: (r.prompt + r.output).max(),
}
with REFERENCE.open(newline="") as _stream:
    LINES = [line for line in csv.DictReader(_stream) if line["item"] == "request generator"]


@pytest.mark.parametrize("line", LINES, ids=[f"{line['num_requests']}-{line['quantity']}" for line in LINES])
def test_released_generator_equals_the_reference(line):
    value = QUANTITIES[line["quantity"]](released_lengths(int(line["num_requests"]), int(line["maxlen"])))
    decimals = len(line["value"].partition(".")[2])
    assert f"{value:.{decimals}f}" == line["value"]


def test_reference_covers_every_quantity_at_three_sizes():
    assert len(LINES) == 3 * len(QUANTITIES)


@pytest.mark.parametrize("maxlen", [4, 64, 257, 2048])
def test_released_law(maxlen):
    """The prompt law is scipy's lognorm(0.8, -1, 18), clipped; nothing exceeds maxlen."""
    lengths = released_lengths(3000, maxlen)
    assert (lengths.prompt + lengths.output).max() <= max(maxlen, 4)
    assert lengths.prompt.min() >= 1
    assert lengths.output.min() >= 1
    expected = np.clip(scipy.stats.lognorm(0.8, -1, 18).ppf([0.25, 0.5, 0.75]), 1, maxlen - 2)
    assert np.quantile(lengths.prompt, [0.25, 0.5, 0.75]) == pytest.approx(expected, rel=0.07, abs=1.2)


def test_longer_set_begins_with_the_shorter_one():
    assert released_lengths(100).output.tolist() == released_lengths(1000).output[:100].tolist()


@pytest.mark.parametrize("maxlen", [16, 64, 128, 2048])
def test_scaled_keeps_the_mix(maxlen):
    full, small = released_lengths(1000), scaled_lengths(1000, maxlen)
    assert (small.prompt + small.output).max() <= maxlen
    assert small.prompt.min() >= 1
    assert small.output.min() >= 2
    assert small.new_tokens == pytest.approx(full.new_tokens * maxlen / 2048, rel=0.08)
    assert np.corrcoef(full.output, small.output)[0, 1] > 0.99
    if maxlen == 2048:
        assert small.output.tolist() == full.output.tolist()
        assert small.prompt.tolist() == full.prompt.tolist()


@pytest.mark.parametrize("n", [1, 37, 1000])
def test_stated_count_is_exact(n):
    lengths = stated_lengths(n)
    assert lengths.new_tokens == 101 * n
    assert lengths.output.min() >= 1
    assert lengths.prompt.tolist() == released_lengths(n).prompt.tolist()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: released_lengths(0), ValueError, "num_requests is 0, must be >= 1"),
        (lambda: released_lengths(2.0), TypeError, "num_requests must be an int, got float"),
        (lambda: released_lengths(5, 3), ValueError, "maxlen is 3, must be >= 4"),
        (lambda: scaled_lengths(5, "64"), TypeError, "maxlen must be an int"),
    ],
    ids=["no requests", "float", "short", "text"],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
