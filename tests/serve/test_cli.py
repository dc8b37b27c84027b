"""The command line: what it makes of its arguments, and what it says without torch, without Ray, without the extra."""

import json
import shutil
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from punica import __version__, progress
from punica.serve import launch
from punica.serve.cli import main, parse
from tests.serve.world import served

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it raises
{}
from punica.serve.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "--served-model-name"), (["--version"], 0, f"punica {__version__}"),
        (["/nowhere"], 2, "'/nowhere' is not a folder"), (["{tiny}", "--port={taken}"], 1, "Address already in use"),
        (["{tiny}", "--host=no.such.host."], 1, "no.such.host"),
        (["{tiny}", "--port=0"], 1, "import of torch halted"),  # what is right goes on
        (["{tiny}", "without"], 1, "punica.serve needs uvicorn: pip install 'punica-lora[serve]'"),
    ],
    ids=["help", "version", "checkpoint", "in use", "host", "right", "no extra"],
)  # fmt: skip
def test_what_needs_no_torch_is_answered_before_its_import(world, arguments, code, said) -> None:
    before = 'sys.modules["uvicorn"] = None' if "without" in arguments else ""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"tiny": str(world.checkpoint), "taken": taken.getsockname()[1]}
        words = [argument.format(**given) for argument in arguments if argument != "without"]
        command = [sys.executable, "-c", WITHOUT_TORCH.format(before), *words]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    told = result.stderr if code else result.stdout
    assert (result.returncode, said in told) == (code, True), result.stderr
    assert len(told.splitlines()) == 1 or said in ("--served-model-name", "import of torch halted")


def built(*arguments: str) -> tuple[launch.Settings, Any]:
    """Settings and engine of a command line."""
    options = parse(arguments)
    settings = launch.settings_of(options)
    return settings, launch.build_of(options, settings)()


def test_arguments_become_settings_and_an_engine_that_is_summed_up(world, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    keys = tmp_path / "keys.txt"
    keys.write_text("--api-key=a=b\n--adapter-key=sql=c\n")
    settings, engine = built(
        str(world.checkpoint), "--adapter", f"sql={world.adapters[1].absolute_path}", "--allow-folder", str(tmp_path),
        "--max-queue=3", "--max-body=99", "--max-model-len=32", "--max-batch-size=2", "--max-loras=2", f"@{keys}",
        "--weights=fp8",
    )  # fmt: skip
    assert (settings.base, settings.max_queue, settings.max_body) == ("tiny", 3, 99)
    assert settings.roots == (tmp_path.resolve(),)
    assert (settings.keys.api_key, dict(settings.keys.adapter_keys)) == ("a=b", {"sql": "c"})
    assert (engine.config.max_model_len, engine.config.max_batch_size, engine.manager.lora_slots) == (32, 2, 2)
    assert engine.runner.model.model.layers[0].mlp.down_proj.weight.dtype == torch.float8_e4m3fn
    assert list(engine.manager.list_adapters()) == [settings.adapters[0].lora_int_id]
    *lines, summary = capsys.readouterr().err.splitlines()
    assert lines[-1] == "loading adapters: 1 of 1 adapters"
    assert lines[0].startswith("loading weights: 1 of ")
    for part in (
        f"tiny: adapters: 1, slots: 2 of rank {engine.manager.lora_config.max_lora_rank}",
        "dtype: float32, weights: fp8", "device: CPU", "context: 32 tokens", f"threads: {torch.get_num_threads()}",
        "batch: 2 requests", "KV cache: 64 tokens",
    ):  # fmt: skip
        assert part in summary


def test_a_post_that_offers_http_2_keeps_its_body(world: Any) -> None:
    """As Java's client sends it; whichever parsers uvicorn finds."""
    with served(world.app(1)[1]) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **offer})
        assert connection.getresponse().status == 200
        connection.close()


