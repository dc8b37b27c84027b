"""Faulty servers: each fault is caught by its case, and the owner of the tokens is named."""

import asyncio
import socket
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from fastapi import HTTPException

from experiments.conformance import cases, client
from experiments.conformance.cases import CUT, EMPTY, FAIL, LONG, NOT_OFFERED, PASS, UNJUDGED, Case, Result, Run
from experiments.conformance.client import Server
from experiments.conformance.expected import COUNT, World
from tests.experiments.conformance import faulty_servers as faulty

CASES = cases.cases([64])
MIXED = CASES["mixed batch"]


def outcome(server: faulty.RightServer, case: Case) -> Result:
    """The result of one case against a server."""

    async def tried(url: str) -> Result:
        asked, result = Server(url), Result("case")
        async with asked.api:
            await case(Run(asked, server.world, await asked.check(server.world)), result)
        return result

    with server.serve() as url:
        return asyncio.run(tried(url))


@pytest.mark.parametrize("name", ["shared prefix", "cancellation", "hot reload", "reload in place"])
def test_a_right_server_passes(world: World, name: str) -> None:
    result = outcome(faulty.RightServer(world), CASES[name])
    assert (result.status, dict(result.findings), result.protocol) == (PASS, {}, {})
    assert result.answers > 5


def test_a_server_without_loading_or_token_ids(world: World) -> None:
    server = faulty.RightServer(world, loads=False, ids=False)
    assert outcome(server, MIXED).status == PASS
    for name in ("hot reload", "reload in place", "poisoned"):
        assert outcome(server, CASES[name]).status == NOT_OFFERED


def test_slot_zero_above_a_threshold(world: World) -> None:
    assert outcome(faulty.SlotZeroAboveThreshold(world, groups=[12]), MIXED).status == PASS
    result = outcome(faulty.SlotZeroAboveThreshold(world, groups=[64]), CASES["batch of 64"])
    named = {found.partition(" (")[0] for found in result.findings if found.endswith(" of tenant-0 (rank 1, all)")}
    assert {"tenant-2"} <= named <= {found.partition(" (")[0] for found in result.findings} <= {*world.models[2:]}


def test_a_prefix_cache_that_ignores_the_adapter(world: World) -> None:
    result = outcome(faulty.PrefixCacheWithoutAdapter(world), cases.shared_prefix)
    wrong = dict(found.split(" got ") for found in result.findings)
    assert len(wrong) == len(world.tenants)  # all but the adapter that was first, and the base model
    assert {*wrong.values()} == {"its own tokens over the cached prefix of tenant-0 (rank 1, all)"}


def test_old_weights_after_a_reload(world: World) -> None:
    (found,) = outcome(faulty.KeepsOldWeights(world), cases.reloaded).findings
    new, old = found.removeprefix("swapped, now ").split(" got the tokens of ")
    assert {new.split()[0], old.split()[0]} < {*world.models}
    assert new != old
    assert {*outcome(faulty.KeepsOldWeights(world), CASES["reload in place"]).findings} == {found}


def test_an_adapter_that_stays_after_its_unloading(world: World) -> None:
    result = outcome(faulty.NeverUnloads(world), cases.reloaded)
    assert (dict(result.findings), result.protocol) == ({"swapped, unloaded, got tokens": 1}, {})


