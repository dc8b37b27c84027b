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
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from experiments.conformance import cases, expected
from experiments.conformance.client import KEY_VARIABLE, Server, some
from experiments.conformance.weights import ADAPTERS, CHECKPOINT, HIDDEN, MAX_LEN
from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError, Settings

MOST = 256  # adapters


class Options(Settings):
    """The command line."""

    make: str | None = None  # folder that receives checkpoint, adapters and tokens
    tenants: int = 16  # make: number of adapters
    ranks: list[int] = [1, 8, 16, 64]  # make: of the adapters
    seed: int = 0  # make: of all weights and prompts
    url: str | None = None  # of the server, http://HOST:PORT
    folder: str | None = None  # url: what make= wrote, as the server sees it too
    base: str | None = None  # url: name of the base model; null: as /v1/models has it
    prefix: str | None = None  # url: text before an adapter's name; null: as /v1/models has it
    batches: list[int] = [64, 256]  # url: requests at once, of a case each
    timeout: float = 60  # url: seconds without a byte of an answer
    out: str | None = None  # url: file.json that receives the results

    def check(self) -> None:
        """Raise `ConfigError` for what is missing or out of range."""
        made, out = Path(self.make or "").expanduser(), Path(self.out or "").expanduser()
        is_ours = not made.exists() or (made.is_dir() and (not [*made.iterdir()] or (made / expected.FILE).is_file()))
        for is_wrong, text in (
            ((self.make is None) == (self.url is None), "give one of make=FOLDER and url=http://HOST:PORT"),
            (not 2 <= self.tenants <= MOST, f"tenants={self.tenants} must be in [2, {MOST}]"),
            (not set() < {*self.ranks} <= {*range(1, HIDDEN + 1)}, f"ranks={self.ranks} must be some of 1 to {HIDDEN}"),
            (self.make and not is_ours, f"make={made} is there and was not written by this command: give a new folder"),
            (self.url and self.folder is None, "url= needs folder=, what make= wrote and the server was started on"),
            (not self.batches or min(self.batches) < 1, f"batches={self.batches} must be one or more positive numbers"),
            (not self.timeout > 0, f"timeout={self.timeout} must be a positive number of seconds"),
            (not out.parent.is_dir(), f"out={out} cannot be written, its folder is not there: give another file"),
        ):
            if is_wrong:
                raise ConfigError(text)


def lines(world: expected.World) -> str:
    """Return what to type to start each server."""
    checkpoint, root = (quote(str((world.folder / name).resolve())) for name in (CHECKPOINT, ADAPTERS))
    given = [f"{name}={quote(str(world.adapter(name)))}" for name in world.models[1:]]
    rank = max(8, 1 << (max(tenant.rank for tenant in world.tenants) - 1).bit_length())  # vLLM takes few other sizes
    template = Path(cases.__file__).with_name("servers.txt").read_text(encoding="utf-8")
    return template.format(
        checkpoint=checkpoint, root=root, rank=rank, length=MAX_LEN, cached=len(given) + 2,
        given=" ".join(f"\\\n    {one}" for one in given), each=" ".join(f"\\\n    --adapter {one}" for one in given),
        test=f"python -m experiments.commands.conformance folder={quote(str(world.folder.resolve()))}",
    )  # fmt: skip


async def results_of(options: Options, world: expected.World) -> list[cases.Result]:
    """Run the cases against the server; the first result is of the models that it serves."""
    server = Server(str(options.url), options.prefix, options.base, os.environ.get(KEY_VARIABLE), options.timeout)
    async with server.api:
        absent = await server.check(world)
        run = cases.Run(server, world, absent)
        results = [cases.Result("models", len(world.models), len(run.models))]
        for model, why in absent.items():
            results[0].protocol[f"absent: {why}"][model] += 1
        for name, case in cases.cases(options.batches).items():
            print(f"{results[-1].case}: {results[-1].status}", flush=True)
            results.append(cases.Result(name))
            await case(run, results[-1])
    print(f"{results[-1].case}: {results[-1].status}")
    return results


def table(results: Sequence[cases.Result], most: int = 12) -> str:
    """Draw a line for each case, below it at most `most` findings; then the protocol's faults, and counts of both."""
    width, lines, faults = max(len(result.case) for result in results), [], defaultdict[str, Counter[str]](Counter)
    for one in results:
        judged = f"{one.judged:5d} of {one.answers} answers"
        lines.append(f"{one.case:{width}}  {one.status:11}  {judged}  {one.note}".rstrip())
        lines += [f"    {number} x {finding}" for finding, number in one.findings.most_common(most)]
        lines += [f"    and {len(one.findings) - most} other findings: out=FILE has all"] * (len(one.findings) > most)
        for fault, models in one.protocol.items():
            faults[fault] += models
    lines += ["", "protocol, whatever the tokens are:"] * bool(faults)
    for fault, models in sorted(faults.items(), key=lambda one: -one[1].total()):
        lines.append(f"    {models.total()} x {fault} ({some(sorted(models))})")
    statuses = ", ".join(f"{number} {status}" for status, number in Counter(one.status for one in results).items())
    times = sum(models.total() for models in faults.values())
    return "\n".join([*lines, "", f"tokens: {statuses}", f"protocol: {len(faults)} faults, {times} times"])


def conformance(options: Options) -> None:
    """Make a folder or test a server. Exits with 1 or 3 where tokens or the protocol fail."""
    options.check()
    if options.make is not None:
        world = expected.make(Path(options.make).expanduser(), options.tenants, options.ranks, options.seed)
        sure, pairs = sum(len(prompt.sure) for prompt in world.prompts), len(world.prompts) * len(world.models)
        said = f"{len(world.tenants)} adapters; of {pairs} pairs of model and prompt {sure} are sure and are used"
        print(f"{world.folder}: {said}\n\n{lines(world)}")
        return
    results = asyncio.run(results_of(options, expected.read(Path(str(options.folder)).expanduser())))
    print("", table(results), sep="\n")
    if options.out is not None:
        told = [{"case": one.case, "status": one.status, **vars(one)} for one in results]
        content = json.dumps({"url": options.url, "results": told}, indent=1)
        Path(options.out).expanduser().write_text(f"{content}\n", encoding="utf-8")
    if any(one.status == cases.FAIL for one in results):
        raise SystemExit(1)
    if any(one.protocol for one in results):
        raise SystemExit(3)


if __name__ == "__main__":
    with_options("conformance", __doc__ or "", "commands.conformance", Options, conformance)
