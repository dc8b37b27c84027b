"""The serving systems of Figure 11: the same tokens from all of them, and the batches that their policies promise."""

from dataclasses import replace

import pytest
import torch

from experiments.facts.systems import SYSTEMS, entries
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import DType, ModelConf
from experiments.systems import bench as bench_module
from experiments.systems import check
from experiments.systems.bench import StreamBench, StreamConf
from experiments.systems.check import check_tokens
from experiments.systems.hf_backend import Generated, SameProduct, linear_layers
from experiments.systems.hf_decoding import Decoding, GraphDecoding
from experiments.systems.serving import built
from experiments.systems.stream import Job, paper_stream, shortened, timeline_of
from experiments.systems.weights import Limits
from experiments.systems.world import World
from experiments.workload import PAPER_WORKLOADS, released_lengths
from punica.engine import ADMISSION_RULES
from punica.engine.runner import ModelRunner

MEASURED = [entry.name for entry in entries() if entry.served_by]
EXACT = [name for name in MEASURED if SYSTEMS.get(name).exact]
TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> World:
    return World(TINY, "cpu", Limits(max_batch_size=4, max_len=48), rank=8)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Ten requests for six adapters (two more than different weights): prompts of 1 to 23 tokens, 1 to 12 new ones."""
    words = torch.Generator().manual_seed(3)
    lengths, news, adapters = [1, 17, 5, 23, 2, 16, 9, 1, 3, 12], [7, 1, 12, 3, 2, 5, 9, 4, 6, 1], [1, 1, 2, 5, 5, 6]
    return [
        Job(tuple(torch.randint(256, (lengths[i],), generator=words).tolist()), news[i], adapters[i % 6])
        for i in range(10)
    ]


def reference_tokens(world, jobs, lora):
    """Of each job alone, generated step by step."""
    tokens = []
    for job in jobs:
        with world.peft.adapter(job.adapter_id if lora else None):
            tokens += world.peft.generate([job.prompt], job.new_tokens).tokens
    return tokens


def test_the_reference_is_computed_once_for_systems_that_agree_and_again_for_other_tokens(jobs, monkeypatch):
    fresh, asked = World(TINY, "cpu", Limits(max_batch_size=4, max_len=48), rank=8), []

    def reference(job, tokens, lora):
        asked.append((job.adapter_id, tuple(tokens), lora))
        return torch.eye(256)[list(tokens)]

    monkeypatch.setattr(fresh, "reference", reference)
    first, other = jobs[0], replace(jobs[0], adapter_id=2)
    for job, tokens in [(first, [3, 4]), (first, [3, 4]), (first, [3, 5]), (other, [3, 4])]:
        assert check.chosen(fresh, job, tokens, lora=True) == tokens
    for job in (first, other):  # without LoRA the adapter does not matter
        assert check.chosen(fresh, job, [3, 4], lora=False) == [3, 4]
    assert asked == [(1, (3, 4), True), (1, (3, 5), True), (2, (3, 4), True), (1, (3, 4), False)]


@pytest.mark.parametrize("lora", [True, False])
def test_one_forward_over_a_sequence_chooses_what_is_generated_step_by_step(lora, world, jobs):
    for job, tokens in zip(jobs, reference_tokens(world, jobs, lora), strict=True):
        assert check.chosen(world, job, tokens, lora) == tokens
        with world.peft.adapter(job.adapter_id if lora else None):
            stepwise = world.peft.forced([job.prompt], [tokens])[0]
        torch.testing.assert_close(world.reference(job, tokens, lora), stepwise, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", EXACT)
def test_every_system_generates_what_hugging_face_generates_one_by_one(name, world, jobs):
    system = built(name, world)
    served = system.serve(jobs)
    assert served.tokens == reference_tokens(world, jobs, system.facts.lora)
    assert served.new_tokens == sum(job.new_tokens for job in jobs) == 50
    assert served.prompt_tokens == 89
    assert served.rows - served.idle_rows == served.new_tokens
    assert 0 < sum(served.phases.values()) <= served.seconds


def test_a_system_serves_again_as_it_served_before(world, jobs):
    system = built("punica", world)
    first = system.serve(jobs)
    again = system.serve(jobs)
    assert (again.tokens, again.steps) == (first.tokens, first.steps)


@pytest.mark.parametrize(
    ("name", "steps", "idle"),
    [
        # static, one adapter: [1 1] [2] [5 5] [6] [1 1] [2] [5], each as long as its longest
        ("static_batching", 7 + 12 + 3 + 5 + 9 + 6 + 1, (7 - 1) + (3 - 2) + (9 - 4)),
        ("hf_peft", 7 + 12 + 3 + 5 + 9 + 6 + 1, (7 - 1) + (3 - 2) + (9 - 4)),
        # static, any adapter: batches of four, four and two
        ("punica_static", 12 + 9 + 6, 4 * 12 - 23 + 4 * 9 - 20 + 2 * 6 - 7),
        ("hf_peft_mixed", 12 + 9 + 6, 4 * 12 - 23 + 4 * 9 - 20 + 2 * 6 - 7),
        ("punica", 17, 0),
        ("continuous_batching", 43, 0),
    ],
)
def test_batches_are_those_of_the_policy(name, steps, idle, world, jobs):
    served = built(name, world).serve(jobs)
    assert timeline_of(jobs, SYSTEMS.get(name).admission, 4).steps == steps
    assert (served.steps, served.idle_rows) == (steps, idle)


def test_the_released_index_rule_gives_wrong_tokens_unless_there_is_one_adapter(world, jobs):
    system = built("punica_last_admitted", world)
    assert system.serve(jobs).tokens != reference_tokens(world, jobs, lora=True)
    check_tokens(system, jobs)  # which gives it a single adapter


@pytest.mark.parametrize("name", ["punica", "hf_peft_mixed", "static_batching"])
def test_the_check_catches_a_wrong_token(name, world, jobs, monkeypatch):
    system = built(name, world)
    served = system.serve(jobs[:3])
    spoilt = [list(tokens) for tokens in served.tokens]
    spoilt[1][-1] ^= 1
    monkeypatch.setattr(system, "serve", lambda _: replace(served, tokens=spoilt))
    with pytest.raises(CheckFailed, match=r"request 1 \(adapter 1, 17 prompt tokens\).*1 of 3"):
        check_tokens(system, jobs[:3])


def test_the_check_refuses_adapters_that_change_nothing(jobs):
    world = World(TINY, "cpu", Limits(max_batch_size=4, max_len=48), rank=8, alpha=1e-9)
    with pytest.raises(CheckFailed, match="change no token"):
        check_tokens(built("punica", world), jobs[:3])


HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module", params=HALF, ids=str)
def half_world(request) -> World:
    model = TINY.model_copy(update=dict(dtype=DType(str(request.param).removeprefix("torch."))))
    return World(model, "cpu", Limits(max_batch_size=4, max_len=48), rank=8)


@pytest.mark.parametrize("name", MEASURED)
def test_half_precision_is_compared_at_every_position_of_whole_sequences(name, half_world, jobs):
    system = built(name, half_world)
    found = check_tokens(system, jobs)
    assert 0.9 <= found.tokens <= 1.0
    assert 0 <= found.logit_error < 0.06
    # the reference itself, batched, and a backbone with its products may have its bits
    assert found.logit_error > 0 or name.startswith("hf_") or not system.facts.lora


def test_forced_tokens_are_taken_instead_of_chosen_ones(world, jobs):
    forced = [[(position + 3) % 256 for position in range(job.new_tokens)] for job in jobs]
    for name in ("punica", "punica_static", "hf_peft", "hf_peft_mixed"):
        system = built(name, world)
        found = system.forced(jobs, forced)
        for job, tokens, logits in zip(jobs, forced, found, strict=True):
            assert logits.shape == (job.new_tokens, 256)
            with world.peft.adapter(job.adapter_id):
                alone = world.peft.forced([job.prompt], [tokens])[0]
            torch.testing.assert_close(logits, alone, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["punica", "punica_static", "static_batching"])
def test_forced_tokens_reach_steps_that_are_sent_ahead(name, world, jobs, monkeypatch):
    """As on a GPU, where the next step is under way before the host has seen the tokens of this one."""
    monkeypatch.setattr(ModelRunner, "works_ahead", True)
    jobs = [replace(job, new_tokens=job.new_tokens + 8) for job in jobs]
    system, stage, sent = built(name, world), ModelRunner.stage, []
    monkeypatch.setattr(ModelRunner, "stage", lambda *of: sent.extend(of[2:]) or stage(*of))
    forced = [[(5 * position + 1) % 256 for position in range(job.new_tokens)] for job in jobs]
    found = system.forced(jobs, forced)
    assert sum(before is not None for before in sent) > 15
    for job, tokens, logits in zip(jobs, forced, found, strict=True):
        with world.peft.adapter(job.adapter_id if system.facts.lora else None):
            alone = world.peft.forced([job.prompt], [tokens])[0]
        torch.testing.assert_close(logits, alone, atol=1e-3, rtol=1e-3)


def test_a_half_precision_error_late_in_one_sequence_is_caught(half_world, jobs, monkeypatch):
    system = built("punica", half_world)
    right = system.forced

    def late_error(jobs, tokens):
        logits = right(jobs, tokens)
        logits[2][-1] += 0.3 * torch.randn_like(logits[2][-1]) * logits[2][-1].norm() / 16
        return logits

    monkeypatch.setattr(system, "forced", late_error)
    with pytest.raises(CheckFailed, match=r"differ from Hugging Face's by .*request 2 \(adapter 2"):
        check_tokens(system, jobs)


def test_few_positions_may_lie_beyond_the_tolerance_within_twice_of_it(half_world, jobs, monkeypatch):
    """Thousands of positions have a few of them; neither many nor far ones."""
    limit = check.TOLERANCE[half_world.dtype]
    few = torch.zeros(400)
    few[:4] = 1.9 * limit
    for given, message in ((few, None), (torch.cat((few, few[:1])), r"0\.98\d+ of"), (few * 1.1, "up to")):
        monkeypatch.setattr(check, "_errors", lambda ours, theirs, given=given: given)
        if message is None:
            assert check_tokens(built("punica", half_world), jobs).logit_error == pytest.approx(1.9 * limit)
        else:
            with pytest.raises(CheckFailed, match=message):
                check_tokens(built("punica", half_world), jobs)


def test_half_precision_that_often_chooses_other_tokens_is_caught(half_world, jobs, monkeypatch):
    system = built("punica", half_world)
    right = system.forced

    def close_calls(jobs, tokens):  # within the error that logits may have, the two best change places
        found = right(jobs, tokens)
        for logits in found:
            best = logits.topk(2, dim=-1).indices
            logits[torch.arange(len(logits)), best[:, 1]] = logits.max(dim=-1).values + 1e-3
        return found

    monkeypatch.setattr(system, "forced", close_calls)
    monkeypatch.setitem(check.TOLERANCE, half_world.dtype, 1.0)
    monkeypatch.setattr(check, "difference", lambda a, b: 0.5 if a.dim() == 1 else 2.0)
    with pytest.raises(CheckFailed, match=r"chooses Hugging Face's token at 0\.0"):
        check_tokens(system, jobs)


def test_transformers_and_peft_multiply_as_our_engine_does(world):
    kinds = {type(module) for module in world.peft.model.modules() if isinstance(module, torch.nn.Linear)}
    assert kinds == {SameProduct}


@pytest.mark.parametrize("alone", [SameProduct, torch.nn.Linear])
@pytest.mark.parametrize("full", [SameProduct, torch.nn.Linear])
@pytest.mark.parametrize("mixed", [SameProduct, torch.nn.Linear])
def test_on_a_gpu_hugging_face_has_the_product_with_which_it_decodes_faster(alone, full, mixed, monkeypatch, capsys):
    backend = World(TINY, "cpu", Limits(max_batch_size=4, max_len=48), rank=8).peft
    backend.load("place0", 1)
    monkeypatch.setattr(backend.weights, "device", "cuda")  # where factors of adapters stay torch's
    for kind in ("Decoding", "GraphDecoding"):
        monkeypatch.setattr(f"experiments.systems.hf_backend.{kind}", lambda *_: None)
    layers, made = linear_layers(backend.model, "cuda"), []
    assert len(layers) == 7 * 2 + 1
    assert not {id(layer) for layer in layers} & {
        id(module) for name, module in backend.model.named_modules() if "lora_" in name
    }

    def product(prompts, rows=None):
        backend.decoding(prompts, 1, rows)
        (kind,) = {type(layer) for layer in layers}
        return kind

    def generate(prompts, new_tokens, rows=None):
        kind = product(prompts, rows)
        made.append((len(prompts), rows is not None, kind))
        faster = mixed if rows else alone if len(prompts) == 1 else full
        return Generated([], 0.0, 0.005 if kind is faster else 0.010)

    monkeypatch.setattr(backend, "generate", generate)
    backend._find_faster_products()
    both = 2 * (SameProduct, torch.nn.Linear)
    assert made == [(*batch, kind) for batch in ((1, False), (4, False), (4, True)) for kind in both]
    assert (product([[1]]), product([[1], [2]])) == (alone, full)
    assert product([[1], [2]], ["place0", "place0"]) is mixed
    ours, torchs = (1.0, 2.0) if full is SameProduct else (2.0, 1.0)
    said = f"a batch of one adapter: {ours} ms per step with our product, {torchs} with torch's"
    assert said in capsys.readouterr().err


def test_a_merged_adapter_leaves_every_bit_of_the_weights_as_it_was(half_world, jobs):
    backend, before = half_world.peft, {name: one.clone() for name, one in half_world.exported().items()}
    with backend.merged(2):
        changed = {name for name, one in half_world.exported().items() if not torch.equal(one, before[name])}
        merged = backend.generate([jobs[0].prompt], 6).tokens
    assert len(changed) == 7 * 2
    assert all(torch.equal(one, before[name]) for name, one in half_world.exported().items())
    with pytest.raises(RuntimeError, match="stopped"), backend.merged(3):
        raise RuntimeError("stopped")
    assert all(torch.equal(one, before[name]) for name, one in half_world.exported().items())
    with backend.merged(2):
        assert backend.generate([jobs[0].prompt], 6).tokens == merged


def captured(step):
    """As a graph is made: the step runs once, and is replayed."""
    step()
    return step


@pytest.mark.parametrize("done", [0, 9])
@pytest.mark.parametrize("rows", [slice(1), slice(3, 7)], ids=["alone", "padded"])
def test_graphs_of_a_fixed_length_choose_what_the_host_would_launch(rows, done, world, jobs, monkeypatch):
    monkeypatch.setattr("experiments.systems.hf_decoding.BLOCK", 8)
    prompts, backend = [job.prompt for job in jobs[rows]], world.peft
    batch = backend.model, prompts, 30, backend._room, "cpu", {}, done
    with backend.merged(2):
        plain, graphs = Decoding(*batch), GraphDecoding(captured, *batch)
        expected = [plain.step() for _ in range(done, 30)]
        assert [graphs.step() for _ in range(done, 30)] == expected
    first, end = (max(map(len, prompts)) + steps for steps in (max(done, 1), 30))
    assert list(graphs._replays) == [*range(-(-first // 8) * 8, end - 1, 8), min(-(-(end - 1) // 8) * 8, end)]


def test_peft_computes_with_the_weights_of_the_adapter_in_its_place(world):
    backend = world.peft
    first, second = backend.places([3, 6])
    assert backend.places([3, 6, 3]) == [first, second, first]
    for adapter_id in (1, 2, 5):
        (place,) = backend.places([adapter_id])
        held = {name: one for name, one in backend.model.named_parameters() if f".{place}." in name}
        wanted = world.adapter_tensors(adapter_id)
        assert {name.replace(f".{place}", ""): one.data_ptr() for name, one in held.items()} == {
            name: tensor.data_ptr() for name, tensor in wanted.items()
        }


def test_weights_exist_once(world):
    shared = {tensor.untyped_storage().data_ptr() for tensor in world.exported().values()}
    engine = built("continuous_batching", world).engine
    assert {parameter.untyped_storage().data_ptr() for parameter in engine.runner.model.parameters()} == shared
    hugging_face = dict(world.peft.model.named_parameters())
    base = [tensor for name, tensor in hugging_face.items() if "lora_" not in name]
    assert {tensor.untyped_storage().data_ptr() for tensor in base} == shared


@pytest.mark.parametrize("workload", PAPER_WORKLOADS)
def test_the_stream_is_the_released_one(workload):
    jobs, lengths = paper_stream(workload, 40, 2048, 32000), released_lengths(40)
    assert [len(job.prompt) for job in jobs] == lengths.prompt.tolist()
    assert [job.new_tokens for job in jobs] == lengths.output.tolist()
    assert [job.prompt for job in jobs] == [job.prompt for job in paper_stream("Distinct", 40, 2048, 32000)]
    assert (
        len({job.adapter_id for job in jobs}) == {"Distinct": 40, "Uniform": 7, "Skewed": 8, "Identical": 1}[workload]
    )


def test_the_stated_stream_has_101_tokens_per_request():
    stated = paper_stream("Skewed", 40, 2048, 32000, "stated")
    assert sum(job.new_tokens for job in stated) == 40 * 101
    released = paper_stream("Skewed", 40, 2048, 32000)
    assert [(job.prompt, job.adapter_id) for job in stated] == [(job.prompt, job.adapter_id) for job in released]


def test_every_system_follows_an_admission_rule_that_can_be_replayed():
    for rule in {entry.admission for entry in entries()}:
        assert rule in ADMISSION_RULES.names()
        assert timeline_of(shortened(paper_stream("Skewed", 5, 32, 256), 5, 3), rule, 4).steps >= 3


@pytest.mark.parametrize("name", ["punica", "static_batching", "hf_peft"])
def test_whole_sequences_are_compared_once_per_system_on_our_engine(name, world, monkeypatch):
    asked, right = [], bench_module.check_tokens
    monkeypatch.setattr(bench_module, "check_tokens", lambda system, jobs: asked.append(jobs) or right(system, jobs))
    bench = StreamBench(world, StreamConf("released", 8, 48, 1, 2, 8, 8), 3, 2, whole=(2, 48))
    found = [bench._agreement(name, workload) for workload in ("Skewed", "Distinct")]
    whole = [jobs for jobs in asked if max(job.new_tokens for job in jobs) > 2]
    if name == "hf_peft":
        assert (whole, found[0].positions) == ([], 6)
        return
    (jobs,) = whole
    assert [job.new_tokens for job in jobs] == [job.new_tokens for job in bench.jobs("Distinct")[:2]]
    assert len({job.adapter_id for job in jobs}) == (2 if name == "punica" else 1)
    assert found[0].positions == 6 + sum(job.new_tokens for job in jobs)


def test_unknown_systems_are_refused_by_name():
    with pytest.raises(ValueError, match=r"serving system 'vllm'.*continuous_batching"):
        SYSTEMS.get("vllm")
