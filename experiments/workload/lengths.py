"""Lengths of prompts and outputs: the released generator's, and those that the paper states, which disagree tenfold
(D01): 985 693 and about 101k generated tokens for 1000 requests.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.workload.popularity import RELEASED_SEED, rounded_shares
from punica.checks import check_count

PROMPT_SIGMA, PROMPT_SHIFT, PROMPT_SCALE = 0.8, -1.0, 18.0
"""Prompt length = SHIFT + SCALE * exp(SIGMA * z), z standard normal: lognorm(0.8, -1, 18) of scipy."""

MAX_BATCH = 32  # largest batch in the paper (section 5.1)
RELEASED_MAXLEN = 2048
STATED_TOKENS_PER_REQUEST = 101  # section 7.2 of the paper: "around 101k tokens" for 1000 requests


@dataclass(frozen=True)
class RequestLengths:
    """Tokens per request: ``prompt`` and ``output``, two int64 arrays of shape [n], every entry at least 1."""

    prompt: NDArray[np.int64]
    output: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def total_tokens(self) -> int:
        """Prompt plus new tokens of all requests: what the paper's throughput counts (disagreement D13)."""
        return int(self.prompt.sum() + self.output.sum())

    @property
    def new_tokens(self) -> int:
        return int(self.output.sum())


def released_lengths(num_requests: int, maxlen: int = RELEASED_MAXLEN, seed: int = RELEASED_SEED) -> RequestLengths:
    """The released generator's lengths, bit for bit, from one PCG64 stream: a log-normal prompt clipped to [1, maxlen -
    2], a total uniform in [0, maxlen) raised to prompt + 2. The prompt's law does not scale with ``maxlen``: use
    `scaled_lengths`.
    """
    check_count("num_requests", num_requests, 1)
    check_count("maxlen", maxlen, 4, "room for a prompt and two new tokens")
    stream = np.random.Generator(np.random.PCG64(seed))
    prompt = np.empty(num_requests)
    total = np.empty(num_requests)
    for i in range(num_requests):  # the two draws alternate in the stream, so they cannot be made in bulk
        drawn = PROMPT_SHIFT + PROMPT_SCALE * np.exp(PROMPT_SIGMA * stream.standard_normal())
        prompt[i] = np.clip(drawn, 1, maxlen - 2)
        total[i] = max(prompt[i] + 2, stream.integers(0, maxlen))
    return RequestLengths(prompt.astype(np.int64), (total - prompt).astype(np.int64))


def scaled_lengths(num_requests: int, maxlen: int, seed: int = RELEASED_SEED) -> RequestLengths:
    """Draw the released lengths, `rescaled`: the same mix of short and long, for a laptop."""
    return rescaled(released_lengths(num_requests, seed=seed), maxlen)


def rescaled(lengths: RequestLengths, maxlen: int, longest: int = RELEASED_MAXLEN) -> RequestLengths:
    """``lengths`` times maxlen / ``longest``, rounded up, cut; outputs of 2 and more keep 2."""
    check_count("maxlen", maxlen, 4, "room for a prompt and two new tokens")
    if maxlen == longest == RELEASED_MAXLEN:
        return lengths
    prompt = np.minimum(-(-lengths.prompt * maxlen // longest), maxlen - 2)
    output = np.maximum(-(-lengths.output * maxlen // longest), np.minimum(lengths.output, 2))
    return RequestLengths(prompt, np.minimum(output, maxlen - prompt))


def stated_lengths(num_requests: int = 1000, seed: int = RELEASED_SEED) -> RequestLengths:
    """Released prompts, and outputs shrunk by one factor to the paper's 101 tokens on average, at least 1 each."""
    lengths = released_lengths(num_requests, seed=seed)
    target = STATED_TOKENS_PER_REQUEST * num_requests
    # one token each first, then the rest in proportion, by largest remainder: the sum is exact and none is empty
    share = (lengths.output - 1) * ((target - num_requests) / (lengths.output - 1).sum())
    return RequestLengths(lengths.prompt, rounded_shares(share, target - num_requests) + 1)
