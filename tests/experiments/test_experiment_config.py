"""Configuration: every experiment composes at every scale, and mistakes are refused with a message that helps."""

import json
import re
import sys

import pytest
from fakes import Fake, composed
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.harness import schema, settings
from experiments.harness.catalogue import experiments
from experiments.harness.resume import run
from experiments.harness.schema import CONF, ConfigError, choice, register_app
from experiments.harness.settings import folders, keys_read, refuse_unread, settle
from experiments.measure.records import TIMERS
from experiments.workload.popularity import WORKLOADS

ALL = {experiment.name: experiment for experiment in experiments()}
GPU_ONLY = ("ext_determinism", "ext_today", "ext_own_server")
NEEDS_A_SERVER = "ext_server"
SLOW = pytest.mark.slow


@pytest.mark.parametrize("scale", ["smoke", "gpu", *(pytest.param(name, marks=SLOW) for name in ("laptop", "paper"))])
@pytest.mark.parametrize("name", sorted(set(ALL) - {NEEDS_A_SERVER}))
def test_every_experiment_composes_and_has_points(tmp_path, name, scale):
    hardware = "h200" if name in GPU_ONLY else "cpu"
    cfg = settle(composed(tmp_path, f"scale={scale}", f"hardware={hardware}", name=name), ALL[name])
    points = ALL[name].points(cfg)
    assert points
    assert len({point.key() for point in points}) == len(points), "two points with one key would overwrite each other"


def test_every_figure_file_has_its_script():
    assert {path.stem for path in (CONF / "figure").glob("*.yaml")} == set(ALL)


def choices(tmp_path, group):
    """What `group=` takes: files of conf/ and what the registries put into Hydra's ConfigStore."""
    composed(tmp_path)
    stored = [name for name in ConfigStore.instance().repo.get(group, {})]
    return [*(path.stem for path in (CONF / group).glob("*.yaml")), *(name.removesuffix(".yaml") for name in stored)]



@pytest.mark.parametrize(
    "group", ["model", "hardware", "workload", "adapters", "timer", pytest.param("system", marks=SLOW)]
)
def test_every_choice_of_every_group_composes(tmp_path, group):
    found = choices(tmp_path, group)
    assert len(found) >= 3
    for name in found:
        assert composed(tmp_path, f"{group}={name}")[group] is not None


@pytest.mark.slow
def test_workloads_systems_and_timers_are_choices_by_being_registered(tmp_path):
    assert set(choices(tmp_path, "workload")) == {"all", *(name.lower() for name in WORKLOADS.names())}
    assert set(choices(tmp_path, "timer")) == {"auto", *TIMERS}
    systems = {name for experiment in ALL.values() for name in composed(tmp_path, name=experiment.name).figure.systems}
    assert set(choices(tmp_path, "system")) == {"all", *(choice(name) for name in systems)}
    assert {"punica", "hf_peft_mixed", "gather_bmm", "sgmv", "backbone", "true_rank"} <= set(
        choices(tmp_path, "system")
    )
    assert not [group for group in ("workload", "system", "timer") if (CONF / group).exists()]


@pytest.mark.parametrize("name", ALL)
def test_every_system_of_a_figure_can_be_chosen_alone(tmp_path, name):
    hardware = "h200" if name in GPU_ONLY or "gpu_systems" in composed(tmp_path, name=name).figure else "cpu"
    cfg = composed(tmp_path, f"hardware={hardware}", name=name)
    for system in cfg.figure.systems:
        cfg.system.names = [choice(system)]
        assert settle(cfg, ALL[name]).system.names == [system]


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
        ("system=tgi", "tgi"),
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
        ("scale.warmup=-1", r"scale\.warmup=-1 must be at least 0: choose scale\.warmup=0 or more"),
        ("scale.max_len=2", r"scale\.max_len=2 must be at least 3"),
        ("figure.h1=0", r"figure\.h1=0 must be at least 1"),
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
    monkeypatch.setattr(schema.environment, "hardware_slug", lambda: "h200")
    cfg = settle(composed(tmp_path, "scale=laptop", "hardware=auto"), ALL["fig07_sgmv_roofline"])
    assert (cfg.hardware.name, cfg.hardware.device, cfg.hardware.bandwidth_gb_s) == ("h200", "cuda", 4800)
    assert (cfg.timer.name, cfg.hardware.dtype.name) == ("cuda_graph", "float16")
    monkeypatch.setattr(schema.environment, "hardware_slug", lambda: "rtx-4090")
    cfg = settle(composed(tmp_path, "scale=laptop", "hardware=auto"), ALL["fig07_sgmv_roofline"])
    assert (cfg.hardware.name, cfg.hardware.bandwidth_gb_s, cfg.hardware.flush_mib) == ("rtx-4090", None, 256)


