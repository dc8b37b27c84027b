"""Scores of a system: throughput and waits from the times at which its tokens came out, as the load client reads them.

Times count from the start of the run, so that the wait for a first token includes all queueing, the server's and the
client's.
"""

import math
from pathlib import Path

from experiments.harness.points import Reading
from experiments.harness.schema import ConfigError
from experiments.published import requests as files
from experiments.servers.client import UNFINISHED, WRONG_COUNT, Answer, Run
from experiments.servers.served import run_readings
from experiments.servers.stream import Job
from experiments.workload.arrivals import Span

OF_THE_CLIENT = "client_"
"""Beginning of readings on the load client, which a file of answers tells nothing of."""


def score(requests: Path, answers: Path) -> list[Reading]:
    """Return readings of the ``answers`` to ``requests``; ConfigError names a line that cannot be."""
    asked, given = files.read_lines(requests, files.Request), files.read_lines(answers, files.Answer)
    if unknown := sorted(set(given) - set(asked)):
        raise ConfigError(f"{answers}: id {unknown[0]} is of no request in {requests}; give that file's own answers")
    found = [_answer(line, given.get(id), answers) for id, line in asked.items()]
    if not any(answer.pieces for answer in found):
        raise ConfigError(f"{answers} has no token of any request: there is nothing to score")
    end = max(answer.pieces[-1] for answer in found if answer.pieces)
    seconds = math.nextafter(max(end, *(answer.at for answer in found)), math.inf)
    span = Span(warm=0.0, seconds=seconds, drain=0.0)
    readings = run_readings(Run(span, sorted(found, key=lambda answer: answer.at)))
    right = [answer for answer in found if not answer.error]
    all_tokens = sum((answer.tokens or 0) + len(answer.job.prompt) for answer in right)
    whole = [Reading("wall_time", seconds, "s"), Reading("throughput", all_tokens / seconds, "token/s")]
    return [*whole, *(one for one in readings if not one.metric.startswith(OF_THE_CLIENT))]


def _answer(request: files.Request, line: files.Answer | None, path: Path) -> Answer:
    """Return the answer to ``request`` that ``line`` tells of; None: there was none."""
    job = Job(request.adapter, request.prompt, request.new_tokens)
    answer = Answer(request.arrival_s, job)
    if line is None:
        return answer
    times = line.token_s
    if times != sorted(times) or (times and times[0] < answer.at):
        raise ConfigError(f"{path}: token_s of id {request.id} must ascend from its arrival at {answer.at:g} s")
    answer.pieces, answer.tokens, answer.prompt_tokens = times, len(times), len(job.prompt)
    answer.end = times[-1] if times else None
    answer.error = line.error or ("" if len(times) == job.new_tokens else WRONG_COUNT if times else UNFINISHED)
    return answer
