"""Conformance test of a multi-LoRA server with OpenAI's API (ours, vLLM, SGLang, LoRAX): whose tokens each tenant gets.

    python -m experiments.commands.conformance make=/tmp/conformance
    python -m experiments.commands.conformance folder=/tmp/conformance url=http://127.0.0.1:8000

The first line writes a tiny checkpoint, its adapters and their right tokens, and prints the lines that start a server.
The second one runs the cases. Status 1: tokens of another model, or wrong ones; 3: right tokens, but faults of the
protocol, which are counted apart. An API key is taken from the variable CONFORMANCE_API_KEY.
"""

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from experiments.conformance import expected
from experiments.conformance.cases import Run, run_cases
from experiments.conformance.client import KEY_VARIABLE, Server
from experiments.conformance.servers import lines
from experiments.conformance.verdict import FAIL, Result, protocol, summary, table
from experiments.conformance.weights import HIDDEN
from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError

LEAST, MOST = 2, 256
"""Numbers of adapters."""


@dataclass
class Options:
    """The command line."""

    make: str | None = None  # folder that receives checkpoint, adapters and tokens
    tenants: int = 16  # make: number of adapters
    ranks: list[int] = field(default_factory=lambda: [1, 8, 16, 64])  # make: of the adapters
    seed: int = 0  # make: of all weights and prompts
    url: str | None = None  # of the server, http://HOST:PORT
    folder: str | None = None  # url: what make= wrote, as the server sees it too
    base: str | None = None  # url: name of the base model; null: as /v1/models has it
    prefix: str | None = None  # url: text before an adapter's name; null: as /v1/models has it
    batches: list[int] = field(default_factory=lambda: [64, 256])  # url: requests at once, of a case each
    timeout: float = 60  # url: seconds without a byte of an answer
    out: str | None = None  # url: file.json that receives the results


def make(options: Options) -> None:
    """Write the folder and print how to start servers on it."""
    folder, ranks = Path(str(options.make)).expanduser(), options.ranks
    if not LEAST <= options.tenants <= MOST:
        raise ConfigError(f"tenants={options.tenants} must be in [{LEAST}, {MOST}]")
    if not ranks or not all(1 <= rank <= HIDDEN for rank in ranks):
        raise ConfigError(f"ranks={ranks} must be one or more of 1 to {HIDDEN}")
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / expected.FILE).is_file())):
        raise ConfigError(f"make={folder} is there and was not written by this command: give a new folder")
    world = expected.make(folder, options.tenants, ranks, options.seed)
    sure, pairs = sum(len(prompt.sure) for prompt in world.prompts), len(world.prompts) * len(world.models)
    print(f"{folder}: {len(world.tenants)} adapters; of {pairs} pairs of model and prompt {sure} are sure and are used")
    print("", lines(world), sep="\n")


async def results_of(options: Options, world: expected.World) -> list[Result]:
    """Run the cases against the server."""
    key = os.environ.get(KEY_VARIABLE)
    server = Server(str(options.url), options.prefix, options.base, key, options.timeout)

    def said(result: Result) -> None:
        print(f"{result.case}: {result.status}", flush=True)

    try:
        return await run_cases(Run(server, world, await server.check(world)), options.batches, said)
    finally:
        await server.close()


def conformance(options: Options) -> None:
    """Make a folder or test a server. Exits with 1 or 3 where tokens or the protocol fail."""
    if (options.make is None) == (options.url is None):
        raise ConfigError("give one of make=FOLDER and url=http://HOST:PORT")
    if options.make is not None:
        make(options)
        return
    if options.folder is None:
        raise ConfigError("url= needs folder=, what make= wrote and the server was started on")
    if not options.batches or min(options.batches) < 1:
        raise ConfigError(f"batches={options.batches} must be one or more positive numbers")
    if not options.timeout > 0:
        raise ConfigError(f"timeout={options.timeout} must be a positive number of seconds")
    if options.out is not None and not Path(options.out).expanduser().parent.is_dir():
        raise ConfigError(f"out={options.out} cannot be written, its folder is not there: give another file")
    results = asyncio.run(results_of(options, expected.read(Path(options.folder).expanduser())))
    print("", table(results), "", summary(results), sep="\n")
    if options.out is not None:
        content = {"url": options.url, "results": [result.as_json() for result in results]}
        Path(options.out).expanduser().write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if code := 1 if any(result.status == FAIL for result in results) else 3 if protocol(results) else 0:
        raise SystemExit(code)


if __name__ == "__main__":
    with_options("conformance", __doc__ or "", "commands.conformance", Options, conformance)
