"""The typed configuration: keys, types and ranges of `conf/` and of the command line. `validated` refuses anything else
with one sentence, before anything runs.
"""

from __future__ import annotations

from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from experiments.workload.popularity import PAPER_WORKLOADS
from experiments.workload.traces import SAMPLE, Trace

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"
Count = Annotated[int, Field(ge=1)]
Counts = Annotated[list[Count], Field(min_length=1)]
Seconds = Annotated[float, Field(ge=0)]
Lengths = Literal["released", "stated"]
"""Lengths of requests: the released generator's, or with the mean that the paper's text states (D01)."""


class ConfigError(ValueError):
    """A configuration that composes but cannot be run; the message names key, value and remedy."""


class Settings(BaseModel):
    """Base of all settings: a key that a subclass does not have is refused."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


S = TypeVar("S", bound=Settings)


class DType(Enum):
    """Element types of weights and activations; the name is torch's."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.float32 else 2


class ModelConf(Settings):
    """One Llama-family model, in the field names of its Hugging Face config (`conf/model/*.yaml`)."""

    name: str
    paper_name: str  # the model of the paper that ours is drawn beside: 7B, 13B or 70B
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    vocab_size: Count
    max_position_embeddings: Count = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    dtype: DType

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> ModelConf:
        hidden, heads = self.hidden_size, f"model.num_attention_heads={self.num_attention_heads}"
        if hidden % (2 * self.num_attention_heads):  # rotary positions: pairs in a head
            raise ValueError(f"model.hidden_size={hidden} must be an even multiple of {heads}: choose another")
        if self.num_attention_heads % (groups := self.num_key_value_heads):
            raise ValueError(f"{heads} must be a multiple of model.num_key_value_heads={groups}: choose another")
        return self

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
        return 2 * self.num_hidden_layers * self._key_value_width()

    def _key_value_width(self) -> int:
        return self.hidden_size // self.num_attention_heads * self.num_key_value_heads


class HardwareConf(Settings):
    """The measured device and its datasheet's ceilings (`conf/hardware/*.yaml`), null where there are none."""

    name: str = Field(pattern=r"^\w[\w.-]*$")  # slug, as in outputs/<name>
    device: Literal["cpu", "cuda"]
    dtype: DType  # what the operator figures compute in
    bandwidth_gb_s: float | None = None
    tflop_s: float | None = None
    flush_mib: int | None = Field(256, ge=0)  # zeroed by host_clock to empty the caches; null: decided
    threads: Count | None = None  # CPU threads of torch; null: OMP_NUM_THREADS, else every usable core


class NamesConf(Settings):
    """A choice that narrows a figure's grid: names of workloads or systems, none of them meaning the figure's own."""

    names: list[str] = []


class WorkloadConf(NamesConf):
    """Popularities; or `workload=trace`: a file's requests, whose `adapter` is client, session, or a popularity."""

    path: Path = SAMPLE
    format: Literal["lora", "azure", "burstgpt", "mooncake"] = "lora"
    adapter: str = "client"

    def trace(self, requests: int) -> Trace:
        """Read the first ``requests``, with their adapters; `ConfigError`: this cannot be."""
        found = _traces(self.path, self.format, self.adapter, requests)
        try:
            _ = found.adapters
        except (OSError, ValueError) as error:
            raise ConfigError(f"workload.path={self.path} cannot be read: {error}") from None
        return found


_traces = lru_cache(maxsize=1)(Trace)  # the same for every point


class AdaptersConf(Settings):
    """The LoRA adapters of a figure: every rank in `ranks` is measured; `slots` null means the largest batch."""

    ranks: Counts
    alpha: float = 16.0
    slots: Count | None = None
    seed: int = Field(0, ge=0)


class EngineConf(Settings):
    """Limits of the serving engine (Figures 11 and 12, and under load)."""

    max_batch_size: Count = 32


class TimerConf(Settings):
    """Clock (`experiments.measure.timing`); auto: host_clock on a CPU, on a GPU cuda_graph, for operators both."""

    name: str


class ScaleConf(Settings):
    """One dial for cost: sizes, grids and repeats of every figure (`conf/scale/*.yaml`; here what most have alike)."""

    name: str
    warmup: int = Field(ge=0)  # untimed calls per system and point
    repeats: Count  # timed calls per system and point, at most
    min_repeats: Count  # ... and at least, where they take no more than `patience`
    seconds_per_point: Seconds  # once spent, a point stops at min_repeats or later
    patience: Seconds  # per system and point; once spent, a point stops at two calls or later
    passes: Count = 3  # over the grid of a figure: repeats of every point, spread in time
    tries: int = Field(1, ge=0)  # further ones of a disturbed point, once the passes are done
    batch_sizes: Counts  # operator figures: 7, 8, 9, README
    hidden_size: Count = 4096  # operator figures: h1 of the projection
    intermediate_size: Count = 11008  # operator figures: h2 of the projection
    model_batch_sizes: Counts  # figures 1 and 10
    seq_lens: Counts = [128, 512, 1024, 1536, 2048]  # figure 1
    layer_seq_lens: Counts = [512, 2048]  # figure 10
    prefill_seq_lens: Counts = [128, 512, 1024, 1536, 2048]  # figure 1: the lengths whose prefill is timed too
    loading_ranks: Counts = [8, 16, 32, 64, 128]  # section 5.2: ranks of the adapters that are loaded
    requests: Count = 1000  # figure 11
    max_len: int = Field(2048, ge=3)  # figure 11: longest prompt + output


