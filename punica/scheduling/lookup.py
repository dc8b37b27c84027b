"""Drafts by prompt look-up: the tokens that followed a request's last ones when these occurred before.

(Saxena, prompt-lookup-decoding, 2023; the n-gram proposer of other engines.) Text to summarise, code to edit and loops
repeat much of what they hold; a draft costs no model.
"""

from punica.scheduling.request import RequestState

LONGEST, SHORTEST = 4, 2
"""Last tokens that are looked up: the most first, since more equal tokens draft better."""


def look_up(request: RequestState, most: int) -> tuple[int, ...]:
    """Return at most ``most`` drafts: what followed the latest earlier occurrence, repeated as often as is needed.

    Tokens are kept as characters of a text, which is searched without a loop in Python. (Two ids of a vocabulary larger
    than Unicode may share one: a draft may be wrong.)
    """
    seen = request.lookup_text
    new = [chr(token % 0x110000) for token in request.tokens_between(len(seen), request.num_tokens)]
    text = request.lookup_text = seen + "".join(new)
    for length in range(LONGEST, SHORTEST - 1, -1):
        at = text.rfind(text[-length:], 0, len(text) - 1) if length < len(text) else -1
        if at >= 0:
            followed = text[at + length : at + length + most]
            return tuple(map(ord, (followed * most)[:most]))
    return ()