@pytest.mark.parametrize(
    ("slug", "overrides", "scale", "model"),
    [
        ("cpu", [], "laptop", "llama-small"),
        ("h200", [], "gpu", "llama2-7b"),
        ("rtx-4090", [], "gpu", "llama2-7b"),
        ("h200", ["hardware=auto"], "gpu", "llama2-7b"),
        ("h200", ["hardware=cpu"], "laptop", "llama-small"),
        ("cpu", ["hardware=h200"], "gpu", "llama2-7b"),
        ("h200", ["scale=laptop"], "laptop", "llama-small"),
        ("h200", ["scale=paper"], "paper", "llama2-7b"),
        ("h200", ["model=llama2-13b"], "gpu", "llama2-13b"),
        ("cpu", ["scale=gpu"], "gpu", "llama2-7b"),
    ],
)
def test_a_run_that_names_no_scale_has_that_of_its_hardware(tmp_path, monkeypatch, slug, overrides, scale, model):
    composed(tmp_path)  # registers the figures
    register_app("reproduce", "", "commands.reproduce", schema="batch")
    monkeypatch.setattr(schema.environment, "hardware_slug", lambda: slug)
    monkeypatch.setattr(schema.environment, "gpu_query", lambda *_: [])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        figure, command = (compose(name, overrides=overrides) for name in ("fig10_layer", "reproduce"))
    assert (figure.scale.name, figure.model.name) == (scale, model)
    assert command.scale == figure.scale


@pytest.mark.parametrize(
    ("slug", "gpus", "overrides", "scale"),
    [
        ("a100-80g", ["81920 MiB"], [], "gpu"),
        ("a100-40g", ["40960 MiB"], [], "laptop"),
        ("a100-80g", ["81920 MiB", "24576 MiB"], [], "laptop"),
        ("gb10", ["[N/A]"], [], "gpu"),
        ("a100-40g", ["40960 MiB"], ["scale=gpu"], "gpu"),
    ],
    ids=["80 GB", "40 GB", "the smaller of two", "does not say", "named"],
)
def test_a_gpu_without_room_for_figure_11_has_the_scale_of_a_laptop(
    tmp_path, monkeypatch, slug, gpus, overrides, scale
):
    composed(tmp_path)  # registers the figures
    monkeypatch.setattr(schema.environment, "hardware_slug", lambda: slug)
    monkeypatch.setattr(schema.environment, "gpu_query", lambda *_: [{"memory.total": told} for told in gpus])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("fig11_textgen", overrides=overrides)
    assert (cfg.scale.name, cfg.hardware.device) == (scale, "cuda")


@pytest.mark.parametrize(("l3", "flush"), [(260.0, 293), (480.0, 540), (16.0, 64), (None, 64)])
def test_a_cpu_empties_its_caches_beyond_the_last_level_that_it_reports(tmp_path, monkeypatch, l3, flush):
    monkeypatch.setattr(settings.environment, "l3_mib", lambda: l3)
    cfg = settle(composed(tmp_path, "scale=laptop"), ALL["fig08_lora_operator"])
    assert cfg.hardware.flush_mib == flush
    cfg = settle(composed(tmp_path, "scale=laptop", "hardware.flush_mib=7"), ALL["fig08_lora_operator"])
    assert cfg.hardware.flush_mib == 7


