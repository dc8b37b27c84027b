"""The serving systems of Figure 11: right tokens from all of them, and the batches that their policies promise."""

from dataclasses import replace

import pytest
import torch
from tiny import TINY, tiny_world, values

from experiments.facts.systems import FIG11, SYSTEMS, entries, names_in
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import DType
from experiments.systems import bench as bench_module
from experiments.systems import check, hugging_face
from experiments.systems.bench import StreamBench, StreamConf
from experiments.systems.check import check_tokens
from experiments.systems.hugging_face import Decoding, GraphDecoding, SameProduct
from experiments.systems.serving import World, built
from experiments.systems.stream import Job
from experiments.systems.weights import Limits
from punica.engine.runner import ModelRunner

MEASURED = [entry.name for entry in entries() if entry.served_by]


@pytest.fixture(scope="module")
def world() -> World:
    return tiny_world()


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=str)
def half_world(request) -> World:
    model = TINY.model_copy(update={"dtype": DType(str(request.param).removeprefix("torch."))})
    return World(model, "cpu", Limits(max_batch_size=4, max_len=48), rank=8)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Ten requests for six adapters (two more than different weights): prompts of 1 to 23 tokens, 1 to 12 new ones."""
    words = torch.Generator().manual_seed(3)
    lengths, news, adapters = [1, 17, 5, 23, 2, 16, 9, 1, 3, 12], [7, 1, 12, 3, 2, 5, 9, 4, 6, 1], [1, 1, 2, 5, 5, 6]
    return [
        Job(tuple(torch.randint(256, (lengths[i],), generator=words).tolist()), news[i], adapters[i % 6])
        for i in range(10)
    ]


def alone(world, job, tokens, lora=True):
    """Logits of a job of Hugging Face alone, step by step."""
    with world.peft.adapter(job.adapter_id if lora else None):
        return world.peft.decoding([job.prompt], len(tokens)).forced(torch.tensor([tokens]))[0]


def reference_tokens(world, jobs, lora):
    tokens = []
    for job in jobs:
        with world.peft.adapter(job.adapter_id if lora else None):
            decoding = world.peft.decoding([job.prompt], job.new_tokens)
            tokens.append([decoding.step()[0] for _ in range(job.new_tokens)])
    return tokens


@pytest.mark.parametrize("lora", [True, False])
def test_one_forward_over_a_sequence_gives_the_logits_of_single_steps(lora, world, jobs):
    for job, tokens in zip(jobs, reference_tokens(world, jobs, lora), strict=True):
        logits = world.reference(job, tokens, lora)
        assert logits.argmax(dim=-1).tolist() == tokens
        torch.testing.assert_close(logits, alone(world, job, tokens, lora), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in MEASURED if SYSTEMS.get(name).exact])
def test_every_system_generates_what_hugging_face_generates_one_by_one(name, world, jobs):
    system = built(name, world)
    served = system.serve(jobs)
    assert served.tokens == reference_tokens(world, jobs, system.facts.lora)
    assert sum(step.live for step in served.steps) == 50
    assert sum(step.tokens for step in served.steps) == 50 + 89
    assert 0 < sum(step.seconds for step in served.steps) <= served.seconds
    again = system.serve(jobs)
    assert (again.tokens, len(again.steps)) == (served.tokens, len(served.steps))


def test_the_released_index_rule_gives_wrong_tokens_unless_there_is_one_adapter(world, jobs):
    system = built("punica_last_admitted", world)
    assert system.serve(jobs).tokens != reference_tokens(world, jobs, lora=True)
    check_tokens(system, jobs)  # which gives it a single adapter


@pytest.mark.parametrize("name", MEASURED)
def test_half_precision_agrees_at_every_position(name, half_world, jobs):
    agreement = check_tokens(built(name, half_world), jobs)
    assert 0.9 <= agreement.tokens <= 1.0
    assert 0 <= agreement.logit_error < 0.06
    assert agreement.positions == 50


@pytest.mark.parametrize(
    ("name", "ahead"),
    [(name, "punica" in name) for name in ("punica", "punica_static", "static_batching", "hf_peft", "hf_peft_mixed")],
)
def test_forced_tokens_are_taken_also_by_steps_that_are_sent_ahead(name, ahead, world, jobs, monkeypatch):
    """On a GPU the next step is under way before the host has seen the tokens of this one."""
    monkeypatch.setattr(ModelRunner, "works_ahead", ahead)
    jobs = [replace(job, new_tokens=job.new_tokens + 8) for job in jobs]
    system = built(name, world)
    forced = [[(5 * position + 1) % 256 for position in range(job.new_tokens)] for job in jobs]
    for job, tokens, logits in zip(jobs, forced, system.forced(jobs, forced), strict=True):
        torch.testing.assert_close(logits, world.reference(job, tokens, system.facts.lora), atol=1e-3, rtol=1e-3)


def spoilt(monkeypatch, system, spoil):
    right = system.forced

    def forced(jobs, tokens):
        logits = right(jobs, tokens)
        for number, rows in enumerate(logits):
            spoil(number, rows)
        return logits

    monkeypatch.setattr(system, "forced", forced)


def test_an_error_late_in_one_sequence_is_caught(half_world, world, jobs, monkeypatch):
    def late(number, rows):
        if number == 2:
            rows[-1] += 0.3 * torch.randn_like(rows[-1]) * rows[-1].norm() / 16

    for one in (half_world, world):
        system = built("punica", one)
        spoilt(monkeypatch, system, late)
        with pytest.raises(CheckFailed, match=r"request 2 \(adapter 2"):
            check_tokens(system, jobs)


@pytest.mark.parametrize(("wrong", "factor", "passes"), [(4, 1.9, True), (5, 1.9, False), (4, 2.1, False)])
def test_one_position_in_a_hundred_may_be_off_within_twice_the_tolerance(
    wrong, factor, passes, half_world, jobs, monkeypatch
):
    limit = check.TOLERANCE[half_world.dtype]
    errors = iter([factor * limit] * wrong + [0.0] * 1000)
    long = [replace(job, new_tokens=20) for job in jobs] * 2
    system = built("punica", half_world)
    expected = [torch.ones(20, 256) for _ in long]
    monkeypatch.setattr(system, "forced", lambda jobs, tokens: expected)
    monkeypatch.setattr(half_world, "reference", lambda job, tokens, lora: expected[0][: len(tokens)])
    monkeypatch.setattr(check, "difference", lambda a, b: next(errors) if a.dim() == 1 else 2.0)
    if passes:
        assert check_tokens(system, long).logit_error == pytest.approx(factor * limit)
    else:
        with pytest.raises(CheckFailed, match="differ from Hugging Face's"):
            check_tokens(system, long)


def test_other_tokens_are_refused_also_where_logits_are_close(half_world, jobs, monkeypatch):
    system, flat, other = built("punica", half_world), torch.ones(20, 256), torch.ones(20, 256)
    other[:, 1] += 1e-3  # another best token, far within the tolerance
    monkeypatch.setattr(system, "forced", lambda jobs, tokens: [other] * len(jobs))
    monkeypatch.setattr(half_world, "reference", lambda job, tokens, lora: flat[: len(tokens)] if lora else -flat[:1])
    with pytest.raises(CheckFailed, match=r"chooses its token at 0\.000"):
        check_tokens(system, [replace(job, new_tokens=20) for job in jobs])


def test_adapters_that_change_nothing_are_refused(jobs):
    world = World(TINY, "cpu", Limits(max_batch_size=4, max_len=48), rank=8, alpha=1e-9)
    with pytest.raises(CheckFailed, match="change no logits"):
        check_tokens(built("punica", world), jobs[:3])


@pytest.mark.parametrize("name", ["punica", "static_batching", "hf_peft"])
def test_whole_sequences_are_compared_once_per_system_on_our_engine(name, world, monkeypatch):
    asked, right = [], bench_module.check_tokens
    monkeypatch.setattr(bench_module, "check_tokens", lambda system, jobs: asked.append(jobs) or right(system, jobs))
    bench = StreamBench(world, StreamConf("released", 8, 48, 1, 2, 8, 8), (3, 2), whole=(2, 48))
    positions = [bench._agreement(name, workload).positions for workload in ("Skewed", "Distinct")]
    whole = [jobs for jobs in asked if max(job.new_tokens for job in jobs) > 2]
    if name == "hf_peft":
        assert (whole, positions[0]) == ([], 6)
        return
    (jobs,) = whole
    assert [job.new_tokens for job in jobs] == [job.new_tokens for job in bench.jobs("Distinct")[:2]]
    assert len({job.adapter_id for job in jobs}) == (2 if name == "punica" else 1)
    assert positions[0] == 6 + sum(job.new_tokens for job in jobs)


def test_on_a_gpu_graphs_have_our_product_and_mixed_batches_torchs(monkeypatch):
    """A graph costs no time of the host, for which torch's product takes less; factors of adapters keep torch's."""
    backend = World(TINY, "cpu", Limits(max_batch_size=4, max_len=48), rank=8).peft
    linear = [(name, one) for name, one in backend.model.named_modules() if isinstance(one, torch.nn.Linear)]
    layers, factors = ([one for name, one in linear if (".lora_" in name) == of_lora] for of_lora in (False, True))
    before = {type(one) for one in factors}
    monkeypatch.setattr(backend.weights, "device", "cuda")
    for kind in ("Decoding", "GraphDecoding"):
        monkeypatch.setattr(hugging_face, kind, lambda *batch: None)
    for rows, product in ((None, SameProduct), (["place0"], torch.nn.Linear), (None, SameProduct)):
        backend.decoding([[1]], 1, rows)
        assert {type(layer) for layer in layers} == {product}
    assert {type(one) for one in factors} == before


def test_a_merged_adapter_leaves_every_bit_of_the_weights_as_it_was(half_world):
    def changed():
        return {name for name, one in half_world.exported().items() if not torch.equal(one, before[name])}

    before = {name: one.clone() for name, one in half_world.exported().items()}
    with half_world.peft.merged(2):
        assert len(changed()) == 7 * 2
    with pytest.raises(RuntimeError, match="stopped"), half_world.peft.merged(3):
        raise RuntimeError("stopped")
    assert not changed()


@pytest.mark.parametrize("done", [0, 9])
@pytest.mark.parametrize("rows", [slice(1), slice(3, 7)], ids=["alone", "padded"])
def test_graphs_of_a_fixed_length_choose_what_the_host_would_launch(rows, done, world, jobs, monkeypatch):
    monkeypatch.setattr(hugging_face, "BLOCK", 8)
    prompts, backend = [job.prompt for job in jobs[rows]], world.peft
    batch = backend.model, prompts, 30, backend._room, "cpu", {}, done
    with backend.merged(2):  # a capture runs the step once
        plain, graphs = Decoding(*batch), GraphDecoding(lambda step: step() is None or step, *batch)
        expected = [plain.step() for _ in range(done, 30)]
        assert [graphs.step() for _ in range(done, 30)] == expected
    first, end = (max(map(len, prompts)) + steps for steps in (max(done, 1), 30))
    assert list(graphs._replays) == [*range(-(-first // 8) * 8, end - 1, 8), min(-(-(end - 1) // 8) * 8, end)]


def test_weights_exist_once_and_peft_computes_with_the_adapter_in_its_place(world):
    shared = {tensor.untyped_storage().data_ptr() for tensor in world.exported().values()}
    engine, backend = built("continuous_batching", world).engine, world.peft
    assert {parameter.untyped_storage().data_ptr() for parameter in engine.runner.model.parameters()} == shared
    base = [tensor for name, tensor in backend.model.named_parameters() if "lora_" not in name]
    assert {tensor.untyped_storage().data_ptr() for tensor in base} == shared
    first, second = backend.places([3, 6])
    assert backend.places([3, 6, 3]) == [first, second, first]
    for adapter_id in (1, 2, 5):
        (place,) = backend.places([adapter_id])
        held = {one.data_ptr() for name, one in backend.model.named_parameters() if f".{place}." in name}
        assert held == {tensor.data_ptr() for tensor in world.adapter_tensors(adapter_id).values()}


HALF = TINY.model_copy(update={"hidden_size": 256, "intermediate_size": 688, "vocab_size": 512, "dtype": DType.float16})
STREAM = StreamConf("released", 16, 96, draws=2, pieces=2, steps=16, slow_steps=8)


@pytest.fixture(scope="module")
def gpu_bench() -> StreamBench:
    return StreamBench(World(HALF, "cuda", Limits(4, 96), rank=8), STREAM, (3, 6))


@pytest.mark.gpu
@pytest.mark.parametrize("workload", ["Distinct", "Skewed", "Identical"])
@pytest.mark.parametrize("name", names_in(FIG11))
def test_every_system_is_checked_and_timed_with_its_graphs_captured_before(gpu_bench, name, workload):
    for draw in range(2):
        found = values(gpu_bench.measure(name, workload, draw))
        assert found["tokens_per_step"] == pytest.approx(found["stream_tokens_per_step"], rel=0.03)
        assert found["throughput"] > 0
        assert found["token_agreement"] >= 0.9
        assert found["logit_error"] < 0.02
    system = gpu_bench.system(name)
    if hasattr(system, "engine"):
        assert system._graphs() > 0
        assert system.engine.runner.attention.cache is gpu_bench.world.kv_cache


@pytest.mark.gpu
def test_a_whole_stream_is_served_without_capturing_in_between(gpu_bench, monkeypatch):
    monkeypatch.setattr("experiments.systems.bench.WHOLE_DRAWS", STREAM.draws)
    found = values(gpu_bench.whole("punica", "Distinct"))
    assert found["stream_throughput"] > 0
