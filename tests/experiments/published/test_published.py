"""Published requests and the score of answers to them: bytes, numbers by hand, and answers that cannot be."""

import json

import pytest
from omegaconf import OmegaConf

from experiments.commands.workload import Options, workload
from experiments.harness.schema import ConfigError, validated
from experiments.published.requests import Request, Stream, read_lines, write_streams
from experiments.published.score import score
from experiments.systems.stream import paper_stream

CHOICES = {"count": 40, "max_len": 64, "vocab_size": 100}


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def request(id, arrival=0.0, prompt=3, new=2):
    return {"id": id, "arrival_s": arrival, "adapter": "adapter-1", "prompt": [1] * prompt, "new_tokens": new}


def scored(tmp_path, requests, answers):
    readings = score(written(tmp_path / "r.jsonl", requests), written(tmp_path / "a.jsonl", answers))
    return {(one.metric, one.statistic): one.value for one in readings}


def test_a_file_holds_the_stream_of_figure_11_and_the_same_choices_give_the_same_bytes(tmp_path):
    files = {path.name: path for path in write_streams(Stream(**CHOICES), tmp_path / "out")}
    assert {"distinct.jsonl", "uniform.jsonl", "skewed.jsonl", "identical.jsonl", "about.json"} < set(files)
    assert [
        (line.adapter, tuple(line.prompt), line.new_tokens, line.arrival_s)
        for line in read_lines(files["skewed.jsonl"], Request).values()
    ] == [(f"adapter-{job.adapter_id}", job.prompt, job.new_tokens, 0.0) for job in paper_stream("Skewed", 40, 64, 100)]
    write_streams(Stream(**CHOICES, rate=8.0), tmp_path / "other")
    write_streams(Stream(**CHOICES), tmp_path / "again")
    about, other, again = (
        json.loads((tmp_path / name / "about.json").read_text()) for name in ("out", "other", "again")
    )
    assert about == {**CHOICES, "lengths": "released", "rate": None, "sha256": again["sha256"]}
    assert not set(about["sha256"].items()) & set(other["sha256"].items())


def test_the_bytes_of_the_paper_are_the_same_on_every_machine(tmp_path):
    """Compare sums with those of the first files: published requests must not change."""
    write_streams(Stream(), tmp_path)
    sums = json.loads((tmp_path / "about.json").read_text())["sha256"]
    assert [sums[name][:16] for name in ("distinct.jsonl", "skewed.jsonl")] == ["ce42f7a22a918713", "f77fda87b97b37e1"]


def test_arrivals_ascend_at_the_rate():
    times = Stream(count=4000, rate=8.0).arrivals()
    assert (times[1:] >= times[:-1]).all()
    assert times[-1] / 4000 == pytest.approx(1 / 8.0, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "count=0 must be at least 1"),
        ({"max_len": 4096}, "max_len=4096 must be at most 2048"),
        ({"lengths": "long"}, "lengths=long must be 'released' or 'stated'"),
        ({"rate": 0.0}, "rate=0.0 must be above 0"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        validated(OmegaConf.create(change), Stream)


def test_a_folder_of_others_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="was not written by this command"):
        write_streams(Stream(**CHOICES), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_scores_by_hand(tmp_path):
    requests = [request(0), request(1, arrival=1.0, prompt=5, new=3)]
    answers = [{"id": 1, "token_s": [2.0, 3.0, 4.0]}, {"id": 0, "token_s": [0.5, 1.5]}]
    found = scored(tmp_path, requests, answers)
    assert found["wall_time", "value"] == pytest.approx(4.0)
    assert found["throughput", "value"] == pytest.approx((3 + 2 + 5 + 3) / 4)
    assert found["output_throughput", "value"] == pytest.approx(5 / 4)
    assert found["time_to_first_token_mean", "value"] == pytest.approx(1000 * (0.5 + 1.0) / 2)
    assert found["time_per_output_token", "median"] == pytest.approx(1000.0)
    assert found["errors", "count"] == 0
    assert not [metric for metric, _ in found if metric.startswith("client")]


def test_missing_short_and_failed_answers_are_errors_and_give_no_throughput(tmp_path):
    answers = [{"id": 0, "token_s": [1, 2.0]}, {"id": 1, "token_s": [1.0]}, {"id": 2, "token_s": [], "error": "http 5"}]
    found = scored(tmp_path, [request(id) for id in range(4)], answers)
    assert found["errors", "count"] == 3
    assert {found[f"errors_{kind}", "count"] for kind in ("unfinished", "wrong_token_count", "http_5")} == {1}
    assert found["output_throughput", "value"] == pytest.approx(2 / 2)
    assert found["throughput", "value"] == pytest.approx(5 / 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"id": 0, "token_s": [2.0, 1.0]}, "token_s of id 0 must ascend"),
        ({"id": 0, "token_s": [0.5, 1.0]}, "ascend from its arrival at 1 s"),
        ({"id": 7, "token_s": [2.0]}, "id 7 is of no request"),
        ({"id": 0, "token_s": ["now"]}, r"a.jsonl, line 1: 'now' of token_s=\['now'\] must be a valid number"),
        ({"id": 0}, "line 1: token_s= is missing"),
        ({"id": 0, "token_s": [], "tokens": 3}, "line 1: tokens= would be read by nothing"),
        ({"id": 0, "token_s": []}, "has no token of any request"),
    ],
)
def test_an_answer_that_cannot_be_is_named(tmp_path, answer, message):
    with pytest.raises(ConfigError, match=message):
        scored(tmp_path, [request(0, arrival=1.0)], [answer])


def test_the_command_writes_and_scores(tmp_path, capsys):
    workload(Options(out=tmp_path / "out", count=3, max_len=8, vocab_size=10))
    file = tmp_path / "out" / "distinct.jsonl"
    lines = read_lines(file, Request).values()
    answers = [{"id": one.id, "token_s": [1.0 + t for t in range(one.new_tokens)]} for one in lines]
    written(tmp_path / "answers.jsonl", answers)
    capsys.readouterr()
    workload(Options(requests=file, score=tmp_path / "answers.jsonl"))
    said = capsys.readouterr().out
    assert "errors count: 0 requests" in said
    assert "time_to_first_token median: 1000 ms" in said
    with pytest.raises(ConfigError, match="give one of out=FOLDER and score=FILE"):
        workload(Options())
