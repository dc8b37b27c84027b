"""Command line of ``python -m punica.serve``."""

import gc
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from punica.adapters import LoRARequest
from punica.checks import check_count
from punica.cluster.ray_cluster import RayCluster
from punica.cluster.ray_runners import RankResources
from punica.cluster.timeouts import Timeouts
from punica.engine import Engine
from punica.serve.app import Settings, app_of
from punica.serve.catalogue import Keys
from punica.serve.engine_child import REFUSALS
from punica.serve.engine_process import EngineProcess
from punica.serve.folders import allowed_roots
from punica.serve.metrics import Metrics
from punica.serve.runners_thread import RunnersThread

GRACE_S = 30
"""Time in which running answers may end at a shut-down."""
KEEP_ALIVE_S = 75
"""Time until an idle connection is closed; longer than clients keep theirs, which else meet a closed one."""
HTTP = "h11"
"""uvicorn's parser. Its other one, the default where it is installed, drops the body of a POST that offers HTTP/2, as
Java's client sends it.
"""
RUNNER_BATCH = 32
"""Requests of one step of a runner, unless ``--max-batch-size`` is given."""
_MOST_QUEUED = 1 << 30  # no limit of the cluster's own: the server counts with --max-queue
_EPILOG = "Arguments may stand in a file, one per line: python -m punica.serve CHECKPOINT @arguments.txt (for keys)."


def pair(text: str) -> tuple[str, str]:
    """Split ``NAME=VALUE``. ArgumentTypeError: one of the two is missing."""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def rename(text: str) -> tuple[str, str, str]:
    """Split ``NAME=OLD=NEW``, of which ``NEW`` may be empty. ArgumentTypeError: another is missing."""
    (name, _, rest) = text.partition("=")
    old, sign, new = rest.partition("=")
    if not (name and old and sign):
        raise ArgumentTypeError(f"{text!r} is not NAME=OLD=NEW")
    return name, old, new


def parser() -> ArgumentParser:
    """Build the parser."""
    made = ArgumentParser(
        "python -m punica.serve", description="Serve a checkpoint and its LoRA adapters by OpenAI's API.",
        epilog=_EPILOG, fromfile_prefix_chars="@",
    )  # fmt: skip
    made.add_argument("checkpoint", help="folder that transformers wrote")
    made.add_argument("--adapter", type=pair, action="append", default=[], metavar="NAME=FOLDER", help="repeatable")
    made.add_argument(
        "--adapter-rename", type=rename, action="append", default=[], metavar="NAME=OLD=NEW",
        help="replaces OLD in the names of this adapter's tensors; NEW may be empty; repeatable, in order",
    )  # fmt: skip
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--served-model-name", metavar="NAME", help="of the base model; default: the folder's name")
    made.add_argument("--api-key", metavar="KEY", help="opens the base model, adapters without a key, loading")
    made.add_argument("--adapter-key", type=pair, action="append", default=[], metavar="NAME=KEY", help="repeatable")
    made.add_argument(
        "--allow-folder", action="append", default=[], metavar="DIR",
        help="adapters below it may be loaded by requests; repeatable; default: none",
    )  # fmt: skip
    made.add_argument("--max-queue", type=int, default=1024, metavar="N", help="waiting generations, then 429")
    made.add_argument("--max-body", type=int, default=1 << 20, metavar="N", help="bytes of a request's body, then 413")
    for name, meaning in (
        ("max-loras", "adapter slots"), ("max-cpu-loras", "adapters in host memory"), ("max-lora-rank", "largest rank"),
        ("max-model-len", "tokens of one request"), ("max-batch-size", "requests of one step"),
    ):  # fmt: skip
        made.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}, as Engine.from_pretrained")
    made.add_argument("--ray", type=int, metavar="N", help="serve on N engines, one GPU each where there are GPUs")
    made.add_argument("--ray-address", metavar="ADDRESS", help="of a Ray cluster; default: a new one on this machine")
    made.add_argument(
        "--step-timeout", type=float, metavar="SECONDS",
        help=f"a runner of --ray whose step takes longer is killed; default: {Timeouts.step_s:g}",
    )  # fmt: skip
    made.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: the checkpoint's")
    return made


