"""Load over HTTP: our own server end to end, servers that misbehave, a client that is too slow, what is refused."""

import asyncio
import json
import time
from collections import Counter
from itertools import islice

import pytest
from fake_server import fake_server
from fakes import composed

from experiments import ext_server
from experiments.harness.catalogue import experiments
from experiments.harness.resume import run
from experiments.harness.schema import ConfigError
from experiments.harness.settings import settle
from experiments.http_load import client as client_module
from experiments.http_load.about import look_up
from experiments.http_load.client import Answer, Client, Job
from experiments.http_load.fields import accepted
from experiments.http_load.loops import BACK_OFF_S, Run, closed_loop, open_loop
from experiments.http_load.readings import is_late, run_readings, tokens_in
from experiments.measure.records import read_rows
from experiments.workload.arrivals import Span

SERVER = next(iter(experiments(["ext_server"])))
BOTH = frozenset({"ignore_eos", "min_tokens"})


def settled(tmp_path, *overrides):
    return settle(composed(tmp_path, *overrides, name=SERVER.name), SERVER)


def counts(rows) -> dict[str, float]:
    return {row.metric: row.value for row in rows if row.statistic in ("value", "count")}


def served(url, model, seconds=0.15, in_flight=2, drain=5.0, fields=BOTH) -> Run:
    """A closed loop of one model."""

    async def work():
        async with Client(look_up(url, ""), "", fields) as client:
            jobs = iter(lambda: Job(model, [1, 2, 3], 4), None)
            return await closed_loop(client, jobs, in_flight, Span(0.0, seconds, drain))

    return asyncio.run(work())


# our own server


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")
    from tests.serve.world import make_world
    from tests.serve.world import served as serving

    world = make_world(tmp_path_factory.mktemp("ext_server"), 6)
    engine, app = world.app(6)
    with serving(app) as url:
        yield engine, url


@pytest.mark.slow
def test_our_server_is_measured_and_drawn(tmp_path, own) -> None:
    engine, url = own
    words = [f"figure.url={url}", "workload.names=[Distinct,Zipf]", "figure.seconds=0.5", "figure.warm=0", "draw=true"]
    outcome = run(composed(tmp_path, *words, "figure.rates=[20]", name=SERVER.name), SERVER)
    assert (outcome.measured, outcome.failed) == (4, [])
    rows = read_rows(outcome.rows_file)
    assert {(row.system, row.model) for row in rows} == {("punica 1.0.0", "tiny")}
    assert {row.engine for row in rows} == {"punica 1.0.0; 6 adapters; ignore_eos and min_tokens; prompts as ids"}
    assert {row.panel for row in rows} == {"20 requests/s", "3 in flight"}
    for panel in ("20 requests/s", "3 in flight"):
        for workload in ("Distinct", "Zipf"):
            found = counts(row for row in rows if (row.panel, row.workload) == (panel, workload))
            assert found["errors"] == found["ended_early"] == 0
            assert found["requests"] == found["time_to_first_token"] == found["request_latency"] > 0
            assert found["output_tokens"] > found["requests"]
            assert {"output_throughput", "request_rate", "client_lag", "client_is_bottleneck"} <= set(found)
            assert {"time_to_first_token_mean", "time_per_output_token_p95", "offered_rate"} - set(found) <= {
                "offered_rate" if panel == "3 in flight" else ""
            }
    assert not engine.has_unfinished(), "what is cancelled is taken from the engine"
    assert outcome.figures == []


def test_prompts_of_words_are_served_too(tmp_path, own) -> None:
    words = (f"figure.url={own[1]}", "figure.seconds=0.2", "figure.prompts=text", "figure.loads=[in_flight]")
    outcome = run(composed(tmp_path, *words, "figure.warm=0", "workload=identical", name=SERVER.name), SERVER)
    found = counts(read_rows(outcome.rows_file))
    assert (found["errors"], outcome.failed) == (0, [])
    assert found["prompt_tokens"] > found["requests"], "as usage counts them"


