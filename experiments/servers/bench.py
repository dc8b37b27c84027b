"""A checkpoint and adapters on disk, processes on them, and the check of their tokens."""

import ctypes
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import torch
from safetensors.torch import save_file

from experiments.benches.model_steps import llama_config, random_llama
from experiments.conformance.world import word_tokenizer
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Reading
from experiments.harness.schema import DType, ModelConf
from experiments.servers.client import Server
from experiments.servers.served import Served
from experiments.servers.systems import SYSTEMS
from experiments.servers.worker import lines_of
from experiments.systems.weights import exported
from punica.adapters import write_random_adapter

AGREEMENT = {DType.float32: 1.0, DType.float16: 0.75, DType.bfloat16: 0.5}
"""Least share of equal first tokens. Rounding decides a few of a hundred close calls between random weights; of another
adapter hardly any token is the same."""
START_S, END_S, POLL_S = 600.0, 60.0, 0.1
"""Longest waits for a server's start and for its end, and the time between two looks."""
BASE, TOKENS = "base", "tokens"
PR_SET_PDEATHSIG, SIGNAL = 1, ctypes.c_ulong(signal.SIGTERM)
END_WITH_PARENT = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, SIGNAL) if sys.platform == "linux" else None


class Bench:
    """Folders of one model and its adapters, processes of systems on them, and the tokens that these gave. `sizes`:
    fields of `ext_servers.ServersConf` that decide the work, and `max_model_len`.
    """

    def __init__(
        self, model: ModelConf, device: str, threads: int, ranks: Sequence[int], seed: int, sizes: Mapping[str, Any],
        python: Path | None,
    ) -> None:  # fmt: skip
        self.model, self.device, self.threads, self.rank = model, device, threads, max(ranks)
        self.sizes, self.python = sizes, python
        self._home = TemporaryDirectory(prefix="servers-")
        self.path = Path(self._home.name)
        self.adapters = written(self.path, model, device, ranks, sizes["adapters"], seed)
        self._found: dict[str, Mapping[str, Any]] = {}

    def run(self, system: str, parts: Sequence[tuple[str, dict[str, Any]]] = ()) -> list[dict[str, Any]]:
        """Run the engine of `system` in a process of its own; return its lines. `CheckFailed`: it fails."""
        about = SYSTEMS[system]
        job = {
            **self.sizes, "engine": about.engine, "options": dict(about.options), "model": str(self.path / "model"),
            "adapters": self.adapters, "rank": self.rank, "dtype": self.model.dtype.name, "device": self.device,
            "parts": [(TOKENS, self.check), *parts],
        }  # fmt: skip
        if about.is_server:
            with ExitStack() as stack:
                return list(lines_of(job, lambda _: Served(stack.enter_context(self._server(system)))))
        asked, answered = self.path / "job.json", self.path / "lines.jsonl"
        asked.write_text(json.dumps(job), encoding="utf-8")
        with self._running(system, str(asked), str(answered)) as process:
            if process.wait():
                raise self._failed(system, process)
        return [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]

    @contextmanager
    def _server(self, system: str) -> Iterator[Server]:
        """Start the server of `system`, which ends with the block. `CheckFailed`: it does not start."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url, given = f"http://127.0.0.1:{port}", {"port": port, "served-model-name": BASE, "drain": 0}
        given |= {"max-batch-size": self.sizes["batch_size"], "max-model-len": self.sizes["max_model_len"]}
        adapters = [f"--adapter={name}={folder}" for name, folder in self.adapters.items()]
        options, deadline = [f"--{name}={value}" for name, value in given.items()], time.monotonic() + START_S
        with self._running(system, str(self.path / "with-tokenizer"), *options, *adapters) as process:
            while not _is_open(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise self._failed(system, process)
                time.sleep(POLL_S)
            yield Server(url, system, BASE, tuple(self.adapters))

    @property
    def check(self) -> dict[str, Any]:
        """Requests without adapter, with the first, and with one each, in turns."""
        (count, new), length = self.sizes["check"], self.sizes["check_prompt"]
        adapters = [(0, 1, 1 + i % len(self.adapters))[i % 3] for i in range(count)]
        prompts = self.prompts([length + i for i in range(count)], 2)
        return {"prompts": prompts, "adapters": adapters, "new_tokens": new}

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(3, self.model.vocab_size) for _ in range(length)] for length in lengths]

    def shares(self, system: str, found: Mapping[str, Any], reference: str) -> list[Reading]:
        """Compare a mixed batch with each request alone, and with that of the system `reference`. `CheckFailed`:
        adapters change no tokens, a request's company does, or the reference has others.
        """
        together, alone = found["together"], found["alone"]
        pairs = zip(together, found["plain"], self.check["adapters"], strict=True)
        changed = [own[0] != plain[0] for own, plain, adapter in pairs if adapter]
        if 2 * sum(changed) < len(changed):
            raise CheckFailed(f"{system}: adapters change the first token of {sum(changed)} of {len(changed)} requests")
        self._found[system] = found
        if reference not in self._found:
            self.shares(reference, self.run(reference)[1], reference)
        ours = self._found[reference]["together"]
        begins = {"first_token_alone": alone, "first_token_reference": ours}
        shares = {metric: same(*([one[:1] for one in side] for side in (together, b))) for metric, b in begins.items()}
        least = AGREEMENT[self.model.dtype]
        for metric, share in shares.items():
            if share < least:
                raise CheckFailed(f"{system}: {metric} ({reference}) is {share:.2f}, must be {least} or more")
        shares["same_alone"] = same(together, alone)
        checked = [Reading("checked", len(together), "requests", "count")]
        if leads := [lead_of_first(*pair) for pair in zip(found.get("likeliest", ()), ours, strict=False)]:
            checked.append(Reading("first_token_lead", max(leads), "log-probability"))
        return [*checked, *(Reading(metric, share, "share") for metric, share in shares.items())]

    @contextmanager
    def _running(self, system: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the process of `system` in a group of its own, which ends with the block, and with this process."""
        with (self.path / f"{system}.log").open("wb") as output:
            process = subprocess.Popen(
                [*SYSTEMS[system].command(self.python), *arguments], cwd=self.path, stdout=output,
                stderr=subprocess.STDOUT, env=SYSTEMS[system].variables(self.device, self.threads),
                start_new_session=True,
                preexec_fn=END_WITH_PARENT,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _failed(self, system: str, process: subprocess.Popen[bytes]) -> CheckFailed:
        said = (self.path / f"{system}.log").read_text(encoding="utf-8", errors="replace")[-3000:]
        ended = f"ended with exit code {process.returncode}" if process.poll() is not None else "has not started"
        return CheckFailed(f"the process of {system} {ended}, and said last:\n{said}")


def _is_open(url: str) -> bool:
    with suppress(httpx2.HTTPError):
        return httpx2.get(f"{url}/v1/models", trust_env=False).status_code == 200
    return False


def same(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens before the first that differs, of all requests."""
    found = [[x == y for x, y in zip(a, b, strict=True)] for a, b in zip(some, others, strict=True)]
    return sum([*one, False].index(False) for one in found) / sum(map(len, found))


def lead_of_first(likeliest: Sequence[tuple[int, float]], tokens: Sequence[int]) -> float:
    """Return by how much the likeliest first token is ahead of that of `tokens`; at least, where that is missing."""
    found = dict(likeliest)
    return max(found.values()) - found.get(tokens[0], min(found.values()))


def written(
    home: Path, model: ModelConf, device: str, ranks: Sequence[int], adapters: int, seed: int
) -> dict[str, str]:
    """Write a model of random weights, also beside a tokenizer, and adapters; return the folders of these by name."""
    config = llama_config(model)
    config.architectures, config.dtype = ["LlamaForCausalLM"], model.dtype.name
    config.save_pretrained(home / "model")
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in exported(random_llama(model, device)).items()}
    save_file(weights, home / "model" / "model.safetensors", metadata={"format": "pt"})
    word_tokenizer(model.vocab_size - 2).save_pretrained(home / "with-tokenizer")
    for file in (home / "model").iterdir():
        (home / "with-tokenizer" / file.name).symlink_to(file)
    dtype = getattr(torch, model.dtype.name)
    write = partial(write_random_adapter, model_config=config, dtype=dtype, device=device)
    folders = {
        f"adapter-{i}": write(home / f"adapter-{i}", rank=ranks[(i - 1) % len(ranks)], seed=seed + i)
        for i in range(1, adapters + 1)
    }
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return {name: str(folder) for name, folder in folders.items()}
