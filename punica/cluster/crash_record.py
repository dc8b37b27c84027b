"""Crash history of one request: when it is quarantined, and when it fails.

    batched --2 shared crashes--> quarantined --8 tokens--> batched --1 shared crash--> quarantined to its end
                                       |
                                       `--3 solo crashes--> FAILED

A runner crash loses its whole batch, so one shared crash does not identify the culprit and fails no request. A culprit
usually crashes again when its tokens are recomputed: quarantine shows which it is. The second quarantine is final, so
each request takes part in at most three shared crashes.
"""

from dataclasses import dataclass

MAX_SHARED_CRASHES = 2
"""Crashes of runners with this request and others before it is quarantined."""
MAX_SOLO_CRASHES = 3
"""Crashes of runners with only this request before it fails."""
PROBATION_TOKENS = 8
"""Tokens that a request generates in its first quarantine before it is batched again."""


@dataclass(eq=False)
class CrashRecord:
    """Runner crashes that one request took part in.

    Attributes:
        quarantined: the request is to be served alone. ``solo_crashes``: crashes of runners with only this request.
    """

    quarantined: bool = False
    solo_crashes: int = 0
    _shared_crashes: int = 0
    _tokens: int = 0  # generated in quarantine since the last crash
    _was_released: bool = False

    def add_crash(self, shared: bool) -> None:
        """Count a crash of the request's runner; ``shared``: other requests were in it."""
        if shared:
            self._shared_crashes += 1
        else:
            self.solo_crashes += 1
        self._tokens = 0
        self.quarantined |= self.solo_crashes > 0 or self._shared_crashes >= MAX_SHARED_CRASHES

    @property
    def must_fail(self) -> bool:
        """True after `MAX_SOLO_CRASHES`."""
        return self.solo_crashes >= MAX_SOLO_CRASHES

    def add_token(self) -> bool:
        """Count a token generated in quarantine; True when the quarantine ends with it."""
        self._tokens += 1
        if self._was_released or self._tokens < PROBATION_TOKENS:
            return False
        self.quarantined, self._was_released = False, True
        return True