def test_repeats_of_a_command_measure_nothing_again(tmp_path) -> None:
    with fake_server("right") as fake:
        words = (f"figure.url={fake.url}", "figure.seconds=0.1", "figure.rates=[90]", "workload=identical")
        first = run(composed(tmp_path, *words, name=SERVER.name), SERVER)
        again = run(composed(tmp_path, *words, name=SERVER.name), SERVER)
    assert (first.measured, again.measured, again.skipped) == (2, 0, 2)


# servers that misbehave


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("http-429", "http_429"), ("http-500", "http_500"), ("cut", "broken_stream"), ("endless", "broken_stream"),
        ("no-json", "broken_stream"), ("error", "error_in_stream"), ("no-usage", "no_usage"),
        ("wrong", "wrong_token_count"), ("short", "wrong_token_count"), ("long", "wrong_token_count"),
    ],
)  # fmt: skip
def test_every_error_is_counted_by_its_kind_and_no_token_with_it(model, kind) -> None:
    with fake_server(model) as fake:
        found = counts(run_readings(served(fake.url, model)))
        sent = len(fake.bodies)
    assert 2 <= found["requests"] <= sent
    assert found["errors"] == found[f"errors_{kind}"] == found["requests"]
    assert found["output_throughput"] == found["request_rate"] == found["output_tokens"] == 0
    assert "time_to_first_token" not in found


def test_errors_of_some_requests_leave_the_others(tmp_path) -> None:
    with fake_server("right", "http-429") as fake:
        words = (f"figure.url={fake.url}", "figure.requests=2", "figure.warm=0", "figure.seconds=0.3")
        cfg = composed(tmp_path, *words, "figure.loads=[in_flight]", "workload=distinct", name=SERVER.name)
        outcome = run(cfg, SERVER)
        assert {body["stream"] for body in fake.bodies} == {True}
        asked = Counter(body["model"] for body in fake.bodies)
    rows = read_rows(outcome.rows_file)
    found = counts(rows)
    assert outcome.failed == []
    assert found["errors"] == found["errors_http_429"] > 0
    assert found["requests"] - found["errors"] == found["time_to_first_token"] > 0
    assert abs(asked["right"] - asked["http-429"]) <= 4, "Distinct: in turns"


def test_a_slow_answer_is_unfinished_at_the_deadline() -> None:
    with fake_server("slow") as fake:
        fake.pause = 600
        found = counts(run_readings(served(fake.url, "slow", seconds=0.1, drain=1.0)))
        assert fake.under_way == len(fake.bodies) > 0, "not waited for"
    assert found["requests"] == found["errors"] == found["errors_unfinished"] == 2
    assert found["time_to_first_token_max"] >= 100, "of requests without a token, too, the wait so far"


def test_a_dead_server_is_asked_at_a_bounded_rate() -> None:
    with fake_server("right") as fake:
        server = look_up(fake.url, "")

    async def work():
        async with Client(server, "", BOTH) as client:
            return await closed_loop(client, iter(lambda: Job("right", [1], 2), None), 2, Span(0.0, 0.3, 1.0))

    found = counts(run_readings(asyncio.run(work())))
    assert found["errors"] == found["errors_no_connection"] == found["requests"] <= 2 * (1 + 0.3 / BACK_OFF_S)


def test_arrivals_do_not_wait_for_answers_and_begin_when_due() -> None:
    times = [0.01, 0.02, 0.05, 0.09, 0.12, 5.0]
    with fake_server("slow") as fake:
        fake.pause = 1.0

        async def work():
            async with Client(look_up(fake.url, ""), "", BOTH) as client:
                jobs = iter(lambda: Job("slow", [1], 2), None)
                return await open_loop(client, jobs, times, Span(0.0, 0.1, 5.0))

        found = asyncio.run(work())
        assert fake.most >= 4
    assert [answer.at for answer in found.answers] == times[:5], "those after the measured time arrive, too"
    assert counts(run_readings(found))["requests"] == 4
    assert [answer.error for answer in found.answers[:4]] == [""] * 4
    assert all(answer.first - answer.at >= 1.0 for answer in found.answers[:4])


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    with fake_server("slow") as fake:
        fake.pause = 0.02

        async def work():
            async with Client(look_up(fake.url, ""), "", BOTH) as client:
                jobs = iter(lambda: Job("slow", [1], 2), None)
                loop = asyncio.create_task(closed_loop(client, jobs, 3, Span(0.0, 60.0, 0.0)))
                while len(fake.bodies) < 9 and not loop.done():
                    await asyncio.sleep(0.005)
                loop.cancel()

        asyncio.run(work())
        assert len(fake.bodies) >= 9
        assert fake.most == 3


