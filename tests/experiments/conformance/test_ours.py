"""The conformance test against `punica.serve`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from experiments.conformance import cases
from experiments.conformance.cases import Run, run_cases
from experiments.conformance.client import Server
from experiments.conformance.expected import World
from experiments.conformance.verdict import FAIL, PASS, Result, protocol, table
from experiments.conformance.weights import ADAPTERS, CHECKPOINT
from punica.adapters import LoRARequest
from punica.engine import Engine
from punica.metadata.rows import RowGroups
from punica.serve.app import Settings, make_app
from tests.serve.world import served


def results_of(world: World, batches: list[int], **sizes: Any) -> list[Result]:
    """Results of all cases against our server with fewer slots than adapters."""
    adapters = [LoRARequest(t.name, number, str(world.adapter(t.name))) for number, t in enumerate(world.tenants, 1)]
    engine = Engine.from_pretrained(world.folder / CHECKPOINT, adapters, device="cpu", max_lora_rank=16, **sizes)
    app = make_app(engine, Settings("base", adapters, roots=[(world.folder / ADAPTERS).resolve()]))

    async def tried(url: str) -> list[Result]:
        server = Server(url, timeout=600)
        try:
            absent = await server.check(world)
            assert server.takes_ids
            return await run_cases(Run(server, world, absent), batches, lambda result: None)
        finally:
            await server.close()

    with served(app) as url:
        return asyncio.run(tried(url))


def test_three_cases_pass_on_our_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"mixed": cases.mixed, "prefix": cases.shared_prefix, "poisoned": cases.poisoned}
    monkeypatch.setattr(cases, "cases", lambda batches: chosen)
    results = results_of(world, [], max_batch_size=32, max_loras=3, max_model_len=256, dtype="float32")
    assert {result.status for result in results} == {PASS}, table(results)
    assert not protocol(results)
    assert min(result.answers for result in results[1:]) >= 12


@pytest.mark.slow
def test_a_fast_path_of_our_engine_with_slot_zero_for_all_is_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RowGroups.of_runs.__func__

    def of_runs(cls: type[RowGroups], slots: Sequence[int], lengths: Sequence[int]) -> RowGroups:
        return right(cls, [min(slot, 0) for slot in slots] if sum(lengths) > 24 else slots, lengths)

    monkeypatch.setattr(RowGroups, "of_runs", classmethod(of_runs))
    monkeypatch.setattr(cases, "cases", lambda batches: {"alone": cases.alone, "large": cases.batch(48)})
    _, alone, large = results_of(world, [], max_batch_size=48, max_loras=5, max_model_len=256, dtype="float32")
    assert alone.status == PASS, table([alone])
    assert large.status == FAIL
    assert any(found.endswith("got the tokens of tenant-0 (rank 1, all)") for found in large.findings), table([large])
    assert not any(found.startswith("the base model") for found in large.findings)


@pytest.mark.slow
def test_every_case_passes_on_our_server_in_bfloat16_with_two_slots(world: World) -> None:
    results = results_of(world, [64, 256], max_batch_size=256, max_loras=2, max_model_len=256, dtype="bfloat16")
    assert {result.status for result in results} == {PASS}, table(results)
    assert not protocol(results)
    assert min(result.answers for result in results) >= 6
