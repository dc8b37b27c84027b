"""vLLM beside ours: steps by subtraction, both engines through one protocol, wrong tokens give no rows.

vLLM itself is a fake here, of the calls that the worker makes: these tests say nothing about its speed or tokens.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from fakes import composed

from experiments.harness.catalogue import experiments
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY, ConfigError, DType, ModelConf
from experiments.harness.settings import settle
from experiments.harness.source import Place, Reach, tree_of
from experiments.measure.records import read_rows
from experiments.plots.frames import measured_frame, rows_of_repeats
from experiments.plots.today import draw_today, gains
from experiments.today import bench as bench_module
from experiments.today import folders, peers
from experiments.today.bench import TodayBench, common, first_tokens, ids, stream_lengths
from experiments.today.measure import DECODE, REGISTRATION, STREAM, TOKENS, Measurement
from experiments.today.worker_punica import Punica

TODAY = next(iter(experiments(["ext_today"])))
TINY = ModelConf(
    name="llama-tiny", paper_name="7B", hidden_size=64, intermediate_size=172, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, dtype=DType.float32,
)  # fmt: skip
TOKENS_OF_A_FAKE = """
def generated(prompt, adapter, count):
    return [(sum(prompt) + 7 * adapter + 13 * place) % 251 for place in range(count)]
"""
CLOCK_OF_A_FAKE = """
import time

now = [0.0]  # of a clock of tokens and looks, or a busy machine makes the difference of two lengths negative

def clock():
    now[0] += 1e-6
    return now[0]

time.perf_counter = clock
"""
FAKE_VLLM = (
    TOKENS_OF_A_FAKE
    + CLOCK_OF_A_FAKE
    + """
import json, os
from types import SimpleNamespace

__version__ = "0.0.0+fake"

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, **settings):
        told = {**settings, "stream": os.environ.get("VLLM_LORA_ENABLE_DUAL_STREAM"), "path": os.environ["PYTHONPATH"]}
        with open(os.path.join(os.path.dirname(__file__), "settings.jsonl"), "a") as file:
            file.write(json.dumps(told) + "\\n")
        self.known, self.most = set(), settings["max_cpu_loras"]
        self.llm_engine = SimpleNamespace(add_lora=self.add, remove_lora=self.known.discard)

    def add(self, request):
        assert os.path.exists(os.path.join(request.lora_path, "adapter_config.json"))
        assert request.lora_int_id not in self.known and len(self.known) < self.most
        self.known.add(request.lora_int_id)

    def generate(self, prompts, params, *, lora_request, use_tqdm):
        now[0] += 2e-4 * max(one.max_tokens for one in params)
        chosen = [request.lora_int_id if request else 0 for request in lora_request]
        tokens = [generated(p["prompt_token_ids"], a, one.max_tokens) for p, a, one in zip(prompts, chosen, params)]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=one)]) for one in tokens]
"""
)
FAKE_REQUEST = """
class LoRARequest:
    def __init__(self, name, number, path):
        self.lora_name, self.lora_int_id, self.lora_path = name, number, path
"""
FAKE_OURS = (
    TOKENS_OF_A_FAKE
    + CLOCK_OF_A_FAKE
    + """
from experiments.today.measure import serve

class Fake:
    about = "punica, a fake"
    def __init__(self, job): assert job["options"] == {"admission": "fcfs_many"}
    def generate(self, prompts, adapters, counts):
        now[0] += 1e-4 * max(counts)
        return list(map(generated, prompts, adapters, counts))
    def register(self, adapter_id): pass
    def forget(self, adapter_id): pass

