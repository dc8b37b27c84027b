"""Configuration: every experiment composes at every scale, and a mistake is one sentence that helps."""

import subprocess
import sys

import pytest
from fakes import Fake, composed, points_of, settled
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.harness.catalogue import experiments
from experiments.harness.command import or_exit, register_app
from experiments.harness.resume import run
from experiments.harness.schema import CONF, BatchConf, ConfigError
from experiments.harness.settings import choice, keys_read, refuse_unread, settle
from experiments.measure import environment

ALL = {experiment.name: experiment for experiment in experiments()}
OPERATORS = ALL["fig08_lora_operator"]
SLOW = pytest.mark.slow
GPU_ONLY = ("ext_operator_tables", "ext_expert_tables", "ext_servers")


@pytest.mark.parametrize("scale", ["smoke", "gpu", *(pytest.param(name, marks=SLOW) for name in ("laptop", "paper"))])
@pytest.mark.parametrize("name", sorted(ALL))
def test_every_experiment_composes_and_has_points(tmp_path, name, scale):
    hardware = "h200" if name in GPU_ONLY else "cpu"
    points = points_of(tmp_path, ALL[name], f"scale={scale}", f"hardware={hardware}")
    assert points
    assert len({point.key() for point in points}) == len(points), "two points with one key would overwrite each other"


def test_every_figure_file_has_its_script():
    assert {path.stem for path in (CONF / "figure").glob("*.yaml")} == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_system_of_a_figure_can_be_chosen_alone(tmp_path, name):
    hardware = "h200" if name in GPU_ONLY or "gpu_systems" in composed(tmp_path, name=name).figure else "cpu"
    cfg = composed(tmp_path, f"hardware={hardware}", name=name)
    for system in cfg.figure.systems:
        cfg.system.names = [choice(system)]
        assert settle(cfg, ALL[name]).system.names == [system]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("scale.repeats=0", ["scale.repeats=0 must be greater than or equal to 1", "choose"]),
        ("adapters.ranks=[16,0]", ["0 of adapters.ranks=[16, 0] must be greater than or equal to 1"]),
        ("figure.batch_sizes=[]", ["figure.batch_sizes=[]", "at least 1 item", "choose"]),
        ("scale.repeats=many", ["scale.repeats=many", "integer"]),
        ("hardware.device=tpu", ["hardware.device=tpu", "'cpu' or 'cuda'"]),
        ("model.num_attention_heads=7", ["hidden_size=64 must be an even multiple of model.num_attention_heads=7"]),
        ("model.num_attention_heads=64", ["must be an even multiple of model.num_attention_heads=64", "choose"]),
        ("model.num_key_value_heads=3", ["attention_heads=4 must be a multiple of model.num_key_value_heads=3"]),
        ("hardware.name=../cpu", ["hardware.name=../cpu must match", "choose"]),
        ("+scale.repeat=3", ["scale.repeat=", "did you mean scale.repeats=?"]),
        ("+engine.max_batchsize=8", ["did you mean engine.max_batch_size=?"]),
        ("scale.repeats=???", ["scale.repeats= is missing: give scale.repeats=<value>"]),
        ("workload=foo", ["'workload/foo'", "distinct"]),
        ("workload.names=[Popular]", ["'Popular'", "known: Distinct, Uniform, Skewed, Identical"]),
        ("system=punica", ["'punica'", "fig08_lora_operator", "Loop"]),
        ("timer=cuda_graph", ["timer='cuda_graph'", "timer=host_clock"]),
    ],
)
def test_a_mistake_is_one_sentence_with_value_limit_and_remedy(tmp_path, capsys, override, parts):
    """Before anything is measured."""
    fake = Fake()
    with pytest.raises(SystemExit):
        or_exit(lambda: run(composed(tmp_path, override), fake))
    (line,) = capsys.readouterr().err.splitlines()
    assert [part for part in ("error: ", *parts) if part not in line] == [], line
    assert fake.measured == []


def test_what_the_schema_has_is_taken_with_a_plus_too(tmp_path):
    cfg = settled(tmp_path, ALL["fig11_textgen"], "++scale.repeats=4", "+figure.minutes.smoke=1")
    assert (cfg.scale.repeats, cfg.figure.minutes["smoke"]) == (4, 1.0)


@pytest.mark.parametrize(("slug", "ceilings", "flush"), [("h200", (4800, 989), 256), ("rtx-4090", (None, None), 256)])
def test_hardware_auto_fills_in_the_ceilings_of_a_known_gpu(tmp_path, monkeypatch, slug, ceilings, flush):
    monkeypatch.setattr(environment, "hardware_slug", lambda: slug)
    cfg = settled(tmp_path, ALL["fig07_sgmv_roofline"], "scale=laptop", "hardware=auto")
    found = cfg.hardware
    assert (found.name, found.device, found.dtype.name, found.flush_mib) == (slug, "cuda", "float16", flush)
    assert (found.bandwidth_gb_s, found.tflop_s) == ceilings
    assert cfg.timer.name == "cuda_graph"


