"""Draws follow transformers' logits processors, and depend on logits, parameters and seed alone.

The host never waits while it tells the device how to choose tokens. Shown with tensors that cannot be read (device
"meta"), and on a GPU with torch's own watch on waiting.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from punica.engine import sampler
from punica.engine.sampler import NO_TOKEN, choose_tokens, draw, token_logprobs, uniform
from punica.scheduling import SamplingParams

VOCAB = 53
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2.5
SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "top-k": SamplingParams(temperature=1.0, top_k=7),
    "top-k beyond the vocabulary": SamplingParams(temperature=1.0, top_k=500),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.08),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "encouraged": SamplingParams(temperature=1.3, repetition_penalty=0.6),
    "all": SamplingParams(temperature=1.5, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
}
PROMPT = [0, 5, 5, 17, 33]


def state(params: SamplingParams, seed: int = 0, output: tuple[int, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(
        params=params, seed=seed, token_ids=[*PROMPT, *output], num_generated=len(output), end_token_ids=(7, 50),
        bad_sequences=params.bad_words,
    )  # fmt: skip


def expected(params: SamplingParams, seen: list[int]) -> torch.Tensor:
    """Probabilities by transformers' processors, in the order of its ``generate``."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain(torch.tensor([seen]), LOGITS[None].clone())[0].double().softmax(-1)


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
def test_distribution_is_that_of_transformers(params) -> None:
    """Chi-square over draws of as many seeds; classes of fewer than five expected draws are one class."""
    draws = 5000
    states = [state(params, seed, (40, 2)) for seed in range(draws)]
    counts = np.bincount(choose_tokens(LOGITS.expand(draws, -1), states).numpy(), minlength=VOCAB)
    wanted = expected(params, [*PROMPT, 40, 2]).numpy() * draws
    assert (counts[wanted == 0] == 0).all(), "a token that transformers never draws"
    common = wanted >= 5
    assert common.sum() >= 3
    found, chance = [*counts[common], counts[~common].sum()], [*wanted[common], wanted[~common].sum()]
    if chance[-1] == 0:
        found, chance = found[:-1], chance[:-1]
    assert scipy.stats.chisquare(found, chance).pvalue > 1e-3


def test_draws_along_one_request_are_as_good_as_over_seeds() -> None:
    numbers = np.array([uniform(123, position) for position in range(20_000)])
    assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert len({uniform(seed, 0) for seed in (0, 1, 2**63, 2**64 - 1)}) == 4


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=2.0, top_k=1), SamplingParams(temperature=0.001),
               SamplingParams(temperature=1e-5), SamplingParams(temperature=1.0, top_p=1e-9),
               SamplingParams(temperature=1.0, min_p=1.0)],
    ids=["greedy", "top-k 1", "cold", "coldest", "top-p 0", "min-p 1"],
)  # fmt: skip
def test_one_candidate_is_greedy(params) -> None:
    rows = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1))
    assert choose_tokens(rows, [state(params, seed) for seed in range(64)]).equal(rows.argmax(-1))


@pytest.mark.parametrize(
    ("temperature", "adjusted"), [(0.0, {}), (9e-6, {}), (0.0, {"logit_bias": {50: -1.0}}), (1e-12, {"min_tokens": 1})]
)
def test_lowest_temperatures_are_greedy_for_equal_logits(temperature, adjusted) -> None:
    rows = torch.zeros(20, VOCAB, dtype=torch.bfloat16)
    rows[:, [8, 9]] = 3.0
    params = SamplingParams(temperature=temperature, **adjusted)
    assert choose_tokens(rows, [state(params, seed) for seed in range(20)]).tolist() == [8] * 20


def test_of_equal_scores_the_lower_ids_are_kept() -> None:
    level = torch.zeros(1, VOCAB)
    found = {int(draw(level, [1.0], [3], [1.0], [0.0], [u])) for u in np.linspace(0, 0.999, 40)}
    assert found == {0, 1, 2}
    assert int(draw(level, [1.0], [1], [1.0], [0.0], [0.99])) == 0


@pytest.mark.parametrize("vocab", [53, 32003])
def test_a_row_does_not_depend_on_its_batch(vocab) -> None:
    """Any neighbours, any place in the batch."""
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn(len(SETTINGS) + 2, vocab, generator=generator) * 3
    states = [state(params, seed) for seed, params in enumerate([*SETTINGS.values(), SamplingParams(),
              SamplingParams(repetition_penalty=1.2)])]  # fmt: skip
    together = choose_tokens(rows, states)
    alone = torch.cat([choose_tokens(rows[i : i + 1], [states[i]]) for i in range(len(states))])
    backwards = choose_tokens(rows.flip(0), states[::-1]).flip(0)
    assert together.equal(alone)
    assert together.equal(backwards)


def test_seed_and_position_decide() -> None:
    params = SamplingParams(temperature=2.0)
    rows = LOGITS.expand(200, -1)
    assert choose_tokens(rows, [state(params, 9)] * 200).unique().numel() == 1
    by_seed = choose_tokens(rows, [state(params, seed) for seed in range(200)])
    by_position = choose_tokens(rows, [state(params, 9, (1,) * n) for n in range(200)])
    assert by_seed.unique().numel() > 10
    assert by_position.unique().numel() > 10


