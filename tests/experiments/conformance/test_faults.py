"""Faulty servers: each fault is caught by its case, and the owner of the tokens is named."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from experiments.conformance import cases
from experiments.conformance.cases import Case, Run
from experiments.conformance.client import Server
from experiments.conformance.expected import World
from experiments.conformance.verdict import FAIL, NOT_OFFERED, PASS, Result
from tests.experiments.conformance import faulty_servers as faulty


def outcome(server: faulty.RightServer, case: Case, *groups: int) -> Result:
    """The result of one case against a server; ``groups``: sizes of its waves, where they matter."""
    server.groups = list(groups)

    async def tried(url: str) -> Result:
        client = Server(url)
        try:
            await client.check(server.world)
            result = Result("case")
            await case(Run(client, server.world), result)
            return result
        finally:
            await client.close()

    with server.serve() as url:
        return asyncio.run(tried(url))


@pytest.mark.parametrize("case", [cases.shared_prefix, cases.reloaded, cases.replaced, cases.cancelled])
def test_a_right_server_passes(world: World, case: Callable[[Run, Result], Awaitable[None]]) -> None:
    result = outcome(faulty.RightServer(world), case)
    assert (result.status, dict(result.findings)) == (PASS, {})
    assert result.answers > 5


def test_a_server_without_loading_or_token_ids(world: World) -> None:
    server = faulty.RightServer(world)
    server.loads = server.ids = False
    assert outcome(server, cases.mixed).status == PASS
    for case in (cases.reloaded, cases.replaced, cases.poisoned):
        assert outcome(server, case).status == NOT_OFFERED


def test_slot_zero_above_a_threshold(world: World) -> None:
    assert outcome(faulty.SlotZeroAboveThreshold(world), cases.mixed, 12).status == PASS
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
    assert dict(result.findings) == {"swapped, unloaded, got tokens instead of HTTP 404": 1}


def test_two_streams_that_are_mixed_up(world: World) -> None:
    result = outcome(faulty.MixesStreams(world), cases.mixed, 12)
    assert result.status == FAIL
    named = [found for found in result.findings if "in a request beside it, between its own" in found]
    assert len(named) >= len(result.findings) // 2  # tails of equal tokens have no owner
    assert outcome(faulty.MixesStreams(world), cases.alone).status == PASS


def test_neighbours_of_a_poisoned_adapter(world: World) -> None:
    result = outcome(faulty.SpoiledByPoison(world), cases.poisoned)
    wrong = {found.partition(" got ")[0] for found in result.findings}
    assert len(wrong) == len(world.models)


def test_answers_that_change_from_run_to_run(world: World) -> None:
    result = outcome(faulty.ChangesItsMind(world), cases.repeated)
    assert result.status == FAIL
    assert all(found.endswith("got other tokens or errors from run to run") for found in result.findings)


def test_streams_that_are_cut_behind_their_last_token(world: World) -> None:
    server = faulty.RightServer(world)
    server.ends_streams = False
    result = outcome(server, cases.mixed)
    assert result.status == FAIL
    assert any("the stream ended without [DONE]" in found for found in result.findings)


def test_a_request_that_gets_no_answer(world: World) -> None:
    class Drops(faulty.RightServer):
        def tokens(self, name: str, ids: Any, beside: Any) -> Any:
            return super().tokens(name, ids, beside)[:3] if name == "tenant-1" else super().tokens(name, ids, beside)

    result = outcome(Drops(world), cases.mixed)
    assert {found.partition(" got ")[2] for found in result.findings} == {"3 tokens of 8, right ones"}