serve(Fake)
"""
)


def stub(folder: Path, module: str = FAKE_VLLM) -> Path:
    """Return an interpreter below `folder` that has a fake vLLM."""
    site = folder / "site"
    (site / "vllm" / "lora").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(module)
    (site / "vllm" / "lora" / "request.py").write_text(FAKE_REQUEST)
    facts = site / "vllm-0.0.0+fake.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0+fake\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def python(tmp_path) -> Path:
    return stub(tmp_path / "stub")


@pytest.fixture
def ours_is_a_fake(tmp_path, monkeypatch):
    """Our worker is one that starts at once, and the folders of model and adapters have no weights."""
    script = tmp_path / "ours.py"
    script.write_text(FAKE_OURS)
    command = peers.Interpreters.command

    def fake(self, system):
        return [sys.executable, str(script)] if system.startswith("punica") else command(self, system)

    def written(home, model, device, rank, adapters, seed):
        for name in range(adapters):
            (home / str(name)).mkdir()
            (home / str(name) / "adapter_config.json").write_text("{}")
        return folders.Folders(str(home), [str(home / str(name)) for name in range(adapters)], 1000)

    monkeypatch.setattr(peers.Interpreters, "command", fake)
    monkeypatch.setattr(bench_module, "written", written)


# measurements, on a clock that the engine moves


class Scripted:
    """An engine of 5 seconds per prompt, `step` per token of the longest, and 2 per registration."""

    def __init__(self, monkeypatch, steps=(0.5,)):
        self.now, self.calls, self.steps, self.log = 0.0, 0, steps, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def generate(self, prompts, adapters, new_tokens):
        self.log.append((adapters[0], new_tokens[0]))
        self.now += 5.0 * len(prompts) + self.steps[self.calls % len(self.steps)] * max(new_tokens)
        self.calls += 1
        return [[0] * count for count in new_tokens]

    def register(self, adapter_id):
        self.now += 2.0
        self.log.append(adapter_id)

    def forget(self, adapter_id):
        self.log.append(-adapter_id)


def test_prefill_is_not_part_of_a_step_and_orders_alternate(monkeypatch):
    engine = Scripted(monkeypatch)
    found = Measurement(engine, {"rounds": 3}).decode(16, [[1]] * 2, {"": [0, 0], "Distinct": [1, 2]}, [4, 8])
    assert found == {"context": 16, "steps": {"": [0.5] * 3, "Distinct": [0.5] * 3}}
    forth, back = [(0, 4), (0, 8), (1, 4), (1, 8)], [(1, 8), (1, 4), (0, 8), (0, 4)]
    assert engine.log == [*forth, *back, *forth, *back]


def test_the_first_round_warms_up(monkeypatch):
    engine = Scripted(monkeypatch, steps=[100.0, 100.0, 0.25, 0.25, 0.5, 0.5])
    found = Measurement(engine, {"rounds": 2}).decode(16, [[1]], {"": [0]}, [4, 8])
    assert found["steps"] == {"": [0.25, 0.5]}


@pytest.mark.parametrize(("seconds", "rounds"), [(1, 1), (7, 1), (8, 2), (100, 3)])
def test_registration_starts_from_nothing_and_ends_in_time(monkeypatch, seconds, rounds):
    engine = Scripted(monkeypatch)
    found = Measurement(engine, {"rounds": 3, "seconds": {"registration": seconds}}).registration(2)
    assert found == {"seconds": [4.0] * rounds}
    assert engine.log == [-1, -2, 1, 2] * rounds


def test_a_stream_counts_from_the_call_to_the_last_token(monkeypatch):
    engine = Scripted(monkeypatch)
    measurement = Measurement(engine, {"rounds": 1, "seconds": {"stream": 9}})
    found = measurement.stream([[1]] * 3, {"": [0] * 3}, [4, 6, 8], warm=1)
    assert found == {"seconds": {"": [19.0]}, "first": {"": 7.0}}


def test_fewer_tokens_than_asked_for_are_an_error():
    engine = SimpleNamespace(generate=lambda prompts, adapters, counts: [[0] * (count - 1) for count in counts])
    with pytest.raises(RuntimeError, match=r"asked for \[2\] new tokens, got \[1\]"):
        Measurement(engine, {}).tokens([[1]], [0], 2)


# the work


def test_adapters_take_turns_and_lengths_have_their_means():
    assert ids("", 3, 2) == [0, 0, 0]
    assert ids("Identical", 3, 2) == [1, 1, 1]
    assert ids("Distinct", 5, 3) == [1, 2, 3, 1, 2]
    lengths = stream_lengths(4096, 259, 158)
    assert sum(prompt for prompt, _ in lengths) / 4096 == pytest.approx(259, rel=0.05)
    assert sum(new for _, new in lengths) / 4096 == pytest.approx(158, rel=0.05)
    assert max(prompt for prompt, _ in lengths) == 4 * 259
    assert (first_tokens([[1, 2], [3, 4]], [[1, 3], [4, 4]]), common([[1, 2], [3, 4]], [[1, 3], [4, 4]])) == (0.5, 0.25)


def test_every_adapter_folder_has_weights_of_its_own(tmp_path):
    found = folders.written(tmp_path, TINY, "cpu", 4, 3, seed=0)
    files = [Path(folder) / "adapter_model.safetensors" for folder in found.adapters]
    assert len({file.read_bytes() for file in files}) == 3
    assert found.adapter_bytes == sum(file.stat().st_size for file in files)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")


# both engines


def settled(tmp_path, *overrides):
    return settle(composed(tmp_path, *overrides, name=TODAY.name), TODAY)


def test_without_its_interpreter_ours_is_measured_alone_and_vllm_alone_is_refused(tmp_path, capsys):
    points = TODAY.points(settled(tmp_path))
    assert {point.system for point in points} == {"punica_many"}
    assert re.search(r"so vllm, vllm_as_shipped cannot run: .*pip install vllm", capsys.readouterr().err)
    with pytest.raises(ConfigError, match=r"figure.vllm_python is empty.*pip install vllm"):
        TODAY.points(settled(tmp_path, "system=vllm"))
    with pytest.raises(ConfigError, match=r"/nowhere has no vLLM.*pip install vllm"):
        TODAY.points(settled(tmp_path, "figure.vllm_python=/nowhere"))
    with pytest.raises(ConfigError, match=r"has no vLLM.*PackageNotFound"):
        TODAY.points(settled(tmp_path, f"figure.vllm_python={sys.executable}"))


def test_both_engines_do_the_same_work_and_rows_name_versions_and_settings(tmp_path, python, ours_is_a_fake):
    cfg = composed(tmp_path, f"figure.vllm_python={python}", "draw=true", name=TODAY.name)
    outcome = run(cfg, TODAY)
    assert (outcome.failed, outcome.measured) == ([], 24)
    kept = [file.read_text() for file in tmp_path.rglob("ext_today.*") if file.suffix in (".csv", ".json")]
    assert len(kept) == 3  # rows, their configuration, the figure's facts
    assert not [one for one in kept if str(python.parent) in one]
    rows = [row for row in read_rows(outcome.rows_file) if row.statistic in ("median", "value")]
    shown = {system: {row.engine for row in rows if row.system == system} for system in cfg.figure.systems}
    assert shown["punica_many"] == {"punica, a fake: admission=fcfs_many"}
    (as_shipped,), (special,) = shown["vllm_as_shipped"], shown["vllm"]
    assert as_shipped.startswith("vllm 0.0.0+fake, torch 2.")
    assert as_shipped.endswith(": as shipped")
    assert special.endswith(
        "specialize_active_lora=True, lora_target_modules=q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"
    )
    counts = Counter((row.panel, row.metric) for row in rows if row.system == "vllm")
    timed = (DECODE, "step_latency"), (STREAM, "output_throughput"), (REGISTRATION, "registration")
    assert [counts[key] for key in timed] == [3, 3, 1]
    shares = "first_token_alone", "first_token_reference", "same_alone"
    assert {row.value for row in rows if row.metric in shares} == {1.0}
    told = [json.loads(line) for line in (python.parent / "site/vllm/settings.jsonl").read_text().splitlines()]
    assert [("specialize_active_lora" in one, one["stream"]) for one in told] == [(True, None), (False, None)]
    limits = "max_num_seqs", "max_loras", "max_cpu_loras", "enable_prefix_caching"
    assert {tuple(one[name] for name in limits) for one in told} == {(3, 3, 4, False)}
    assert len(outcome.figures) == 3
    assert run(cfg, TODAY).measured == 0
    figure = draw_today(measured_frame(rows_of_repeats(Path(outcome.rows_file))), pd.DataFrame())
    texts = [[text.get_text() for text in axis.texts if "x (vllm" in text.get_text()] for axis in figure.axes]
    assert list(map(len, texts)) == [3, 3, 1]  # a ratio above every case


def test_an_engine_with_other_tokens_has_no_rows(tmp_path, ours_is_a_fake):
    python = stub(tmp_path / "other", FAKE_VLLM.replace("7 * adapter", "8 * adapter"))
    outcome = run(composed(tmp_path, f"figure.vllm_python={python}", "figure.parts=[decode]", name=TODAY.name), TODAY)
    assert len(outcome.failed) == 2
    assert "vllm begins 0.33 of the requests as punica_many does, wanted are 1.0" in outcome.failed[0]
    assert {row.system for row in read_rows(outcome.rows_file)} == {"punica_many"}


def test_a_process_that_fails_says_why(tmp_path, ours_is_a_fake):
    python = stub(tmp_path / "broken", FAKE_VLLM.replace('"max_cpu_loras"', '"max_gpu_loras"'))
    given = [f"figure.vllm_python={python}", "system=vllm"]
    outcome = run(composed(tmp_path, *given, name=TODAY.name), TODAY)
    assert "vllm ended with exit code 1" in outcome.failed[0]
    assert "KeyError: 'max_gpu_loras'" in outcome.failed[0]


def test_what_a_process_leaves_behind_is_ended(tmp_path):
    left = tmp_path / "pid"
    assert bench_module._run(["sh", "-c", f"sleep 60 & echo $! > {left}; exit 3"], os.environ, tmp_path / "log") == 3
    pid, deadline = int(left.read_text()), time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it still runs"


@pytest.fixture
def bench(tmp_path, ours_is_a_fake) -> TodayBench:
    sizes = {"adapters": 2, "check": [6, 2], "check_prompt": 3}
    return TodayBench(TINY, "cpu", 4, 0, sizes, peers.Interpreters(None))


def test_a_stream_alone_has_its_adapters_registered_first(bench):
    bench.sizes |= {"requests": 2, "lengths": [4, 4], "new_tokens": [2, 4], "warm": 1}
    parts = dict(bench.parts({DECODE: [], REGISTRATION: False, STREAM: True, "workloads": ["Distinct"]}))
    assert list(parts) == [REGISTRATION, STREAM]
    assert parts[STREAM]["cases"] == {"Distinct": [1, 2]}
    given = parts[STREAM]
    assert (sum(given["new_tokens"]), sum(map(len, given["prompts"]))) == bench.stream_tokens()


def test_tokens_that_depend_on_the_company_are_refused(bench):
    alone = [[place, place] for place in range(6)]
    found = {"together": alone, "alone": alone, "plain": [[9, 9]] * 6}
    bench.check("vllm", found)
    with pytest.raises(CheckFailed, match=r"vllm: 0.83 of the requests of a mixed batch begin as they do alone"):
        bench.check("vllm", {**found, "together": [*alone[:5], [4, 4]]})
    bench.model = TINY.model_copy(update=dict(dtype=DType.float16))  # where rounding may decide
    bench.check("vllm", {**found, "together": [*alone[:5], [4, 4]]})
    with pytest.raises(CheckFailed, match=r"0.67 of the requests of a mixed batch begin"):
        bench.check("vllm", {**found, "together": [*alone[:4], [5, 5], [4, 4]]})


def test_adapters_that_change_nothing_are_refused(bench):
    found = {"together": [[place] for place in range(6)]}
    with pytest.raises(CheckFailed, match="adapters change the first token of 0 of 4 requests"):
        bench.check("vllm", {"together": found["together"], "alone": found["together"], "plain": found["together"]})


def test_our_engine_behind_the_protocol(tmp_path):
    found = folders.written(tmp_path, TINY, "cpu", 4, 3, seed=0)
    job = {"model": found.model, "adapters": [*found.adapters, str(tmp_path / "absent")], "rank": 4, "dtype": "float32",
           "device": "cpu", "batch_size": 3, "max_len": 16, "options": {"admission": "fcfs_many"}}  # fmt: skip
    engine = Punica(job)
    prompts = [[5, 6, 7], [5, 6, 7], [5, 6, 7], [8, 9]]
    tokens = Measurement(engine, job).tokens(prompts, [0, 1, 2, 3], 4)
    assert tokens["together"] == tokens["alone"]
    assert [len({tuple(one) for one in tokens[name][:3]}) for name in ("together", "plain")] == [3, 1]
    manager = engine._engine.manager
    for adapter_id in (1, 2, 3):
        engine.forget(adapter_id)
    assert not manager.list_adapters()
    engine.register(2)
    assert list(manager.list_adapters()) == [2]
    with pytest.raises(RuntimeError, match="absent"):
        engine.generate([[1]], [4], [1])


# settings


def test_rows_are_stale_once_an_engine_or_its_worker_changes():
    codes = Reach(tree_of(REPOSITORY), REPOSITORY / "experiments/ext_today.py").codes
    for name in ("worker_punica", "worker_vllm", "measure"):
        module = tree_of(REPOSITORY).module(f"experiments.today.{name}")
        texts = {tree_of(REPOSITORY).code(Place(module.name, one)).text for one in module.definitions}
        assert codes >= {text for text in texts if text.startswith("FunctionDef")}


@pytest.mark.parametrize("name", ["worker_vllm", "measure"])
def test_what_runs_under_the_other_interpreter_imports_nothing_of_this_repository(name):
    source = (REPOSITORY / f"experiments/today/{name}.py").read_text(encoding="utf-8")
    imported = re.findall(r"^ *(?:from|import) ((?:experiments|punica)[\w.]*)", source, flags=re.MULTILINE)
    assert imported == (["experiments.today.measure"] if name == "worker_vllm" else [])


def test_options_and_variables_reach_the_engine(tmp_path):
    found = peers.Interpreters(Path("python"), tmp_path)
    assert found.environment("vllm_dual_stream")["VLLM_LORA_ENABLE_DUAL_STREAM"] == "1"
    assert found.environment("vllm_tuned")["VLLM_TUNED_CONFIG_FOLDER"] == str(tmp_path)
    assert found.peer("vllm_tuned").described().endswith(f", VLLM_TUNED_CONFIG_FOLDER={tmp_path.name}")  # no path
    with pytest.raises(ConfigError, match=r"figure.vllm_tables=None must be the folder"):
        peers.Interpreters(Path("python")).peer("vllm_tuned")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("figure.parts=[decode,hour]", "figure.parts has 'hour'"),
        ("figure.new_tokens=[2,8]", r"must ascend from figure.batch_size=3"),
        ("figure.contexts=[6]", "must be above 6"),
        ("figure.adapters=2", "must be at least figure.batch_size=3"),
        ("figure.contexts=[5000]", "are above the positions of llama-tiny"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, override, text):
    with pytest.raises(ConfigError, match=text):
        TODAY.points(settled(tmp_path, override))


def test_settings_of_vllm_are_compared_by_decode_steps_unless_asked(tmp_path, python):
    given = ["scale=gpu", "hardware=h200", f"figure.vllm_python={python}"]
    points = TODAY.points(settled(tmp_path, *given))
    panels = {name: {point.panel for point in points if point.system == name} for name in ("vllm", "vllm_as_shipped")}
    assert panels == {"vllm": {TOKENS, DECODE, STREAM, REGISTRATION}, "vllm_as_shipped": {TOKENS, DECODE}}
    assert [len(group) for group in TODAY.together(points)] == [8, 8, 4]
    assert {(point.batch_size, point.seq_len) for point in points if point.panel == DECODE} == {(32, 624)}


def test_a_cpu_has_nothing_to_compare(tmp_path, capsys):
    assert TODAY.points(settled(tmp_path, "scale=laptop")) == []
    assert "nothing to compare on a CPU" in capsys.readouterr().err


# the picture


def test_ratios_are_over_the_fastest_setting(tmp_path):
    table = pd.DataFrame(
        {"punica_many": [4.0, 2.0, 1.0], "vllm": [6.0, 5.0, None], "vllm_as_shipped": [8.0, 4.0, None]},
        index=["", "Identical", "Distinct"],
    )
    assert gains(table, more_is_better=False) == {"": (1.5, "vllm"), "Identical": (2.0, "vllm_as_shipped")}
    assert gains(table, more_is_better=True) == {"": (0.5, "vllm_as_shipped"), "Identical": (0.4, "vllm")}
