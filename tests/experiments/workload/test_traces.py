"""Formats of traces, adapters by rule, and what a cache finds in Mooncake's."""

import json

import numpy as np
import pytest

from experiments.simulator.prefix_hits import hit_rate
from experiments.workload import popularity
from experiments.workload.traces import FORMATS, Trace, TracedRequest, read_trace

PROMPTS = [TracedRequest(0.0, 1, 1, blocks=ids) for ids in ((1, 2), (1, 2, 3), (7, 8), (1, 2, 3, 4), (7, 8, 9))]
MOONCAKE = {"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [4, 5, 6]}
LORA, AZURE = "arrival_s,client,prompt_tokens,output_tokens", "TIMESTAMP,ContextTokens,GeneratedTokens\r"
GPT = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
FILES = {
    "lora": (LORA, "3.5,a,7,2", TracedRequest(3.5, 7, 2, "a")),
    "azure": (AZURE, "1970-01-02 00:00:00.2500000,374,44\r", TracedRequest(86400.25, 374, 44)),
    "burstgpt": (GPT, "5,s1,1.5,GPT-4,472,18,490,Chat", TracedRequest(5.0, 472, 18, "GPT-4", "s1")),
    "mooncake": (None, json.dumps(MOONCAKE), TracedRequest(1.5, 1100, 3, blocks=(4, 5))),
}


def written(tmp_path, *lines):
    path = tmp_path / "trace"
    path.write_text("".join(f"{line}\n" for line in lines if line is not None), newline="")
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read(tmp_path, form):
    head, line, expected = FILES[form]
    assert read_trace(written(tmp_path, head, line, line), form) == [expected] * 2
    assert read_trace(written(tmp_path, head, line, line), form, most=1) == [expected]


def test_blank_lines_are_left_out_and_times_may_name_their_zone(tmp_path):
    assert len(read_trace(written(tmp_path, json.dumps(MOONCAKE), "", " "), "mooncake")) == 1
    day = "1970-01-02 01:00:00"
    path = written(tmp_path, AZURE[:-1], f"{day}+02:00,3,4", "", f"{day}Z,3,4", f"{day},3,4")
    assert [request.arrival for request in read_trace(path, "azure")] == [82800.0, 90000.0, 90000.0]


def test_files_of_burstgpt_without_sessions_and_with_failures(tmp_path):
    lines = "Timestamp,Model,Request tokens,Response tokens", "9,ChatGPT,5,0", "8,ChatGPT,6,2", "7,GPT-4,7,1"
    path = written(tmp_path, *lines)
    assert [request.prompt for request in read_trace(path, "burstgpt")] == [7, 6]  # by arrival
    with pytest.raises(ValueError, match=r"no session .* workload.adapter=client"):
        _ = Trace(path, "burstgpt", "session").adapters


WRONG = {
    "lora": {"arrival_s": ["nan", "", "-1e308"], "client": [""], "prompt_tokens": ["0", "x", "1.5"],
             "output_tokens": ["-1", ""]},
    "azure": {"TIMESTAMP": ["yesterday", "inf"], "ContextTokens": ["", "9" * 30], "GeneratedTokens": ["many"]},
    "burstgpt": {"Timestamp": ["?"], "Model": [""], "Request tokens": ["0"], "Response tokens": ["1e3"]},
    "mooncake": {"timestamp": [None], "input_length": [1.5, True], "output_length": [-1, 2.0],
                 "hash_ids": ["12", [1.5], None, [True], ["5"], [5.0]]},
}  # fmt: skip
CASES = [(form, column, value) for form, of in WRONG.items() for column, values in of.items() for value in values]


@pytest.mark.parametrize(("form", "column", "value"), CASES)
def test_a_malformed_line_is_named_by_file_line_and_column(tmp_path, form, column, value):
    head, line, _ = FILES[form]
    wrong = json.dumps({**MOONCAKE, column: value})
    if head:
        names, fields = (text.strip().split(",") for text in (head, line))
        wrong = ",".join((dict(zip(names, fields, strict=True)) | {column: value}).values())
    with pytest.raises(ValueError, match=rf"trace, line {3 if head else 2}, column {column}: .*workload.format"):
        read_trace(written(tmp_path, head, line, wrong), form)


REFUSED = {
    "{": "timestamp: None", "[1]": "timestamp: None", "[" * 100_000: "timestamp: None", "": "has no request",
    LORA: "no column TIMESTAMP", '"' + "x" * 200_000: "no CSV file",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=["json", "list", "deep", "empty", "columns", "field"])
def test_a_file_of_another_format_is_refused(tmp_path, text):
    form = "azure" if text.startswith(("a", '"')) else "mooncake"
    with pytest.raises(ValueError, match=f"{REFUSED[text]}.* workload.format"):
        read_trace(written(tmp_path, text or None), form)


def test_a_session_is_the_first_block_behind_those_of_all(tmp_path):
    prompts = [(0, 1, 2), (0, 5), (0, 1, 3), (0,), (0,), (0, 5, 6)]
    lines = [json.dumps({**MOONCAKE, "input_length": 512 * len(ids), "hash_ids": ids}) for ids in prompts]
    assert Trace(path := written(tmp_path, *lines), "mooncake", "session").adapters.tolist() == [0, 1, 0, 2, 3, 1]
    assert Trace(path, "mooncake", "Zipf").adapters.tolist() == popularity("Zipf").requests(6).tolist()


def test_bursts_keep_their_shape_at_another_rate(tmp_path):
    lines = [f"{at},{client},8,2" for at, client in ((10, "b"), (10, "a"), (10, "b"), (18, "c"))]
    trace = Trace(written(tmp_path, LORA, *lines), "lora", "client")
    assert trace.adapters.tolist() == [0, 1, 0, 2]
    assert trace.arrivals(2.0, 3.9) == pytest.approx([0, 0, 0, 1.5, 2, 2, 2, 3.5])  # four in two seconds, repeated
    assert len(trace.arrivals(2.0, 1000.0)) == 2000


def test_lengths_fit_in_proportion_and_the_longest_are_cut(tmp_path):
    lines = [f"{at},a,80,20" for at in range(398)] + ["398,a,9000,20", "399,a,1,1"]
    trace = Trace(written(tmp_path, LORA, *lines), "lora", "client")
    short, whole = trace.lengths(50), trace.lengths(200)
    assert (short.prompt[0], short.output[0], short.prompt[398], short.output[398]) == (40, 10, 48, 2)
    assert (whole.prompt[0], whole.output[0], whole.prompt[398], whole.output[399]) == (80, 20, 198, 1)
    assert np.all(short.prompt + short.output <= 50)


HITS = {
    "one adapter": ([0] * 5, 100, False, 2 + 3 + 2),
    "plain adapters share nothing": ([0, 1, 0, 1, 1], 100, False, 3),
    "activated adapters share all": ([0, 1, 0, 1, 1], 100, True, 7),
    "the least recent is evicted": ([0] * 5, 3, False, 2 + 2),
    "prompts beyond the cache": ([0] * 5, 1, False, 0),
}


@pytest.mark.parametrize(("adapters", "capacity", "activated", "hits"), HITS.values(), ids=HITS)
def test_hits(adapters, capacity, activated, hits):
    total = sum(len(prompt.blocks) for prompt in PROMPTS)
    assert hit_rate(PROMPTS, adapters, capacity, activated=activated) == pytest.approx(hits / total)
