"""`SamplingParams`: how the next token of a request is chosen, and when its generation ends."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from punica.checks import as_int, check_count, check_number, clip

LOWEST_TEMPERATURE = 1e-3
"""Below it (but 0) scaled scores leave the range in which they can be told apart."""
MOST_LOGPROBS = 20
MOST_STOPS = 64
LONGEST_STOP = 1024
_SEEDS = 1 << 64


@dataclass(frozen=True)
class SamplingParams:
    """Greedy unless said otherwise; checked and normalised when built (TypeError, ValueError).

    The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, draw.

    Args:
        max_new_tokens: most tokens to generate, at least 1.
        temperature: scores are divided by it; 0 is greedy, else at least 0.001.
        top_k: keep the k highest scores (of equal ones the lower ids); ``None`` keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to at least this, in (0, 1].
        min_p: keep tokens at least this probable relative to the most probable one, in [0, 1].
        repetition_penalty: positive scores of tokens in prompt or output are divided by it, negative ones multiplied;
            > 0, and 1 changes nothing.
        seed: of this request's draws, 0 to 2**64 - 1. Equal logits and equal seed give equal tokens, whatever else is
            in the batch and on every tensor-parallel rank. ``None``: one that the engine derives from its own seed and
            the number of the request.
        stop_token_ids: generation ends with any of these, which is kept in the output.
        stop: strings that end generation; the text of the result ends before the first of them, its tokens include
            those that completed it. They need an engine with a tokenizer.
        ignore_eos: go on past the end-of-sequence tokens of the model; ``stop_token_ids`` still end it.
        logprobs: with every token, log-probabilities of the token and of this many most probable ones (0 to 20), from
            the model's logits before penalty and temperature.

    ``is_greedy`` says that the token is the one with the highest logit, untouched: nothing to sample.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    is_greedy: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("max_new_tokens", check_count("max_new_tokens", self.max_new_tokens))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            put(name, check_number(name, getattr(self, name)))
        self._check_ranges()
        for name, lowest, highest in (("top_k", 1, None), ("seed", 0, _SEEDS - 1), ("logprobs", 0, MOST_LOGPROBS)):
            value = getattr(self, name)
            if value is not None:
                put(name, check_count(name, value, lowest, "None switches it off"))
                if highest is not None and getattr(self, name) > highest:
                    raise ValueError(f"{name} is {clip(value)}, must be at most {highest}")
        put("is_greedy", self.repetition_penalty == 1.0 and (self.temperature == 0.0 or self.top_k == 1))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        put("stop", _strings(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be a bool, got {type(self.ignore_eos).__name__} {clip(self.ignore_eos)}")

    def _check_ranges(self) -> None:
        if self.temperature != 0.0 and self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature is {self.temperature}, must be 0 (greedy) or at least {LOWEST_TEMPERATURE}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, must be in (0, 1]; 1 keeps every token")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}, must be in [0, 1]; 0 keeps every token")
        if self.repetition_penalty <= 0.0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, must be > 0; 1 changes nothing")


def as_sampling_params(value: object) -> SamplingParams:
    """``value``, or greedy decoding of that many tokens when it is an integer; TypeError for anything else."""
    if isinstance(value, SamplingParams):
        return value
    try:
        count = as_int("max_new_tokens", value)
    except TypeError:
        raise TypeError(
            f"params must be a SamplingParams or a number of new tokens, got {type(value).__name__} {clip(value)}"
        ) from None
    return SamplingParams(count)


def _token_ids(values: Any) -> tuple[int, ...]:
    ids = _listed("stop_token_ids", values, MOST_STOPS)
    return tuple(check_count(f"stop_token_ids[{place}]", value, lowest=0) for place, value in enumerate(ids))


def _strings(values: Any) -> tuple[str, ...]:
    strings = (values,) if isinstance(values, str) else _listed("stop", values, MOST_STOPS)
    for place, value in enumerate(strings):
        if not isinstance(value, str):
            raise TypeError(f"stop[{place}] must be a str, got {type(value).__name__} {clip(value)}")
        if not 0 < len(value) <= LONGEST_STOP:
            raise ValueError(f"stop[{place}] has {len(value)} characters, must have 1 to {LONGEST_STOP}")
    return tuple(strings)


def _listed(name: str, values: Any, most: int) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {type(values).__name__} {clip(values)}")
    listed = tuple(values)
    if len(listed) > most:
        raise ValueError(f"{name} has {len(listed)} entries, must have at most {most}")
    return listed
