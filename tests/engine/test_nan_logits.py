"""Logits that hold NaN fail their own request only."""

from pathlib import Path

import pytest
import torch

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import Engine, EngineConfig, Request
from punica.engine import runner as runner_module
from punica.scheduling import SamplingParams
from tests.world import are_served, damage, finish

CHOICES = {
    "greedy": SamplingParams(6),
    "sampled": SamplingParams(6, temperature=1.0, top_k=20, logprobs=2),
    "penalised": SamplingParams(6, repetition_penalty=1.3),
}


@pytest.fixture
def huge(backbone, tmp_path: Path) -> LoRARequest:
    """Finite weights whose products overflow: no check of the file can tell."""
    folder = write_random_adapter(tmp_path / "huge", backbone.config, 4, 9)
    damage(folder, 1e30)
    return LoRARequest("huge", 9, str(folder))


def failures(engine: Engine) -> dict[str, str | None]:
    """Step until all have ended; return the errors in the outputs of steps."""
    return {name: result.error for name, result in finish(engine).items() if result.error is not None}


@pytest.mark.parametrize(
    ("rule", "choice"), [("fcfs", "greedy"), ("fcfs", "sampled"), ("fcfs_many", "penalised"), ("static", "sampled")]
)
def test_an_adapter_that_overflows_fails_its_own_requests(backbone, huge, ahead, rule, choice) -> None:
    """In a cache so small that its blocks go to others at once."""
    engine = backbone.engine(rule, num_blocks=12, block_size=4, max_batch_size=4)
    good, bad = [], []
    for i in range(8):
        prompt = [1 + i, 2, 3, 4, 5]
        bad.append(engine.add_request(Request(f"bad{i}", prompt, CHOICES[choice], huge)))
        good.append(backbone.ask(engine, f"good{i}", prompt, i % 4, 7))
    failed = failures(engine)
    assert failed.keys() == {state.request_id for state in bad}
    assert all(state.output_token_ids == [] and state.logprobs == [] for state in bad)
    assert all("NaN" in text and "adapter 'huge' (id 9)" in text for text in failed.values())
    assert are_served(backbone, *good)


@pytest.mark.parametrize("rule", ["fcfs", "static_mixed"])
def test_nan_that_comes_later_leaves_what_came_before(backbone, monkeypatch, ahead, rule) -> None:
    engine, choose = backbone.engine(rule), runner_module.choose_tokens

    def damaged(logits: torch.Tensor, requests, best):
        rows = [i for i, one in enumerate(requests) if (one.request_id, one.num_generated) in {("bad", 3), ("idle", 1)}]
        logits[rows] = float("nan")
        return choose(logits, requests, None if rows else best)

    monkeypatch.setattr(runner_module, "choose_tokens", damaged)
    bad = backbone.ask(engine, "bad", [7, 8], 0, SamplingParams(9, logprobs=1))
    idle = backbone.ask(engine, "idle", [3], 0, 1)  # in a batch that leaves together it stays for nothing
    good = backbone.ask(engine, "good", [5, 6], 2, 9)
    failed = failures(engine)
    assert list(failed) == ["bad"]
    assert "without an adapter" in failed["bad"]
    assert bad.output_token_ids == backbone.generate_merged((7, 8), 0, 3)
    assert len(bad.logprobs) == 3
    assert are_served(backbone, idle, good)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("graphs", [False, True])
def test_an_adapter_that_overflows_on_a_gpu(backbone, huge, graphs, choice) -> None:
    """In float32, in a cache whose blocks hold its NaN when others get them."""
    config = EngineConfig(max_batch_size=4, max_model_len=64, num_blocks=24, block_size=16, cuda_graphs=graphs)
    engine = Engine(backbone.model("cuda", torch.float32), config.lora_config(16), config, warm_up=False)
    states = []
    for i in range(12):
        engine.add_request(Request(f"bad{i}", [1 + i, 2, 3], CHOICES[choice], huge))
        states.append(backbone.ask(engine, f"good{i}", [1 + i, 2, 3], i % 4, 20))
    assert failures(engine).keys() == {f"bad{i}" for i in range(12)}
    assert are_served(backbone, *states)