def test_two_streams_that_are_mixed_up(world: World) -> None:
    result = outcome(faulty.MixesStreams(world, groups=[12]), MIXED)
    named = [found for found in result.findings if "in a request beside it, between its own" in found]
    assert len(named) >= max(1, len(result.findings) // 2)  # tails of equal tokens have no owner
    assert outcome(faulty.MixesStreams(world), CASES["each alone"]).status == PASS


def test_neighbours_of_a_poisoned_adapter(world: World) -> None:
    result = outcome(faulty.SpoiledByPoison(world), cases.poisoned)
    assert len({found.partition(" got ")[0] for found in result.findings}) == len(world.models)


def test_answers_that_change_from_run_to_run(world: World) -> None:
    result = outcome(faulty.ChangesItsMind(world), cases.repeated)
    changed = [found for found in result.findings if found.endswith("got other tokens from run to run")]
    assert len(changed) == len(world.models)


@pytest.mark.parametrize("case", [MIXED, cases.repeated])
def test_tokens_of_streams_without_an_end_are_judged(world: World, case: Case) -> None:
    """The protocol's fault is one, with its count; it neither fails right tokens nor hides wrong ones."""
    result = outcome(faulty.RightServer(world, ends_streams=False), case)
    assert (result.status, result.judged) == (PASS, result.answers)
    ((fault, models),) = result.protocol.items()
    assert (models.total(), {*models}) == (result.answers // 2, {*world.models})
    wrong = outcome(faulty.ChangesItsMind(world, ends_streams=False), case)
    assert (wrong.status, [*wrong.protocol]) == (FAIL, [fault])


FORMS = {
    "an event that is no chunk: ping": {"between": "data: ping\n\n"},
    'error in the stream: {"error": "late"}': {"between": 'data: {"error": "late"}\n\n'},
    'an event that is no chunk: {"usage": #}': {"between": 'data: {"usage": 3}\n\n'},
    "a stream of content type text/plain": {"stream_type": "text/plain"},
    "a whole answer in place of a stream": {"stream_type": None},
}


@pytest.mark.parametrize("fault", FORMS)
def test_odd_events_and_streams_do_not_hide_tokens(world: World, fault: str) -> None:
    result = outcome(faulty.RightServer(world, **FORMS[fault]), MIXED)
    assert (result.status, result.judged, [*result.protocol]) == (PASS, result.answers, [fault])
    assert result.protocol[fault].total() == result.answers // 2 * (COUNT if "between" in FORMS[fault] else 1)


def test_comments_and_empty_events_are_no_faults(world: World) -> None:
    result = outcome(faulty.RightServer(world, between=": ping\n\ndata:\n\nevent: nothing\n\n"), MIXED)
    assert (result.status, result.protocol) == (PASS, {})


@pytest.mark.parametrize(
    ("change", "status", "judged", "fault"),
    [
        (lambda tokens: tokens[:3], UNJUDGED, 10, CUT), (lambda tokens: (), UNJUDGED, 10, EMPTY),
        (lambda tokens: tokens + tokens, PASS, 12, LONG), (lambda tokens: (60, 61), FAIL, 12, None),
    ],
    ids=["cut", "empty", "long", "cut and wrong"],
)  # fmt: skip
def test_answers_of_another_length(world: World, change: Any, status: str, judged: int, fault: str | None) -> None:
    class Changes(faulty.RightServer):
        def tokens(self, name: str, ids: Any, beside: Any) -> Any:
            own = super().tokens(name, ids, beside)
            return change(own) if name == "tenant-1" and self.asked[name] > 1 else own

    result = outcome(Changes(world, keeps_limit=False), MIXED)
    assert (result.status, result.judged, result.answers) == (status, judged, 12)
    wrong = {"tenant-1 (rank 8, q v) got 2 tokens of 8, not the right ones": 2}
    assert (dict(result.findings), result.protocol) == (({}, {fault: {"tenant-1": 2}}) if fault else (wrong, {}))


@pytest.mark.parametrize("status", [503, 429])
def test_errors_that_differ_by_name_and_number_are_one_fault(
    world: World, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is full is asked again before that is a fault."""
    monkeypatch.setattr(client, "TRIES", 3)
    monkeypatch.setattr(client, "PAUSE_S", 0.01)

    class Refuses(faulty.RightServer):
        def tokens(self, name: str, ids: Any, beside: Any) -> Any:
            if self.asked[name] > 1 and name != "base":
                number = self.asked.total()
                raise HTTPException(status, f"{name} of request 3f2a77b0-{number} failed after 0.{number} s")
            return super().tokens(name, ids, beside)

    server = Refuses(world)
    result = outcome(server, MIXED)
    ((fault, models),) = result.protocol.items()
    assert fault == f"HTTP {status}: MODEL of request # failed after #.# s"
    assert result.status == UNJUDGED
    assert models.total() == result.answers - result.judged == 10
    assert server.asked["tenant-1"] == 1 + 2 * (3 if status == 429 else 1)


def test_a_server_without_an_answer_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = Server(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        for stream in (False, True):
            answer = asyncio.run(asyncio.wait_for(server.ask("base", "w1", COUNT, stream), 30))
            assert (answer.tokens, answer.faults) == ((), ["ReadTimeout"])


@pytest.mark.parametrize("form", ["org/{}", "llama:{}", "{}", "/srv/adapters/{}", "llama+{}@v1"])
def test_names_are_found_in_the_list(world: World, form: str) -> None:
    result = outcome(faulty.foreign(world, form), MIXED)
    assert (result.status, result.judged) == (PASS, 12)