# fields that fix the number of tokens


@pytest.mark.parametrize(
    ("refuses", "taken"),
    [
        (set(), BOTH), ({"min_tokens"}, {"ignore_eos"}), ({"ignore_eos"}, {"min_tokens"}),
        ({"ignore_eos", "min_tokens"}, set()),
    ],
)  # fmt: skip
def test_fields_are_sent_as_far_as_a_server_takes_them(refuses, taken) -> None:
    with fake_server("right") as fake:
        fake.refuses = refuses
        assert accepted(look_up(fake.url, ""), "", Job("right", [1], 3), 5.0) == taken
        assert taken <= fake.bodies[-1].keys()
        assert not refuses & fake.bodies[-1].keys()


def test_answers_that_may_end_early_are_no_errors_and_are_counted(tmp_path) -> None:
    with fake_server("short") as fake:
        fake.refuses = set(BOTH)
        words = (f"figure.url={fake.url}", "figure.loads=[in_flight]", "figure.seconds=0.1", "figure.warm=0")
        outcome = run(composed(tmp_path, *words, "workload=identical", name=SERVER.name), SERVER)
    rows = read_rows(outcome.rows_file)
    found = counts(rows)
    assert (found["errors"], found["output_tokens"]) == (0, found["requests"])
    assert 0 < found["ended_early"] <= found["requests"]
    assert "answers may end early" in rows[0].engine


@pytest.mark.parametrize(("model", "words"), [("no-usage", "no usage"), ("http-503", "http 503"), ("cut", "broken")])
def test_a_server_that_cannot_be_measured_is_one_clear_error(tmp_path, model, words) -> None:
    with fake_server(model) as fake:
        cfg = composed(tmp_path, f"figure.url={fake.url}", "workload=identical", name=SERVER.name)
        with pytest.raises(ConfigError, match=words):
            run(cfg, SERVER)
        assert len(fake.bodies) == 1


# the client


def test_a_client_that_is_late_is_marked() -> None:
    assert not is_late([0.001] * 100, [0.02])
    assert is_late([0.001] * 90 + [0.02] * 10, [0.02])
    assert not is_late([0.001] * 90 + [0.02] * 10, [1.0])
    assert is_late([], [0.02]), "the loop never came to look"


def test_a_client_whose_loop_is_blocked_is_marked_in_the_rows(monkeypatch) -> None:
    async def blocking(self, answer):
        time.sleep(0.03)
        answer.pieces, answer.tokens, answer.prompt_tokens, answer.error = [self.now()], 4, 3, ""
        answer.end = self.now()

    monkeypatch.setattr(client_module.Client, "send", blocking)
    with fake_server("right") as fake:
        found = counts(run_readings(served(fake.url, "right")))
    assert found["client_is_bottleneck"] == 1
    assert found["client_lag_max"] > 20


def test_tokens_are_shared_out_over_their_pieces() -> None:
    job = Job("a", [1], 8)
    right = Answer(0.0, job, pieces=[0.5, 1.5, 1.6, 2.5], tokens=8, error="")
    wrong = Answer(0.0, job, pieces=[1.5], tokens=8, error="broken stream")
    assert tokens_in([right, wrong], 1.0, 2.0) == 4


# the stream


