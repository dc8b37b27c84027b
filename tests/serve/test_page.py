"""The page of the running batch: what its data shows to which key, and what a browser makes of it."""

import logging
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from punica.engine import Request, SamplingParams
from punica.serve.access import Keys
from punica.serve.watch import Watch
from tests.serve.browser import CHROMIUM, Browser
from tests.serve.test_router_metrics import HOSTILE
from tests.serve.world import get, python, served, wait_until


def test_a_watched_step_has_the_rows_and_segments_of_its_layout(world: Any) -> None:
    watch = Watch(engine := world.engine(2))
    watch.view(False)
    assert engine.on_step is None  # routers start no recording
    for name, adapter in (("a", 1), ("b", 0), ("c", 1)):
        engine.add_request(Request(name, [7] * 5, 2 + adapter, world.adapters[adapter]))
    watch.view(True)
    while engine.has_unfinished():
        engine.step()
    view = watch.view(True)
    assert (view["num_steps"], view["num_tokens"], len(view["steps"])) == (5, 8, 5)
    assert [row[1:] for row in view["steps"][2]["rows"]] == [
        ([2], 5, 5, True, True, None), ([1], 1, 6, False, False, "length"), ([2], 1, 7, False, False, "length"),
    ]  # fmt: skip
    assert [step["segments"] for step in view["steps"][1:4]] == [
        [([1], 5, 0), ([2], 1, 1)], [([2], 5, 1), ([1], 1, 0), ([2], 1, 1)], [([2], 1, 1)],
    ]  # fmt: skip
    mixed = engine.add_request(Request("d", [7] * 5, 2, {one: 0.5 for one in world.adapters[:2]}))
    assert watch.view(False)["waiting"] == [1, 2]
    engine.generate([[1]], None, 2)
    assert mixed.has_ended
    assert watch.view(True)["steps"][-2]["segments"] == [([], 1, -1), ([1, 2], 1, -2)]
    watch._until = 0.0
    engine.generate([[1]], None, 2)
    assert engine.on_step is None


def test_a_prompt_in_pieces_joins_once(world: Any) -> None:
    watch = Watch(engine := world.engine(1, admission="chunked", prefill_chunk=4))
    watch.view(True)
    engine.generate([[7] * 10], None, 1)
    assert [row[2:6] for step in watch.view(True)["steps"] for row in step["rows"]] == [
        (4, 4, True, True), (4, 8, True, False), (2, 10, True, False),
    ]  # fmt: skip


def test_a_long_step_is_kept_and_names_outlive_slots(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0, 20.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr("punica.serve.watch.time", SimpleNamespace(monotonic=clock.__next__))
    watch = Watch(engine := world.engine(2, max_loras=1))
    for number, adapter in enumerate(world.adapters[:2]):
        assert watch.view(True)["num_steps"] == number
        engine.generate([[7] * 5], [adapter], 1)
    view = watch.view(True)
    assert (view["slots"], view["names"], len(view["steps"])) == ([2], {1: "tenant-0", 2: "tenant-1"}, 2)
    engine.generate([[7] * 5], None, 1)
    assert engine.on_step is not None
    engine.generate([[7] * 5], None, 1)
    assert engine.on_step is None


def test_drafts_are_rows_of_a_decoding_request(world: Any) -> None:
    watch = Watch(engine := world.engine(1, speculate=3))
    watch.view(True)
    (result,) = engine.generate([[5, 6, 7] * 5], None, SamplingParams(max_new_tokens=100, ignore_eos=True))
    view = watch.view(True)
    assert (view["num_tokens"], len(result.token_ids)) == (100, 100)
    assert view["num_steps"] < 100
    assert (True, False) in {(row[2] > 1, row[4]) for step in view["steps"] for row in step["rows"]}


def test_a_key_sees_all_rows_and_the_names_that_it_opens(world: Any) -> None:
    engine, app = world.app(3, keys=Keys("server", {"tenant-0": "zero"}))
    with TestClient(app) as client:
        assert (client.get("/steps").status_code, client.get("/").status_code) == (401, 200)
        others = {"2": "tenant-1", "3": "tenant-2"}
        for key, names, model in (("zero", {"1": "tenant-0"}, None), ("server", others, "tiny")):
            shown = client.get("/steps", headers={"Authorization": f"Bearer {key}"}).json()
            assert (shown["slots"], shown["names"], shown["model"], shown["demo"]) == ([1, 2, 3], names, model, False)
            assert set(re.findall("tenant-.", str(shown))) == set(names.values())
        assert engine.on_step is not None


def test_looks_of_the_page_are_not_in_the_log(world: Any) -> None:
    log, text = logging.getLogger("uvicorn.access"), StringIO()
    handler = logging.StreamHandler(text)
    with served(world.app(1)[1]) as url:
        log.addHandler(handler)
        log.setLevel("INFO")
        for path in ("/steps", "/version"):
            assert get(url, path).status_code == 200
    log.removeHandler(handler)
    assert "/version" in text.getvalue()
    assert "/steps" not in text.getvalue()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    made = Browser(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    assert made.faults == []


def text_of(browser: Browser, name: str) -> str:
    return browser.run(f'document.getElementById("{name}")?.textContent ?? ""')


@pytest.mark.slow
def test_a_hostile_name_is_text_and_others_are_letters(world: Any, browser: Browser) -> None:
    world = replace(world, adapters=[replace(world.adapters[0], lora_name=HOSTILE), world.adapters[1]])
    engine, app = world.app(2, {"max_model_len": 256}, keys=Keys("server", {"tenant-1": "one"}))
    step = engine.step
    engine.step = lambda: time.sleep(0.01) or step()
    with served(app) as url:
        browser.call("Page.navigate", url=url)
        wait_until(lambda: "missing or unknown API key" in text_of(browser, "error"), 60)
        assert browser.run('$("keys").hidden') is False
        assert (text_of(browser, "running"), browser.run('$("rows").checkVisibility()')) == ("?", False)
        browser.run('$("key").value = "server"; document.forms[0].requestSubmit()')
        wait_until(lambda: browser.run("view.names?.[1]") == HOSTILE, 60)
        body = 'prompt: "a", ignore_eos: true, max_tokens: 250'
        for key, model in (("one", '"tenant-1"'), ("server", "view.names[1]"), ("server", "view.model")):
            browser.run(f'key = "{key}"; void ask("v1/completions", {{ model: {model}, {body} }})')
        wait_until(lambda: all(one in text_of(browser, "rows") for one in (HOSTILE, "adapter B", "no adapter")), 60)
    assert "tenant-1" not in browser.run("document.documentElement.outerHTML")
    assert browser.run("document.scripts.length") == 1
    for width in (500, 1300):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


@pytest.mark.slow
def test_the_demo_shows_its_adapters_and_leaves_no_folder(browser: Browser) -> None:
    process = python("-m", "punica.serve", "--demo", "--port=0", "--drain=0", stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        (folder,) = re.findall(r"loads (.*)/random-weights", next(lines))
        (url,) = re.findall(r"look at (\S+)", next(line for line in lines if "look at" in line))
        next(line for line in lines if "running on" in line)
        browser.call("Page.navigate", url=url)
        names = {"poet", "lawyer", "cook"}
        wait_until(lambda: names <= set(re.findall("poet|lawyer|cook", text_of(browser, "events"))), 120)
        assert browser.run('$("demo").hidden') is False
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert (process.returncode, Path(folder).exists()) == (128 + signal.SIGTERM, False)
