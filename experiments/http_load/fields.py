"""Fields of completions that fix the number of tokens, as far as a server takes them."""

import asyncio

from experiments.harness.schema import ConfigError
from experiments.http_load.about import Server
from experiments.http_load.client import IGNORE_EOS, MIN_TOKENS, NO_USAGE, WRONG_COUNT, Answer, Client, Job

SHOWN = 300
"""Letters of a server's error that a message repeats."""


def accepted(server: Server, key: str, job: Job, patience: float) -> frozenset[str]:
    """Send `job` with fewer and fewer of the fields `IGNORE_EOS` and `MIN_TOKENS` until the server takes it.

    A server may also ignore what it does not know: its answers then have other numbers of tokens, which are counted.
    `ConfigError`: it refuses the job without them as well, or its streams have no usage.
    """
    fields: tuple[str, ...]
    for fields in ((IGNORE_EOS, MIN_TOKENS), (IGNORE_EOS,), (MIN_TOKENS,), ()):
        answer = asyncio.run(_send(server, key, job, frozenset(fields), patience))
        if answer.error in ("", WRONG_COUNT):
            return frozenset(fields)
        if answer.error == NO_USAGE:
            raise ConfigError(
                f"{server.url} sends no usage in its streams (stream_options.include_usage), and tokens are counted by "
                "it alone: use a version of the server that does"
            )
        if answer.error not in ("http 400", "http 422"):
            break
    raise ConfigError(
        f"{server.url} does not serve a prompt of {len(job.prompt)} and {job.new_tokens} new tokens of {job.model!r}: "
        f"{answer.error} {answer.detail[:SHOWN]}"
    )


async def _send(server: Server, key: str, job: Job, fields: frozenset[str], patience: float) -> Answer:
    answer = Answer(0.0, job)
    async with Client(server, key, fields) as client:
        try:
            async with asyncio.timeout(patience):
                await client.send(answer)
        except TimeoutError:
            answer.detail = f"after {patience:g} s"
    return answer
