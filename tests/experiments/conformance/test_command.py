"""Command line of the conformance test: exit codes, table and JSON, and mistakes that are one error each."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from experiments.commands import conformance as command
from experiments.commands.conformance import Options, conformance
from experiments.conformance import cases
from experiments.conformance.expected import World
from experiments.harness.schema import REPOSITORY, ConfigError
from tests.experiments.conformance import faulty_servers as faulty

MIXED = cases.cases([])["mixed batch"]


def options(world: World, url: str, **fields: Any) -> Options:
    return Options(url=url, folder=str(world.folder), batches=[40], **fields)


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "cases", lambda batches: {"mixed": MIXED, "large": cases.batch(batches[0])})


@pytest.mark.usefixtures("two_cases")
def test_a_right_server_is_told_in_a_table(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with faulty.RightServer(world).serve() as url:
        conformance(options(world, f"{url}/v1/"))
    said = capsys.readouterr().out
    assert "models: pass\nmixed: pass\nlarge: pass\n" in said
    assert "mixed   pass            12 of 12 answers\nlarge   pass            40 of 40 answers\n\n" in said
    assert said.endswith("tokens: 3 pass\nprotocol: 0 faults, 0 times\n")


@pytest.mark.usefixtures("two_cases")
def test_a_faulty_server_gives_status_1_and_names_tenants(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    server = faulty.SlotZeroAboveThreshold(world)
    server.groups = [12, 40]
    with server.serve() as url, pytest.raises(SystemExit) as stopped:
        conformance(options(world, url, out=str(out)))
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    finding = "tenant-4 (rank 8, q v) got the tokens of tenant-0 (rank 1, all)"
    assert f" x {finding}\n" in said
    assert "tokens: 2 pass, 1 FAIL\nprotocol: 0 faults" in said
    _, right, wrong = json.loads(out.read_text())["results"]
    assert (right["case"], right["status"], right["findings"]) == ("mixed", "pass", {})
    assert (wrong["status"], wrong["answers"]) == ("FAIL", 40)
    assert wrong["findings"][finding] >= 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "give one of make=FOLDER and url="),
        ({"make": "a", "url": "http://x"}, "give one of make=FOLDER and url="),
        ({"url": "http://127.0.0.1:1"}, "url= needs folder="),
        ({"url": "http://127.0.0.1:1", "folder": "/nowhere"}, "folder=/nowhere has no expected.json"),
        ({"url": "http://127.0.0.1:1", "folder": "", "batches": [0]}, r"batches=\[0\] must be"),
        ({"url": "http://127.0.0.1:1", "folder": "", "timeout": 0}, "timeout=0 must be"),
        ({"url": "http://x", "folder": "", "out": "/nowhere/a.json"}, "out=/nowhere/a.json cannot be written"),
        ({"make": "a", "tenants": 1}, r"tenants=1 must be in \[2, 256\]"),
        ({"make": "a", "ranks": [0]}, r"ranks=\[0\] must be one or more of 1 to 128"),
        ({"make": str(REPOSITORY)}, "is there and was not written by this command"),
    ],
)
def test_arguments_are_refused_before_anything_happens(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        conformance(Options(**fields))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", r"cannot be reached .*: give http://HOST:PORT of a server"),
        *((url, "must be an address like") for url in ("127.0.0.1:8000", "ftp://127.0.0.1", "http://[", "nonsense")),
    ],
)  # fmt: skip
def test_an_url_without_a_server(world: World, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^url=.* {words}"):
        conformance(options(world, url))


def test_servers_that_are_not_the_one_meant(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(faulty.RightServer):
        key = "secret"

    server = Plain(world)
    server.models = {"base": "base", "other": "base"}
    with server.serve() as url:
        with pytest.raises(ConfigError, match=r"wants an API key .* set CONFORMANCE_API_KEY"):
            conformance(options(world, url))
        monkeypatch.setenv(command.KEY_VARIABLE, "secret")
        with pytest.raises(ConfigError, match=r"base, other, and does not answer as tenant-0, .* start it as make="):
            conformance(options(world, url))
        with pytest.raises(ConfigError, match=r"does not answer as base:tenant-0, .* \(HTTP 404: no model MODEL\)"):
            conformance(options(world, url, prefix="base:"))
        with pytest.raises(ConfigError, match=r"is no server of OpenAI's API: /v1/models gave HTTP 404"):
            conformance(options(world, f"{url}/elsewhere"))


@pytest.mark.usefixtures("two_cases")
def test_adapters_behind_a_prefix_on_a_server_that_lists_none(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    server = faulty.RightServer(world)
    server.lists = False
    server.models = {"llama": "base"} | {f"llama:{tenant.name}": tenant.name for tenant in world.tenants}
    with server.serve() as url:
        conformance(options(world, url, prefix="llama:", base="llama"))
    assert "3 pass" in capsys.readouterr().out


@pytest.mark.usefixtures("two_cases")
def test_a_foreign_server_has_few_faults_of_the_protocol_and_its_tokens_are_judged(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An absent adapter is one fault and left out; streams without [DONE] are one. Neither is a finding of tokens."""
    out = tmp_path / "results.json"
    server = faulty.Foreign(world)
    del server.models["org/tenant-3"]
    with server.serve() as url, pytest.raises(SystemExit) as stopped:
        conformance(options(world, url, out=str(out)))
    assert stopped.value.code == 3
    said = capsys.readouterr().out
    assert said.endswith("tokens: 1 unjudged, 2 pass\nprotocol: 2 faults, 26 times\n")
    assert "    1 x absent: HTTP 404: no model MODEL (tenant-3)\n" in said
    assert "    25 x the stream ended without [DONE] (base, tenant-0, tenant-1, tenant-2, tenant-4)\n" in said, said
    _, mixed, large = json.loads(out.read_text())["results"]
    assert [mixed["judged"], large["judged"]] == [10, 40]
    with faulty.ForeignOfSlotZero(world).serve() as url, pytest.raises(SystemExit) as stopped:
        conformance(options(world, url))
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    assert " x tenant-2 (rank 16, mlp) got the tokens of tenant-0 (rank 1, all)\n" in said
    assert "tokens: 1 pass, 2 FAIL\nprotocol: 1 faults, 26 times\n" in said


@pytest.mark.usefixtures("two_cases")
def test_names_that_could_be_two_adapters_are_not_guessed(world: World) -> None:
    server = faulty.Foreign(world)
    server.models["other/tenant-2"] = "tenant-2"
    with server.serve() as url, pytest.raises(ConfigError, match="lists org/tenant-2, other/tenant-2: give prefix="):
        conformance(options(world, url))


@pytest.mark.slow
def test_a_mistake_on_the_command_line_is_one_line() -> None:
    words = [sys.executable, "-m", "experiments.commands.conformance", "url=http://127.0.0.1:1"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: url= needs folder=, what make= wrote and the server was started on\n"


def test_make_prints_how_to_start_a_server(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.expected, "make", lambda folder, count, ranks, seed: world)
    conformance(Options(make=str(tmp_path / "new"), tenants=5, ranks=[1, 8, 16]))
    said = capsys.readouterr().out
    assert "5 adapters; of" in said
    assert f"python -m punica.serve {world.folder.resolve()}/checkpoint" in said