@pytest.mark.parametrize(
    ("slug", "gpus", "overrides", "scale", "model"),
    [
        ("cpu", [], [], "laptop", "llama-small"),
        ("h200", [], [], "gpu", "llama2-7b"),
        ("h200", [], ["hardware=cpu"], "laptop", "llama-small"),
        ("cpu", [], ["hardware=h200"], "gpu", "llama2-7b"),
        ("a100-80g", ["81920 MiB"], [], "gpu", "llama2-7b"),
        ("a100-40g", ["40960 MiB"], [], "laptop", "llama-small"),
        ("a100-80g", ["81920 MiB", "24576 MiB"], [], "laptop", "llama-small"),
    ],
)
def test_a_run_that_names_no_scale_has_that_of_its_hardware_and_its_memory(
    tmp_path, monkeypatch, slug, gpus, overrides, scale, model
):
    composed(tmp_path)  # registers the figures
    register_app("reproduce", "", "commands.reproduce", BatchConf)
    monkeypatch.setattr(environment, "hardware_slug", lambda: slug)
    monkeypatch.setattr(environment, "gpu_query", lambda *_: [{"memory.total": told} for told in gpus])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        figure, command = (compose(name, overrides=overrides) for name in ("fig10_layer", "reproduce"))
    assert (figure.scale.name, figure.model.name) == (scale, model)
    assert command.scale == figure.scale


@pytest.mark.parametrize(("l3", "flush"), [(260.0, 293), (16.0, 64), (None, 64)])
def test_a_cpu_empties_its_caches_beyond_the_last_level_that_it_reports(tmp_path, monkeypatch, l3, flush):
    monkeypatch.setattr(environment, "l3_mib", lambda: l3)
    for words, expected in ((["scale=laptop"], flush), (["scale=laptop", "hardware.flush_mib=7"], 7)):
        assert settled(tmp_path, OPERATORS, *words).hardware.flush_mib == expected


def test_deciding_what_is_stale_needs_no_torch():
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
        ("fig01_batching", "timer=host_clock", "timer"),
        ("fig11_textgen", "scale.batch_sizes=[1]", "scale.batch_sizes"),
    ],
)
def test_what_an_experiment_does_not_read_is_refused(name, override, key):
    with pytest.raises(ConfigError, match=f"{key} is not read by {name}: leave it out"):
        refuse_unread(["scale=smoke", override], keys_read(ALL[name]), name)


@pytest.mark.parametrize("name", ["fig08_lora_operator", "fig10_layer", "ext_moe"])
def test_too_few_slots_for_the_adapters_of_a_batch_are_refused(tmp_path, name):
    assert points_of(tmp_path, ALL[name], "adapters.slots=2", "figure.batch_sizes=[2]")
    with pytest.raises(ConfigError, match=r"adapters.slots is 2, Distinct has 3 adapters in a batch of 3"):
        points_of(tmp_path, ALL[name], "adapters.slots=2", "figure.batch_sizes=[3]")
    with pytest.raises(ConfigError, match=r"adapters.slots is 6, Zipf has 7 adapters in a batch of 13"):
        points_of(tmp_path, ALL[name], "adapters.slots=6", "figure.batch_sizes=[13,14]", "workload=zipf")


@pytest.mark.parametrize(
    ("name", "override", "error"),
    [
        ("fig13_cluster", "address=host:1", "address=host:1 is read with runtime=ray alone"),
        ("fig13_cluster", "figure.kill=true", "figure.kill=True is read with runtime=ray alone"),
        ("fig13_cluster", "figure.seconds=3601", "must be less than or equal to 3600"),
        ("fig13_cluster", "figure.model=foo runtime=ray", "figure.model=foo is unknown: choose one of llama-small"),
        ("ext_placement", "figure.seconds=3601", "must be less than or equal to 3600"),
    ],
)
def test_what_the_hour_does_not_have_is_refused(tmp_path, name, override, error):
    with pytest.raises(ConfigError, match=error):
        points_of(tmp_path, ALL[name], *override.split())


@pytest.mark.parametrize("name", ALL)
def test_what_an_experiment_reads_is_not_refused(name):
    usual = ["scale=smoke", "hardware=cpu", "+paths.outputs=x", "force=true", "system=all", "figure.title=T"]
    refuse_unread([*usual, *(f"{key}=1" for key in ALL[name].reads)], keys_read(ALL[name]), name)


@SLOW
def test_every_declared_key_exists(tmp_path):
    for experiment in ALL.values():
        cfg = composed(tmp_path, name=experiment.name)
        for key in keys_read(experiment):
            above, _, last = key.rpartition(".")
            assert last in (OmegaConf.select(cfg, above) if above else cfg), (experiment.name, key)
