"""Configuration: every experiment composes at every scale, and mistakes are refused with a message that helps."""

import sys

import pytest
from fakes import Fake, composed
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from experiments.harness.catalogue import experiments
from experiments.harness.resume import run
from experiments.harness.schema import CONF, ConfigError
from experiments.harness.settings import folders, settle

ALL = {experiment.name: experiment for experiment in experiments()}
GPU_ONLY = ("ext_determinism",)


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
@pytest.mark.parametrize("name", ALL)
def test_every_experiment_composes_and_has_points(tmp_path, name, scale):
    hardware = "h200" if name in GPU_ONLY else "cpu"
    cfg = settle(composed(tmp_path, f"scale={scale}", f"hardware={hardware}", name=name), ALL[name])
    points = ALL[name].points(cfg)
    assert points
    assert len({point.key() for point in points}) == len(points), "two points with one key would overwrite each other"


def test_every_figure_file_has_its_script():
    assert {path.stem for path in (CONF / "figure").glob("*.yaml")} == set(ALL)


def test_every_choice_of_every_group_composes(tmp_path):
    for group in ("model", "hardware", "workload", "adapters", "system", "engine", "timer"):
        for path in (CONF / group).glob("*.yaml"):
            assert composed(tmp_path, f"{group}={path.stem}")[group] is not None


def test_the_scale_chooses_the_model_unless_the_user_does(tmp_path):
    assert composed(tmp_path).model.name == "llama-tiny"
    assert composed(tmp_path, "scale=laptop").model.name == "llama-small"
    assert composed(tmp_path, "scale=laptop", "model=llama2-13b").model.name == "llama2-13b"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("scale.repeat=3", "repeat"),
        ("figure.h3=4", "h3"),
        ("scale.repeats=many", "many"),
        ("figure.dtype=float8", "float8"),
        ("workload=foo", "foo"),
        ("model=llama3", "llama3"),
        ("system=vllm", "vllm"),
        ("figure.batch_sizes=64", "64"),
    ],
)
def test_a_mistyped_key_or_value_fails_while_composing(tmp_path, override, expected):
    with pytest.raises((HydraException, OmegaConfBaseException)) as caught:
        composed(tmp_path, override)
    text = f"{caught.value} {caught.value.__cause__}"
    assert expected in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.names=[Popular]", r"'Popular'.*known: Distinct, Uniform, Skewed, Identical"),
        ("system=punica", r"'punica'.*fig08_lora_operator.*Loop"),
        ("timer=cuda_graph", r"timer='cuda_graph'.*timer=host_clock"),
        ("hardware.device=tpu", r"hardware\.device='tpu'"),
    ],
)
def test_a_choice_that_cannot_run_is_refused_before_measuring(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        run(composed(tmp_path, override), ALL["fig08_lora_operator"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scale.repeats=0", r"scale\.repeats=0 must be at least 1"),
        ("adapters.ranks=[16,0]", r"adapters\.ranks=\[16, 0\]"),
        ("figure.batch_sizes=[]", r"figure\.batch_sizes=\[\]"),
        ("hardware.threads=0", r"hardware\.threads=0"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_limit(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        run(composed(tmp_path, override), Fake())


def test_a_choice_narrows_the_grid(tmp_path):
    cfg = settle(composed(tmp_path, "workload=skewed", "system=sgmv"), ALL["fig08_lora_operator"])
    points = ALL["fig08_lora_operator"].points(cfg)
    assert {(point.workload, point.system) for point in points} == {("Skewed", "SGMV")}


def test_hardware_auto_fills_in_the_ceilings_of_a_known_gpu(tmp_path, monkeypatch):
    from experiments.harness import schema

    monkeypatch.setattr(schema.environment, "hardware_slug", lambda: "h200")
    cfg = settle(composed(tmp_path, "scale=laptop", "hardware=auto"), ALL["fig07_sgmv_roofline"])
    assert (cfg.hardware.name, cfg.hardware.device, cfg.hardware.bandwidth_gb_s) == ("h200", "cuda", 4800)
    assert (cfg.timer.name, cfg.hardware.dtype.name) == ("cuda_graph", "float16")
    monkeypatch.setattr(schema.environment, "hardware_slug", lambda: "rtx-4090")
    cfg = settle(composed(tmp_path, "scale=laptop", "hardware=auto"), ALL["fig07_sgmv_roofline"])
    assert (cfg.hardware.name, cfg.hardware.bandwidth_gb_s, cfg.hardware.flush_mib) == ("rtx-4090", None, 256)


def test_smoke_rows_lie_apart(tmp_path):
    smoke, laptop = folders(composed(tmp_path)), folders(composed(tmp_path, "scale=laptop"))
    assert smoke.fresh_rows == tmp_path / "cpu" / "smoke" / "rows"
    assert laptop.fresh_rows == tmp_path / "cpu" / "rows"


def test_deciding_what_is_stale_needs_no_torch(tmp_path):
    import subprocess

    code = (
        "import sys, experiments.commands.reproduce; from experiments.harness.catalogue import experiments;"
        "heavy = {'torch', 'matplotlib', 'pandas'} & set(sys.modules); assert not heavy, heavy; assert experiments()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONF.parent)
