"""Process of an engine alone: it does the parts of a job. The top imports nothing, since any interpreter runs this.

    python -m experiments.servers.worker job.json lines.jsonl

A job names folders, limits, options of the engine and parts, methods of `Measurement` that give a JSON line each. All
requests are prompts of token ids and greedy, and ignore end tokens.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Cases = dict[str, list[int]]  # popularity -> adapter id of each request; 0 is no adapter
Scored = list[tuple[int, float]]  # tokens and their log-probabilities
LIKELIEST = 5  # first tokens whose log-probabilities are told
MOST_TRIES = 5
"""Times that two lengths are timed where other work on the machine made the longer one quicker: no step took that."""


class Punica:
    """Our engine, with a slot per request of a batch and one to load into, and host memory for all adapters."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        import punica
        from punica.adapters import LoRARequest
        from punica.engine import Engine, SamplingParams

        self._adapters = [LoRARequest(name, i, path) for i, (name, path) in enumerate(job["adapters"].items(), start=1)]
        self._engine = Engine.from_pretrained(
            job["model"], dtype=job["dtype"], device=job["device"], max_model_len=job["max_model_len"],
            max_batch_size=job["batch_size"], max_lora_rank=job["rank"], max_cpu_loras=len(self._adapters) + 1,
            **job["options"],
        )  # fmt: skip
        self._params = SamplingParams
        self.about = f"punica {punica.__version__}, torch {torch.__version__}"

    def generate(self, prompts: list[list[int]], adapters: list[int], new_tokens: list[int]) -> list[list[int]]:
        """Continue every prompt by exactly its number of new tokens."""
        return [result.token_ids for result in self._results(prompts, adapters, new_tokens)]

    def scored(self, *given: list[Any], most: int = 0) -> list[list[Scored]]:
        """Do the same; return for each token itself, first, and the ``most`` likeliest."""
        return [[list(one.items()) for one in result.logprobs] for result in self._results(*given, logprobs=most)]

    def _results(self, prompts: Any, adapters: list[int], new_tokens: list[int], **asked: Any) -> list[Any]:
        params = [self._params(max_new_tokens=n, ignore_eos=True, **asked) for n in new_tokens]
        chosen = [self._adapters[i - 1] if i else None for i in adapters]
        results = self._engine.generate(prompts, chosen, params)
        if errors := [result.error for result in results if result.error]:
            raise RuntimeError(errors[0])
        return results


