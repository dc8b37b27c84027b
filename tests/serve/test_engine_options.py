"""Options of the engine at a server: prefix cache, chunks and speculation; flags, the salt of a call, metrics."""

import re

import pytest
from starlette.testclient import TestClient

from punica.serve.cli import parse

PROMPT = list(range(40, 90))


def test_a_salt_keeps_calls_apart_and_metrics_tell_hits(world) -> None:
    _, app = world.app(1, {"prefix_cache": True, "admission": "chunked", "prefill_chunk": 20})
    answers = []
    with TestClient(app) as client:
        for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, **salt}
            answers.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": [1], "cache_salt": 3}).status_code == 400
        shown = client.get("/metrics").text
    assert len(set(answers)) == 1
    counted = dict(re.findall(r"^punica_prefix_(\w+)_total (\S+)$", shown, re.MULTILINE))
    assert {name: float(value) for name, value in counted.items()} == {
        "hit_tokens": 2 * 48, "missed_tokens": 5 * 50 - 2 * 48, "evicted_blocks": 0,
    }  # fmt: skip


def test_flags_are_sizes_of_the_engine(world) -> None:
    folder = str(world.checkpoint)
    sizes = parse([folder, "--prefix-cache", "--prefill-chunk", "256"]).sizes
    assert (sizes["prefix_cache"], sizes["prefill_chunk"], sizes["admission"]) == (True, 256, "chunked")
    sizes = parse([folder]).sizes
    assert sizes.keys().isdisjoint({"prefill_chunk", "admission"})
    assert sizes["prefix_cache"] is False


def test_speculation_has_a_flag_and_metrics(world, capsys) -> None:
    folder = str(world.checkpoint)
    assert "speculate" not in parse([folder]).sizes
    _, app = world.app(1, {"speculate": parse([folder, "--speculate", "4"]).sizes["speculate"]})
    with TestClient(app) as client:
        body = {"model": "tiny", "prompt": [5, 6, 7] * 5, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()
        shown = client.get("/metrics").text
    counted = dict(re.findall(r"^punica_(drafted|accepted)_tokens_total (\S+)$", shown, re.MULTILINE))
    assert float(counted["drafted"]) >= 4
    assert 0 <= float(counted["accepted"]) <= float(counted["drafted"])
    for wrong in (["--speculate", "0"], ["--speculate", "4", "--ray", "2"]):
        with pytest.raises(SystemExit):
            parse([folder, *wrong])
        assert "--speculate" in capsys.readouterr().err
