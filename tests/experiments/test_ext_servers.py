"""Engines and servers: the same work for all, wrong tokens give no rows, loads count errors, overrides are refused.

vLLM itself is a fake here, of the calls that the worker makes: these tests say nothing about its speed or tokens.
"""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from fake_server import fake_server
from fakes import composed, points_of, settled
from tiny import TINY

from experiments.ext_servers import EXPERIMENT as SERVERS
from experiments.ext_servers import _parts
from experiments.harness.command import INTERRUPTED, with_options
from experiments.harness.counted import counted, frame_of
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY, ConfigError, DType, Settings
from experiments.measure.records import read_rows
from experiments.plots.frames import measured_frame
from experiments.plots.serving import draw_servers
from experiments.servers import bench as bench_module
from experiments.servers import client as client_module
from experiments.servers import systems
from experiments.servers.bench import Bench, lead_of_first, same, written
from experiments.servers.client import BACK_OFF_S, FIELDS, Answer, Client, Run, Server, look_up
from experiments.servers.client import run as run_load
from experiments.servers.served import Served, is_late, run_readings, tokens_in
from experiments.servers.stream import Job, Stream, companies, ids, stream_lengths
from experiments.servers.systems import SYSTEMS, System, versions
from experiments.servers.worker import LIKELIEST, MOST_TRIES, Measurement, Punica
from experiments.workload.arrivals import Span

OF_A_FAKE = """
import json, os, time
from types import SimpleNamespace

now = [0.0]  # of a clock of tokens and looks, or a busy machine makes the difference of two lengths negative

def clock():
    now[0] += 1e-6
    return now[0]

def generated(prompt, adapter, count):
    return [(sum(prompt) + 7 * adapter + 13 * place) % 251 for place in range(count)]

time.perf_counter = clock
"""
FAKE_VLLM = f"""{OF_A_FAKE}
from experiments.servers.worker import LIKELIEST
__version__ = "0.0.0+fake"
NOISE = float(os.environ.get("VLLM_BATCH_INVARIANT") != "1")

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize, logprobs=None):
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        assert logprobs in (None, 0, LIKELIEST)
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, **settings):
        told = {{**settings, "stream": os.environ.get("VLLM_LORA_ENABLE_DUAL_STREAM")}}
        with open(os.path.join(os.path.dirname(__file__), "settings.jsonl"), "a") as file:
            file.write(json.dumps(told) + "\\n")

    def generate(self, prompts, params, *, lora_request, use_tqdm):
        now[0] += 2e-4 * max(one.max_tokens for one in params)
        chosen = [request.lora_int_id if request else 0 for request in lora_request]
        assert all(os.path.exists(one.lora_path) for one in lora_request if one)
        tokens = [generated(p["prompt_token_ids"], a, one.max_tokens) for p, a, one in zip(prompts, chosen, params)]
        told = [[{{token: SimpleNamespace(logprob=-len(tokens) * NOISE)}} for token in one] for one in tokens]
        pairs = zip(tokens, told, strict=True)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=one, logprobs=of)]) for one, of in pairs]
"""
FAKE_REQUEST = """
class LoRARequest:
    def __init__(self, name, number, path):
        self.lora_name, self.lora_int_id, self.lora_path = name, number, path
"""
FAKE_OURS = f"""{OF_A_FAKE}
from experiments.servers.worker import serve

class Fake:
    about = "punica, a fake"
    def __init__(self, job): assert job["options"] == {{"admission": "fcfs_many"}}
    def generate(self, prompts, adapters, counts):
        now[0] += 1e-4 * max(counts)
        return list(map(generated, prompts, adapters, counts))
    def scored(self, *given, most=0):
        return [[[(token, -1.0)] for token in one] for one in self.generate(*given)]

serve(Fake)
"""


