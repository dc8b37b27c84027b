"""Server of parsed arguments: settings, the engine or the runners behind it, and the application."""

import gc
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI

from punica.adapters import LoRARequest
from punica.cluster.ray_cluster import RayCluster
from punica.cluster.ray_runners import RunnerResources, Timeouts
from punica.engine import Engine
from punica.serve.app import Settings, make_app
from punica.serve.process import EngineProcess
from punica.serve.runners import RunnersThread
from punica.serve.server import Server
from punica.serve.stepper import REFUSALS
from punica.threads import limit_threads


def settings_of(options: Namespace) -> Settings:
    adapters = [LoRARequest(name, number, folder) for number, (name, folder) in enumerate(options.adapter, start=1)]
    others = options.max_queue, options.max_body, options.metrics_adapter_names, options.demo
    return Settings(options.base, adapters, options.keys, options.roots, *others)


def build_of(options: Namespace, settings: Settings) -> Callable[[], Engine]:
    """Return the function that loads the engine, in whichever process and working directory."""
    folder = os.path.abspath(os.path.expanduser(options.checkpoint))
    return partial(_load, settings.base, folder, settings.adapters, options.sizes)


def _load(base: str, folder: str, adapters: Sequence[LoRARequest], sizes: dict[str, Any]) -> Engine:
    began = time.perf_counter()
    engine = Engine.from_pretrained(folder, adapters, **sizes)
    limit_threads(engine.runner.model)  # before their number is told
    weight, config, manager = engine.runner.model.lm_head.weight, engine.config, engine.manager
    slots = "no adapter slots"
    if manager is not None:
        slots = f"adapters: {len(adapters)}, slots: {manager.lora_slots} of rank {manager.lora_config.max_lora_rank}"
    device = torch.cuda.get_device_name(weight.device) if weight.is_cuda else "CPU"
    stored = ", weights: fp8" if engine.runner.model.config.fp8_weights else ""
    print(
        f"{base}: {slots}, dtype: {str(weight.dtype).removeprefix('torch.')}{stored}, device: {device}, threads: "
        f"{torch.get_num_threads()}, context: {config.max_model_len} tokens, batch: {config.max_batch_size} requests, "
        f"KV cache: {config.total_blocks * config.block_size} tokens; loaded in {time.perf_counter() - began:.1f} s",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return engine


def cluster_of(options: Namespace, settings: Settings) -> RayCluster:
    threads = max(1, (os.cpu_count() or 1) // options.ray)
    each = RunnerResources(num_gpus=float(torch.cuda.is_available()), num_threads=threads)
    timeouts = Timeouts(**({} if options.step_timeout is None else {"step_s": options.step_timeout}))
    build = build_of(options, settings)
    return RayCluster(build, options.ray, resources=each, address=options.ray_address, timeouts=timeouts)


@contextmanager
def opened(options: Namespace, settings: Settings) -> Iterator[FastAPI]:
    """Build the application over an engine's process or over runners, which end with the block."""
    if options.ray is None:
        with EngineProcess(build_of(options, settings)) as engine:
            yield make_app(engine, settings)
        return
    with cluster_of(options, settings) as cluster:
        yield make_app(RunnersThread(cluster), settings)


def serve(options: Namespace, sockets: list[socket.socket]) -> None:
    """Serve until interrupted; exit with a message for a checkpoint, adapters or sizes that are refused, and with
    SIGINT's code without a traceback, also while the engine loads.
    """
    try:
        with ExitStack() as stack:
            try:
                app = stack.enter_context(opened(options, settings_of(options)))
            except REFUSALS as error:
                raise SystemExit(f"{type(error).__name__}: {error}") from None
            gc.freeze()  # a collection of all that was imported would halt every stream
            Server(app, drain_s=options.drain, grace_s=options.grace).run(sockets)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
