"""Extension: LoRA on GPUs of its own, over a link, beside LoRA on every GPU: a map of where it wins, simulated.

Claim: InfiniLoRA (arXiv 2604.07173) serves 3.05 times the requests within latency targets, on average over mixtures of
experts, as LoRA servers hold the adapters of all base GPUs. Expected shape: an adapter of a dense model is small, its
GPUs hold enough of them, and round trips in every layer cost more than they save; an adapter on all experts has
gigabytes, a GPU holds a few, and LoRA servers win where the link is fast enough. Routing requests to the GPU that has
their adapter saves memory without a link.

Systems: `coupled` (LoRA on every GPU, requests go anywhere), `coupled_by_adapter` (they go where their adapter is) and
`disaggregated`. Panels: number of adapters and exponent of their popularity, for each model and rank.

    request_rate:  requests/s per GPU, LoRA servers counted, within the targets; 0 where no rate is
    slots, lora_servers: adapters in a GPU's memory; GPUs that serve no base model
    ..., 50 GB/s, 5 us: of `disaggregated`, over such a link (each way, one way)

Every row is `kind=simulated`, by `experiments.cluster.disaggregated`. Step costs are of Llama-2 7B under `figure.cost`,
per byte and weight. Targets: `token_ms` of a step, ours; `wait_ms` for an adapter, beyond which 5 % may wait.

    python -m experiments.ext_disaggregated 'figure.models=[qwen3-30b-a3b]' figure.wait_ms=1000 figure.gpus=8

Cost on one core: 12 s at scale=laptop, 20 s at scale=paper, which has a second exponent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, cast

from omegaconf import MISSING

from experiments.harness import Config, Experiment, FigureConf, Point, Reading, main
from experiments.harness.schema import REPOSITORY, low
from experiments.harness.settings import folders


@dataclass
class DisaggregatedConf(FigureConf):
    """`models`, `ranks`, numbers of `adapters` and `exponents` of their popularity (Zipf's law); links of `bandwidths`
    (GB/s each way) and `latencies` (us one way); `gpus` of `memory_gb`, `most` requests in flight on each; targets;
    whose `cost` of steps, and whose `loads`.
    """

    models: list[str] = field(default_factory=list)
    ranks: list[int] = MISSING
    adapters: list[int] = MISSING
    exponents: list[float] = MISSING
    bandwidths: list[int] = MISSING
    latencies: list[int] = MISSING
    gpus: int = low(2)
    memory_gb: int = MISSING
    most: int = MISSING
    token_ms: int = MISSING
    wait_ms: int = MISSING
    cost: str = MISSING
    loads: str = MISSING
    sizes: dict[str, Any] = MISSING


class Disaggregated(Experiment):
    """Request rates within targets, per number of adapters (the panels), model, rank and system."""

    name, figure, order, conf = "ext_disaggregated", "ext disaggregated", 293, DisaggregatedConf
    clock, drawn_by = "host_clock", "disaggregated.draw_map"
    passes = 1  # a formula repeats itself

    def points(self, cfg: Config) -> list[Point]:
        from experiments.cluster.link_map import asked_of, panel_of

        figure = cast(DisaggregatedConf, cfg.figure)
        about = _settings(cfg, figure)
        found = [
            Point(
                panel_of(adapters, exponent), system, "", model, rank=rank,
                settings={**about, "adapters": adapters, "exponent": exponent},
            )
            for exponent in figure.exponents
            for model in figure.models
            for rank in figure.ranks
            for adapters in figure.adapters
            for system in cfg.system.names
        ]  # fmt: skip
        for point in found:
            asked_of(point)  # refuses a model that there is not, or that a GPU does not hold
        return found

    def is_derived(self, point: Point) -> bool:
        return True

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.cluster.link_map import readings

        return readings(point)


def _settings(cfg: Config, figure: DisaggregatedConf) -> dict[str, Any]:
    """Return what decides a row beside its columns."""
    from experiments.cluster.link_map import TIMED
    from experiments.cluster.load_costs import load_cost
    from experiments.cluster.recorded import chosen_cost
    from punica.workload import stated_lengths

    recorded, lengths = REPOSITORY / "results", stated_lengths()  # committed rows, wherever those of this run go
    return {
        "cost": asdict(chosen_cost(figure.cost, TIMED, folders(cfg).paper, recorded)),
        "loads": asdict(load_cost(recorded, figure.loads, TIMED)),
        "prompt": float(lengths.prompt.mean()), "output": float(lengths.output.mean()),
        "links": [[bandwidth, latency] for bandwidth in figure.bandwidths for latency in figure.latencies],
        "gpus": figure.gpus, "memory_gb": figure.memory_gb, "most": figure.most, "token_ms": figure.token_ms,
        "wait_ms": figure.wait_ms,
    }  # fmt: skip


EXPERIMENT = Disaggregated()

if __name__ == "__main__":
    main(EXPERIMENT)
