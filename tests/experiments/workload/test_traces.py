"""Mooncake's format, and what a cache finds in it."""

import json

import pytest

from experiments.simulator.prefix_hits import hit_rate
from experiments.workload.traces import TracedPrompt, read_mooncake

PROMPTS = [TracedPrompt(0.0, ids) for ids in ((1, 2), (1, 2, 3), (7, 8), (1, 2, 3, 4), (7, 8, 9))]


def test_full_blocks_are_read_with_their_second(tmp_path):
    lines = [{"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [4, 5, 6]}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_mooncake(tmp_path / "trace.jsonl") == [TracedPrompt(1.5, (4, 5))]


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 1}', '{"timestamp": 1, "input_length": 1}'])
def test_a_line_of_another_format_is_named(tmp_path, line):
    good = '{"timestamp": 0, "input_length": 0, "hash_ids": []}'
    (tmp_path / "trace.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="line 2 of"):
        read_mooncake(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    ("adapters", "capacity", "activated", "hits"),
    [
        pytest.param([0] * 5, 100, False, 2 + 3 + 2, id="one-adapter"),
        pytest.param([0, 1, 0, 1, 1], 100, False, 3, id="plain-adapters-share-nothing"),
        pytest.param([0, 1, 0, 1, 1], 100, True, 7, id="activated-adapters-share-all"),
        pytest.param([0] * 5, 3, False, 2 + 2, id="the-least-recent-is-evicted"),
        pytest.param([0] * 5, 1, False, 0, id="prompts-beyond-the-cache"),
    ],
)
def test_hits(adapters, capacity, activated, hits):
    total = sum(len(prompt.blocks) for prompt in PROMPTS)
    assert hit_rate(PROMPTS, adapters, capacity, activated=activated) == pytest.approx(hits / total)
