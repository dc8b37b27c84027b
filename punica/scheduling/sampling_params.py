"""`SamplingParams`: choice of the next token of a request, and end of its generation."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from punica.checks import as_int, check_count, check_number, clip

LOWEST_TEMPERATURE = 1e-3
"""Lowest temperature but 0; below it scaled scores leave their usable range."""
MOST_LOGPROBS = 20
MOST_STOPS = 64
LONGEST_STOP = 1024
_SEEDS = 1 << 64


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, greedy by default; checked and normalised when built (TypeError, ValueError).

    Applied in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p, draw.

    Args:
        max_new_tokens: most tokens to generate, at least 1.
        temperature: divisor of the scores, at least 0.001; 0 is greedy.
        top_k: keep the k highest scores (of equal ones the lower ids); ``None`` keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to at least this, in (0, 1].
        min_p: keep tokens at least this probable relative to the most probable one, in [0, 1].
        repetition_penalty: divisor of positive scores of tokens in prompt or output, factor of negative ones; > 0, and
            1 changes nothing.
        seed: seed of the draws, 0 to 2**64 - 1. Equal logits and seed give equal tokens in any batch and on every
            tensor-parallel rank. ``None``: derived from the engine's seed and the number of the request.
        stop_token_ids: tokens that end generation; they are kept in the output.
        stop: strings that end generation; the text ends before the first of them, the tokens with it. They need an
            engine with a tokenizer.
        ignore_eos: ignore the model's end-of-sequence tokens; ``stop_token_ids`` still end generation.
        logprobs: number (0 to 20) of most probable tokens whose log-probabilities are returned beside the token's own,
            from the logits before penalty and temperature.

    ``is_greedy``: the token is the argmax of the logits, without penalty.
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
