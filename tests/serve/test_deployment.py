"""docs/deployment.md: its commands run as written, and its tables say what the server has."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from punica.cluster.ray_runners import CHECK_TIMEOUT_S, Timeouts
from punica.serve import access, app, catalogue, cli, launch, protocol, runners, server
from punica.serve.runners import RunnerMetrics
from tests.serve.world import EngineThread

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")


def test_its_commands_run_as_written(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, adapter in zip(("sql", "poet"), world.adapters[:2], strict=True):
        shutil.copytree(adapter.absolute_path, tmp_path / "adapters" / name)
    (tmp_path / "checkpoint").symlink_to(world.checkpoint)
    (arguments,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "arguments.txt").write_text(arguments)
    monkeypatch.chdir(tmp_path)
    (serve,) = re.findall(r"^\$ python -m punica\.serve (.*)$", PAGE, flags=re.MULTILINE)
    options = cli.parse([*shlex.split(serve), "--max-batch-size=2", "--max-model-len=64"])
    settings = replace(launch.settings_of(options), names_in_metrics=True)
    commands = [shlex.split(line) for line in re.findall(r"^\$ curl (.*)$", PAGE, flags=re.MULTILINE)]
    assert len(commands) == 6
    with TestClient(app.make_app(EngineThread(launch.build_of(options, settings)()), settings)) as client:
        for address, *words in commands:
            fields = dict(zip(words[::2], words[1::2], strict=True))
            headers = dict(word.split(": ") for flag, word in zip(words[::2], words[1::2], strict=True) if flag == "-H")
            method, path = "POST" if "-d" in fields else "GET", address.removeprefix("localhost:8000")
            answer = client.request(method, path, content=fields.get("-d"), headers=headers)
            assert answer.status_code == 200, (address, answer.text)
        exposed = client.get("/metrics").text
    exposed += RunnerMetrics(1).exposition().decode()
    named = set(re.findall(r"^\| `((?:punica_|vllm:)\w+)", PAGE, flags=re.MULTILINE))
    kinds = re.findall(r"^# TYPE ((?:punica_|vllm:)\w+) (\w+)$", exposed, flags=re.MULTILINE)
    assert named == {name for name, _ in kinds if not name.endswith("_created")}


def test_its_limits_are_those_of_the_server() -> None:
    limits = dict(re.findall(r"^\| ([^|`]+) \| (.+?) \| [^|]*\|$", PAGE, flags=re.MULTILINE))
    settings = app.Settings("x")
    numbers = (
        settings.max_body >> 20, None, settings.max_queue, protocol.MOST_CHOICES, protocol.MOST_MESSAGES,
        catalogue.MOST_ADAPTERS, access.MOST_ENTRIES, server.SEND_TIMEOUT_S, server.KEEP_ALIVE_S, cli.GRACE_S,
    )  # fmt: skip
    del limits["What"], limits["Name"]
    for (name, limit), number in zip(limits.items(), numbers, strict=True):
        assert number is None or f"{number:,g}" in limit or f"{number:g}" in limit, name
    times = {"--drain": cli.DRAIN_S, "--grace": cli.GRACE_S, "--step-timeout": Timeouts().step_s}
    assert all(re.search(rf"`{name}` (seconds )?\({time:g}( s)?\)", PAGE) for name, time in times.items())
    assert f"tried every {runners.TEND_S:g} s" in PAGE
    assert f"within {CHECK_TIMEOUT_S:g} s gives a 503" in PAGE
