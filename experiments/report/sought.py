"""Numbers that the report looks for: what each extension found, and systems that the paper does not have."""

from collections.abc import Sequence

import numpy as np

from experiments.benches.operator_lines import TABLES, best_existing, lines
from experiments.claims.rows import NotMeasured, Rows
from experiments.ext_expert_tables import SITES
from experiments.ext_expert_tables import lines as expert_lines
from experiments.report.findings import Found, Sought, found_in, matching
from experiments.report.machines import OPERATOR_TABLES
from punica.workload.popularity import PAPER_WORKLOADS

Wide = dict[str, object]


def _by_popularity(what: str, figure: str, above: Wide, below: Wide, **where: object) -> list[Sought]:
    return [Sought(f"{what}, {name}", figure, above, below, {**where, "workload": name}) for name in PAPER_WORKLOADS]


def _metric(name: str, **columns: object) -> Wide:
    return {"metric": name, **columns}


def _rate(panel: str, metric: str = "throughput", system: str = "punica") -> Wide:
    return {"panel": panel, "metric": metric, "system": system}


TABLE, SERVED, LOAD, MANY, MOE = OPERATOR_TABLES, "11", "ext latency under load", "ext many adapters", "ext moe"
TODAY, HF, SERVER, OWN = "ext today", "ext hf baselines", "ext server", "ext own server"
ADAPTERS = (("no adapters", ""), ("one adapter", "Identical"), ("32 adapters", "Distinct"))
ROLES = {"llama2-7b": "Llama-2 7B", "llama2-13b": "Llama-2 13B", "llama-small": "llama-small"}
SOUGHT: dict[str, Sequence[Sought]] = {
    "ext_padding": [
        *_by_popularity("time padded to the widest rank / at true ranks", "ext padding", {"system": "padded"},
                        {"system": "true rank"}, metric="latency"),
        Sought("bytes, padded / at true ranks", "ext padding", _metric("bytes_over_true_rank", system="padded")),
    ],
    "ext_fp8": [
        *(Sought(f"time of a {name} adapter / 16 bits, {panel}", "ext fp8", {"system": f"FP8 {name}"},
                 {"system": "SGMV"}, {"metric": "latency", "panel": panel})
          for name in ("e4m3", "e5m2", "w8a8") for panel in ("Distinct, rank 16", "Distinct, rank 64",
                                                             "Identical, rank 16", "Identical, rank 64")),
        *(Sought(f"{what}, {name}", "ext fp8", _metric(metric, system=f"FP8 {name}"))
          for name in ("e4m3", "e5m2") for metric, what in (("changed_greedy_tokens", "share of greedy tokens changed"),
                                                            ("logit_error", "relative error of logits"))),
        *(Sought(f"operator tables: time in FP8 / 16 bits, {name}", TABLE, {"system": "fp8"}, {"system": "wrapper"},
                 {"panel": panel, "metric": "latency"})
          for name, panel in (("64 rows of their own, rank 16", "fp8: T=64 Distinct r=16"),
                              ("64 rows of their own, rank 64", "fp8: T=64 Distinct r=64"),
                              ("64 rows of shared adapters", "fp8: T=64 [USI]* r=*"),
                              ("prefills", "fp8: T=* adapters*"))),
    ],
    "ext_determinism": [
        Sought("time of batch_invariant / default", "ext determinism", {"system": "batch invariant"},
               {"system": "deterministic"}, {"metric": "latency"}),
        Sought("time of atomic sums / default", "ext determinism", {"system": "atomics"}, {"system": "deterministic"},
               {"metric": "latency"}),
        Sought("default: share of outputs that differ between runs", "ext determinism",
               {"metric": "outputs_differing_between_runs", "system": "deterministic"}),
        *(Sought(f"operator tables: batch_invariant / default, {name}", TABLE, {"system": "wrapper, batch invariant"},
                 {"system": "wrapper"}, {"panel": f"invariant: {panel}", "metric": "latency"})
          for name, panel in (("decode", "T=* [DUSI]*"), ("prefills", "T=* adapters*"))),
    ],
    "ext_paper_step": [
        Sought("one prompt and 31 decodes: in two calls / in one", "ext paper step", {"system": "apart"},
               {"system": "SGMV"}, {"metric": "latency"}),
        Sought("one prompt and 31 decodes: by Loop / in one", "ext paper step", {"system": "Loop"}, {"system": "SGMV"},
               {"metric": "latency"}),
    ],
    "ext_added_latency": _by_popularity("projection with LoRA / without", "ext added latency", _metric("latency"),
                                        _metric("base_latency")),
    "ext_breakdown": [
        Sought("decode step, Distinct / without adapters", "ext breakdown", {"workload": "Distinct"}, {"workload": ""},
               {"metric": "step_latency", "panel": "decode", "system": "punica"}),
        Sought("decode step, Identical / without adapters", "ext breakdown", {"workload": "Identical"},
               {"workload": ""}, {"metric": "step_latency", "panel": "decode", "system": "punica"}),
        Sought("decode step, Distinct / its bytes alone", "ext breakdown", _metric("step_latency"), _metric("floor"),
               {"workload": "Distinct", "panel": "decode", "system": "punica"}),
        Sought("decode step, batch_invariant / default", "ext breakdown", {"system": "batch invariant"},
               {"system": "punica"}, {"metric": "step_latency", "panel": "decode"}),
        Sought("decode step, FP8 cache / 16 bits", "ext breakdown", {"system": "fp8 cache"}, {"system": "punica"},
               {"metric": "step_latency", "panel": "decode"}),
        *(Sought(f"decode step of {requests}, 512 cached tokens, {name}, {role}", "ext breakdown",
                 {"metric": "step_latency", "workload": workload, "model": model, "panel": "decode",
                  "system": "punica", "seq_len": 512, "batch_size": batch})
          for model, role in ROLES.items() for requests, batch, cases in (("one request", 1, 2), ("32 requests", 32, 3))
          for name, workload in ADAPTERS[:cases]),
    ],
    "ext_stated_lengths": [
        *(Sought(f"Punica, Distinct, lengths as the paper states them, {role}", "ext stated lengths",
                 {"metric": "throughput", "system": "punica", "workload": "Distinct", "model": model})
          for model, role in ROLES.items()),
        Sought("Punica / static batching of one adapter, Distinct", "ext stated lengths", {"system": "punica"},
               {"system": "static_batching"}, {"metric": "throughput", "workload": "Distinct"}),
    ],
    "ext_latency_under_load": [
        Sought("saturation: Punica", LOAD, _rate("capacity", "capacity")),
        Sought("saturation: continuous batching, one adapter", LOAD,
               _rate("*capacity", "capacity", "continuous_batching")),
        *(Sought(f"{what} of Punica{rule}", LOAD, _rate(panel, metric, system))
          for what, panel, metric in (
              ("p99 first token, where continuous batching saturates,", "baseline capacity", "time_to_first_token_p99"),
              ("p99 first token at 80 % of its saturation", "load 80 %", "time_to_first_token_p99"),
              ("p99 gap between two tokens at 60 % of its saturation", "load 60 %", "inter_token_latency_p99"))
          for system, rule in (("punica", ""), ("punica_many", " without the limit of one prefill per step"))),
    ],
    "ext_many_adapters": [
        *(Sought(f"throughput, {above} / {below}", MANY, _rate(above), _rate(below))
          for above, below in (("1000 adapters", "32 adapters"), ("100 adapters", "8 adapters"),
                               ("16 adapters, 8 slots", "32 adapters"), ("8 adapters, 4 slots", "8 adapters"),
                               ("1000 adapters, 128 in memory", "1000 adapters"),
                               ("100 adapters, 16 in memory", "100 adapters"))),
        Sought("more adapters than slots: first token of requests that load / of others", MANY,
               _rate("* slots", "loading_over_resident")),
        Sought("more adapters than slots: throughput, resident_first / default", MANY,
               _rate("* slots", system="punica_resident_first"), _rate("* slots")),
    ],
    "ext_moe": [
        *(Sought(f"layer of experts, 32 requests, with adapters / without, {model}, {name}", MOE, {"system": "layer"},
                 {"system": "backbone layer"},
                 {"metric": "layer_latency", "batch_size": 32, "model": model, "workload": name})
          for model in ("mixtral-8x7b", "qwen3-30b-a3b") for name in ("Distinct", "Identical")),
        Sought("layer of experts, 32 requests of 8 adapters, 256 slots / 8 slots", MOE, {"panel": "*, 256 slots"},
               {"panel": "*, 8 slots"}, {"metric": "layer_latency", "system": "layer"}),
        *(Sought(f"engine's step of 32 requests, {name}", MOE,
                 {"metric": "step_latency", "system": system, "workload": workload, "panel": panel, "batch_size": 32})
          for name, system, workload, panel in (
              ("no adapters", "backbone engine", "Distinct", "qwen3-30b-a3b"),
              ("one adapter", "engine", "Identical", "qwen3-30b-a3b"),
              ("32 adapters", "engine", "Distinct", "qwen3-30b-a3b"),
              ("32 adapters in FP8", "engine", "Distinct", "qwen3-30b-a3b, float8*"))),
    ],
    "ext_today": [
        *(Sought(f"decode step, {vllm} / ours, {name}", TODAY, {"system": vllm}, {"system": "punica_many"},
                 {"metric": "step_latency", "panel": "decode", "workload": workload})
          for vllm in ("vllm", "vllm_as_shipped", "vllm_dual_stream")
          for name, workload in (("no adapters", ""), ("one adapter", "Identical"), ("an adapter each", "Distinct"))),
        *(Sought(f"stream, tokens per second, ours / vllm, {name}", TODAY, {"system": "punica_many"},
                 {"system": "vllm"}, {"metric": "output_throughput", "panel": "stream", "workload": workload})
          for name, workload in (("no adapters", ""), ("one adapter", "Identical"), ("many adapters", "Distinct"))),
    ],
    "ext_server": [
        *(Sought(f"{server} over HTTP, Distinct, {what}", SERVER, _rate(panel, metric, f"{server}*"), None,
                 {"workload": "Distinct"})
          for server in ("punica", "vllm")
          for what, panel, metric in (("output, 32 in flight", "32 in flight", "output_throughput"),
                                      ("p99 first token at 16 requests per second", "16 requests/s",
                                       "time_to_first_token_p99"))),
        *(Sought(f"{server} over HTTP, 32 in flight, tokens per second, Distinct / Identical", SERVER,
                 {"workload": "Distinct"}, {"workload": "Identical"},
                 _rate("32 in flight", "output_throughput", f"{server}*"))
          for server in ("punica", "vllm")),
    ],
    "ext_own_server": [
        Sought("chats, tokens per second, server over HTTP / its engine alone", OWN,
               _metric("throughput_over_engine", system="punica_server")),
        Sought("chats at 80 % load, p99 first token", OWN,
               {"panel": "load 80 %", "metric": "time_to_first_token_p99", "system": "punica_server"}),
    ],
    "ext_disaggregated": [
        *(Sought(f"simulated: requests/s with LoRA servers / {without}, {model}, rank {rank}", "ext disaggregated",
                 {"system": "disaggregated", "metric": "request_rate, 50 GB/s, 5 us"},
                 {"system": system, "metric": "request_rate"},
                 {"model": model, "rank": rank, "panel": "512 adapters, Zipf 1.2"})
          for model in ("llama2-7b", "mixtral-8x7b", "qwen3-30b-a3b") for rank in (16, 64)
          for system, without in (("coupled", "on every GPU"), ("coupled_by_adapter", "the same, routed by adapter"))),
    ],
    "ext_cluster_scale": [
        *(Sought(f"simulator, {what}", "ext cluster scale",
                 _metric(metric, panel=f"{number} requests", system="punica"))
          for number, metric, what in ((18000, "wall_time", "18000 requests"),
                                       (18000, "time_per_step", "a step of 18000 requests"),
                                       (18000, "peak_memory", "memory for 18000 requests"),
                                       (1000000, "wall_time", "a million requests on 1,000 GPUs"),
                                       (1000000, "peak_memory", "memory for a million requests"))),
    ],
    "fig11_textgen": [
        *(Sought(f"Punica / PEFT's mixed batches, {role}, {name}", SERVED, {"system": "punica"},
                 {"system": "hf_peft_mixed"}, {"metric": "throughput", "model": model, "workload": name})
          for model, role in ROLES.items() for name in PAPER_WORKLOADS),
        *(Sought(f"Punica / it in static batches (part of the above), {role}", SERVED, {"system": "punica"},
                 {"system": "punica_static"}, {"metric": "throughput", "model": model})
          for model, role in ROLES.items()),
        Sought("windows / whole streams, throughput of Punica", SERVED, _metric("prediction_over_stream")),
    ],
    "ext_hf_baselines": [
        *(Sought(f"Hugging Face, time of a step, {panel}: adapter unmerged, eager / merged, graphs", HF,
                 {"system": "unmerged"}, {"system": "merged, graphs"}, {"panel": panel, "metric": "step_latency"})
          for panel in ("batch 1", "batch 32")),
        *(Sought(f"PEFT's mixed batch, {panel}: {what}", HF, _metric(metric, panel=panel, system="mixed"))
          for panel in ("batch 1", "batch 32")
          for metric, what in (("step_latency", "time of a step"), ("launches_per_step", "launches of a step"),
                               ("launch_time", "time of a launch alone"),
                               ("device_share", "share of a step that the device computes"))),
    ],
    "fig12_textgen_70b": [
        *(Sought(f"fully sharded / plain adapters, {what}, Llama-2 70B", "12", {"system": "punica_sharded"},
                 {"system": "punica"}, {"metric": metric, "model": "llama2-70b"})
          for metric, what in (("adapter_memory", "memory"), ("step_latency", "time of a step"))),
    ],
    "sec53_migration": [
        Sought("move of a request: copy / recompute", "text 5.3", {"system": "copy"}, {"system": "recompute"},
               {"metric": "migration_latency"}),
    ],
    "fig13_cluster": [
        *(Sought(f"requests with other tokens than alone, {what}", "13",
                 _metric("requests_with_other_tokens", panel=panel))
          for panel, what in (("ray hour", "hour on Ray"), ("ray hour, a runner killed", "with a runner killed"))),
    ],
}  # fmt: skip


