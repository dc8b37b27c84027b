"""Faulty servers: each fault is caught by its case, and the owner of the tokens is named."""

import asyncio
import itertools
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from fastapi import HTTPException

from experiments.conformance import cases
from experiments.conformance.cases import CUT, EMPTY, FAIL, LONG, NOT_OFFERED, PASS, UNJUDGED, Case, Result, Run
from experiments.conformance.client import Server
from experiments.conformance.expected import COUNT, World
from tests.experiments.conformance import faulty_servers as faulty

MIXED, ALONE = (cases.cases([])[name] for name in ("mixed batch", "each alone"))


def outcome(server: faulty.RightServer, case: Case, *groups: int) -> Result:
    """The result of one case against a server; ``groups``: sizes of its waves, where they matter."""
    server.groups = list(groups)

    async def tried(url: str) -> Result:
        client, result = Server(url), Result("case")
        async with client.api:
            await case(Run(client, server.world, await client.check(server.world)), result)
        return result

    with server.serve() as url:
        return asyncio.run(tried(url))


@pytest.mark.parametrize("case", [cases.shared_prefix, cases.reloaded, cases.replaced, cases.cancelled])
def test_a_right_server_passes(world: World, case: Case) -> None:
    result = outcome(faulty.RightServer(world), case)
    assert (result.status, dict(result.findings), result.protocol) == (PASS, {}, {})
    assert result.answers > 5


def test_a_server_without_loading_or_token_ids(world: World) -> None:
    server = faulty.RightServer(world)
    server.loads = server.ids = False
    assert outcome(server, MIXED).status == PASS
    for case in (cases.reloaded, cases.replaced, cases.poisoned):
        assert outcome(server, case).status == NOT_OFFERED


def test_slot_zero_above_a_threshold(world: World) -> None:
    assert outcome(faulty.SlotZeroAboveThreshold(world), MIXED, 12).status == PASS
    result = outcome(faulty.SlotZeroAboveThreshold(world), cases.batch(64), 64)
    assert result.status == FAIL
    slot_zero = " got the tokens of tenant-0 (rank 1, all)"
    assert any(found.startswith("tenant-2 ") and found.endswith(slot_zero) for found in result.findings)
    assert not any(found.startswith(("tenant-0", "the base model")) for found in result.findings)


def test_a_prefix_cache_that_ignores_the_adapter(world: World) -> None:
    result = outcome(faulty.PrefixCacheWithoutAdapter(world), cases.shared_prefix)
    assert result.status == FAIL
    wrong = {found.partition(" got ")[0] for found in result.findings}
    assert len(wrong) == len(world.tenants)  # all but the adapter that was first, and the base model
    got = "got its own tokens over the cached prefix of tenant-0 (rank 1, all)"
    assert all(found.endswith(got) for found in result.findings)


def test_old_weights_after_a_reload(world: World) -> None:
    result = outcome(faulty.KeepsOldWeights(world), cases.reloaded)
    assert result.status == FAIL
    ((found, _),) = result.findings.items()
    assert found.startswith("swapped, now tenant-")
    old, new = found.partition(" got the tokens of ")[2], found.partition("now ")[2].partition(",")[0]
    assert old.startswith("tenant-")
    assert not old.startswith(new)
    assert set(outcome(faulty.KeepsOldWeights(world), cases.replaced).findings) == {found}


def test_an_adapter_that_stays_after_its_unloading(world: World) -> None:
    result = outcome(faulty.NeverUnloads(world), cases.reloaded)
    assert (dict(result.findings), result.protocol) == ({"swapped, unloaded, got tokens": 1}, {})


def test_two_streams_that_are_mixed_up(world: World) -> None:
    result = outcome(faulty.MixesStreams(world), MIXED, 12)
    assert result.status == FAIL
    named = [found for found in result.findings if "in a request beside it, between its own" in found]
    assert len(named) >= len(result.findings) // 2  # tails of equal tokens have no owner
    assert outcome(faulty.MixesStreams(world), ALONE).status == PASS