def stub(folder: Path, module: str = FAKE_VLLM) -> Path:
    """Return an interpreter below `folder` that has a fake vLLM."""
    site = folder / "site"
    facts = site / "vllm-0.0.0+fake.dist-info"
    for path in (site / "vllm" / "lora", facts):
        path.mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(module)
    (site / "vllm" / "lora" / "request.py").write_text(FAKE_REQUEST)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0+fake\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def ours_is_a_fake(tmp_path, monkeypatch):
    """Our worker is one that starts at once, and the folders of model and adapters have no weights."""
    script, command = tmp_path / "ours.py", System.command
    script.write_text(FAKE_OURS)

    def of_fakes(self, python):
        return [sys.executable, str(script)] if self.engine == "punica" else command(self, python)

    def empty(home, model, device, ranks, adapters, seed):
        for name in range(adapters):
            (home / str(name)).mkdir()
        return {f"adapter-{name}": str(home / str(name)) for name in range(adapters)}

    monkeypatch.setattr(System, "command", of_fakes)
    monkeypatch.setattr(bench_module, "written", empty)


class Scripted:
    """An engine of 5 seconds per prompt, and `step` per token of the longest."""

    def __init__(self, monkeypatch, steps=(0.5,)):
        self.now, self.steps, self.log = 0.0, steps, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def generate(self, prompts, adapters, new_tokens):
        self.now += 5.0 * len(prompts) + self.steps[len(self.log) % len(self.steps)] * max(new_tokens)
        self.log.append((adapters[0], new_tokens[0]))
        return [[0] * count for count in new_tokens]


def test_prefill_is_not_part_of_a_step_and_orders_alternate(monkeypatch):
    engine = Scripted(monkeypatch)
    found = Measurement(engine, {"rounds": 3}).decode(16, [[1]] * 2, {"": [0, 0], "Distinct": [1, 2]}, [4, 8])
    assert found == {"context": 16, "seconds": {"": [0.5] * 3, "Distinct": [0.5] * 3}}
    forth, back = [(0, 4), (0, 8), (1, 4), (1, 8)], [(1, 8), (1, 4), (0, 8), (0, 4)]
    assert engine.log == [*forth, *back, *forth, *back]


def test_the_first_round_warms_up(monkeypatch):
    measurement = Measurement(Scripted(monkeypatch, steps=[100.0, 100.0, 0.25, 0.25, 0.5, 0.5]), {"rounds": 2})
    assert measurement.decode(16, [[1]], {"": [0]}, [4, 8])["seconds"] == {"": [0.25, 0.5]}
    measurement = Measurement(Scripted(monkeypatch, steps=[100.0, 0.25, 0.5]), {"rounds": 2})
    assert measurement.prompt(16, [[1]], {"": [0]})["seconds"] == {"": [5.25, 5.5]}


def test_lengths_are_timed_again_where_the_longer_was_quicker_but_not_to_warm_up(monkeypatch):
    engine = Scripted(monkeypatch, steps=[100.0, 0.5, 0.5, 100.0, 0.25, 0.25])
    assert Measurement(engine, {"rounds": 1}).decode(16, [[1]], {"": [0]}, [4, 8])["seconds"] == {"": [0.25]}
    assert engine.log == [(0, 4), (0, 8), *[(0, 8), (0, 4)] * 2]
    engine = Scripted(monkeypatch, steps=[-0.5])
    assert Measurement(engine, {"rounds": 1}).decode(16, [[1]], {"": [0]}, [4, 8])["seconds"] == {"": [-0.5]}
    assert len(engine.log) == 2 * (1 + MOST_TRIES), "then the row is refused"


def test_a_stream_has_its_adapters_in_memory_and_counts_to_the_last_token(monkeypatch):
    engine = Scripted(monkeypatch)
    measurement = Measurement(engine, {"rounds": 1, "adapters": {"a": "/a", "b": "/b"}})
    found = measurement.stream([[1]] * 3, {"": [0] * 3}, [4, 6, 8], warm=1)
    assert found == {"seconds": {"": [19.0]}, "first": {"": 7.0}}
    assert engine.log == [(1, 1), (0, 4), (0, 4)]


def test_a_switch_is_timed_from_the_adapters_request_behind_what_was_answered_without_one(monkeypatch):
    engine = Scripted(monkeypatch, steps=[0.5, 100.0, 0.5, 0.25, 0.5, 0.75])
    found = Measurement(engine, {}).switch(2, [[1, 2], [3, 4], [5, 6]], [[7], [8], [9]])
    assert found == {"context": 2, "seconds": {"": [5.25, 5.75]}}
    assert engine.log == [(0, 1), (1, 1)] * 3


