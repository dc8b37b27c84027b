"""`SamplingParams`: choice of the next token of a request, and end of its generation."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from punica.checks import as_int, check_bool, check_count, check_encodable, check_number, clip

LOWEST_TEMPERATURE = 1e-5
"""Lower temperatures are greedy, as in vLLM; clients send them where 0 was once refused."""
MOST_LOGPROBS, MOST_STOPS, LONGEST_STOP, MOST_CHOICES = 20, 64, 1024, 128
MOST_ADJUSTED = 1024
"""Most bad words, and most tokens with a bias."""
MOST_BIAS, MOST_PENALTY = 100.0, 2.0
_SEEDS = 1 << 64
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, greedy by default; checked and normalised when built (TypeError, ValueError).

    Applied in the order of transformers and vLLM: biases, bans (bad words, ends before ``min_tokens``), repetition,
    frequency and presence penalty, temperature, top-k, top-p, min-p, draw.

    Args:
        max_new_tokens: most tokens to generate, at least 1.
        temperature: divisor of the scores; 0 and all below 1e-5 are greedy, kept as 0.
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
        min_tokens: fewest tokens before an end token, stop token or stop string may end generation.
        logit_bias: ``{token id: bias}``, -100 to 100, added to its score; kept as sorted pairs.
        presence_penalty: taken from the scores of tokens in the output, -2 to 2.
        frequency_penalty: taken from them for each time that they are in the output, -2 to 2.
        bad_words: texts that are never completed, or sequences of token ids. Of a text these are its tokens, and those
            of the text after a space; it needs an engine with a tokenizer.
        skip_special_tokens: leave special tokens out of the text.
        n: number of outputs of ``generate`` and ``stream`` for each prompt, see :meth:`choices`.

    ``adjusts``: some parameter changes scores by tokens. ``is_greedy``: the token is the argmax of the logits.
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
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    n: int = 1
    adjusts: bool = field(init=False, repr=False, compare=False)
    is_greedy: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("max_new_tokens", check_count("max_new_tokens", self.max_new_tokens))
        put("min_tokens", check_count("min_tokens", self.min_tokens, 0))
        put("n", check_count("n", self.n))
        for name in _NUMBERS:
            put(name, check_number(name, getattr(self, name)))
        for name, is_right, limits in (
            ("temperature", self.temperature >= 0.0, "at least 0 (greedy)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]; 1 keeps every token"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]; 0 keeps every token"),
            ("repetition_penalty", self.repetition_penalty > 0.0, "> 0; 1 changes nothing"),
            ("presence_penalty", abs(self.presence_penalty) <= MOST_PENALTY, "in [-2, 2]; 0 changes nothing"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MOST_PENALTY, "in [-2, 2]; 0 changes nothing"),
            ("min_tokens", self.min_tokens <= self.max_new_tokens, f"at most max_new_tokens, {self.max_new_tokens}"),
            ("n", self.n <= MOST_CHOICES, f"at most {MOST_CHOICES}"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)}, must be {limits}")
        if self.temperature < LOWEST_TEMPERATURE:
            put("temperature", 0.0)
        for name, lowest, highest in (("top_k", 1, None), ("seed", 0, _SEEDS - 1), ("logprobs", 0, MOST_LOGPROBS)):
            if (value := getattr(self, name)) is not None:
                put(name, check_count(name, value, lowest, "None switches it off"))
                if highest is not None and getattr(self, name) > highest:
                    raise ValueError(f"{name} is {clip(value)}, must be at most {highest}")
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        strings = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop, MOST_STOPS)
        put("stop", tuple(_string(f"stop[{place}]", value) for place, value in enumerate(strings)))
        put("logit_bias", _biases(self.logit_bias))
        put("bad_words", _words(self.bad_words))
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        bans_ends = self.min_tokens and (self.stop_token_ids or not self.ignore_eos)
        put("adjusts", penalties or bool(bans_ends or self.logit_bias or self.bad_words))
        put("is_greedy", not self.adjusts and (self.temperature == 0.0 or self.top_k == 1))
        for name in ("ignore_eos", "skip_special_tokens"):
            check_bool(name, getattr(self, name))

    def choices(self) -> list["SamplingParams"]:
        """Return the parameters of each of the ``n`` outputs: each its own seed, counted up from the given one."""
        seeds = [None if self.seed is None else (self.seed + place) % _SEEDS for place in range(self.n)]
        return [self] if self.n == 1 else [replace(self, n=1, seed=seed) for seed in seeds]


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


def _token_ids(name: str, values: Any, most: int = MOST_STOPS) -> tuple[int, ...]:
    ids = _listed(name, values, most)
    return tuple(check_count(f"{name}[{place}]", value, lowest=0) for place, value in enumerate(ids))


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__} {clip(value)}")
    if not 0 < len(value) <= LONGEST_STOP:
        raise ValueError(f"{name} has {len(value)} characters, must have 1 to {LONGEST_STOP}")
    check_encodable(name, value)
    return value


def _words(values: Any) -> tuple[str | tuple[int, ...], ...]:
    words: list[str | tuple[int, ...]] = []
    given = (values,) if isinstance(values, str) else _listed("bad_words", values, MOST_ADJUSTED)
    for place, value in enumerate(given):
        name = f"bad_words[{place}]"
        words.append(_string(name, value) if isinstance(value, str) else _token_ids(name, value, LONGEST_STOP))
        if not words[-1]:
            raise ValueError(f"{name} is empty, must have at least one token")
    return tuple(words)


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    if values is None:
        return ()
    try:
        given = dict(values)
    except (TypeError, ValueError):
        kind = type(values).__name__
        raise TypeError(f"logit_bias must be a dict of token ids and biases, got {kind} {clip(values)}") from None
    if len(given) > MOST_ADJUSTED:
        raise ValueError(f"logit_bias has {len(given)} entries, must have at most {MOST_ADJUSTED}")
    biases: dict[int, float] = {}
    for key, value in given.items():
        token, bias = check_count("a token id of logit_bias", key, 0), check_number(f"logit_bias[{clip(key)}]", value)
        if abs(bias) > MOST_BIAS:
            raise ValueError(f"logit_bias[{token}] is {bias}, must be in [-100, 100]")
        biases[token] = bias
    return tuple(sorted(biases.items()))


def _listed(name: str, values: Any, most: int) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {type(values).__name__} {clip(values)}")
    listed = tuple(values)
    if len(listed) > most:
        raise ValueError(f"{name} has {len(listed)} entries, must have at most {most}")
    return listed
