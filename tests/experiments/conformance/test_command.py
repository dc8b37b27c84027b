"""Command line of the conformance test: exit codes, table and JSON, and mistakes that are one error each."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from experiments.commands import conformance as command
from experiments.commands.conformance import Options, conformance
from experiments.conformance import cases, client
from experiments.conformance.expected import World
from experiments.harness.schema import REPOSITORY, ConfigError
from tests.experiments.conformance import faulty_servers as faulty

CASES = cases.cases([40])
SLOT_ZERO = "tenant-{} (rank {}) got the tokens of tenant-0 (rank 1, all)"


@pytest.fixture(autouse=True)
def _two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "cases", lambda batches: {name: CASES[name] for name in ("mixed batch", "batch of 40")})


def said_of(server: faulty.RightServer, folder: Path, code: int, capsys: Any, **fields: Any) -> tuple[str, Any]:
    """What the command prints and writes of a server; ``code``: its status."""
    world, status = server.world, 0
    with server.serve() as url:
        try:
            conformance(Options(url=f"{url}/v1/", folder=str(world.folder), out=str(folder / "out.json"), **fields))
        except SystemExit as stopped:
            status = int(str(stopped.code))
    assert status == code
    return capsys.readouterr().out, json.loads((folder / "out.json").read_text())["results"]


def test_a_right_server_gives_status_0(world: World, tmp_path: Path, capsys: Any) -> None:
    said, results = said_of(faulty.RightServer(world), tmp_path, 0, capsys)
    assert said.endswith("tokens: 3 pass\nprotocol: 0 faults, 0 times\n")
    assert [(one["status"], one["judged"], one["answers"]) for one in results] == [
        ("pass", 6, 6), ("pass", 12, 12), ("pass", 40, 40),
    ]  # fmt: skip


def test_a_faulty_server_gives_status_1_and_names_tenants(world: World, tmp_path: Path, capsys: Any) -> None:
    server = faulty.SlotZeroAboveThreshold(world, groups=[12, 40])
    said, (_, right, wrong) = said_of(server, tmp_path, 1, capsys)
    assert f" x {SLOT_ZERO.format(4, '8, q v')}\n" in said
    assert (right["case"], right["status"], right["findings"]) == ("mixed batch", "pass", {})
    assert (wrong["status"], wrong["answers"], wrong["protocol"]) == ("FAIL", 40, {})
    assert wrong["findings"][SLOT_ZERO.format(4, "8, q v")] >= 2


def test_a_foreign_server_has_few_faults_of_the_protocol(world: World, tmp_path: Path, capsys: Any) -> None:
    """Absent adapters are left out and one fault; streams without [DONE] are one. Neither is a finding of tokens."""
    server = faulty.foreign(world)
    del server.models["org/tenant-3"], server.models["org/tenant-1"]
    said, (first, mixed, large) = said_of(server, tmp_path, 3, capsys)
    assert said.endswith("tokens: 1 unjudged, 2 pass\nprotocol: 2 faults, 26 times\n")
    assert first["protocol"] == {"absent: HTTP 404: no model MODEL": {"tenant-1": 1, "tenant-3": 1}}
    assert [mixed["judged"], large["judged"]] == [8, 40]
    assert [{*one["protocol"]} for one in (mixed, large)] == [{"the stream ended without [DONE]"}] * 2
    server = faulty.foreign(world)
    server.models["org/tenant-2"] = "tenant-0"
    _, (*_, large) = said_of(server, tmp_path, 1, capsys)
    assert {*large["findings"]} == {SLOT_ZERO.format(2, "16, mlp")}


def test_adapters_behind_a_prefix_on_a_server_that_lists_none(world: World, tmp_path: Path, capsys: Any) -> None:
    models = {"llama": "base"} | {f"llama:{tenant.name}": tenant.name for tenant in world.tenants}
    said_of(faulty.RightServer(world, lists=False, models=models), tmp_path, 0, capsys, prefix="llama:", base="llama")


URL = {"url": "http://127.0.0.1:1", "folder": ""}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("make", {}), ("make", {"make": "a", "url": "http://x"}), ("folder", {"url": "http://x"}),
        ("folder", {**URL, "folder": "/nowhere"}), ("batches", {**URL, "batches": [0]}),
        ("timeout", {**URL, "timeout": 0}), ("out", {**URL, "out": "/nowhere/a.json"}),
        ("tenants", {"make": "a", "tenants": 1}), ("ranks", {"make": "a", "ranks": [0]}),
        ("make", {"make": str(REPOSITORY)}),
    ],
)  # fmt: skip
def test_arguments_are_refused_before_anything_happens(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        conformance(Options(**fields))


URLS = ("http://127.0.0.1:1", "127.0.0.1:8000", "ftp://127.0.0.1", "http://[", "http://127.0.0.1:x", "nonsense")


@pytest.mark.parametrize("url", URLS)
def test_an_url_without_a_server(world: World, url: str) -> None:
    with pytest.raises(ConfigError, match=rf"^url=.*{re.escape(url)}.* http://"):
        conformance(Options(url=url, folder=str(world.folder)))


def test_servers_that_are_not_the_one_meant(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(world.folder)
    server = faulty.RightServer(world, key="secret", models={"base": "base", "other": "base"})
    with server.serve() as url:
        with pytest.raises(ConfigError, match=r"HTTP 401: no key.* CONFORMANCE_API_KEY"):
            conformance(Options(url=url, folder=folder))
        monkeypatch.setenv(client.KEY_VARIABLE, "secret")
        with pytest.raises(ConfigError, match=r"base, other, and does not answer as tenant-0, "):
            conformance(Options(url=url, folder=folder))
        with pytest.raises(ConfigError, match=r"does not answer as base:tenant-0, .* \(HTTP 404: no model MODEL\)"):
            conformance(Options(url=url, folder=folder, prefix="base:"))
        with pytest.raises(ConfigError, match=r"HTTP 404.* OpenAI's API"):
            conformance(Options(url=f"{url}/elsewhere", folder=folder))
    server.models = faulty.foreign(world).models | {"other/tenant-2": "tenant-2"}
    with server.serve() as url, pytest.raises(ConfigError, match="lists org/tenant-2, other/tenant-2: give prefix="):
        conformance(Options(url=url, folder=folder))


def test_make_prints_how_to_start_every_server(world: World, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command.expected, "make", lambda folder, count, ranks, seed: world)
    conformance(Options(make=str(tmp_path / "new"), tenants=5, ranks=[1, 8, 16]))
    said = capsys.readouterr().out
    for server in ("punica.serve", "vllm.entrypoints", "sglang.launch_server", "lorax-launcher"):
        assert server in said
    assert said.count(f"{world.folder.resolve()}/checkpoint") == 5
    assert said.count(f"tenant-4={world.adapter('tenant-4')}") == 3
    assert said.count("experiments.commands.conformance") == 4