def test_a_switch_has_prompts_of_its_own_and_room_and_is_all_that_a_cache_is_measured_by(tmp_path, monkeypatch):
    given = ["scale=gpu", "hardware=h200", f"figure.vllm_python={stub(tmp_path / 'stub')}", "figure.new_tokens=[48,50]"]
    cfg = settled(tmp_path, SERVERS, *given, "system.names=[punica_cached]")
    points = SERVERS.points(cfg)
    assert [point.panel for point in points] == ["tokens", "switch"]
    monkeypatch.setattr(bench_module, "written", lambda *given: {"adapter": "folder"})
    made = Bench(cfg.model, "cpu", 1, [16], 0, cfg.figure.sizes_of_work(), None)
    parts = dict(_parts(cfg, SERVERS.points(settled(tmp_path, SERVERS, *given, "system.names=[punica_many]")), made))
    switch = parts["switch"]
    assert not [one for one in switch["prompts"] for other in parts["prompt"]["prompts"] if one[:20] == other[:20]]
    longest = max(len(one) + len(asked) for one, asked in zip(switch["prompts"], switch["asked"], strict=True))
    assert longest < cfg.figure.sizes_of_work()["max_model_len"]


def test_fewer_tokens_than_asked_for_are_an_error():
    engine = SimpleNamespace(generate=lambda prompts, adapters, counts: [[0] * (count - 1) for count in counts])
    with pytest.raises(RuntimeError, match=r"asked for \[2\] new tokens, got \[1\]"):
        Measurement(engine, {}).tokens([[1]], [0], 2)


def test_adapters_take_turns_and_lengths_have_their_means():
    assert ids("", 3, 2) == [0, 0, 0]
    assert ids("Identical", 3, 2) == [1, 1, 1]
    assert ids("Distinct", 5, 3) == [1, 2, 3, 1, 2]
    assert ids("Skewed", 6, 9) == [1, 2, 3, 4, 1, 2]
    lengths = stream_lengths(4096, 259, 158)
    assert sum(prompt for prompt, _ in lengths) / 4096 == pytest.approx(259, rel=0.05)
    assert sum(new for _, new in lengths) / 4096 == pytest.approx(158, rel=0.05)
    assert max(prompt for prompt, _ in lengths) == 4 * 259
    assert same([[1, 2], [3, 4], [5, 6]], [[1, 3], [4, 4], [5, 6]]) == 0.5
    likeliest = [(7, -0.5), (8, -2.0), (9, -3.0)]
    assert [lead_of_first(likeliest, tokens) for tokens in ([7, 1], [8, 1], [6])] == [0, 1.5, 2.5]


def test_batches_hold_the_same_request_in_other_company():
    batches = companies(6, 3, 40)
    assert batches[0] == [1]
    assert all(1 in batch and len(batch) == len({*batch}) <= 3 for batch in batches)
    assert {i for batch in batches for i in batch} == {*range(6)}
    assert {batch.index(1) for batch in batches} == {0, 1, 2}


def test_a_stream_has_new_prompts_and_the_same_lengths_and_adapters_again():
    names = [f"a{place}" for place in range(6)]

    def drawn(workload, seed=0):
        return list(islice(Stream(workload, names, 6, [9, 6], 64, seed).jobs(), 12))

    for name, sizes in {"Distinct": [2] * 6, "Uniform": [4] * 3, "Skewed": [2, 2, 4, 4]}.items():
        assert sorted(Counter(job.model for job in drawn(name)).values()) == sizes
    jobs = drawn("Distinct")
    shapes = [(job.model, len(job.prompt), job.new_tokens) for job in jobs]
    assert shapes[:6] == shapes[6:]
    assert [job.prompt for job in jobs[:6]] != [job.prompt for job in jobs[6:]]
    assert jobs == drawn("Distinct") != drawn("Distinct", seed=1)


