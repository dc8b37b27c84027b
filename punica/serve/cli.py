"""Command line of ``python -m punica.serve``: its arguments, checked at once, without torch."""

import math
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from punica import __version__
from punica.checks import clip
from punica.serve.access import Keys, allowed_roots

DRAIN_S = 5.0
"""Default time from SIGTERM to the closed port."""
GRACE_S = 30.0
"""Default time in which running answers may end after that."""
EXTRA = ("fastapi", "prometheus_client", "uvicorn")
RUNNER_BATCH = 32
"""Requests of one step of a runner, unless ``--max-batch-size`` is given."""
_OF_ONE_ENGINE = ("speculate", "prefill-chunk", "prefix-cache")  # what a cluster's scheduler does not count
_EPILOG = "Arguments may stand in a file, one per line: python -m punica.serve CHECKPOINT @arguments.txt (for keys)."
_NOT_TEXT = "a file of arguments (@FILE) must be text, one argument a line"


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        if "\0" in arg_line:  # bytes of a locale without UTF-8 are no error before
            self.error(_NOT_TEXT)
        return [arg_line]


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not (name and value):
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def number(kind: type[int] | type[float], lowest: float, highest: float = math.inf) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        with suppress(ValueError):
            if lowest <= (value := kind(text)) <= highest and math.isfinite(value):
                return value
        most = "" if highest == math.inf else f", at most {highest}"
        whole = "an integer" if kind is int else "a number"
        raise ArgumentTypeError(f"{clip(text)} must be {whole}, at least {lowest}{most}")

    return read


def parser() -> ArgumentParser:
    made = _Parser(
        "python -m punica.serve", description="Serve a checkpoint and its LoRA adapters by OpenAI's API.",
        epilog=_EPILOG, fromfile_prefix_chars="@",
    )  # fmt: skip
    add = made.add_argument
    several: dict[str, Any] = {"action": "append", "default": []}
    add("checkpoint", nargs="?", help="folder that transformers wrote")
    add("--demo", action="store_true", help="in place of a checkpoint: a tiny one of random weights, three adapters")
    add("--version", action="version", version=f"punica {__version__}")
    add("--adapter", type=pair, **several, metavar="NAME=FOLDER", help="repeatable")
    add("--host", default="127.0.0.1")
    add("--port", type=number(int, 0, 65535), default=8000, metavar="N", help="0: a free one")
    add("--served-model-name", metavar="NAME", help="of the base model; default: the folder's name")
    add("--api-key", metavar="KEY", help="opens the base model, adapters without a key, loading")
    add("--adapter-key", type=pair, **several, metavar="NAME=KEY", help="repeatable")
    add("--allow-folder", **several, metavar="DIR",
        help="adapters below it may be loaded by requests; repeatable; default: none")  # fmt: skip
    for name, default, lowest, meaning in (
        ("max-queue", 1024, 0, "waiting generations, then 429"), ("max-body", 1 << 20, 1, "bytes of a body, then 413"),
        ("max-loras", None, 1, "adapter slots"), ("max-cpu-loras", None, 1, "adapters in host memory"),
        ("max-lora-rank", None, 1, "largest rank"), ("max-model-len", None, 2, "tokens of one request"),
        ("max-batch-size", None, 1, "requests of one step"),
        ("prefill-chunk", None, 1, "rows of prompts in one step; longer prompts take several; without --ray"),
        ("speculate", None, 1, "drafts of a request in one step, from the tokens before; without --ray"),
    ):  # fmt: skip
        meaning += "; default: as Engine.from_pretrained" if default is None else f"; default: {default}"
        add(f"--{name}", type=number(int, lowest), default=default, metavar="N", help=meaning)
    for name, seconds, meaning in (
        ("drain", DRAIN_S, "after SIGTERM: /health is 503, new requests are refused, the port stays open"),
        ("grace", GRACE_S, "after that: running answers may end"),
    ):
        meaning += f"; default: {seconds:g}"
        add(f"--{name}", type=number(float, 0), default=seconds, metavar="SECONDS", help=meaning)
    add("--ray", type=number(int, 1), metavar="N", help="serve on N engines, one GPU each where there are GPUs")
    add("--ray-address", metavar="ADDRESS", help="of a Ray cluster; default: a new one on this machine")
    add("--step-timeout", type=number(float, 0.001), metavar="SECONDS",
        help="a runner of --ray whose step takes longer is killed")  # fmt: skip
    add("--adapter-templates", action="store_true",
        help="chats use the template in their adapter's folder, in the server's process: for trusted folders",
    )  # fmt: skip
    add("--metrics-adapter-names", action="store_true",
        help="/metrics, which needs no key, names adapters: for routers that place requests by adapter")  # fmt: skip
    add("--prefix-cache", action="store_true", help="equal beginnings of prompts are computed once; without --ray")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="default: the checkpoint's")
    add("--weights", choices=("fp8",), help="quantise those of linear layers while loading; default: in --dtype")
    return made


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    """Return the arguments, and what follows from them: ``base``, ``keys``, ``roots`` and ``sizes``. Exits with one
    line where they are refused, also by each other and by the disk.
    """
    made = parser()
    try:
        options = made.parse_args(arguments)
        _check_source(options)
        _check_names(options)
        _check_ray(options)
        if options.ray_address is None and not options.demo:  # other machines have other disks
            _check_folders(options)
        options.keys = Keys(options.api_key, dict(options.adapter_key))
        options.roots, options.sizes = allowed_roots(options.allow_folder), _sizes(options)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        made.error(_NOT_TEXT if isinstance(error, UnicodeDecodeError) else str(error))
    return options


