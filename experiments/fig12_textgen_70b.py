"""Figure 12: text generation of a model that is cut over several GPUs (70B on 8 in the paper). Claim (section 7.2):
with tensor parallelism Punica serves 70B at 441 to 446 token/s whatever the popularity, 20 times the backbone-only
baseline where requests differ, and as fast as that where they share a model. Expected shape: as Figure 11's. But bytes
allow less than the paper's flatness: of an adapter a rank reads 44 % at 8 ranks, and Distinct at most 0.76 of
backbone-only Identical. `punica_sharded` has fully sharded adapters, which the paper has not: less memory and fewer
bytes, but two small collectives more per pair of layers. The stream, its windows and the check are those of
`fig11_textgen`; every step is taken by `figure.tp_size` processes (NCCL between GPUs, gloo on a CPU). Tokens are
checked on a model of the same widths with `figure.check_layers` layers. The model is the largest of Llama-2 that fits
this machine's GPUs, on a CPU llama-tiny, which only shows that it works. Further rows: `collective_share` of a step,
waits for other ranks included; `adapter_memory` of the slots on the fullest rank. Cost at scale=laptop: about 35 s on
two cores; on two H200s a repeat of 7B takes 90 s, and three of 70B seven minutes.
"""

from dataclasses import replace
from typing import Any, cast

from experiments.fig11_textgen import Fig11, TextgenConf, sizes_of
from experiments.harness import Config, ConfigError, Point, main
from experiments.harness.schema import Count, ModelConf
from experiments.harness.settings import ranks_here

MOST_RANKS = 64


class RanksConf(TextgenConf):
    tp_size: Count | None = None  # ranks; null: as many as this machine has GPUs, 8 at most, or 2 on a CPU
    check_layers: Count = 2  # of the compared model, which must fit one GPU
    adapter_sets: Count = 4  # distinct adapter weights; further adapters are copies in other slots


class Fig12(Fig11):
    """Throughput per popularity and system, on ranks that are kept for the whole run."""

    name, figure, order, conf = "fig12_textgen_70b", "12", 71, RanksConf
    defaults = {"model": "fitting"}
    drawn_by = "serving.draw_ranks"

    def point(self, cfg: Config, system: str, workload: str, rank: int) -> Point:
        figure, size = cast(RanksConf, cfg.figure), ranks_of(cfg)
        point, model = super().point(cfg, system, workload, rank), f"{cfg.model.paper_name} Model"
        ranks = {"tp_size": size, "check_layers": figure.check_layers, "adapter_sets": figure.adapter_sets}
        panel = point.panel.replace(model, f"{model}, tp {size}", 1)
        return replace(point, panel=panel, settings={**point.settings, "ranks": ranks})

    def release(self) -> None:
        ranks: Any = self._kept[1]
        if ranks is not None:
            ranks.close()
        super().release()

    def _bench(self, cfg: Config, point: Point) -> Any:
        from experiments.systems.ranks import BenchOnRanks, RankBench

        figure, adapters = cast(RanksConf, cfg.figure), cfg.adapters
        rank = point.rank or adapters.ranks[0]
        drawn = {"rank": rank, "alpha": adapters.alpha, "seed": adapters.seed, "sets": figure.adapter_sets}
        check = figure.check_requests, figure.check_tokens
        given = (cfg.model, cfg.hardware.device, *sizes_of(cfg), check, figure.check_layers, drawn)
        size, backend = ranks_of(cfg), "gloo" if cfg.hardware.device == "cpu" else None
        return self.kept(repr((given, size)), lambda: BenchOnRanks(RankBench, given, size, backend))


def adapter_share(model: ModelConf, tp_size: int) -> float:
    """Part of an adapter's elements that a rank reads: one factor is whole (A of layers cut by columns, B by rows)."""
    hidden, inner = model.hidden_size, model.intermediate_size
    kv_b = 2 * (hidden // model.num_attention_heads * model.num_key_value_heads)
    column_a, column_b, row_a, row_b = 5 * hidden, hidden + 2 * inner, hidden + inner, 2 * hidden
    kv_ranks = min(tp_size, model.num_key_value_heads)  # beyond, ranks share a head
    cut = (column_b + row_a) / tp_size + kv_b / kv_ranks
    return (cut + column_a + row_b) / (column_a + column_b + kv_b + row_a + row_b)


def bytes_ratio(model: ModelConf, rank: int, tp_size: int, requests: float, context: float) -> float:
    """Bytes of a step without adapters over those of one with an adapter of `rank` per request, on one rank."""
    weights = (model.backbone_parameters() - model.vocab_size * model.hidden_size) / tp_size
    cached = requests * context * model.kv_elements() / min(tp_size, model.num_key_value_heads)
    adapters = requests * model.lora_parameters(rank) * adapter_share(model, tp_size)
    return (weights + cached) / (weights + cached + adapters)


def ranks_of(cfg: Config) -> int:
    """Return the number of ranks. `ConfigError` for one that does not divide the model."""
    given = cast(RanksConf, cfg.figure).tp_size
    size = ranks_here(cfg.hardware.device) if given is None else given
    heads, kv_heads = cfg.model.num_attention_heads, cfg.model.num_key_value_heads
    shared = kv_heads % size and size % kv_heads
    if size > MOST_RANKS or heads % size or cfg.model.intermediate_size % size or shared:
        raise ConfigError(
            f"figure.tp_size={size} must divide the {heads} heads, the {kv_heads} key-value heads (or be a multiple of "
            f"them) and the intermediate size {cfg.model.intermediate_size} of {cfg.model.name}: choose another one"
        )
    return size


EXPERIMENT = main(Fig12, __name__)