class Vllm:
    """vLLM's offline `LLM`, with a slot per request of a batch, and host memory for all adapters. As it ships but for
    the options of the job and what makes the work the same: no tokenizer, and no prefix cache but where the job asks
    for one, since passes repeat their prompts.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        from importlib.metadata import version

        import vllm
        from vllm.lora.request import LoRARequest

        self._params = vllm.SamplingParams
        self._adapters = [LoRARequest(name, i, path) for i, (name, path) in enumerate(job["adapters"].items(), start=1)]
        self._llm = vllm.LLM(
            model=job["model"], dtype=job["dtype"], seed=0, skip_tokenizer_init=True, enable_lora=True,
            max_model_len=job["max_model_len"], max_num_seqs=job["batch_size"], max_loras=job["batch_size"],
            max_lora_rank=job["rank"], max_cpu_loras=len(self._adapters),
            **{"enable_prefix_caching": False, **job["options"]},
        )  # fmt: skip
        self.about = f"vllm {vllm.__version__}, torch {version('torch')}"

    def generate(self, prompts: list[list[int]], adapters: list[int], new_tokens: list[int]) -> list[list[int]]:
        return [list(answer.token_ids) for answer in self._answers(prompts, adapters, new_tokens)]

    def scored(self, *given: list[Any], most: int = 0) -> list[list[Scored]]:
        found = [answer.logprobs for answer in self._answers(*given, logprobs=most)]
        return [[[(token, told.logprob) for token, told in one.items()] for one in answer] for answer in found]

    def _answers(self, prompts: Any, adapters: list[int], new_tokens: list[int], **asked: Any) -> list[Any]:
        same = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **asked}
        params = [self._params(max_tokens=n, **same) for n in new_tokens]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        chosen = [self._adapters[i - 1] if i else None for i in adapters]
        outputs = self._llm.generate(given, params, lora_request=chosen, use_tqdm=False)
        return [output.outputs[0] for output in outputs]


class Measurement:
    """Parts of a job on one engine."""

    def __init__(self, engine: Any, job: dict[str, Any]) -> None:
        self.engine, self.job = engine, job

    def tokens(self, prompts: list[list[int]], adapters: list[int], new_tokens: int) -> dict[str, Any]:
        """Generate for all requests in one batch, for each alone, and in one without adapters; rank first tokens."""
        counts = [new_tokens] * len(prompts)
        together = self._timed(prompts, adapters, counts)[1]
        alone = [self._timed([p], [a], [new_tokens])[1][0] for p, a in zip(prompts, adapters, strict=True)]
        plain = self._timed(prompts, [0] * len(prompts), counts)[1]
        scored: Any = getattr(self.engine, "scored", lambda *_, **__: [])  # a server is asked for texts
        likeliest = [first for first, in scored(prompts, adapters, [1] * len(prompts), most=LIKELIEST)]
        return {"together": together, "alone": alone, "plain": plain, "likeliest": likeliest}

    def decode(self, context: int, prompts: list[list[int]], cases: Cases, new_tokens: list[int]) -> dict[str, Any]:
        """Time a full batch that decodes, per step: two lengths of the same requests, subtracted. Prefill, and steps in
        which the batch fills or empties, are in both and drop out. `context` is the mean number of cached tokens in the
        steps that remain.
        """
        short, long = new_tokens

        def step(adapters: list[int], turn: int) -> float:
            for _ in range(MOST_TRIES if turn else 1):  # the first turn warms up: the shorter one may well take longer
                seconds = {n: self._timed(prompts, adapters, [n] * len(prompts))[0] for n in in_turns(new_tokens, turn)}
                if seconds[long] > seconds[short]:
                    break
            return (seconds[long] - seconds[short]) / (long - short)

        return {"context": context, "seconds": self._by_case(cases, step, warm=1)}

    def prompt(self, context: int, prompts: list[list[int]], cases: Cases) -> dict[str, Any]:
        """Time a full batch of prompts of `context` tokens, to the first token of each."""
        one = [1] * len(prompts)
        seconds = self._by_case(cases, lambda ids, _: self._timed(prompts, ids, one)[0], warm=1)
        return {"context": context, "seconds": seconds}

    def switch(self, context: int, prompts: list[list[int]], asked: list[list[int]]) -> dict[str, Any]:
        """Time the first token of an adapter that is asked behind a prompt that was just answered without one."""
        seconds = []
        for prompt, question in zip(prompts, asked, strict=True):
            self._timed([prompt], [0], [1])
            seconds.append(self._timed([prompt + question], [1], [1])[0])
        return {"context": context, "seconds": {"": seconds[1:]}}  # the first warms up

    def stream(self, prompts: list[list[int]], cases: Cases, new_tokens: list[int], warm: int) -> dict[str, Any]:
        """Time all requests of a queue, from the call to the last token, with all adapters in host memory. Each adapter
        was asked for a token before, then `warm` of the requests: `first`.
        """
        numbers = list(range(1, len(self.job["adapters"]) + 1))
        self._timed([[3]] * len(numbers), numbers, [1] * len(numbers))
        first = {name: self._timed(prompts[:warm], ids[:warm], new_tokens[:warm])[0] for name, ids in cases.items()}
        seconds = self._by_case(cases, lambda ids, _: self._timed(prompts, ids, new_tokens)[0], warm=0)
        return {"seconds": seconds, "first": first}

    def company(self, prompts: list[list[int]], adapters: list[int], new_tokens: int, batches: list[list[int]]) -> Any:
        """Answer request 1 in `batches` of requests; share of its most frequent tokens, and log-probabilities, too."""
        found = []
        for batch in batches:
            given = [prompts[i] for i in batch], [adapters[i] for i in batch], [new_tokens] * len(batch)
            found.append([told[0] for told in self.engine.scored(*given)[batch.index(1)]])
        told = {"tokens": [[token for token, _ in one] for one in found], "answers": found}
        return {name: max(map(answers.count, answers)) / len(answers) for name, answers in told.items()}

    def _by_case(self, cases: Cases, timed: Callable[[list[int], int], float], warm: int) -> dict[str, list[float]]:
        """Return the seconds of each case, timed in turns, without the first `warm` turns."""
        found: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(self.job["rounds"] + warm):
            for name in in_turns(cases, turn):
                found[name].append(timed(cases[name], turn))
        return {name: seconds[warm:] for name, seconds in found.items()}

    def _timed(self, prompts: list[list[int]], adapters: list[int], counts: list[int]) -> tuple[float, list[list[int]]]:
        began = time.perf_counter()
        tokens = self.engine.generate(prompts, adapters, counts)
        seconds = time.perf_counter() - began
        if [len(one) for one in tokens] != counts:
            raise RuntimeError(f"asked for {counts} new tokens, got {[len(one) for one in tokens]}")
        return seconds, tokens


def in_turns(cases: Iterable[Any], turn: int) -> list[Any]:
    """Return `cases` forth in even turns and back in odd ones, which cancels a drift."""
    return list(cases)[:: -1 if turn % 2 else 1]


def lines_of(job: dict[str, Any], build: Callable[[dict[str, Any]], Any]) -> Iterator[dict[str, Any]]:
    """Do a job on the engine that `build` makes of it; yield a line per part."""
    began = time.perf_counter()
    engine = build(job)
    yield {"part": "start", "seconds": time.perf_counter() - began, "about": engine.about}
    for part, given in job["parts"]:
        does = engine if part == "load" else Measurement(engine, job)
        yield {"part": part, **getattr(does, part)(**given)}


def serve(build: Callable[[dict[str, Any]], Any]) -> None:
    """Do the job; SIGTERM, also at the parent's end, kills the group, since processes of an engine may outlive it."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(os.getpid(), signal.SIGKILL))
    found = lines_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), build)
    Path(sys.argv[2]).write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")


if __name__ == "__main__":
    serve(lambda job: {"punica": Punica, "vllm": Vllm}[job["engine"]](job))