def public_kernels(rows: Rows) -> list[Found]:
    """Divide the fastest public kernel of each line of the operator tables by ours, table by table."""
    found = []
    for table in TABLES:
        best = {f"{table}: {line.label}": best_existing(line) for line in lines(table)}
        for system, how in (("wrapper", "as a layer calls it"), ("normal shrink", "its shrink launched normally")):
            mine = _latencies(rows, TABLE, system)
            ratios = [kernel[1] / mine[panel] for panel, kernel in best.items() if kernel and panel in mine]
            if ratios:
                found.append(found_in(f"table {table}: fastest public kernel / ours, {how}", np.array(ratios)))
    ours = [_latencies(rows, "expert tables", f"{site}, delta") for site in SITES]
    ratios = [line.best_existing() / sum(one[line.label] for one in ours)
              for line in expert_lines() if all(line.label in one for one in ours)]  # fmt: skip
    return [*found, *([found_in("experts: fastest public kernels / ours", np.array(ratios))] if ratios else [])]


def _latencies(rows: Rows, figure: str, system: str) -> dict[str, float]:
    """Map panels to microseconds in a graph."""
    try:
        mine = matching(rows.figure(figure), {"metric": "latency", "system": system})
    except NotMeasured:
        return {}
    return dict(zip(mine["panel"], mine["value"], strict=True))
