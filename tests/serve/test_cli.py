"""The command line: what it makes of its arguments, and what it says without the extra."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{}":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import punica.serve
import runpy
runpy.run_module("punica.serve", run_name="__main__")
"""


@pytest.mark.slow
def test_without_the_extra_it_says_how_to_install_it() -> None:
    command = [sys.executable, "-c", WITHOUT.format("uvicorn")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("punica.serve needs ")
    assert "pip install 'punica[serve]'" in result.stderr


def test_arguments_become_settings_and_an_engine(world: Any, tmp_path: Path) -> None:
    from punica.serve import cli

    keys = tmp_path / "keys.txt"
    keys.write_text("--api-key=a=b\n--adapter-key=sql=c\n")
    folder = world.adapters[5 % len(world.adapters)].absolute_path
    arguments = [
        str(world.checkpoint), "--adapter", f"sql={folder}", "--allow-folder", str(tmp_path), "--max-queue=3",
        "--max-body=99", "--max-model-len=32", "--max-batch-size=2", "--max-loras=2", f"@{keys}",
    ]  # fmt: skip
    options = cli.parser().parse_args(arguments)
    settings = cli.settings_of(options)
    assert (settings.base, settings.max_queue, settings.max_body) == ("tiny", 3, 99)
    assert settings.roots == (tmp_path.resolve(),)
    assert (settings.keys.api_key, dict(settings.keys.adapter_keys)) == ("a=b", {"sql": "c"})
    engine = cli.engine_of(options, settings)
    assert (engine.config.max_model_len, engine.config.max_batch_size, engine.manager.lora_slots) == (32, 2, 2)
    assert list(engine.manager.list_adapters()) == [settings.adapters[0].lora_int_id]


def test_a_post_that_offers_http_2_keeps_its_body(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Java's client sends it; whichever parsers uvicorn finds."""
    from punica.serve import cli
    from tests.serve.world import served

    app = world.app(1)[1]
    with served(app) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **offer})
        assert connection.getresponse().status == 200
        connection.close()
    given: dict[str, Any] = {}
    monkeypatch.setattr(cli, "opened", lambda *_: nullcontext(app))
    monkeypatch.setattr(cli.gc, "freeze", lambda: None)
    monkeypatch.setattr(cli.uvicorn, "run", lambda _, **settings: given.update(settings))
    cli.main([str(world.checkpoint)])
    assert given["http"] == "h11"


def test_folders_that_may_be_loaded_make_slots(world: Any, tmp_path: Path) -> None:
    from punica.serve import cli

    options = cli.parser().parse_args([str(world.checkpoint), "--allow-folder", str(tmp_path), "--max-batch-size=2"])
    assert cli.engine_of(options, cli.settings_of(options)).manager is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter", "tiny=x"], "name two models"), (["--adapter", "a=x", "--adapter", "a=y"], "name two models"),
        (["--allow-folder", "/nowhere"], "nowhere"), (["--max-queue=-1"], "--max-queue"),
        (["--max-body=0"], "--max-body"), (["--adapter", "a=/nowhere"], "nowhere"), (["--ray=0"], "--ray"),
        (["--ray-address=auto"], "--ray-address needs --ray N"), (["--step-timeout=9"], "--step-timeout needs --ray N"),
        (["--ray=1", "--step-timeout=0"], "step_s is 0"), (["--adapter-rename=a=b="], "a=b= is of no --adapter"),
        (["--ray=2", "--adapter", "a=x", "--max-loras=3", "--max-batch-size=4"], "--max-loras 3 is below"),
    ],
    ids=range(12),
)  # fmt: skip
def test_what_is_refused_is_one_line(world: Any, arguments: list[str], message: str) -> None:
    from punica.serve import cli

    with pytest.raises(SystemExit, match=message):
        cli.main([str(world.checkpoint), *arguments])


def test_several_engines_are_the_factory_of_one_with_a_slot_for_every_request(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from punica.serve import cli

    monkeypatch.chdir(world.checkpoint.parent)
    given: dict[str, Any] = {}
    monkeypatch.setattr(cli, "RayCluster", lambda build, count, **options: given.update(options, build=build, n=count))
    arguments = ["tiny", "--ray=3", "--max-batch-size=5", "--max-model-len=32", "--ray-address=host:1"]
    arguments.append("--step-timeout=7.5")
    cases = (["--adapter=sql=adapters/tenant-1"], 5), (["--max-lora-rank=4", "--max-loras=9"], 9), ([], None)
    for more, slots in cases:
        options = cli.parser().parse_args([*arguments, *more])
        cli.cluster_of(options, cli.settings_of(options))
        assert (given["n"], given["address"], given["timeouts"].step_s) == (3, "host:1", 7.5)
        monkeypatch.chdir(tmp_path)  # as the processes of the runners
        engine = given["build"]()
        monkeypatch.chdir(world.checkpoint.parent)
        assert (engine.config.max_batch_size, engine.config.max_model_len) == (5, 32)
        assert (None if engine.manager is None else engine.manager.lora_slots) == slots


def test_without_ray_it_says_how_to_install_it(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from punica.serve import cli

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=r"a cluster needs Ray; install it with: pip install 'punica\[cluster\]'"):
        cli.main([str(world.checkpoint), "--ray=2"])


@pytest.mark.parametrize(
    ("option", "form", "given"),
    [
        ("--adapter", "NAME=VALUE", ("sql", "sql=", "=x")),
        ("--adapter-rename", "NAME=OLD=NEW", ("sql", "sql=a", "sql==b", "=a=b")),
    ],
)  # fmt: skip
def test_an_argument_needs_all_its_parts(capsys: pytest.CaptureFixture[str], option, form, given) -> None:
    from punica.serve import cli

    for argument in given:
        with pytest.raises(SystemExit):
            cli.parser().parse_args(["x", option, argument])
        assert f"is not {form}" in capsys.readouterr().err


def test_an_adapter_with_other_names_of_tensors_is_renamed(world: Any, tmp_path: Path, alone: Any) -> None:
    from punica.serve import cli

    adapter, other = world.adapters[2], tmp_path / "other"
    shutil.copytree(adapter.absolute_path, other)
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(
        {name.replace("model.layers", "model.visual.text.layers"): one for name, one in tensors.items()},
        other / "adapter_model.safetensors",
    )
    words = [str(world.checkpoint), f"--adapter=plain={adapter.absolute_path}", f"--adapter=other={other}"]
    words += ["--adapter-rename=other=visual.=", "--adapter-rename=other=text.=", "--max-batch-size=2"]
    options = cli.parser().parse_args(words)
    settings = cli.settings_of(options)
    assert [one.weights_mapper for one in settings.adapters] == [None, {"visual.": "", "text.": ""}]
    engine = cli.engine_of(options, settings)
    found = engine.generate(["hello"] * 2, list(settings.adapters), 8)
    assert [one.text for one in found] == [alone.generate(["hello"], adapter, 8)[0].text] * 2