def _check_source(options: Namespace) -> None:
    if options.demo == (options.checkpoint is not None) or (options.demo and options.adapter):
        raise ValueError("pass a checkpoint's folder, or --demo without a checkpoint and adapters of yours")
    if options.demo:
        options.home = TemporaryDirectory(prefix="punica-demo-")
        options.checkpoint = f"{options.home.name}/random-weights"
        options.adapter = [(name, f"{options.home.name}/{name}") for name in ("poet", "lawyer", "cook")]
        options.max_batch_size, options.max_model_len = options.max_batch_size or 8, options.max_model_len or 512


def _check_names(options: Namespace) -> None:
    options.base = options.served_model_name or Path(options.checkpoint).expanduser().resolve().name
    names = [options.base, *(name for name, _ in options.adapter)]
    for name in names:
        if name != name.encode(errors="replace").decode():
            raise ValueError(f"the name {clip(name)} is not UTF-8; pass another to --adapter or --served-model-name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice} name two models; pass other names to --adapter or --served-model-name")


def _check_ray(options: Namespace) -> None:
    if options.ray is None:
        for name, value in (("--ray-address", options.ray_address), ("--step-timeout", options.step_timeout)):
            if value is not None:
                raise ValueError(f"{name} needs --ray N, the number of engines")
    elif given := [name for name in _OF_ONE_ENGINE if getattr(options, name.replace("-", "_"))]:
        raise ValueError(f"--{given[0]} is for one engine, not the runners of --ray; leave out one of them")
    elif find_spec("ray") is None:
        raise RuntimeError("--ray needs Ray; install it with: pip install 'punica-lora[cluster]'")


def _check_folders(options: Namespace) -> None:
    folders = [("checkpoint", options.checkpoint, "config.json")]
    folders += [(f"--adapter {name}", folder, "adapter_config.json") for name, folder in options.adapter]
    for what, text, file in folders:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"{what}: {clip(text)} is not a folder; nothing is downloaded, pass a local one")
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{what}: the folder {clip(text)} has no {file}; pass the one that has it")


def _sizes(options: Namespace) -> dict[str, Any]:
    """Return the sizes of an engine; ValueError: a runner of ``--ray`` has no slot for every request of its batch."""
    limits = ("max_model_len", "max_batch_size", "max_loras", "max_cpu_loras", "max_lora_rank")
    names = (*limits, "prefill_chunk", "speculate", "dtype")
    sizes = {name: value for name in names if (value := getattr(options, name)) is not None}
    sizes |= {"adapter_templates": options.adapter_templates, "prefix_cache": options.prefix_cache}
    if options.weights == "fp8":
        sizes["fp8_weights"] = True
    if "prefill_chunk" in sizes:
        sizes["admission"] = "chunked"
    if options.allow_folder and not options.adapter:
        sizes.setdefault("max_lora_rank", 16)
    if options.ray is None:
        return sizes
    batch = sizes.setdefault("max_batch_size", RUNNER_BATCH)
    if options.adapter or sizes.keys() & {"max_loras", "max_cpu_loras", "max_lora_rank"}:
        slots = sizes.setdefault("max_loras", batch)
        if slots < batch:
            raise ValueError(
                f"--max-loras {slots} is below --max-batch-size {batch}, and with --ray every request of a batch needs "
                "a slot; raise the one or lower the other"
            )
    return sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted; exit with one line for what is refused: before torch is imported, where that can be."""
    options = parse(arguments)
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise SystemExit(f"punica.serve needs {missing[0]}: pip install 'punica-lora[serve]'")
    from punica.serve.server import listen

    try:
        sockets = listen(options.host, options.port)
    except OSError as error:
        raise SystemExit(str(error)) from None
    print(f"punica {__version__} loads {options.checkpoint}", file=sys.stderr, flush=True)
    if options.demo:
        from punica.serve.demo import write_demo

        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # else the folders would stay
        write_demo(options.checkpoint, options.adapter)
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"look at http://{host}:{sockets[0].getsockname()[1]}/#send", file=sys.stderr, flush=True)
    from punica.serve.launch import serve

    serve(options, sockets)
