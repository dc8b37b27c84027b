"""Costs of steps, layers and served tokens (Figures 1, 10, 11, 12): weights, cached tokens and LoRA.

A decode step multiplies all weights with its rows, reads the cached tokens of each, and pays the floor of every kernel
of its layers. LoRA adds two launches per operator call, its adapters' weights and two passes over every output. The
host's time is taken as hidden; collectives are not priced.
"""

import re
from typing import Any

from experiments.claims.costs.formula import Terms, added, formula, scaled
from experiments.claims.costs.machine import Machine, conf_of, multiplied
from experiments.claims.fig11 import PAPER_GPUS, RELEASED_RULE
from experiments.claims.text import LOADING, RANK, replay
from experiments.facts.systems import SYSTEMS
from experiments.harness.schema import ModelConf
from punica.workload.popularity import popularity

PRODUCTS, CACHED, ATTENTION, KERNELS = "products", "cached tokens", "attention", "kernels' floors"
LORA_LAUNCHES, LORA_WEIGHTS, LORA_ROWS = "LoRA launches", "LoRA weights", "LoRA rows"
CONTEXT = 683
"""Mean context of a decoding row over the released requests (``paper_results/workload_reference.csv``)."""
REQUESTS = 1024
REPLAYED = {"fcfs": "continuous", "single_adapter": "one_adapter", "static": "static"}
"""Rule of admission -> replay that tells its batches."""
SERVED = ("punica", RELEASED_RULE, "continuous_batching", "static_batching", "deepspeed", "hf_peft")


def backbone(
    machine: Machine, conf: ModelConf, rows: float, context: float, count: float | None = None, shared: int = 1
) -> Terms:
    """Price a decode step without LoRA on ``shared`` GPUs, each of which launches everything.

    ``count``: weights, all that a step multiplies without one.
    """
    weights = machine.weights(multiplied(conf) if count is None else count, rows)
    cached = machine.shared_out(rows * context * conf.kv_elements(), rows * conf.num_key_value_heads / shared)
    floors = machine.layer_kernels * conf.num_hidden_layers * machine.small
    return {PRODUCTS: weights / shared, CACHED: cached / shared, KERNELS: floors}


def lora(machine: Machine, conf: ModelConf, rows: float, adapters: float, shared: int = 1) -> Terms:
    """Price what LoRA of all projections adds to a step on ``shared`` GPUs, each of which launches everything."""
    launches = machine.lora_launches * conf.num_hidden_layers * machine.queued
    passes = machine.numbers(1.5 * rows * conf.lora_parameters(1))  # x once, y twice, of about equal widths
    all_, each = adapters * conf.lora_parameters(RANK), rows / adapters
    read = adapters * RANK * conf.num_hidden_layers * (6 * conf.hidden_size + conf.intermediate_size)  # by the shrinks
    shrunk = max(machine.weights(read, each), machine.shared_out(read, adapters))
    weights = shrunk + machine.weights(all_ - read, each)
    return {LORA_LAUNCHES: launches, LORA_WEIGHTS: weights / shared, LORA_ROWS: passes / shared}


@formula(("1",), ("backbone",), "step_latency")
def invocation(machine: Machine, row: Any) -> Terms:
    """One decode step, or a batch of prompts, whose attention reads half of what it has so far on the mean."""
    conf = conf_of(row.model)
    if row.panel == "decode":
        return backbone(machine, conf, row.batch_size, row.seq_len)
    tokens = row.batch_size * row.seq_len
    attention = 2 * tokens * row.seq_len / 2 * conf.kv_elements() / machine.peak
    floors = machine.layer_kernels * conf.num_hidden_layers * machine.small
    return {PRODUCTS: machine.weights(multiplied(conf), tokens), ATTENTION: attention, KERNELS: floors}


@formula(("10",), ("punica",), "layer_latency")
def layer(machine: Machine, row: Any) -> Terms:
    """One of the model's layers in a decode step, without the head."""
    conf = conf_of(row.model)
    adapters = popularity(row.workload).number_of_adapters(int(row.batch_size))
    weights = multiplied(conf) - conf.vocab_size * conf.hidden_size
    step = backbone(machine, conf, row.batch_size, row.seq_len, weights)
    return scaled(added(step, lora(machine, conf, row.batch_size, adapters)), 1 / conf.num_hidden_layers)


@formula(("11", "12"), SERVED, "throughput")
def token(machine: Machine, row: Any) -> Terms:
    """One token: the steps of the replayed requests over their tokens, on all GPUs that share the model."""
    steps = _replayed(row)
    decoded = scaled(_step(machine, row, steps.mean_batch), steps.decode_steps)
    prompts = scaled(_step(machine, row, 1), steps.prefill_steps)
    return scaled(added(decoded, prompts), 1 / (steps.decode_steps * steps.mean_batch + steps.prefill_steps))


@formula(("11", "12"), ("punica",), "implied_time_per_step")
def served_step(machine: Machine, row: Any) -> Terms:
    """One step at the mean batch."""
    return _step(machine, row, _replayed(row).mean_batch)


@formula((LOADING,), ("punica", "link"), "step_latency_alone")
def step_before_a_load(machine: Machine, row: Any) -> Terms:
    """One step of rows that each have their own adapter."""
    conf, context = conf_of(row.model), row.seq_len if row.seq_len == row.seq_len else CONTEXT
    added_by_lora = lora(machine, conf, row.batch_size, row.batch_size)
    return added(backbone(machine, conf, row.batch_size, context), added_by_lora)


def _replayed(row: Any) -> Any:
    return replay(REPLAYED[SYSTEMS.get(row.system).admission], row.workload, REQUESTS)


def _step(machine: Machine, row: Any, rows: float) -> Terms:
    """Price a step of ``rows`` rows of the system of ``row``."""
    conf, entry = conf_of(row.model), SYSTEMS.get(row.system)
    gpus = re.search(r", tp (\d+)", row.panel)
    shared = int(gpus[1]) if gpus else (PAPER_GPUS if row.figure == "12" else 1)
    adapters = 1.0
    if entry.admission == "fcfs" and entry.exact:
        adapters = min(rows, machine.stated.get("served_adapters", _replayed(row).mean_segments))
    step = backbone(machine, conf, rows, CONTEXT, shared=shared)
    return added(step, lora(machine, conf, rows, adapters, shared)) if entry.lora else step
