"""docs/deployment.md: its commands run as written, and its tables say what the server has."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

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
    settings = launch.settings_of(options)
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
    named = set(re.findall(r"^\| `(punica_\w+)", PAGE, flags=re.MULTILINE))
    kinds = re.findall(r"^# TYPE (punica_\w+) (\w+)$", exposed, flags=re.MULTILINE)
    assert named == {name for name, _ in kinds if not name.endswith("_created")}


def test_its_limits_are_those_of_the_server() -> None:
    limits = dict(re.findall(r"^\| ([^|`]+) \| (.+?) \| [^|]*\|$", PAGE, flags=re.MULTILINE))
    expected = {
        "body": f"{app.Settings('x').max_body >> 20} MiB",
        "generations that wait or run": str(app.Settings("x").max_queue),
        "choices and prompts of one call": str(protocol.MOST_CHOICES),
        "messages of a chat": f"{protocol.MOST_MESSAGES:,}",
        "adapters with a name": f"{catalogue.MOST_ADAPTERS:,}",
        "entries of an adapter's folder": str(access.MOST_ENTRIES),
        "answer whose client does not read": f"{server.SEND_TIMEOUT_S:.0f} s",
        "idle connection": f"{server.KEEP_ALIVE_S} s",
        "running answers at the end": f"`--grace`, {cli.GRACE_S:g} s",
    }  # fmt: skip
    for name, limit in expected.items():
        assert limit in limits[name], name
    assert f"`--drain` seconds ({cli.DRAIN_S:g})" in PAGE
    assert f"`--grace` seconds ({cli.GRACE_S:g})" in PAGE
    assert f"`--step-timeout` ({Timeouts().step_s:.0f} s)" in PAGE
    assert f"tried every {runners.TEND_S:.0f} s" in PAGE
    assert f"within {CHECK_TIMEOUT_S:.0f} s gives a 503" in PAGE
