"""The typed configuration: keys and values of `conf/` and of the command line.

YAML files under `conf/` hold values; the dataclasses here are their schema, registered in Hydra's ConfigStore. A key
that no dataclass has, or a value of the wrong type, fails while the configuration is composed, before anything runs.
Ranges that a type cannot express are checked in `harness.settings.settle`, by `check_ranges` and `__post_init__`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from inspect import formatannotation
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from experiments.measure import environment
from experiments.measure.records import TIMERS
from experiments.workload.popularity import PAPER_WORKLOADS, WORKLOADS

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"
ROOM = 0.4
"""Part of a GPU that keys and values, adapter slots and graphs of a serving system are left."""
GPU_SCALE = 75e9
"""Bytes of GPU memory that Figure 11 takes with Llama-2 7B at scale=gpu (on an H200, Distinct alone: 72e9)."""


class ConfigError(ValueError):
    """A configuration that composes but cannot be run; the message names key, value and remedy."""


class DType(Enum):
    """Element types of weights and activations; the name is torch's."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.float32 else 2


class Runtime(Enum):
    """World in which Figure 13's hour is served."""

    simulated = "simulated"
    ray = "ray"


def low(minimum: int, default: Any = MISSING) -> Any:
    """Declare a field whose value must be at least `minimum`; undeclared, that is 1 for integers."""
    return field(default=default, metadata={"low": minimum})


def check_ranges(cfg: Config) -> None:
    """Raise `ConfigError` for the first number of `cfg` below its field's minimum (see `low`), and for a list of whole
    numbers that is empty or holds one below 1.
    """
    groups = ((group.name, getattr(cfg, group.name)) for group in fields(cfg))
    for group, values in groups:
        for one in fields(values) if is_dataclass(values) else ():
            key, value = f"{group}.{one.name}", getattr(values, one.name)
            kind = one.type if isinstance(one.type, str) else formatannotation(one.type)
            if kind == "list[int]" and (not value or min(value) < 1):
                example = f"for example {key}=[1,8,64]"
                raise ConfigError(f"{key}={value} must hold at least one integer, all 1 or more: {example}")
            minimum = one.metadata.get("low", 1 if kind.startswith("int") else None)
            if minimum is not None and value is not None and value < minimum:
                raise ConfigError(f"{key}={value} must be at least {minimum}: choose {key}={minimum} or more")