class PathsConf(Settings):
    """The only place with directories; relative ones start at the repository's root."""

    outputs: str
    results: str
    figures: str
    paper_results: str


class FigureConf(Settings):
    """Fields of every figure; an experiment subclasses it with its own, and has a file in `conf/figure/`."""

    title: str
    minutes: dict[str, float] = {}  # by scale: time of a run; none: no limit
    systems: list[str] = []  # what `system=all` runs, in drawing order
    gpu_systems: list[str] = []  # of these, those that a CPU does not have
    workloads: list[str] = list(PAPER_WORKLOADS)  # what `workload=all` runs
    sizes: dict[str, dict[str, Any]] = {}  # by scale: values of fields that are not given


class RunConf(Settings):
    """Settings of a run of one figure and of one of many."""

    model: ModelConf
    hardware: HardwareConf
    workload: WorkloadConf
    adapters: AdaptersConf
    system: NamesConf
    engine: EngineConf = EngineConf()
    timer: TimerConf
    scale: ScaleConf
    paths: PathsConf
    runtime: Literal["simulated", "ray"] = "simulated"  # figure 13: the world that serves its hour
    address: str = ""  # figure 13 on Ray: of a cluster, host:6379 or auto; none: a new one on this machine
    force: bool = False  # measure again what is already on disk
    draw: bool = True  # draw the figure after measuring


class Config(RunConf):
    figure: FigureConf


class BatchConf(RunConf):
    """A run over many figures: `reproduce`, `figures`, `record` and `report` of `experiments.commands`."""

    figures: list[str] = []  # names or prefixes (fig08); none: every figure
    source: Literal["auto", "fresh", "recorded"] = "auto"  # rows of this machine, recorded ones, or what there is
    allow_dirty: bool = False  # record: accept rows measured from uncommitted code


def keys_of(model: type[Settings]) -> dict[str, Any]:
    """Return the keys of `model` for Hydra: with their defaults, ``???`` where a value must be given."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            found[name] = keys_of(kind)
        else:
            value = "???" if field.is_required() else field.default
            found[name] = value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value
    return found


def validated(cfg: DictConfig, model: type[S]) -> S:
    """Return the values of `cfg`, composed by Hydra, as a `model`; `ConfigError` for the first that cannot be."""
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{missing[0]}= is missing: give {missing[0]}=<value>, --help lists the keys")
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
        return model.model_validate(values)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{str(error).partition(chr(10))[0]}; --help lists keys and choices") from None
    except ValidationError as error:
        raise ConfigError(sentence(error, model, values)) from None


def sentence(error: ValidationError, model: type[Settings], values: Any) -> str:
    """Return the first error of `values` as `model` in one sentence: key, value, limit and remedy."""
    first = error.errors()[0]
    path, kind = first["loc"], first["type"]
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if kind == "extra_forbidden":
        for part in path[:-1]:
            model = model.model_fields[str(part)].annotation  # type: ignore[assignment]
        return unknown([*map(str, path)], model.model_fields)
    names = [part for part in path if isinstance(part, str)]
    key, value = ".".join(names), values
    for part in names:
        value = value.get(part, "") if isinstance(value, dict) else value
    if kind == "missing":
        return f"{key}= is missing: give {key}=<value>"
    wanted = first["msg"].partition(" should ")[2] or f"be valid ({first['msg']})"
    wanted = wanted.replace("a valid list", "a list, which has brackets")
    item = f"{first['input']!r} of " if len(names) < len(path) else ""
    return f"{item}{key}={value} must {wanted}: choose such a value"


def unknown(path: list[str], known: Any) -> str:
    """Return the sentence for a key that nothing reads, given those that are `known` beside it."""
    above = "".join(f"{part}." for part in path[:-1])
    near = get_close_matches(path[-1], map(str, known), n=1)
    meant = f"did you mean {above}{near[0]}=?" if near else f"it has {', '.join(known)}"
    return f"{above}{path[-1]}= would be read by nothing: {above[:-1] or 'the configuration'} has no such key; {meant}"


def model_conf(name: str) -> ModelConf:
    return ModelConf.model_validate(OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml")))