def test_every_adapter_folder_has_weights_of_its_own_and_our_engine_tells_them_apart(tmp_path):
    adapters = written(tmp_path, TINY, "cpu", [4, 2], 3, seed=0)
    assert len({(Path(folder) / "adapter_model.safetensors").read_bytes() for folder in adapters.values()}) == 3
    config = json.loads((tmp_path / "with-tokenizer" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    job = {"model": str(tmp_path / "model"), "adapters": {**adapters, "absent": str(tmp_path / "absent")}, "rank": 4,
           "dtype": "float32", "device": "cpu", "batch_size": 3, "max_model_len": 16,
           "options": {"admission": "fcfs_many"}}  # fmt: skip
    engine = Punica(job)
    tokens = Measurement(engine, job).tokens([[5, 6, 7], [5, 6, 7], [5, 6, 7], [8, 9]], [0, 1, 2, 3], 4)
    assert tokens["together"] == tokens["alone"]
    assert [len({tuple(one) for one in tokens[name][:3]}) for name in ("together", "plain")] == [3, 1]
    assert [max(one, key=lambda pair: pair[1])[0] for one in tokens["likeliest"]] == [t[0] for t in tokens["together"]]
    assert {len(one) for one in tokens["likeliest"]} == {LIKELIEST}
    found = [json.loads((Path(folder) / "adapter_config.json").read_text())["r"] for folder in adapters.values()]
    assert found == [4, 2, 4]
    batches = [[1], [0, 2, 1], [1, 0]]
    found = Measurement(engine, job).company([[5, 6, 7], [5, 6], [8]], [0, 1, 2], 4, batches)
    assert found["tokens"] == 1 >= found["answers"] >= 1 / 3
    with pytest.raises(RuntimeError, match="absent"):
        engine.generate([[1]], [4], [1])


def test_our_products_in_vllm_need_both_in_one_environment(tmp_path, monkeypatch):
    ours = stub(tmp_path / "stub").parent / "site/punica_lora-9.9.dist-info"
    ours.mkdir()
    (ours / "METADATA").write_text("Name: punica-lora\nVersion: 9.9\n")
    (ours / "entry_points.txt").write_text("[vllm.general_plugins]\npunica = punica.vllm:register\n")
    monkeypatch.chdir(tmp_path)  # an editable install is found in the repository
    assert versions(SYSTEMS["vllm_punica"], tmp_path / "stub/python").endswith(", punica 9.9")
    monkeypatch.setattr(systems, "vllm_versions", lambda python: "vllm 1, torch 2")
    assert versions(SYSTEMS["vllm"], Path("python")) == "vllm 1, torch 2"
    with pytest.raises(ConfigError, match=r"without our products: .*pip install"):
        versions(SYSTEMS["vllm_punica"], Path("python"))


def test_engines_do_the_same_work_and_rows_name_versions_and_settings(tmp_path, ours_is_a_fake, monkeypatch):
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", "/some/tables")
    python = stub(tmp_path / "stub")
    names = "system.names=[punica_many,vllm,vllm_dual_stream,vllm_invariant]"
    cfg = composed(tmp_path, f"figure.vllm_python={python}", names, "draw=true", name=SERVERS.name)
    outcome = run(cfg, SERVERS)
    assert (outcome.failed, outcome.measured, len(outcome.figures)) == ([], 48, 2)
    kept = [file.read_text() for file in tmp_path.rglob("ext_servers.*") if file.suffix in (".csv", ".json")]
    assert not [one for one in kept if str(python.parent) in one or "/some" in one]
    rows = [row for row in read_rows(outcome.rows_file) if row.statistic in ("median", "value")]
    shown = {system: {row.engine for row in rows if row.system == system} for system in cfg.system.names}
    assert shown["punica_many"] == {"punica, a fake: admission=fcfs_many"}
    (dual,) = shown["vllm_dual_stream"]
    assert dual.startswith("vllm 0.0.0+fake, torch 2.")
    assert dual.endswith("TUNED_CONFIG_FOLDER=tables, PUNICA_VLLM=0, VLLM_LORA_ENABLE_DUAL_STREAM=1")
    counts = Counter((row.panel, row.metric) for row in rows if row.system == "vllm")
    timed = ("decode", "step_latency"), ("prompt", "prompt_latency"), ("stream", "output_throughput")
    assert [counts[key] for key in (*timed, ("switch", "switch_latency"))] == [3, 3, 3, 1]
    shares = "first_token_alone", "first_token_reference", "same_alone"
    assert {row.value for row in rows if row.metric in shares} == {1.0}
    assert {row.value for row in rows if row.metric == "first_token_lead"} == {0.0}
    same = {(row.system, row.metric): row.value for row in rows if row.panel == "company"}
    assert same["vllm", "same_tokens"] == same["vllm_invariant", "same_answers"] == 1
    assert same["vllm", "same_answers"] < 1 == same["punica_many", "same_answers"]
    told = [json.loads(line) for line in (python.parent / "site/vllm/settings.jsonl").read_text().splitlines()]
    assert [one["stream"] for one in told] == [None, "1", None]
    limits = "max_num_seqs", "max_loras", "max_cpu_loras", "enable_prefix_caching", "specialize_active_lora"
    assert {tuple(one[name] for name in limits) for one in told} == {(3, 3, 4, False, True)}
    assert run(cfg, SERVERS).measured == 0
    figure = draw_servers(measured_frame(counted(frame_of(read_rows(Path(outcome.rows_file))))), pd.DataFrame())
    assert [len(axis.patches) for axis in figure.axes] == [12, 12, 12], "four systems of three cases"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("7 * adapter", "8 * adapter", r"vllm: first_token_reference \(punica_many\) is 0.33, must be 1.0 or more"),
        ("max_tokens = max_tokens", "tokens = 1", "(?s)process of vllm ended with exit code 1.*AttributeError"),
    ],
)
def test_an_engine_with_other_tokens_or_none_has_no_rows(tmp_path, ours_is_a_fake, old, new, words):
    python = stub(tmp_path / "other", FAKE_VLLM.replace(old, new))
    given = [f"figure.vllm_python={python}", "figure.parts=[decode]", "system=vllm"]
    outcome = run(composed(tmp_path, *given, name=SERVERS.name), SERVERS)
    assert re.search(words, outcome.failed[0])
    assert outcome.measured == 0


