"""Jobs for engines in processes of their own, and the check of their tokens."""

import json
import math
import os
import random
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import DType, ModelConf
from experiments.today.folders import written
from experiments.today.measure import DECODE, NONE, REGISTRATION, STREAM, TOKENS
from experiments.today.peers import Interpreters
from experiments.workload import popularity

AGREEMENT = {DType.float32: 1.0, DType.float16: 0.75, DType.bfloat16: 0.5}
"""Least share of equal first tokens. Rounding decides a few of a hundred close calls between random weights; of another
adapter hardly any token is the same."""
LOG_LETTERS = 3000


class TodayBench:
    """Folders of one model and its adapters, and the lines that engines wrote about them.

    `sizes`: fields of `ext_today.TodayConf` that decide the work.
    """

    def __init__(
        self, model: ModelConf, device: str, rank: int, seed: int, sizes: Mapping[str, Any], peers: Interpreters
    ) -> None:
        self.model, self.device, self.rank, self.sizes, self.peers = model, device, rank, sizes, peers
        self._home = TemporaryDirectory(prefix="today-")
        self.folders = written(Path(self._home.name), model, device, rank, sizes["adapters"], seed)
        self._tokens: dict[str, dict[str, Any]] = {}

    def run(self, system: str, reference: str, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run `system` in a process of its own and return its lines: start, tokens, and the parts that are `wanted`.

        `wanted`: part -> what `parts` takes. `CheckFailed` if its tokens are wrong (see `check`), or differ from those
        of the system `reference`, or if its process fails.
        """
        lines = self._lines(system, [self._token_part(), *self.parts(wanted)])
        self._tokens[system] = found = next(line for line in lines if line["part"] == TOKENS)
        self.check(system, found)
        same, least = self.agreement(system, reference), AGREEMENT[self.model.dtype]
        if same < least:
            raise CheckFailed(f"{system} begins {same:.2f} of the requests as {reference} does, wanted are {least}")
        return lines

    def agreement(self, system: str, reference: str) -> float:
        """Return the share of requests that both begin with the same token."""
        return first_tokens(self.tokens(system)["together"], self.tokens(reference)["together"])

    def tokens(self, system: str) -> dict[str, Any]:
        """Return the tokens of `system`, from a process that generates no more if it did not run yet."""
        if system not in self._tokens:
            lines = self._lines(system, [self._token_part()])
            self._tokens[system] = next(line for line in lines if line["part"] == TOKENS)
        return self._tokens[system]

    def check(self, system: str, found: Mapping[str, Any]) -> None:
        """Raise `CheckFailed` if adapters change no tokens, or a request's company does: the mixed batch of `found`
        against each request alone.
        """
        least, adapters = AGREEMENT[self.model.dtype], self._token_part()[1]["adapters"]
        changed = [a[0] != b[0] for a, b, i in zip(found["together"], found["plain"], adapters, strict=True) if i]
        if 2 * sum(changed) < len(changed):
            raise CheckFailed(f"{system}: adapters change the first token of {sum(changed)} of {len(changed)} requests")
        alone = first_tokens(found["together"], found["alone"])
        if alone < least:
            raise CheckFailed(
                f"{system}: {alone:.2f} of the requests of a mixed batch begin as they do alone, wanted are {least}"
            )

    def parts(self, wanted: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Return parts of a job. `wanted`: contexts of decode steps, and popularities of these and of the stream."""
        sizes, workloads, parts = self.sizes, wanted["workloads"], []
        for context in wanted[DECODE]:
            prompts = self._prompts([context - sum(sizes["new_tokens"]) // 2] * sizes["batch_size"], context)
            cases = {name: ids(name, sizes["batch_size"], sizes["adapters"]) for name in workloads}
            given = {"context": context, "prompts": prompts, "cases": cases, "new_tokens": sizes["new_tokens"]}
            parts.append((DECODE, given))
        if wanted[REGISTRATION] or wanted[STREAM]:  # whose adapters are in host memory
            parts.append((REGISTRATION, {"adapters": sizes["adapters"]}))
        if wanted[STREAM]:
            lengths = stream_lengths(sizes["requests"], *sizes["lengths"])
            cases = {name: ids(name, sizes["requests"], sizes["adapters"]) for name in workloads}
            given = {"prompts": self._prompts([prompt for prompt, _ in lengths], 1), "cases": cases}
            parts.append((STREAM, {**given, "new_tokens": [new for _, new in lengths], "warm": sizes["warm"]}))
        return parts

    def stream_tokens(self) -> tuple[int, int]:
        """Return the new tokens and the prompt tokens of the stream."""
        lengths = stream_lengths(self.sizes["requests"], *self.sizes["lengths"])
        return sum(new for _, new in lengths), sum(prompt for prompt, _ in lengths)

    def _token_part(self) -> tuple[str, dict[str, Any]]:
        """Requests without adapter, with the first, and with one each, in turns."""
        requests, tokens = self.sizes["check"]
        adapters = [(0, 1, 1 + i % self.sizes["adapters"])[i % 3] for i in range(requests)]
        prompts = self._prompts([self.sizes["check_prompt"] + i for i in range(requests)], 2)
        return TOKENS, {"prompts": prompts, "adapters": adapters, "new_tokens": tokens}

    def _prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(3, self.model.vocab_size) for _ in range(length)] for length in lengths]

    def _lines(self, system: str, parts: Collection[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Run the worker of `system` on `parts` and return its lines. Its processes end with this call."""
        sizes, folders = self.sizes, self.folders
        job = {
            "model": folders.model, "adapters": folders.adapters, "rank": self.rank, "dtype": self.model.dtype.name,
            "device": self.device, "batch_size": sizes["batch_size"], "max_len": sizes["max_len"],
            "options": self.peers.peer(system).options, "rounds": sizes["rounds"], "seconds": sizes["seconds"],
            "parts": parts,
        }  # fmt: skip
        with TemporaryDirectory(prefix=f"{system}-") as home:
            asked, answered, log = (Path(home) / name for name in ("job.json", "lines.jsonl", "log"))
            asked.write_text(json.dumps(job), encoding="utf-8")
            command = [*self.peers.command(system), str(asked), str(answered)]
            code = _run(command, self.peers.environment(system), log)
            if code or not answered.exists():
                said = log.read_text(encoding="utf-8", errors="replace")[-LOG_LETTERS:]
                raise CheckFailed(f"the process of {system} ended with exit code {code}, and said last:\n{said}")
            return [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]


def _run(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Run a command in its own process group, output into `log`; end what is left of the group. Returns its code."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ids(workload: str, requests: int, adapters: int) -> list[int]:
    """Adapter id of each request, those of a popularity in turns; 0 without one."""
    if workload == NONE:
        return [0] * requests
    return [1 + int(i) % adapters for i in popularity(workload).requests(requests, "round_robin")]


def stream_lengths(requests: int, prompt: int, new: int) -> list[tuple[int, int]]:
    """Draw lengths of prompts (log-normal, up to four times the mean `prompt`) and outputs (uniform about `new`)."""
    draw, spread, middle = random.Random(0), 0.8, math.log(prompt) - 0.8**2 / 2
    drawn = [(draw.lognormvariate(middle, spread), new * draw.uniform(0.4, 1.6)) for _ in range(requests)]
    return [(max(1, min(4 * prompt, round(length))), max(1, round(output))) for length, output in drawn]


def first_tokens(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of requests with the same first token."""
    return sum(a[0] == b[0] for a, b in zip(some, others, strict=True)) / len(some)


def common(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of tokens before the first that differs, of all requests."""
    same = [next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
            for a, b in zip(some, others, strict=True)]  # fmt: skip
    return sum(same) / sum(map(len, some))
