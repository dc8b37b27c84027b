"""Serving systems, one entry of `SYSTEMS` each, and models. A new system is a line here and a class that serves it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from punica.registry import Registry

MODELS = {"7B": ("llama2-7b", "7B"), "13B": ("llama2-13b", "13B"), "70B": ("llama2-70b", "70B")}
"""The paper's model -> ours of that size, and its name in the paper's own rows."""
STAND_INS = {"llama-small": "7B"}
"""Smaller model -> the paper's model that it stands in for where no model of that size was measured (on a CPU)."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Unit of time -> seconds."""
ENGINE = "experiments.systems.engine_systems.EngineSystem"
HUGGING_FACE = "experiments.systems.hf_systems.HfSystem"
FIG11, FIG12, LOAD, MANY = "fig11_textgen", "fig12_textgen_70b", "ext_latency_under_load", "ext_many_adapters"
STATED_LENGTHS, OF_A_TRACE = ", stated lengths", ", trace "
OTHER_STREAMS = f"{STATED_LENGTHS}|{OF_A_TRACE}"
"""In the panels of Figure 11 of another stream than its own, which no claim reads."""


@dataclass(frozen=True)
class System:
    """A serving system: ``name``; ``served_by``: its `ServingSystem`, or the dotted name (empty: of the paper alone);
    ``admission``: its rule, ``chunk``: most rows of prompts in a step, for ``chunked``; ``index_rule``: of decode rows
    (D04), ``sharded``: adapters over ranks, both of our engine; ``figures`` that run it; ``lora``: applies adapters,
    each request's own if ``exact``; ``baseline`` of the paper; ``slow``: fewer steps per window; ``label``; ``policy``:
    whose batching it has on our engine; ``paper``: names there; ``colour``, ``marker``: None and "" the next free ones;
    ``shade`` of bars.
    """

    name: str
    served_by: str | type[Any] = ENGINE
    admission: str = "fcfs"
    figures: tuple[str, ...] = ()
    lora: bool = True
    exact: bool = True
    baseline: bool = False
    slow: bool = False
    chunk: int | None = None
    index_rule: str = "per_request"
    sharded: bool = False
    label: str = ""
    policy: str = ""
    paper: tuple[str, ...] = ()
    colour: int | None = None
    marker: str = ""
    shade: float = 1.0


SYSTEMS: Registry[System] = Registry("serving system")
for _entry in (
    System("punica", figures=(FIG11, FIG12, LOAD, MANY), paper=("Punica", "Punica layer with LoRA"),
           colour=0, marker="o"),
    System("punica_many", admission="fcfs_many", figures=(LOAD,), colour=9, marker="P"),
    System("punica_resident_first", admission="resident_first", figures=(MANY,), colour=4, marker="D"),
    System("punica_sharded", sharded=True, figures=(FIG12,), colour=0, shade=0.6),
    System("continuous_batching", admission="single_adapter", figures=(FIG11, FIG12, LOAD), lora=False,
           baseline=True, label="continuous batching, one adapter", policy="vLLM (2023)", paper=("vLLM",),
           colour=4, marker="v"),
    System("static_batching", admission="static", figures=(FIG11, LOAD), lora=False, baseline=True,
           label="static batching, one adapter", policy="FasterTransformer", paper=("FasterTransformer",),
           colour=2, marker="^"),
    System("deepspeed", "", "static", lora=False, baseline=True, paper=("DeepSpeed",), colour=5, marker="P"),
    System("hf_peft", HUGGING_FACE, "static", (FIG11,), baseline=True, paper=("HuggingFace Transformers",),
           colour=3, marker="s"),
    System("hf_peft_mixed", HUGGING_FACE, "static_mixed", (FIG11,), slow=True, colour=1, marker="D"),
    System("punica_static", admission="static_mixed", figures=(FIG11,), colour=0, marker="*", shade=0.6),
    System("punica_last_admitted", index_rule="last_admitted", figures=(FIG11,), exact=False, colour=9, marker="X",
           shade=0.3),
    *(System(f"punica_chunk_{rows}", admission="chunked", chunk=rows, figures=(LOAD,), colour=9, shade=shade,
             marker=marker, label=f"punica, {rows} rows of prompts")
      for rows, shade, marker in zip((128, 256, 512, 1024, 2048), (0.2, 0.35, 0.5, 0.65, 0.8), "dp<>h", strict=True)),
):  # fmt: skip
    SYSTEMS.register(_entry.name)(_entry)

OTHER_PAPER_SYSTEMS = {"Punica runtime, backbone only": "backbone"}
"""System of the paper that serves no requests -> ours."""


def entries() -> Iterator[System]:
    """All systems, in the order in which figures draw them."""
    return (SYSTEMS.get(name) for name in SYSTEMS.names())


def names_in(figure: str) -> list[str]:
    """Systems that the experiment `figure` runs by default; `${systems_in:...}` in its YAML."""
    return [entry.name for entry in entries() if figure in entry.figures]


OmegaConf.register_new_resolver("systems_in", names_in, replace=True)


def baselines() -> list[str]:
    return [entry.name for entry in entries() if entry.baseline]


def without_lora() -> list[str]:
    """The measured systems that serve the backbone alone."""
    return [entry.name for entry in entries() if entry.served_by and not entry.lora]


def by_paper_name() -> dict[str, str]:
    """Systems of the paper -> ours with the same batching rule."""
    return {theirs: entry.name for entry in entries() for theirs in entry.paper} | OTHER_PAPER_SYSTEMS


def name_of(system: str) -> str:
    """Name of one of our systems in figures, tables and verdicts."""
    return (SYSTEMS.get(system).label if system in SYSTEMS.names() else "") or system


def policies(systems: Iterable[str]) -> str:
    """A sentence about whose policies `systems` have, for captions; empty where none has another system's.

    >>> policies(["punica", "continuous_batching"])
    'continuous batching: the policy of vLLM (2023), on this engine without LoRA'
    """
    here, policy = set(systems), {one.name: one.policy for one in entries() if one.policy}
    said = [f"{name_of(name).partition(',')[0]}: the policy of {of}" for name, of in policy.items() if name in here]
    return f"{', '.join(said)}, on this engine without LoRA" if said else ""
