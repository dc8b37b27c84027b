"""Speculation of a server: its flag, and metrics of drafts."""

import re

import pytest
from starlette.testclient import TestClient

from punica.serve.cli import parse


def test_the_flag_and_metrics(world, capsys) -> None:
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