@pytest.fixture
def bench(ours_is_a_fake) -> Bench:
    return Bench(TINY, "cpu", 1, [4], 0, {"adapters": 2, "check": [6, 2], "check_prompt": 3}, None)


def wait_for_end(pid):
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it still runs"


def test_what_a_process_leaves_behind_is_ended(tmp_path, bench, monkeypatch):
    left = tmp_path / "pid"
    monkeypatch.setattr(System, "command", lambda *_: ["sh", "-c", f"sleep 60 & echo $! > {left}; exit 3"])
    with bench._running("punica_many") as process:
        assert process.wait() == 3
    wait_for_end(int(left.read_text()))


def test_sigterm_is_an_interruption_whose_clean_up_no_further_signal_cuts(tmp_path, bench, monkeypatch, request):
    """The process sends them, as `timeout` and `record_all` do, then ends; its child would not."""
    os.mkfifo(left := tmp_path / "pid")
    script = f"trap 'kill -TERM $PPID; kill -INT $PPID; exit' TERM; sleep 60 & echo $! > {left}; wait"
    monkeypatch.setattr(System, "command", lambda *_: ["sh", "-c", script])
    monkeypatch.setattr(sys, "argv", ["script"])
    pids: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.default_int_handler)))

    def job(_):
        with bench._running("punica_many"):
            pids.append(int(left.read_text()))
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match=str(INTERRUPTED)):
        with_options("script", "", "script", Settings, job)
    wait_for_end(*pids)


def test_a_worker_that_is_terminated_ends_its_group(tmp_path, bench, monkeypatch):
    os.mkfifo(left := tmp_path / "pid")
    (asked := tmp_path / "job.json").write_text("{}")
    engine = f"os.spawnlp(os.P_WAIT, 'sh', 'sh', '-c', 'sleep 60 & echo $! > {left}; wait')"
    code = f"import os; from experiments.servers.worker import serve; serve(lambda _: {engine})"
    monkeypatch.setattr(System, "command", lambda *_: [sys.executable, "-c", code])
    with bench._running("punica_many", str(asked), str(tmp_path / "lines")) as process:
        pid = int(left.read_text())
        process.terminate()
        wait_for_end(pid)


