"""Figure 13 on Ray: what is made of what the front of the cluster saw, and one short run from the command line."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from fakes import PAPER, settled

from experiments.cluster import ray_hour
from experiments.cluster.hour import World, timed_steps
from experiments.cluster.ray_hour import check_numbers, check_tokens
from experiments.cluster.served import KILLED, RAY, SIMULATED_RAY
from experiments.fig13_cluster import EXPERIMENT
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.measure.records import read_rows
from punica.cluster import StepWork

Step = namedtuple("Step", "runner work begin_s end_s seconds")


def test_a_step_with_decodes_began_when_the_one_before_ended() -> None:
    joined, decoding, empty = StepWork(0, 0, 7, 16), StepWork(1, 8, 0, 16), StepWork()
    steps = [
        Step("a", joined, 1.0, 1.2, 0.1), Step("b", joined, 1.1, 1.25, 0.1), Step("a", decoding, 1.23, 1.3, 0.1),
        Step("b", empty, 1.3, 1.31, 0.0), Step("b", joined, 2.0, 2.1, 0.1),
    ]  # fmt: skip
    runners, seconds = zip(*((step.runner, seconds) for step, seconds in timed_steps(steps)), strict=True)
    assert "".join(runners) == "abab"
    assert seconds == pytest.approx((0.2, 0.15, 0.1, 0.1))


def test_tokens_that_were_lost_or_came_twice_or_differ_beyond_ties_are_no_result() -> None:
    for served in ([[1], [2, 3]], [[1, 2, 2], [2, 3]]):
        with pytest.raises(CheckFailed, match=f"request 0 has {len(served[0])}, asked for 2"):
            check_numbers(served, [2, 2])
    alone = [[i] for i in range(2000)]
    assert check_tokens(alone, alone) == 0
    assert check_tokens([*([9999] for _ in range(2)), *alone[2:]], alone) == 2
    with pytest.raises(CheckFailed, match="3 of 2000 requests have other tokens"):
        check_tokens([*([9999] for _ in range(3)), *alone[3:]], alone)


@pytest.mark.parametrize(
    ("hardware", "scale", "model", "speed_up", "max_len"),
    [("cpu", "laptop", "llama-tiny", 20, 192), ("h100", "gpu", "llama2-7b", 60, 128)],
)
def test_hours_of_all_rules_and_the_loss_of_a_runner_under_the_first(
    tmp_path, hardware, scale, model, speed_up, max_len
) -> None:
    words = ("runtime=ray", f"hardware={hardware}", f"scale={scale}", "system.names=[punica,least_loaded]")
    cfg = settled(tmp_path, EXPERIMENT, *words, "figure.kill=true")
    found = ray_hour.points(cfg)
    assert [(one.panel, one.system) for one in found] == [
        (RAY, "punica"), (SIMULATED_RAY, "punica"), (RAY, "least_loaded"), (SIMULATED_RAY, "least_loaded"),
        (KILLED, "punica"),
    ]  # fmt: skip
    assert {(one.model, one.settings["speed_up"], one.settings["max_len"]) for one in found} == {
        (model, speed_up, max_len)
    }


def test_a_rule_that_engines_cannot_follow_is_refused_before_anything_starts(tmp_path) -> None:
    words = ("runtime=ray", "system.names=[punica,released]")
    with pytest.raises(ConfigError, match="system=released puts several prompts into a step"):
        ray_hour.points(settled(tmp_path, EXPERIMENT, *words))


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1)])
def test_runners_serve_on_the_hardware_of_the_rows_and_one_that_does_not_come_up_is_one_error(
    tmp_path, monkeypatch, device, gpus
) -> None:
    """Also where the machine has GPUs that were not asked for."""
    pytest.importorskip("ray", reason="the optional extra 'cluster' is not installed")
    from experiments.cluster import ray_serving

    name = "h200" if gpus else "cpu"
    words = ("runtime=ray", f"hardware={name}", "figure.seconds=20", "figure.max_len=48")
    settings = ray_hour.points(settled(tmp_path, EXPERIMENT, *words))[0].settings
    assert (settings["device"], settings.get("checked", 0)) == (device, ray_hour.CHECKED if gpus else 0)
    built = []

    def never(build, count, *, resources, **_: object) -> None:
        built.append((build, count, resources.num_gpus))
        raise RuntimeError("Ray did not come up on this machine (timed out)")

    monkeypatch.setattr(ray_serving, "RayCluster", never)
    world = World(str(PAPER), "punica", **settings)
    with ray_serving.tenants_of(world) as tenants:
        with (
            pytest.raises(ConfigError, match="runtime=ray: Ray did not come up on this machine"),
            ray_serving.runners(world, tenants),
        ):
            pass
        assert built == [(tenants.build, 4, gpus)]  # and `served_by_one_engine` builds by the same
        assert tenants.build.keywords == {"device": device, "dtype": torch.float32}
        assert tenants.build.args[2].batch_invariant == bool(gpus)


@pytest.mark.slow
def test_the_hour_on_ray_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the optional extra 'cluster' is not installed")
    words = ["runtime=ray", "scale=smoke", "figure.kill=true", "figure.seconds=120", "figure.max_len=48"]
    words += ["system.names=[punica,least_loaded]"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.fig13_cluster", *words, f"paths.outputs={tmp_path}"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["measured"], outcome["failed"]) == (5, [])
    rows = read_rows(Path(outcome["rows_file"]))
    kinds = {RAY: "measured", KILLED: "measured", SIMULATED_RAY: "simulated"}
    assert {row.panel: row.kind for row in rows} == kinds
    value = {(row.panel, row.system, row.metric, row.statistic): row.value for row in rows}
    for panel, rule in ((RAY, "punica"), (RAY, "least_loaded"), (KILLED, "punica"), (SIMULATED_RAY, "punica")):
        assert value[panel, rule, "total_tokens", "value"] == value[RAY, "punica", "total_tokens", "value"]
    for rule in ("punica", "least_loaded"):
        assert value[RAY, rule, "requests_with_other_tokens", "value"] == 0
    assert value[KILLED, "punica", "lost_runners", "value"] == 1
    assert all(row.cost_model for row in rows if row.panel == SIMULATED_RAY)
    assert value[SIMULATED_RAY, "punica", "measured_over_simulated_mean_throughput", "value"] > 0