def test_every_figure_of_a_cpu_has_its_share_of_twenty_minutes():
    files = {name: OmegaConf.load(CONF / "figure" / f"{name}.yaml") for name in ALL}
    found = {name: file.get("minutes", {}).get("laptop") for name, file in files.items()}
    minutes = {name: share for name, share in found.items() if share is not None}
    assert set(minutes) == set(ALL) - {*GPU_ONLY, NEEDS_A_SERVER}
    assert sum(minutes.values()) < 16.01  # three more are for set-up, one for judging


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


@pytest.mark.parametrize(
    ("name", "override", "key"),
    [
        ("fig08_lora_operator", "model=llama-tiny", "model"),
        ("fig08_lora_operator", "adapters.alpha=8", "adapters.alpha"),
        ("fig08_lora_operator", "engine.page_size=8", "engine.page_size"),
        ("fig08_lora_operator", "scale.seq_lens=[16]", "scale.seq_lens"),
        ("fig01_batching", "workload=skewed", "workload"),
        ("fig01_batching", "timer=host_clock", "timer"),
        ("fig11_textgen", "scale.batch_sizes=[1]", "scale.batch_sizes"),
        ("fig11_textgen", "adapters.slots=4", "adapters.slots"),
    ],
)
def test_what_an_experiment_does_not_read_is_refused(name, override, key):
    with pytest.raises(
        ConfigError, match=rf"{re.escape(override)} would change nothing, {key} is not read by {name}: "
    ):
        refuse_unread(["scale=smoke", override], keys_read(ALL[name]), name)


@pytest.mark.parametrize("name", ALL)
def test_what_an_experiment_reads_is_not_refused(name):
    given = [
        "scale=smoke",
        "hardware=cpu",
        "+paths.outputs=x",
        "force=true",
        "draw=false",
        "system=all",
        "figure.title=T",
    ]
    refuse_unread(given, keys_read(ALL[name]), name)
    refuse_unread([f"{key}=1" for key in ALL[name].reads], keys_read(ALL[name]), name)


@pytest.mark.slow
def test_every_declared_key_exists(tmp_path):
    for experiment in ALL.values():
        cfg = composed(tmp_path, name=experiment.name)
        for key in keys_read(experiment):
            OmegaConf.select(cfg, key, throw_on_missing=True)
            assert OmegaConf.select(cfg, key.rpartition(".")[0] or key) is not None, (experiment.name, key)
            assert key.rpartition(".")[2] in (cfg if "." not in key else cfg[key.split(".")[0]])


def test_the_kept_configuration_holds_what_is_read_and_nothing_else(tmp_path):
    run(composed(tmp_path, "workload=distinct", "figure.batch_sizes=[1]"), Fake())
    kept = json.loads((tmp_path / "cpu/smoke/rows/fig08_lora_operator.json").read_text())
    assert set(kept) == {"figure", "hardware", "workload", "adapters", "system", "timer", "scale", "force", "draw"}
    assert kept["figure"]["h1"] == kept["scale"]["hidden_size"] == 96
    assert set(kept["adapters"]) == {"ranks"}
    assert {"name", "repeats", "batch_sizes"} <= set(kept["scale"])
    assert not {"seq_lens", "requests", "model_batch_sizes"} & set(kept["scale"])


@pytest.mark.parametrize("name", ["fig01_batching", "fig11_textgen"])
def test_what_only_the_host_clock_can_time_says_so_on_a_gpu(tmp_path, name):
    for timer in ("auto", "cuda_graph"):
        cfg = settle(composed(tmp_path, "hardware=h200", f"timer={timer}", name=name), ALL[name])
        assert cfg.timer.name == "host_clock"
    assert (
        settle(composed(tmp_path, "hardware=h200", name="fig10_layer"), ALL["fig10_layer"]).timer.name == "cuda_graph"
    )