def test_tokens_that_depend_on_the_company_or_on_no_adapter_are_refused(bench):
    alone = [[place, place] for place in range(6)]
    found = {"together": alone, "alone": alone, "plain": [[9, 9]] * 6}
    bench.shares("punica_many", found, "punica_many")
    with pytest.raises(CheckFailed, match=r"first_token_alone .* is 0.83"):
        bench.shares("punica_many", {**found, "together": [*alone[:5], [4, 4]]}, "punica_many")
    bench.model = TINY.model_copy(update={"dtype": DType.float16})  # where rounding may decide
    bench.shares("punica_many", {**found, "together": [*alone[:5], [4, 4]]}, "punica_many")
    with pytest.raises(CheckFailed, match="adapters change the first token of 0 of 4 requests"):
        bench.shares("punica_many", {**found, "plain": alone}, "punica_many")


def counts(rows) -> dict[str, float]:
    return {row.metric: row.value for row in rows if row.statistic in ("value", "count")}


def served(url, model, span, load=2, fields=FIELDS) -> Run:
    """The run of a load of one model."""

    async def work():
        async with Client(Server(url, "fake", "base", ()), "", fields) as client:
            return await run_load(client, iter(lambda: Job(model, [1, 2, 3], 4), None), span, load)

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("http-429", "http_429"), ("http-500", "http_500"), ("cut", "broken_stream"), ("endless", "broken_stream"),
        ("no-json", "broken_stream"), ("error", "error_in_stream"), ("no-usage", "no_usage"),
        ("wrong", "wrong_token_count"), ("short", "wrong_token_count"), ("long", "wrong_token_count"),
    ],
)  # fmt: skip
def test_every_error_is_counted_by_its_kind_and_no_token_with_it(model, kind):
    with fake_server(model) as fake:
        found = counts(run_readings(served(fake.url, model, Span(0.0, 0.15, 5.0))))
        sent = len(fake.bodies)
    assert 2 <= found["requests"] <= sent
    assert found["errors"] == found[f"errors_{kind}"] == found["requests"]
    assert found["output_throughput"] == found["request_rate"] == found["output_tokens"] == 0
    assert "time_to_first_token" not in found


def test_errors_of_some_requests_leave_the_others_and_rows_are_not_measured_again(tmp_path):
    with fake_server("right", "http-429") as fake:
        given = [f"figure.url={fake.url}", "figure.requests=2", "figure.in_flight=[2]", "figure.rates=[]"]
        cfg = composed(tmp_path, *given, "figure.seconds=0.3", "workload=distinct", name=SERVERS.name)
        outcome = run(cfg, SERVERS)
        asked = Counter(body["model"] for body in fake.bodies)
        assert (run(cfg, SERVERS).measured, outcome.failed) == (0, [])
    rows = read_rows(outcome.rows_file)
    found = counts(rows)
    assert {(row.system, row.model, row.panel) for row in rows} == {("fake 1.2", "base", "2 in flight")}
    assert {row.engine for row in rows} == {"fake 1.2; 2 adapters; ignore_eos and min_tokens"}
    assert found["errors"] == found["errors_http_429"] > 0
    assert found["requests"] - found["errors"] == found["time_to_first_token"] > 0
    assert abs(asked["right"] - asked["http-429"]) <= 4, "Distinct: in turns"


def test_a_slow_answer_is_unfinished_at_the_deadline():
    with fake_server("slow") as fake:
        fake.pause = 600
        found = counts(run_readings(served(fake.url, "slow", Span(0.0, 0.1, 1.0))))
        assert fake.under_way == len(fake.bodies) > 0, "not waited for"
    assert found["requests"] == found["errors"] == found["errors_unfinished"] == 2
    assert found["time_to_first_token_max"] >= 100, "of requests without a token, too, the wait so far"


def test_a_dead_server_is_asked_at_a_bounded_rate():
    with fake_server("right") as fake:
        url = fake.url
    found = counts(run_readings(served(url, "right", Span(0.0, 0.3, 1.0))))
    assert found["errors"] == found["errors_no_connection"] == found["requests"] <= 2 * (1 + 0.3 / BACK_OFF_S)


def test_arrivals_do_not_wait_for_answers_and_begin_when_due():
    times = [0.01, 0.02, 0.05, 0.09, 0.12, 5.0]
    with fake_server("slow") as fake:
        fake.pause = 1.0
        found = served(fake.url, "slow", Span(0.0, 0.1, 5.0), load=times)
        assert fake.most >= 4
    assert [answer.at for answer in found.answers] == times[:5], "those after the measured time arrive, too"
    assert counts(run_readings(found))["requests"] == 4
    assert [answer.error for answer in found.answers[:4]] == [""] * 4
    assert all(answer.pieces[0] - answer.at >= 1.0 for answer in found.answers[:4])


