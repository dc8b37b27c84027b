"""Formats of traces, adapters by rule, and what a cache finds in Mooncake's."""

import json

import numpy as np
import pytest

from experiments.simulator.prefix_hits import hit_rate
from experiments.workload import popularity
from experiments.workload.traces import FORMATS, Trace, TracedRequest, read_trace

PROMPTS = [TracedRequest(0.0, 1, 1, blocks=ids) for ids in ((1, 2), (1, 2, 3), (7, 8), (1, 2, 3, 4), (7, 8, 9))]
MOONCAKE = {"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [4, 5, 6]}
FILES = {
    "lora": ("arrival_s,client,prompt_tokens,output_tokens", "3.5,a,7,2", TracedRequest(3.5, 7, 2, "a")),
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r", "1970-01-02 00:00:00.2500000,374,44\r",
        TracedRequest(86400.25, 374, 44),
    ),
    "burstgpt": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,s1,1.5,GPT-4,472,18,490,Conversation log", TracedRequest(5.0, 472, 18, "GPT-4", "s1"),
    ),
    "mooncake": (None, json.dumps(MOONCAKE), TracedRequest(1.5, 1100, 3, blocks=(4, 5))),
}  # fmt: skip


def written(tmp_path, *lines):
    path = tmp_path / "trace"
    path.write_text("".join(f"{line}\n" for line in lines if line is not None), newline="")
    return path


def traced(tmp_path, prompts, form="mooncake", rule="session"):
    lines = [json.dumps({**MOONCAKE, "input_length": 512 * len(ids), "hash_ids": list(ids)}) for ids in prompts]
    return Trace(written(tmp_path, *lines), form, rule)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read(tmp_path, form):
    head, line, expected = FILES[form]
    assert read_trace(written(tmp_path, head, line, line), form) == [expected] * 2
    assert read_trace(written(tmp_path, head, line, line), form, most=1) == [expected]


def test_files_of_burstgpt_without_sessions_and_with_failures(tmp_path):
    path = written(
        tmp_path, "Timestamp,Model,Request tokens,Response tokens", "9,ChatGPT,5,0", "8,ChatGPT,6,2", "7,GPT-4,7,1"
    )
    assert [request.prompt for request in read_trace(path, "burstgpt")] == [7, 6]  # by arrival
    with pytest.raises(ValueError, match=r"no session .* workload.adapter=client"):
        _ = Trace(path, "burstgpt", "session").adapters


WRONG = {
    "lora": {"arrival_s": ["nan", ""], "client": [""], "prompt_tokens": ["0", "x", "1.5"], "output_tokens": ["-1", ""]},
    "azure": {"TIMESTAMP": ["yesterday", "inf"], "ContextTokens": ["", "9" * 30], "GeneratedTokens": ["many"]},
    "burstgpt": {"Timestamp": ["?"], "Model": [""], "Request tokens": ["0"], "Response tokens": ["1e3"]},
    "mooncake": {"timestamp": [None], "input_length": [1.5], "output_length": [-1], "hash_ids": ["12", [1.5], None]},
}


CASES = [(form, *case) for form, columns in WRONG.items() for case in columns.items()]


@pytest.mark.parametrize(("form", "column", "value"), [(*case, value) for *case, values in CASES for value in values])
def test_a_malformed_line_is_named_by_file_line_and_column(tmp_path, form, column, value):
    head, line, _ = FILES[form]
    if head:
        fields = dict(zip(head.strip().split(","), line.strip().split(","), strict=True)) | {column: value}
        wrong = ",".join(fields.values())
    else:
        wrong = json.dumps({**MOONCAKE, column: value})
    with pytest.raises(ValueError, match=rf"trace, line {3 if head else 2}, column {column}: .*workload.format"):
        read_trace(written(tmp_path, head, line, wrong), form)


@pytest.mark.parametrize(("form", "lines"), [("mooncake", ["{"]), ("mooncake", ["[]"]), ("azure", ["a,b", "1,2"])])
def test_a_file_of_another_format_is_refused(tmp_path, form, lines):
    with pytest.raises(ValueError, match=r"column (timestamp|TIMESTAMP): None"):
        read_trace(written(tmp_path, *lines), form)
    with pytest.raises(ValueError, match="has no request"):
        read_trace(written(tmp_path), form)


def test_a_session_is_the_first_block_behind_those_of_all(tmp_path):
    prompts = [(0, 1, 2), (0, 5), (0, 1, 3), (0,), (0,), (0, 5, 6)]
    assert traced(tmp_path, prompts).adapters.tolist() == [0, 1, 0, 2, 3, 1]
    drawn = traced(tmp_path, prompts, rule="Zipf").adapters
    assert drawn.tolist() == popularity("Zipf").requests(6).tolist()


def test_bursts_keep_their_shape_at_another_rate(tmp_path):
    head, form = FILES["lora"][0], "lora"
    lines = [f"{at},{client},8,2" for at, client in ((10, "b"), (10, "a"), (10, "b"), (18, "c"))]
    trace = Trace(written(tmp_path, head, *lines), form, "client")
    assert trace.adapters.tolist() == [0, 1, 0, 2]
    times = trace.arrivals(2.0, 3.9)  # four requests in two seconds, again and again
    assert times == pytest.approx([0, 0, 0, 1.5, 2, 2, 2, 3.5])
    assert len(trace.arrivals(2.0, 1000.0)) == 2000


def test_lengths_fit_in_proportion_and_the_longest_are_cut(tmp_path):
    lines = [f"{at},a,80,20" for at in range(398)] + ["398,a,9000,20", "399,a,1,1"]
    trace = Trace(written(tmp_path, FILES["lora"][0], *lines), "lora", "client")
    short, whole = trace.lengths(50), trace.lengths(200)
    assert (short.prompt[0], short.output[0], short.prompt[398], short.output[398]) == (40, 10, 48, 2)
    assert (whole.prompt[0], whole.output[0], whole.prompt[398], whole.output[399]) == (80, 20, 198, 1)
    assert np.all(short.prompt + short.output <= 50)


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
