"""The conformance test against `punica.serve`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from experiments.commands.conformance import Options, results_of, table
from experiments.conformance import cases
from experiments.conformance.cases import FAIL, PASS, Result
from experiments.conformance.expected import World
from experiments.conformance.weights import ADAPTERS, CHECKPOINT
from punica.adapters import LoRARequest
from punica.engine import Engine
from punica.metadata.rows import RowGroups
from punica.serve.app import Settings, make_app
from tests.serve.world import served


def ours(world: World, batches: list[int], **sizes: Any) -> list[Result]:
    """Results of all cases against our server with fewer slots than adapters."""
    adapters = [LoRARequest(t.name, number, str(world.adapter(t.name))) for number, t in enumerate(world.tenants, 1)]
    engine = Engine.from_pretrained(world.folder / CHECKPOINT, adapters, device="cpu", max_lora_rank=16, **sizes)
    app = make_app(engine, Settings("base", adapters, roots=[(world.folder / ADAPTERS).resolve()]))

    with served(app) as url:
        return asyncio.run(results_of(Options(url=url, batches=batches, timeout=600), world))


def test_three_cases_pass_on_our_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"mixed": cases.cases([])["mixed batch"], "prefix": cases.shared_prefix, "poisoned": cases.poisoned}
    monkeypatch.setattr(cases, "cases", lambda batches: chosen)
    results = ours(world, [], max_batch_size=32, max_loras=3, max_model_len=256, dtype="float32")
    assert {result.status for result in results} == {PASS}, table(results)
    assert not any(result.protocol for result in results)
    assert min(result.answers for result in results[1:]) >= 12


@pytest.mark.slow
def test_a_fast_path_of_our_engine_with_slot_zero_for_all_is_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RowGroups.of_runs.__func__

    def of_runs(cls: type[RowGroups], slots: Sequence[int], lengths: Sequence[int]) -> RowGroups:
        return right(cls, [min(slot, 0) for slot in slots] if sum(lengths) > 24 else slots, lengths)

    monkeypatch.setattr(RowGroups, "of_runs", classmethod(of_runs))
    chosen = {"alone": cases.cases([])["each alone"], "large": cases.cases([48])["batch of 48"]}
    monkeypatch.setattr(cases, "cases", lambda batches: chosen)
    _, alone, large = ours(world, [], max_batch_size=48, max_loras=5, max_model_len=256, dtype="float32")
    assert alone.status == PASS, table([alone])
    assert large.status == FAIL
    assert any(found.endswith("got the tokens of tenant-0 (rank 1, all)") for found in large.findings), table([large])
    assert not any(found.startswith("the base model") for found in large.findings)


@pytest.mark.slow
def test_every_case_passes_on_our_server_in_bfloat16_with_two_slots(world: World) -> None:
    results = ours(world, [64, 256], max_batch_size=256, max_loras=2, max_model_len=256, dtype="bfloat16")
    assert {result.status for result in results} == {PASS}, table(results)
    assert not any(result.protocol for result in results)
    assert min(result.answers for result in results) >= 6