def settings_of(options: Namespace) -> Settings:
    """Return the server's settings. ValueError: a name twice, the base model's for an adapter, a name to rename in that
    no adapter has.
    """
    base = options.served_model_name or Path(options.checkpoint).expanduser().resolve().name
    names = [base, *(name for name, _ in options.adapter)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice} name two models; pass other names to --adapter or --served-model-name")
    mappers: dict[str, dict[str, str]] = {name: {} for name in names[1:]}
    for name, old, new in options.adapter_rename:
        if name not in mappers:
            raise ValueError(f"--adapter-rename {name}={old}={new} is of no --adapter; there are {sorted(mappers)}")
        mappers[name][old] = new
    adapters = [
        LoRARequest(name, number, folder, weights_mapper=mappers[name] or None)
        for number, (name, folder) in enumerate(options.adapter, start=1)
    ]
    keys = Keys(options.api_key, dict(options.adapter_key))
    roots = allowed_roots(options.allow_folder)
    max_queue = check_count("--max-queue", options.max_queue, 0)
    return Settings(base, adapters, keys, roots, max_queue, check_count("--max-body", options.max_body))


def sizes_of(options: Namespace, settings: Settings) -> dict[str, Any]:
    """Return the sizes of an engine, with slots for adapters that are given or may be loaded later."""
    sizes: dict[str, Any] = {
        name: value
        for name in ("max_model_len", "max_batch_size", "max_loras", "max_cpu_loras", "max_lora_rank", "dtype")
        if (value := getattr(options, name)) is not None
    }
    if settings.roots and not settings.adapters:
        sizes.setdefault("max_lora_rank", 16)
    return sizes


def build_of(options: Namespace, settings: Settings) -> Callable[[], Engine]:
    """Return the function that loads the engine, in whichever process."""
    return partial(Engine.from_pretrained, options.checkpoint, settings.adapters, **sizes_of(options, settings))


def engine_of(options: Namespace, settings: Settings) -> Engine:
    """Load the engine."""
    return build_of(options, settings)()


def cluster_of(options: Namespace, settings: Settings) -> RayCluster:
    """Start the runners of ``--ray``, each with a slot for every request of its batch.

    Raises, besides the errors of `RayCluster`, ValueError: fewer slots.
    """
    count, sizes = check_count("--ray", options.ray), sizes_of(options, settings)
    batch = sizes.setdefault("max_batch_size", RUNNER_BATCH)
    if settings.adapters or sizes.keys() & {"max_loras", "max_cpu_loras", "max_lora_rank"}:
        slots = sizes.setdefault("max_loras", batch)
        if slots < batch:
            raise ValueError(
                f"--max-loras {slots} is below --max-batch-size {batch}, and with --ray every request of a batch needs "
                "a slot; raise the one or lower the other"
            )
    folder = os.path.abspath(os.path.expanduser(options.checkpoint))  # runners have other working directories
    threads = max(1, (os.cpu_count() or 1) // count)
    each = RankResources(num_gpus=float(torch.cuda.is_available()), num_threads=threads)
    build = partial(Engine.from_pretrained, folder, settings.adapters, **sizes)
    timeouts = Timeouts() if options.step_timeout is None else Timeouts(step_s=options.step_timeout)
    return RayCluster(
        build, count, resources=each, max_queued=_MOST_QUEUED, address=options.ray_address, timeouts=timeouts
    )


@contextmanager
def opened(options: Namespace, settings: Settings) -> Iterator[FastAPI]:
    """Build the application over an engine in a process of its own, or over runners; they end with the block."""
    if options.ray is None:
        for name, value in (("--ray-address", options.ray_address), ("--step-timeout", options.step_timeout)):
            if value is not None:
                raise ValueError(f"{name} needs --ray N, the number of engines")
        with EngineProcess(build_of(options, settings), Metrics()) as engine:
            yield app_of(engine, settings)
        return
    with cluster_of(options, settings) as cluster:
        yield app_of(RunnersThread(cluster, Metrics()), settings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted; exit with a message for arguments and checkpoints that are refused."""
    options = parser().parse_args(arguments)
    with ExitStack() as stack:
        try:
            settings = settings_of(options)
            app = stack.enter_context(opened(options, settings))
        except REFUSALS as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from None
        gc.freeze()  # a collection of all that was imported would halt every stream
        uvicorn.run(
            app, host=options.host, port=options.port, http=HTTP, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
