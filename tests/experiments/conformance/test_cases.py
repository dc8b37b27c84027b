"""Servers with one fault each: its case catches it. The command, and our server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica-lora[serve]'")

from fastapi import HTTPException

from experiments.commands.conformance import Options, conformance, results_of, table
from experiments.conformance import cases
from experiments.conformance.cases import NOT_OFFERED, PASS, UNJUDGED, Case, Result, Run
from experiments.conformance.world import ADAPTERS, CHECKPOINT, World
from experiments.harness.schema import ConfigError
from punica.adapters import LoRARequest
from punica.engine import Engine
from punica.serve.app import Settings, make_app
from tests.experiments.conformance import faulty_servers as faulty
from tests.serve.world import EngineThread, served

MODELS = ["base", *(f"tenant-{number}" for number in range(5))]
ALL = cases.waves([MODELS * 2])
SLOT_ZERO = "tenant-4 got the tokens of tenant-0"


def outcome(server: faulty.RightServer, case: str | Case, **names: str) -> Result:
    """The result of one case against a server."""
    chosen = cases.cases(server.world, [40])[case] if isinstance(case, str) else case

    async def tried(url: str) -> Result:
        run, result = Run(server.world, url, **names), Result("case")
        async with run.api:
            await run.check()
            await chosen(run, result)
        return result

    with server.serve() as url:
        return asyncio.run(tried(url))


@pytest.mark.parametrize("name", ["shared prefix", "cancellation", "hot reload", "reload in place", "mixed batches"])
def test_a_right_server_passes(world: World, name: str) -> None:
    result = outcome(faulty.RightServer(world), name)
    assert (result.status, dict(result.findings), dict(result.protocol)) == (PASS, {}, {})
    assert result.answers > 5


def test_a_server_without_loading_and_with_other_names(world: World) -> None:
    models = {"llama": "base"} | {f"org/{name}": name for name in world.models[1:]}
    server = faulty.RightServer(world, loads=False, models=models)
    assert outcome(server, ALL, base="llama", prefix="org/").status == PASS
    server = faulty.RightServer(world, loads=False)
    for name in ("hot reload", "reload in place", "poisoned"):
        assert outcome(server, name).status == NOT_OFFERED


def test_slot_zero_above_a_threshold(world: World) -> None:
    assert outcome(faulty.SlotZeroAboveThreshold(world, groups=[12]), ALL).status == PASS
    result = outcome(faulty.SlotZeroAboveThreshold(world, groups=[40]), "batch of 40")
    found = dict(one.split(" got the tokens of ") for one in result.findings)
    assert found["tenant-2"] == "tenant-0"
    assert {*found} <= {*world.models[2:]}


def test_a_prefix_cache_that_ignores_the_adapter(world: World) -> None:
    result = outcome(faulty.PrefixCacheWithoutAdapter(world), cases.shared_prefix)
    assert len(result.findings) == len(world.models) - 1  # all but the adapter that was first, and the base model


@pytest.mark.slow
def test_old_weights_after_a_reload(world: World) -> None:
    (found,) = outcome(faulty.KeepsOldWeights(world), cases.reloaded).findings
    new, old = found.removeprefix("swapped, now ").split(" got the tokens of ")
    assert {new.split()[0], old.split()[0]} < {*world.models}
    assert new != old
    assert {*outcome(faulty.KeepsOldWeights(world), "reload in place").findings} == {found}


@pytest.mark.slow
def test_an_adapter_that_stays_one_that_spoils_and_answers_that_change(world: World) -> None:
    result = outcome(faulty.NeverUnloads(world), cases.reloaded)
    assert (dict(result.findings), dict(result.protocol)) == ({"swapped, unloaded, got tokens": 1}, {})
    found = outcome(faulty.SpoiledByPoison(world), cases.poisoned).findings
    assert len({one.partition(" got ")[0] for one in found}) == len(world.models)
    found = outcome(faulty.ChangesItsMind(world), ALL).findings
    assert len({one.partition(" got ")[0] for one in found}) == len(world.models)


def test_two_streams_that_are_mixed_up(world: World) -> None:
    result = outcome(faulty.MixesStreams(world, groups=[12]), ALL)
    assert result.findings
    assert outcome(faulty.MixesStreams(world), "each alone").status == PASS


def test_errors_are_faults_by_kind_and_no_findings(world: World) -> None:
    class Refuses(faulty.RightServer):
        def tokens(self, name: str, ids: Any, beside: Any) -> Any:
            if self.asked[name] > 1 and name != "base":
                raise HTTPException(503, f"request {self.asked.total()} failed")
            return super().tokens(name, ids, beside)

    result = outcome(Refuses(world), ALL)
    assert dict(result.protocol) == {"InternalServerError 503": 10}
    assert (result.status, result.judged) == (UNJUDGED, result.answers - 10)


def test_the_command_tells_tokens_by_table_file_and_status(
    world: World, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "cases", lambda *_: {"all": ALL, "batch": cases.waves([(MODELS * 7)[:40]])})

    def said_of(server: faulty.RightServer) -> tuple[int, str, Any]:
        status, out = 0, tmp_path / "out.json"
        with server.serve() as url:
            try:
                conformance(Options(url=f"{url}/v1/", folder=world.folder, out=out))
            except SystemExit as stopped:
                status = int(str(stopped.code))
        return status, capsys.readouterr().out, json.loads(out.read_text())["results"]

    status, said, results = said_of(faulty.RightServer(world))
    assert (status, said.endswith("tokens: 2 pass\nprotocol: 0 faults, 0 times\n")) == (0, True)
    assert [(one["status"], one["judged"], one["answers"]) for one in results] == [("pass", 12, 12), ("pass", 40, 40)]
    status, said, (right, wrong) = said_of(faulty.SlotZeroAboveThreshold(world, groups=[12, 40]))
    assert (status, f" x {SLOT_ZERO}\n" in said, right["status"], wrong["status"]) == (1, True, "pass", "FAIL")
    assert wrong["findings"][SLOT_ZERO] >= 2


def test_servers_that_are_not_the_one_meant(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://127.0.0.1:1", "127.0.0.1:8000", "http://127.0.0.1:x"):
        with pytest.raises(ConfigError, match=f"^url=.*{url}.* http://"):
            conformance(Options(url=url, folder=world.folder))
    server = faulty.RightServer(world, key="secret", models={"base": "base", "other": "base"})
    with server.serve() as url:
        with pytest.raises(ConfigError, match=r"no key.* CONFORMANCE_API_KEY"):
            conformance(Options(url=url, folder=world.folder))
        monkeypatch.setenv(cases.KEY_VARIABLE, "secret")
        with pytest.raises(ConfigError, match=r"does not answer as org/tenant-0 .*no model org/tenant-0"):
            conformance(Options(url=url, folder=world.folder, prefix="org/"))


@pytest.mark.slow
def test_every_case_passes_on_our_server_in_bfloat16_with_fewer_slots_than_adapters(world: World) -> None:
    adapters = [LoRARequest(t, number, str(world.adapter(t))) for number, t in enumerate(world.models[1:], 1)]
    sizes: dict[str, Any] = {"max_batch_size": 256, "max_loras": 2, "max_model_len": 256, "dtype": "bfloat16"}
    engine = Engine.from_pretrained(world.folder / CHECKPOINT, adapters, device="cpu", max_lora_rank=16, **sizes)
    app = make_app(EngineThread(engine), Settings("base", adapters, roots=[(world.folder / ADAPTERS).resolve()]))
    with served(app) as url:
        results = asyncio.run(results_of(Options(url=url, batches=[64, 256], timeout=600), world))
    assert {(result.status, result.protocol.total()) for result in results} == {(PASS, 0)}, table(results)
    assert min(result.answers for result in results) >= 6
