"""Speculation of a server: its flag, and metrics of drafts."""

import re

import pytest
from starlette.testclient import TestClient

from punica.serve.cli import parse


def test_metrics_tell_drafts(world) -> None:
    bodies, shown = [], ""
    for speculate in (0, 3):
        _, app = world.app(1, {"speculate": speculate})
        with TestClient(app) as client:
            body = {"model": "tiny", "prompt": [5, 6, 7] * 5, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            bodies.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            shown = client.get("/metrics").text
    assert bodies[0] == bodies[1]
    counted = dict(re.findall(r"^punica_(drafted|accepted)_tokens_total (\S+)$", shown, re.MULTILINE))
    assert float(counted["drafted"]) >= 3
    assert float(counted["accepted"]) <= float(counted["drafted"])


def test_the_flag_is_a_size_of_the_engine(world, capsys) -> None:
    folder = str(world.checkpoint)
    assert parse([folder, "--speculate", "4"]).sizes["speculate"] == 4
    assert "speculate" not in parse([folder]).sizes
    for wrong in (["--speculate", "0"], ["--speculate", "4", "--ray", "2"]):
        with pytest.raises(SystemExit):
            parse([folder, *wrong])
        assert "--speculate" in capsys.readouterr().err