def test_neighbours_of_a_poisoned_adapter(world: World) -> None:
    result = outcome(faulty.SpoiledByPoison(world), cases.poisoned)
    wrong = {found.partition(" got ")[0] for found in result.findings}
    assert len(wrong) == len(world.models)


def test_answers_that_change_from_run_to_run(world: World) -> None:
    result = outcome(faulty.ChangesItsMind(world), cases.repeated)
    assert result.status == FAIL
    changed = [found for found in result.findings if found.endswith("got other tokens from run to run")]
    assert len(changed) == len(world.models)


@pytest.mark.parametrize("case", [MIXED, cases.repeated])
def test_tokens_of_streams_without_an_end_are_judged(world: World, case: Case) -> None:
    """The protocol's fault is one, with its count; it neither fails right tokens nor hides wrong ones."""

    class Endless(faulty.RightServer):
        ends_streams = False

    result = outcome(Endless(world), case)
    assert (result.status, result.judged) == (PASS, result.answers)
    ((fault, models),) = result.protocol.items()
    assert fault == "the stream ended without [DONE]"
    assert models.total() == result.answers // 2
    assert set(models) == set(world.models)

    class Wrong(Endless, faulty.ChangesItsMind):
        pass

    wrong = outcome(Wrong(world), case)
    assert wrong.status == FAIL
    assert [*wrong.protocol] == [fault]


FORMS = {
    "an event that is no chunk: ping": "data: ping\n\n",
    'error in the stream: {"error": "late"}': 'data: {"error": "late"}\n\n',
    'an event that is no chunk: {"usage": #}': 'data: {"usage": 3}\n\n',
}


@pytest.mark.parametrize("fault", FORMS)
def test_an_odd_event_does_not_hide_the_tokens_after_it(world: World, fault: str) -> None:
    class Odd(faulty.RightServer):
        between = FORMS[fault]

    result = outcome(Odd(world), MIXED)
    assert (result.status, result.judged, [*result.protocol]) == (PASS, result.answers, [fault])
    assert result.protocol[fault].total() == COUNT * result.answers // 2


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("text/plain", "a stream of content type text/plain"), (None, "a whole answer in place of a stream")],
)
def test_streams_of_another_form_are_read(world: World, kind: str | None, fault: str) -> None:
    class Other(faulty.RightServer):
        stream_type = kind

    result = outcome(Other(world), MIXED)
    assert (result.status, result.judged, [*result.protocol]) == (PASS, result.answers, [fault])


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
        keeps_limit = False

        def tokens(self, name: str, ids: Any, beside: Any) -> Any:
            own = super().tokens(name, ids, beside)
            return change(own) if name == "tenant-1" and self.asked[name] > 1 else own

    result = outcome(Changes(world), MIXED)
    assert (result.status, result.judged, result.answers) == (status, judged, 12)
    wrong = {"tenant-1 (rank 8, q v) got 2 tokens of 8, not the right ones": 2}
    assert (dict(result.findings), result.protocol) == (({}, {fault: {"tenant-1": 2}}) if fault else (wrong, {}))


def test_errors_that_differ_by_name_and_number_are_one_fault(world: World) -> None:
    class Refuses(faulty.RightServer):
        numbers = itertools.count()

        def tokens(self, name: str, ids: Any, beside: Any) -> Any:
            if self.asked[name] > 1 and name != "base":
                number = next(self.numbers)
                raise HTTPException(503, f"{name} of request 3f2a77b0-{number} failed after 0.{number} s")
            return super().tokens(name, ids, beside)

    result = outcome(Refuses(world), MIXED)
    ((fault, models),) = result.protocol.items()
    assert fault == "HTTP 503: MODEL of request # failed after #.# s"
    assert result.status == UNJUDGED
    assert models.total() == result.answers - result.judged == 10


@pytest.mark.parametrize("form", ["org/{}", "llama:{}", "{}", "/srv/adapters/{}", "llama+{}@v1"])
def test_names_are_found_in_the_list(world: World, form: str) -> None:
    server = faulty.Foreign(world, form)
    result = outcome(server, MIXED)
    assert (result.status, result.judged) == (PASS, 12)
    assert outcome(server, cases.reloaded).status == NOT_OFFERED
