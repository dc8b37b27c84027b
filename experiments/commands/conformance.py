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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated

from pydantic import Field

from experiments.conformance import cases
from experiments.conformance.world import ADAPTERS, BASE, CHECKPOINT, FILE, HIDDEN, MAX_LEN, World, make, read
from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError, Counts, Settings


class Options(Settings):
    make: Path | None = None  # folder that receives checkpoint, adapters and tokens
    tenants: int = Field(16, ge=2, le=256)  # make: number of adapters
    ranks: list[Annotated[int, Field(ge=1, le=HIDDEN)]] = Field([1, 8, 16, 64], min_length=1)  # make: of the adapters
    seed: int = 0  # make: of all weights and prompts
    url: str | None = None  # of the server, http://HOST:PORT
    folder: Path | None = None  # url: what make= wrote, as the server sees it too
    base: str = BASE  # url: name of the base model there
    prefix: str = ""  # url: text before an adapter's name there
    batches: Counts = [64, 256]  # url: requests at once, of a case each
    timeout: float = Field(60, gt=0)  # url: seconds without a byte of an answer
    out: Path | None = None  # url: file.json that receives the results


def lines(world: World, most: int) -> str:
    """Return what to type to start each server, with room for ranks up to ``most``."""
    checkpoint, root = (quote(str((world.folder / name).resolve())) for name in (CHECKPOINT, ADAPTERS))
    given = [f"{name}={quote(str(world.adapter(name)))}" for name in world.models[1:]]
    rank = max(8, 1 << (most - 1).bit_length())  # vLLM takes few other sizes
    template = Path(cases.__file__).with_name("servers.txt").read_text(encoding="utf-8")
    return template.format(
        checkpoint=checkpoint, root=root, rank=rank, length=MAX_LEN, cached=len(given) + 2,
        given=" ".join(f"\\\n    {one}" for one in given), each=" ".join(f"\\\n    --adapter {one}" for one in given),
        test=f"python -m experiments.commands.conformance folder={quote(str(world.folder.resolve()))}",
    )  # fmt: skip


async def results_of(options: Options, world: World) -> list[cases.Result]:
    key = os.environ.get(cases.KEY_VARIABLE)
    run, results = cases.Run(world, str(options.url), options.prefix, options.base, key, options.timeout), []
    async with run.api:
        await run.check()
        for name, case in cases.cases(world, options.batches).items():
            results.append(result := cases.Result(name))
            await case(run, result)
            print(f"{name}: {result.status}", flush=True)
    return results


def table(results: Sequence[cases.Result], most: int = 12) -> str:
    """Draw a line for each case, below it at most `most` findings; then the protocol's faults, and counts of both."""
    lines, faults = list[str](), sum((one.protocol for one in results), Counter[str]())
    for one in results:
        lines.append(f"{one.case:16}  {one.status:11}  {one.judged:5d} of {one.answers} answers")
        lines += [f"    {number} x {finding}" for finding, number in one.findings.most_common(most)]
        lines += [f"    and {len(one.findings) - most} other findings: out=FILE has all"] * (len(one.findings) > most)
    lines += ["", "protocol, whatever the tokens are:"] * bool(faults)
    lines += [f"    {number} x {fault}" for fault, number in faults.most_common()]
    statuses = ", ".join(f"{number} {status}" for status, number in Counter(one.status for one in results).items())
    return "\n".join([*lines, "", f"tokens: {statuses}", f"protocol: {len(faults)} faults, {faults.total()} times"])


def conformance(options: Options) -> None:
    """Make a folder or test a server. Exits with 1 or 3 where tokens or the protocol fail."""
    made, out = options.make and options.make.expanduser(), options.out
    if (made is None) == (options.url is None) or (options.url and options.folder is None):
        raise ConfigError("give make=FOLDER; or url=http://HOST:PORT with folder=, what make= wrote for the server")
    if made and made.exists() and not (made / FILE).is_file() and (made.is_file() or any(made.iterdir())):
        raise ConfigError(f"make={made} is there and was not written by this command: give a new folder")
    if out and not out.parent.is_dir():
        raise ConfigError(f"out={out} is in no folder that is there: give another")
    if made:
        world = make(made, options.tenants, options.ranks, options.seed)
        print(f"{made}: {options.tenants} adapters\n\n{lines(world, max(options.ranks))}")
        return
    results = asyncio.run(results_of(options, read(Path(str(options.folder)).expanduser())))
    print("", table(results), sep="\n")
    if out:
        told = [{"case": one.case, "status": one.status, **vars(one)} for one in results]
        out.write_text(f"{json.dumps({'url': options.url, 'results': told}, indent=1)}\n", encoding="utf-8")
    if status := 1 if any(one.status == cases.FAIL for one in results) else 3 * any(one.protocol for one in results):
        raise SystemExit(status)


if __name__ == "__main__":
    with_options("conformance", __doc__ or "", "commands.conformance", Options, conformance)