def test_folders_that_may_be_loaded_make_slots(world: Any, tmp_path: Path) -> None:
    _, engine = built(str(world.checkpoint), "--allow-folder", str(tmp_path), "--max-batch-size=2")
    assert engine.manager.lora_config.max_lora_rank == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter", "\udcff=x"], "is not UTF-8"),
        (["--adapter", "tiny=x"], "name two models"), (["--adapter", "a=x", "--adapter", "a=y"], "name two models"),
        (["--allow-folder", "/nowhere"], "nowhere"), (["--max-queue=-1"], "--max-queue: '-1' must be an integer, at l"),
        (["--wrong"], "--wrong"), (["@/nowhere"], "'/nowhere'"), (["--port", "80000"], "at most 65535"),
        (["--max-body=0"], "--max-body"), (["--adapter", "a=/nowhere"], "--adapter a: '/nowhere' is not a folder"),
        (["--adapter", "a={tiny}"], "has no adapter_config.json"), (["--ray=0"], "--ray"), (["--port=x"], "--port"),
        (["--ray-address=auto"], "--ray-address needs --ray N"), (["--step-timeout=9"], "--step-timeout needs --ray N"),
        (["--ray=1", "--step-timeout=0"], "--step-timeout"),
        (["--ray=2", "--max-loras=3", "--max-batch-size=4"], "--max-loras 3 is below"), (["--api-key="], "API key"),
        (["--max-model-len=1"], "at least 2"), (["--grace=inf"], "a number, at least 0"), (["--drain=nan"], "--drain"),
        (["--dtype=int8"], "--dtype"), (["@{tiny}/model.safetensors"], "must be text"), (["--api-key=ü€"], "Latin-1"),
        (["--weights=int4"], "--weights"),
        (["--adapter", "sql"], "is not NAME=VALUE"), (["--adapter", "sql="], "is not NAME=VALUE"),
        (["--adapter", "=x"], "is not NAME=VALUE"), (["--ray=2", "without"], "pip install 'punica-lora[clust"),
        (["--demo"], "or --demo without a checkpoint"), (["--ray=2", "--prefix-cache"], "--prefix-cache is for one"),
        (["--ray=2", "--prefill-chunk=9"], "--prefill-chunk is for one engine"),
    ],
    ids=range(32),
)  # fmt: skip
def test_what_is_refused_is_one_line(world, arguments, message, capsys, monkeypatch) -> None:
    if "without" in arguments:
        arguments = arguments[:-1]
        monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        main([str(world.checkpoint), *(argument.format(tiny=world.checkpoint) for argument in arguments)])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_folder_of_an_adapter_is_no_checkpoint(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([world.adapters[0].absolute_path])
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_that_is_damaged_is_one_line(world: Any, tmp_path: Path) -> None:
    shutil.copytree(world.checkpoint, tmp_path / "damaged")
    (tmp_path / "damaged/config.json").write_text("{")
    with pytest.raises(SystemExit, match=r"config\.json") as ended:
        main([str(tmp_path / "damaged"), "--port=0"])
    assert "\n" not in str(ended.value)


def test_several_engines_are_the_factory_of_one_with_a_slot_for_every_request(world, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(world.checkpoint.parent)
    given: dict[str, Any] = {}
    make = lambda build, count, **options: given.update(options, build=build, n=count)  # noqa: E731
    monkeypatch.setattr(launch, "RayCluster", make)
    arguments = ["tiny", "--ray=3", "--max-batch-size=5", "--max-model-len=32", "--ray-address=host:1"]
    cases = (["--adapter=sql=adapters/tenant-1"], 5), (["--max-lora-rank=4", "--max-loras=9"], 9), ([], None)
    for more, slots in cases:
        options = parse([*arguments, "--step-timeout=7.5", *more])
        launch.cluster_of(options, launch.settings_of(options))
        assert (given["n"], given["address"], given["timeouts"].step_s) == (3, "host:1", 7.5)
        monkeypatch.chdir(tmp_path)  # as the processes of the runners
        engine = given["build"]()
        monkeypatch.chdir(world.checkpoint.parent)
        assert (engine.config.max_batch_size, engine.config.max_model_len) == (5, 32)
        assert (None if engine.manager is None else engine.manager.lora_slots) == slots
