"""A checkpoint and adapters on disk, our server of them and its engine alone, one process at a time."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from experiments.conformance.weights import word_tokenizer
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ModelConf
from experiments.http_load.about import look_up
from experiments.http_load.client import IGNORE_EOS, MIN_TOKENS, Client, Job
from experiments.http_load.loops import Run, closed_loop, open_loop
from experiments.own_server import worker
from experiments.own_server.process import OwnServer, environment_of, run_module
from experiments.own_server.stream import Stream
from experiments.today.folders import written
from experiments.workload.arrivals import Span

BASE = "base"
FIELDS = frozenset({IGNORE_EOS, MIN_TOKENS})
PATIENCE_S = 300.0
"""Longest wait for one answer of the check."""


class OwnBench:
    """Folders of one model and its adapters, the server while it runs, and the engine's texts.

    `sizes`: fields of `ext_own_server.OwnServerConf`, and `max_model_len`.
    """

    def __init__(
        self, model: ModelConf, device: str, threads: int, rank: int, seed: int, sizes: Mapping[str, Any]
    ) -> None:
        self._sizes, self._environment = sizes, environment_of(device, threads)
        self._home = TemporaryDirectory(prefix="own-server-")
        self._path = Path(self._home.name)
        folders = written(self._path, model, device, rank, sizes["adapters"], seed)
        word_tokenizer(model.vocab_size - 2).save_pretrained(folders.model)
        self.names = [f"adapter-{number}" for number in range(1, sizes["adapters"] + 1)]
        self._arguments = [
            folders.model, f"--served-model-name={BASE}", f"--max-batch-size={sizes['batch_size']}",
            f"--max-model-len={sizes['max_model_len']}",
            *(f"--adapter={name}={folder}" for name, folder in zip(self.names, folders.adapters, strict=True)),
        ]  # fmt: skip
        count, new = sizes["check"]
        stream = Stream("Distinct", count, [sizes["lengths"][0], new], model.vocab_size, self.names, seed)
        jobs = [job for job, _ in zip(stream.jobs(), range(count), strict=False)]
        self._check = [Job(name, job.prompt, new) for job in jobs for name in (job.model, BASE)]
        self._texts: list[str] = []
        self._server: OwnServer | None = None

    def engine(self, stream: Stream | None) -> dict[str, float]:
        """Run the engine alone; return its throughput for `stream`, if any. `CheckFailed`: adapters change nothing."""
        self.close()
        asked, found, log = (self._path / name for name in ("job.json", "found.json", "engine.log"))
        job = {
            "arguments": self._arguments, "check": [astuple(one) for one in self._check],
            "stream": None if stream is None else asdict(stream),
            **{name: self._sizes[name] for name in ("in_flight", "warm", "seconds")},
        }  # fmt: skip
        asked.write_text(json.dumps(job), encoding="utf-8")
        run_module(worker.__name__, [str(asked), str(found)], self._environment, log)
        said = json.loads(found.read_text(encoding="utf-8"))
        self._texts = said.pop("texts")
        changed = [own != base for own, base in zip(self._texts[::2], self._texts[1::2], strict=True)]
        if 2 * sum(changed) < len(changed):
            raise CheckFailed(f"adapters change the text of {sum(changed)} of {len(changed)} requests")
        return said

    def saturated(self, stream: Stream) -> Run:
        """Keep the server's requests in flight."""
        return asyncio.run(self._loaded(stream, None))

    def loaded(self, stream: Stream, rate: float) -> Run:
        """Send requests to the server by the clock, at `rate` per second."""
        return asyncio.run(self._loaded(stream, rate))

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _loaded(self, stream: Stream, rate: float | None) -> Run:
        sizes, url = self._sizes, self._url()
        span = Span(sizes["warm"], sizes["seconds"], sizes["drain"])
        async with Client(look_up(url, ""), "", FIELDS) as client:
            if rate is None:
                return await closed_loop(client, stream.jobs(), sizes["in_flight"], span)
            return await open_loop(client, stream.jobs(), span.arrivals(rate, stream.seed).tolist(), span)

    def _url(self) -> str:
        """Return the address of the server, started and checked. `CheckFailed`: other texts than the engine's."""
        if self._server is None:
            if not self._texts:
                self.engine(None)
            self._server = OwnServer(self._arguments, self._environment, self._path / "server.log")
            try:
                self._compare(self._server.url)
            except BaseException:
                self.close()
                raise
        return self._server.url

    def _compare(self, url: str) -> None:
        """Ask the server for the texts of the check, one request at a time."""
        for job, expected in zip(self._check, self._texts, strict=True):
            body = {"model": job.model, "prompt": job.prompt, "max_tokens": job.new_tokens, "temperature": 0}
            body[IGNORE_EOS] = True
            answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
            found = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            if found != expected:
                raise CheckFailed(f"the server says {found!r} as {job.model}, its engine alone {expected!r}")