@dataclass
class ModelConf:
    """One Llama-family model, in the field names of its Hugging Face config (`conf/model/*.yaml`)."""

    name: str = MISSING
    paper_name: str = MISSING  # the model of the paper that ours is drawn beside: 7B, 13B or 70B
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_hidden_layers: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    vocab_size: int = MISSING
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    dtype: DType = MISSING

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} must be a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}"
            )

    def lora_parameters(self, rank: int, layers: int | None = None) -> int:
        """A and B of q, k, v, o, gate, up and down in `layers` layers (None: all of the model's), by arithmetic."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self._key_value_width()
        shapes = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden), *[(hidden, inner)] * 2]
        per_layer = rank * sum(h_in + h_out for h_in, h_out in (*shapes, (inner, hidden)))
        return per_layer * (layers or self.num_hidden_layers)

    def backbone_parameters(self) -> int:
        """Projections, norms, embedding and output head."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self._key_value_width()
        per_layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
        return self.num_hidden_layers * per_layer + 2 * self.vocab_size * hidden + hidden

    def kv_elements(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_hidden_layers * self._key_value_width()

    def _key_value_width(self) -> int:
        return self.hidden_size // self.num_attention_heads * self.num_key_value_heads


@dataclass
class HardwareConf:
    """The device that is measured and its ceilings (`conf/hardware/*.yaml`).

    `bandwidth_gb_s` and `tflop_s` are datasheet numbers, which Figure 7 draws beside the roof that it measures
    (`experiments.measure.roofline`); null where there are none. Under `hardware=auto`, null: as in the file of the
    hardware that was found.
    """

    name: str = MISSING  # slug, as in outputs/<name>
    device: str = MISSING  # cpu or cuda
    dtype: DType = MISSING  # what the operator figures compute in
    bandwidth_gb_s: float | None = None
    tflop_s: float | None = None
    flush_mib: int | None = low(0, 256)  # zeroed by host_clock and events to empty the caches; null: decided
    threads: int | None = None  # CPU threads of torch; null: OMP_NUM_THREADS, else every usable core


@dataclass
class NamesConf:
    """A choice that narrows a figure's grid: names of workloads or systems, none of them meaning the figure's own.

    `workload=` has a choice per entry of the registry, `system=` one per system of a figure (`conf/figure/*.yaml`).
    """

    names: list[str] = field(default_factory=list)


@dataclass
class AdaptersConf:
    """The LoRA adapters of a figure: every rank in `ranks` is measured; `slots` null means the largest batch."""

    ranks: list[int] = MISSING
    alpha: float = 16.0
    slots: int | None = None
    seed: int = low(0, 0)


@dataclass
class EngineConf:
    """Limits of the serving engine (figures 11 to 13)."""

    max_batch_size: int = 32
    block_size: int = 16
    num_blocks: int | None = None  # null: enough for max_batch_size requests of scale.max_len tokens


@dataclass
class TimerConf:
    """Clock (`experiments.measure.timing`); auto: host_clock on a CPU, on a GPU cuda_graph, for operators both."""

    name: str = MISSING


@dataclass
class ScaleConf:
    """One dial for cost: sizes, grids and repeats of every figure (`conf/scale/{smoke,laptop,gpu,paper}.yaml`)."""

    name: str = MISSING
    warmup: int = low(0)  # untimed calls per system and point
    repeats: int = MISSING  # timed calls per system and point, at most
    min_repeats: int = MISSING  # ... and at least, where they take no more than `patience`
    seconds_per_point: float = low(0)  # once spent, a point stops at min_repeats or later
    patience: float = low(0)  # seconds per system and point; once spent, a point stops at two calls or later
    passes: int = MISSING  # over the grid of a figure: repeats of every point, spread in time
    tries: int = low(0)  # further ones of a disturbed point, once the passes are done
    batch_sizes: list[int] = MISSING  # operator figures: 7, 8, 9, README
    hidden_size: int = MISSING  # operator figures: h1 of the projection
    intermediate_size: int = MISSING  # operator figures: h2 of the projection
    model_batch_sizes: list[int] = MISSING  # figures 1 and 10
    seq_lens: list[int] = MISSING  # figure 1
    layer_seq_lens: list[int] = MISSING  # figure 10
    prefill_seq_lens: list[int] = MISSING  # figure 1: the lengths whose prefill is timed too
    prompts: list[int] = MISSING  # ext_paper_step: rows of the one prompt among decodes
    loading_ranks: list[int] = MISSING  # section 5.2: ranks of the adapters that are loaded
    moe_divisor: int = MISSING  # ext_moe: widths of the models are theirs over this
    requests: int = MISSING  # figure 11
    max_len: int = low(3)  # figure 11: longest prompt + output
    window_pieces: int = MISSING  # figure 11: runs of consecutive steps that one repeat times, see systems.windows
    window_steps: int = MISSING  # figure 11: steps of such a run ...
    window_slow_steps: int = MISSING  # ... and of one of PEFT's mixed batches
    whole_requests: int = MISSING  # figure 11: requests whose tokens are compared from end to end ...
    whole_tokens: int = MISSING  # ... or to this token
    cluster_seconds: int = MISSING  # figure 13: so much of the hour is served, from its start
    cluster_model: str = MISSING  # figure 13 on Ray: what its runners serve ...
    cluster_speed_up: int = MISSING  # ... seconds of the hour in one of theirs ...
    cluster_max_len: int = MISSING  # ... and longest prompt and output


@dataclass
class PathsConf:
    """The only place with directories; relative ones start at the repository's root."""

    outputs: str = MISSING
    results: str = MISSING
    figures: str = MISSING
    paper_results: str = MISSING


@dataclass
class FigureConf:
    """Fields of every figure; an experiment subclasses it with its own, and has a file in `conf/figure/`."""

    title: str = MISSING
    minutes: dict[str, float] = field(default_factory=dict)  # by scale: time of a run; none: no limit
    systems: list[str] = field(default_factory=list)  # what `system=all` runs, in drawing order
    workloads: list[str] = field(default_factory=lambda: list(PAPER_WORKLOADS))  # what `workload=all` runs


@dataclass
class Config:
    """A run of one figure."""

    figure: FigureConf = MISSING
    model: ModelConf = MISSING
    hardware: HardwareConf = MISSING
    workload: NamesConf = MISSING
    adapters: AdaptersConf = MISSING
    system: NamesConf = MISSING
    engine: EngineConf = field(default_factory=EngineConf)
    timer: TimerConf = MISSING
    scale: ScaleConf = MISSING
    paths: PathsConf = MISSING
    runtime: Runtime = Runtime.simulated  # figure 13: the world that serves its hour
    address: str = ""  # figure 13 on Ray: of a cluster, host:6379 or auto; none: a new one on this machine
    force: bool = False  # measure again what is already on disk
    draw: bool = True  # draw the figure after measuring


@dataclass
class BatchConf(Config):
    """A run over many figures: `reproduce`, `figures`, `record` and `report` of `experiments.commands`."""

    figures: list[str] = field(default_factory=list)  # names or prefixes (fig08); none: every figure
    source: str = "auto"  # figures: fresh rows of this machine, recorded rows, or auto (fresh where there are some)
    allow_dirty: bool = False  # record: accept rows measured from uncommitted code


def model_conf(name: str) -> ModelConf:
    """The model of `conf/model/<name>.yaml`."""
    values = OmegaConf.merge(OmegaConf.structured(ModelConf), OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    return cast(ModelConf, OmegaConf.to_object(values))


def _detected(what: str) -> str:
    """`name`, `device` or `dtype` of this machine, for `conf/hardware/auto.yaml`."""
    name = environment.hardware_slug()
    on_cpu = name == "cpu"
    return {"name": name, "device": "cpu" if on_cpu else "cuda", "dtype": "float32" if on_cpu else "float16"}[what]


def scale_of(hardware: str) -> str:
    """The scale of a run that names none: `laptop` where `hardware=` is or finds a CPU, or a GPU of this machine has
    less memory than `GPU_SCALE`; `gpu` elsewhere.
    """
    file = CONF / "hardware" / f"{hardware}.yaml"
    on_cpu = not file.exists() or OmegaConf.load(file).device == "cpu"  # Hydra refuses a hardware without a file
    return "laptop" if on_cpu or (gpu_bytes() or GPU_SCALE) < GPU_SCALE else "gpu"


def gpu_bytes() -> float | None:
    """Memory of this machine's smallest visible GPU; None where none says it."""
    told = [gpu["memory.total"].split()[0] for gpu in environment.gpu_query("memory.total")]
    return min((float(mib) * 2**20 for mib in told if mib.isdigit()), default=None)


def ranks_here(device: str) -> int:
    """Return the number of tensor-parallel ranks: the largest power of two of the GPUs, 8 at most; on a CPU two."""
    gpus = len(environment.gpu_query("index")) if device == "cuda" else 2
    return max(size for size in (1, 2, 4, 8) if size <= max(1, gpus))


@lru_cache(maxsize=8)
def fitting_model(device: str, scale: str) -> str:
    """The largest of the paper's models whose weights, shared out over all GPUs of this machine, leave `ROOM` of each
    for the rest; `llama-tiny` on a CPU, and at scale=smoke.
    """
    if device == "cpu" or scale == "smoke":
        return "llama-tiny"
    memory = gpu_bytes() or 0.0
    for name in ("llama2-70b", "llama2-13b"):
        model = model_conf(name)
        if model.dtype.bytes * model.backbone_parameters() / ranks_here(device) <= (1 - ROOM) * memory:
            return name
    return "llama2-7b"


def _fitting(field: str, device: str, scale: str) -> Any:
    """Return one field of `fitting_model`, for `conf/model/fitting.yaml`."""
    value = getattr(model_conf(fitting_model(device, scale)), field)
    return value.name if isinstance(value, DType) else value


def choice(name: str) -> str:
    """Return the command line's spelling of a name: `skewed`, `gather_bmm`, `backbone` also for `backbone X@W`."""
    return re.sub(r"\W+", "_", name.removesuffix(" X@W").lower())


def register_schemas() -> None:
    """Register schemas, choices of `workload=` and `timer=`, and resolvers with Hydra; idempotent."""
    OmegaConf.register_new_resolver("detect_hardware", _detected, replace=True)
    OmegaConf.register_new_resolver("scale_of", scale_of, replace=True)
    OmegaConf.register_new_resolver("from_root", lambda folder: str(REPOSITORY / folder), replace=True)
    OmegaConf.register_new_resolver("fitting_model", _fitting, replace=True)
    store = ConfigStore.instance()
    store.store(name="run", group="schema", node=Config, package="_global_")
    store.store(name="batch", group="schema", node=BatchConf, package="_global_")
    register_names("workload", WORKLOADS.names())
    register_names("system", [])
    for timer in ("auto", *TIMERS):
        store.store(name=timer, group="timer", node=TimerConf(timer))


def register_names(group: str, names: Iterable[str]) -> None:
    """Make each of `names` a choice of `group` (workload or system), beside `all`, which means the figure's own."""
    store = ConfigStore.instance()
    store.store(name="all", group=group, node=NamesConf())
    for name in names:
        store.store(name=choice(name), group=group, node=NamesConf([name if group == "workload" else choice(name)]))


def register_app(name: str, header: str, module: str, **overrides: str | None) -> None:
    """Register the primary config `name` of `python -m experiments.<module>`: `conf/config.yaml` with `overrides` of
    its groups, and the text of `--help`.
    """
    register_schemas()
    primary: list[Any] = ["config", *({f"override {key}": value} for key, value in overrides.items()), "_self_"]
    hydra = {"job": {"name": name}, "help": {"app_name": module, "header": header}}
    ConfigStore.instance().store(name=name, node={"defaults": primary, "hydra": hydra})


def register_options(name: str, header: str, module: str, node: Any) -> None:
    """Register `name` as a command whose whole configuration are the fields of the dataclass `node`, without files."""
    store = ConfigStore.instance()
    store.store(name=name, group="schema", node=node, package="_global_")
    primary: list[Any] = [{"schema": name}, {"override hydra/job_logging": "stdout"}, "_self_"]
    usage = f"{header}\n\nUsage: python -m experiments.{module} [key=value] ...\n\n$CONFIG\n"
    hydra = {"job": {"name": name}, "help": {"template": usage}, "run": {"dir": "."}, "output_subdir": None}
    store.store(name=name, node={"defaults": primary, "hydra": hydra})