def test_adapters_follow_the_popularity_and_prompts_are_new(tmp_path) -> None:
    figure = settled(tmp_path).figure
    names = tuple(f"a{place}" for place in range(6))
    drawn = {
        workload: list(islice(ext_server.jobs(figure, workload, names, 0), 12))
        for workload in ("Distinct", "Uniform", "Skewed", "Identical", "Zipf")
    }
    sizes = {name: sorted(Counter(job.model for job in some).values()) for name, some in drawn.items()}
    assert sizes["Distinct"] == [2] * 6
    assert sizes["Uniform"] == [4] * 3
    assert sizes["Identical"] == [12]
    assert sizes["Skewed"] == [2, 2, 4, 4]
    assert sizes["Zipf"][-1] > 2
    first, second = drawn["Distinct"][:6], drawn["Distinct"][6:]
    assert [(job.model, job.new_tokens, len(job.prompt)) for job in first] == [
        (job.model, job.new_tokens, len(job.prompt)) for job in second
    ]
    assert all(one.prompt != other.prompt for one, other in zip(first, second, strict=True) if len(one.prompt) > 2)
    again = list(islice(ext_server.jobs(figure, "Distinct", names, 0), 6))
    assert again == first
    assert list(islice(ext_server.jobs(figure, "Distinct", names, 1), 6)) != first


# what is refused


def test_without_an_address_nothing_is_measured_and_said(tmp_path, capsys) -> None:
    outcome = run(composed(tmp_path, name=SERVER.name), SERVER)
    assert (outcome.points, outcome.failed) == (0, [])
    assert "figure.url is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["workload=distinct"], "Distinct of figure.requests=6 requests has 6 adapters, .* serves 3: .*requests=3"),
        (["figure.adapters=[right,none]"], "figure.adapters has 'none'"),
        (["figure.loads=[often]"], "figure.loads has 'often'"), (["figure.rates=[0]"], "figure.rates=.* above 0"),
        (["figure.rates=[]"], "figure.rates is empty"), (["figure.prompts=x"], "figure.prompts has 'x'"),
        (["figure.lengths=x"], "figure.lengths has 'x'"), (["figure.seconds=0"], "figure.seconds=.* above 0"),
        (["figure.drain=-1"], "figure.drain=-1"), (["figure.max_len=3"], "figure.max_len=3"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name_before_anything_is_sent(tmp_path, overrides, words) -> None:
    with fake_server("right", "slow", "wrong") as fake:
        with pytest.raises(ConfigError, match=words):
            SERVER.points(settled(tmp_path, f"figure.url={fake.url}", "workload=identical", *overrides))
        assert fake.bodies == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "must be an address"), ("ftp://x", "must be an address"),
        ("http://me:secret@127.0.0.1:1", "by the environment"), ("http://127.0.0.1:9", "start the server first"),
    ],
)  # fmt: skip
def test_addresses(url, words) -> None:
    with pytest.raises(ConfigError, match=words):
        look_up(url, "")


def test_models_without_parents_must_be_named() -> None:
    with fake_server() as fake:
        fake.models[:] = [{"id": name, "owned_by": "sglang"} for name in ("base", "right")]
        with pytest.raises(ConfigError, match="lists no adapters"):
            look_up(fake.url, "")
        found = look_up(f"{fake.url}/v1/", "", adapters=["right"])
        assert (found.label, found.base, found.adapters, found.url) == ("sglang 1.2", "base", ("right",), fake.url)
        fake.models[:] = [{"name": "base"}]
        with pytest.raises(ConfigError, match="without a list of models"):
            look_up(fake.url, "")


def test_the_key_comes_from_the_environment_and_is_stored_nowhere(tmp_path, monkeypatch) -> None:
    words = ["figure.loads=[in_flight]", "figure.seconds=0.1", "figure.warm=0", "workload=identical"]
    with fake_server("right") as fake:
        fake.key = "very-secret"
        cfg = composed(tmp_path, f"figure.url={fake.url}", *words, name=SERVER.name)
        with pytest.raises(ConfigError, match="SERVER_API_KEY"):
            run(cfg, SERVER)
        monkeypatch.setenv(ext_server.KEY, fake.key)
        outcome = run(cfg, SERVER)
    assert counts(read_rows(outcome.rows_file))["errors"] == 0
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".csv", ".json")]
    assert len(stored) == 2
    assert not any(b"very-secret" in content for content in stored)
    assert json.loads(next(tmp_path.rglob("ext_server.json")).read_text())["figure"]["url"] == fake.url