def test_infinite_logits_give_some_token_and_disturb_no_neighbour() -> None:
    params, clean = SamplingParams(temperature=1.0, top_k=9, top_p=0.7), LOGITS[None]
    alone = choose_tokens(clean, [state(params, 4)])
    for value in (float("inf"), -float("inf")):
        broken = torch.full((1, VOCAB), value)
        both = choose_tokens(torch.cat((broken, clean)), [state(params, 4)] * 2)
        assert 0 <= int(both[0]) < VOCAB
        assert both[1:].equal(alone)
    one = LOGITS.clone()
    one[7] = float("inf")
    assert int(choose_tokens(one[None], [state(SamplingParams(temperature=1.0), 4)])) == 7


@pytest.mark.parametrize(
    ("dtype", "place"), [(torch.float32, 0), (torch.float16, 7), (torch.bfloat16, VOCAB - 1)], ids=str
)
def test_one_nan_gives_no_token_and_disturbs_no_neighbour(dtype, place) -> None:
    """Whatever else is in its row, however its token is chosen."""
    states = [state(params, seed) for seed, params in enumerate([SamplingParams(), *SETTINGS.values()])]
    rows = LOGITS.to(dtype).expand(len(states), -1).clone()
    rows[:, 3] = float("inf")
    clean = choose_tokens(rows, states)
    for broken in range(len(states)):
        damaged = rows.clone()
        damaged[broken, place] = float("nan")
        expected = clean.clone()
        expected[broken] = NO_TOKEN
        assert choose_tokens(damaged, states).equal(expected)
    assert (clean == 3).all()


def test_logits_of_16_bits() -> None:
    rows = LOGITS[None].to(torch.float16)
    params = [state(SamplingParams(temperature=1.0), seed) for seed in range(50)]
    assert choose_tokens(rows.expand(50, -1), params).equal(choose_tokens(rows.float().expand(50, -1), params))


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    rows = torch.stack((LOGITS, LOGITS.flip(0), LOGITS))
    params = [SamplingParams(logprobs=3), SamplingParams(), SamplingParams(temperature=0.5, logprobs=0)]
    tokens = torch.tensor([11, 4, 2])
    found = token_logprobs(rows, tokens, [state(one) for one in params]).read()
    wanted = LOGITS.double().log_softmax(-1)
    assert list(found) == [0, 2]
    assert list(found[0]) == [11, *LOGITS.topk(3).indices.tolist()]
    assert list(found[2]) == [2]
    for row in found.values():
        assert all(abs(value - float(wanted[token])) < 1e-5 for token, value in row.items())


def test_logprobs_do_not_depend_on_what_others_ask_for() -> None:
    rows = torch.randn(40, 1001, generator=torch.Generator().manual_seed(2)).mul(2).round()  # many equal ones
    states = [state(SamplingParams(logprobs=None if row % 5 == 0 else row % 21)) for row in range(40)]
    tokens = choose_tokens(rows, states)
    together = token_logprobs(rows, tokens, states).read()
    for row, one in enumerate(states):
        alone = token_logprobs(rows[row : row + 1], tokens[row : row + 1], [one])
        assert together.get(row) == (None if alone is None else alone.read()[0])
        assert (row in together) == (one.params.logprobs is not None)


# --- nothing waits ---------------------------------------------------------------------------------------------------

LARGE = 1001
PARAMS = [
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0.8, logprobs=0),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(temperature=1.1, repetition_penalty=1.2, logprobs=20),
    SamplingParams(temperature=1.1, repetition_penalty=0.9, top_p=0.5),
    SamplingParams(min_tokens=9, logit_bias={5: 2.0}, bad_words=[[4], [7, 8]]),
    SamplingParams(temperature=1.1, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(),
]


class Waits(Exception):
    """The host would wait for the device."""


class Copies(TorchDispatchMode):
    """Notes the sources of copies from one device to another; those that make the host wait are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        source, target = None, None
        if name == "_to_copy":
            source, target = args[0], kwargs.get("device") or args[0].device
        elif name == "copy_":
            source, target = args[1], args[0].device
        if source is not None and source.device.type != torch.device(target).type:
            if not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
                raise Waits(f"{name} from {source.device} to {target}")
            self.sources.append(source)
        return func(*args, **kwargs)


def states() -> list[SimpleNamespace]:
    return [state(params, i, (33, 17) * (i % 2)) for i, params in enumerate(PARAMS)]


def watched(logits: torch.Tensor) -> tuple[torch.Tensor, sampler.PendingLogprobs, list[torch.Tensor]]:
    with Copies() as copies:
        tokens = choose_tokens(logits, states())
        pending = token_logprobs(logits, tokens, states())
    return tokens, pending, copies.sources


def test_nothing_waits() -> None:
    tokens, pending, sources = watched(torch.empty(len(PARAMS), LARGE, device="meta"))
    assert tokens.shape == (len(PARAMS),)
    assert pending.table.shape == (3, 2, 21)
    assert len(sources) == 8, "rows, numbers, cut rows, four adjustments, rows with log-probabilities"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_waits_on_a_gpu(dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(PARAMS), LARGE, generator=generator).mul(3).to("cuda", dtype)
    logits[0, 5] = float("nan")
    watched(logits)  # the first call loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens, pending, sources = watched(logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(source.is_pinned() for source in sources)
    assert len(sources) == 8
    on_host = choose_tokens(logits.cpu(), states())
    assert int(tokens[0]) == NO_TOKEN
    assert tokens.cpu().equal(on_host)
    found, wanted = pending.read(), token_logprobs(logits.cpu(), on_host, states()).read()
    assert found.keys() == wanted.keys() == {0, 1, 4}
    assert list(found[1].values()) == pytest.approx(list(wanted[1].values()), abs=1e-4)