def test_a_closed_loop_keeps_its_number_in_flight():
    with fake_server("slow") as fake:
        fake.pause = 0.02
        served(fake.url, "slow", Span(0.0, 0.5, 1.0), load=3)
        assert len(fake.bodies) >= 9
        assert fake.most == 3


@pytest.mark.parametrize("fields", [(), ("ignore_eos",), FIELDS])
def test_answers_that_may_end_early_are_no_errors_and_are_counted(fields):
    with fake_server("short") as fake:
        fake.refuses = set(FIELDS) - set(fields)
        found = counts(run_readings(served(fake.url, "short", Span(0.0, 0.1, 5.0), fields=fields)))
        assert all(fake.bodies[0].keys() & set(FIELDS) == set(fields) for _ in fake.bodies)
    assert found["ended_early"] == (0 if fields else found["requests"])
    assert found["errors"] == (found["requests"] if fields else 0)


def test_a_server_without_a_right_answer_has_no_rows_and_says_why(tmp_path):
    with fake_server("http-503") as fake:
        given = [f"figure.url={fake.url}", "workload=identical", "figure.seconds=0.2", "figure.rates=[]"]
        outcome = run(composed(tmp_path, *given, name=SERVERS.name), SERVERS)
    assert re.search("no right answer as http-503: http 503 .*no", outcome.failed[0])


def test_a_client_that_is_late_is_marked(monkeypatch):
    assert not is_late([0.001] * 100, [0.02])
    assert is_late([0.001] * 90 + [0.02] * 10, [0.02])
    assert not is_late([0.001] * 90 + [0.02] * 10, [1.0])
    assert is_late([], [0.02]), "the loop never came to look"

    async def blocking(self, answer):
        time.sleep(0.03)
        answer.pieces, answer.tokens, answer.prompt_tokens, answer.error = [self.now()], 4, 3, ""
        answer.end = self.now()

    monkeypatch.setattr(client_module.Client, "send", blocking)
    found = counts(run_readings(served("http://127.0.0.1:9", "right", Span(0.0, 0.15, 5.0))))
    assert found["client_is_bottleneck"] == 1
    assert found["client_lag_max"] > 20


def test_tokens_are_shared_out_over_their_pieces():
    job = Job("a", [1], 8)
    right = Answer(0.0, job, pieces=[0.5, 1.5, 1.6, 2.5], tokens=8, error="")
    wrong = Answer(0.0, job, pieces=[1.5], tokens=8, error="broken stream")
    assert tokens_in([right, wrong], 1.0, 2.0) == 4


def test_batches_over_http_have_the_tokens_of_their_words(monkeypatch):
    async def send(self, answer):
        answer.text, answer.error = f" w{answer.job.prompt[0]} w{len(answer.job.model)}</s>", ""

    monkeypatch.setattr(client_module.Client, "send", send)
    server = Served(Server("http://127.0.0.1:9", "x", "base", ("a",)))
    assert server.generate([[5], [6]], [0, 1], [2, 3]) == [[5, 4], [6, 1, -1]]


def test_without_its_interpreter_ours_is_measured_alone_and_vllm_alone_is_refused(tmp_path, capsys):
    points = points_of(tmp_path, SERVERS)
    assert {point.system for point in points} == {"punica_many", "punica_server"}
    assert re.search(r"so vllm cannot run: .*pip install vllm", capsys.readouterr().err)
    for given, words in (
        ("system=vllm", r"figure.vllm_python is empty.*pip install vllm"),
        ("figure.vllm_python=/nowhere", r"/nowhere has no vLLM.*pip install vllm"),
        (f"figure.vllm_python={sys.executable}", r"has no vLLM.*PackageNotFound"),
    ):
        with pytest.raises(ConfigError, match=words):
            points_of(tmp_path, SERVERS, given)
    assert points_of(tmp_path, SERVERS, "scale=laptop") == []
    assert "on a CPU only figure.url=" in capsys.readouterr().err


