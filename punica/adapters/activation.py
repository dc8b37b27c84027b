"""Activated LoRA: an adapter that works from its invocation tokens on (PEFT's `alora_invocation_tokens`).

Rows before the activation are computed by the base model, so that their keys and values serve every adapter.
"""

from collections.abc import Sequence

import numpy as np

from punica.checks import clip

MOST_INVOCATION = 256  # tokens; a search compares each with the candidates that are left
_TAIL = 1024  # tokens of a prompt that are searched first


def check_invocation(tokens: object) -> tuple[int, ...] | None:
    """Return the invocation tokens of a config; `None`: plain LoRA. TypeError, ValueError: other contents."""
    name = "alora_invocation_tokens"
    if tokens is None:
        return None
    if not isinstance(tokens, list | tuple) or not all(type(token) is int for token in tokens):
        raise TypeError(f"{name} must be a list of token ids, got {clip(tokens)}")
    if not tokens:
        raise ValueError(f"{name} is empty; give the tokens of the invocation, or leave it out for plain LoRA")
    if len(tokens) > MOST_INVOCATION:
        raise ValueError(f"{name} has {len(tokens)} tokens, at most {MOST_INVOCATION} are supported")
    if min(tokens) < 0:
        raise ValueError(f"{name} has the negative token {clip(min(tokens))}")
    return tuple(tokens)


def activation_start(tokens: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Return the index of the first token of the invocation's last occurrence in a prompt; `None`: it has none.

    The adapter works from there on, and on all tokens that are generated; without an occurrence on no token at all,
    whatever is generated. So does PEFT (`calculate_alora_offsets`).
    """
    for first in dict.fromkeys((max(0, len(tokens) - _TAIL), 0)):  # a short prompt once
        ids = np.asarray(tokens[first:])
        starts = np.arange(len(ids) - len(invocation) + 1)
        for offset, token in enumerate(invocation):
            starts = starts[ids[starts + offset] == token]
        if len(starts):
            return first + int(starts[-1])
    return None