def test_a_process_measures_all_of_a_system_and_engines_have_no_loads(tmp_path):
    given = ["scale=gpu", "hardware=h200", f"figure.vllm_python={stub(tmp_path / 'stub')}", "workload=identical"]
    points = points_of(tmp_path, SERVERS, *given)
    groups = [[point.panel for point in group] for group in SERVERS.together(points)]
    engine = ["tokens", "company", *["decode"] * 2, *["prompt"] * 2, "switch", *["stream"] * 2]
    assert groups == [engine, ["tokens", *["stream"] * 2, "64 in flight", "16 requests/s"], engine]
    assert {(point.batch_size, point.seq_len) for point in points if point.panel == "decode"} == {(32, 624)}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("figure.parts=[decode,hour]",
         "figure.parts.*must be 'decode', 'prompt', 'switch', 'stream', 'company' or 'load'"),
        ("figure.new_tokens=[2,8]", "figure.new_tokens.* must ascend from figure.batch_size=3"),
        ("figure.new_tokens=[2]", "figure.new_tokens"), ("figure.contexts=[6]", "figure.contexts.* must be above 14"),
        ("figure.adapters=2", "figure.adapters=2 must be at least figure.batch_size=3"),
        ("figure.contexts=[5000]", "figure.contexts.* above the 4096 of llama-tiny"),
        ("figure.in_flight=[5]", "figure.in_flight=.5. .*Distinct need 5 adapters, figure.adapters has 4"),
        ("figure.rates=[0]", "figure.rates"), ("figure.in_flight=[0]", "figure.in_flight"),
        ("figure.seconds=0", "figure.seconds=0"), ("figure.after=-1", "figure.after=-1"),
        ("figure.fields=[x]", "figure.fields"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(tmp_path, override, words):
    with pytest.raises(ConfigError, match=words):
        points_of(tmp_path, SERVERS, override)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "must be an address"), ("ftp://x", "must be an address"),
        ("http://me:secret@127.0.0.1:1", "by the environment"), ("http://127.0.0.1:9", "start the server first"),
    ],
)  # fmt: skip
def test_addresses(url, words):
    with pytest.raises(ConfigError, match=words):
        look_up(url, "")


def test_models_without_parents_and_servers_without_a_list_must_be_named():
    with fake_server() as fake:
        fake.models[:] = [{"id": name, "owned_by": "sglang"} for name in ("base", "right")]
        with pytest.raises(ConfigError, match="lists no adapters"):
            look_up(fake.url, "")
        found = look_up(f"{fake.url}/v1/", "", ["right"])
        assert found == Server(fake.url, "sglang 1.2", "base", ("right",))
        fake.models[:] = [{"name": "base"}]
        with pytest.raises(ConfigError, match="does not list its models"):
            look_up(fake.url, "")


def test_popularities_of_more_adapters_than_the_server_has_are_refused(tmp_path):
    with fake_server("right", "slow") as fake:
        for workload in ("distinct", "uniform"):
            with pytest.raises(ConfigError, match=rf"(?i){workload} need . adapters, {fake.url} has 2"):
                points_of(tmp_path, SERVERS, f"figure.url={fake.url}", f"workload={workload}")
        assert fake.bodies == []


def test_the_key_comes_from_the_environment_and_is_stored_nowhere(tmp_path, monkeypatch):
    given = ["figure.rates=[]", "figure.seconds=0.1", "figure.before=0", "workload=identical"]
    with fake_server("right") as fake:
        fake.key = "very-secret"
        cfg = composed(tmp_path, f"figure.url={fake.url}", *given, name=SERVERS.name)
        with pytest.raises(ConfigError, match="SERVER_API_KEY"):
            run(cfg, SERVERS)
        monkeypatch.setenv(client_module.KEY, fake.key)
        outcome = run(cfg, SERVERS)
    assert counts(read_rows(outcome.rows_file))["errors"] == 0
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".csv", ".json")]
    assert len(stored) == 2
    assert not any(b"very-secret" in content for content in stored)


def test_what_runs_under_the_other_interpreter_imports_nothing_of_this_repository():
    source = (REPOSITORY / "experiments/servers/worker.py").read_text(encoding="utf-8")
    assert re.findall(r"^(?:from|import) ((?:experiments|punica|torch)[\w.]*)", source, flags=re.MULTILINE) == []
