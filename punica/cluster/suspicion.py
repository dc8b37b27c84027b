"""Which requests may be the cause when runners die, from nothing but who was there.

    served with others --2 deaths--> alone --8 tokens--> with others --1 death--> alone to its end
                                       |
                                       `--3 deaths of runners with nobody else in them--> FAILED

A runner takes everybody who is in it along, so that a death in company tells little of each: machines break, and of a
batch at most one is to blame. Nobody fails for it. Who was there twice is served alone for a while; what kills a
runner usually does so again when it is computed again. Nor does a request end others by coming back for ever: the
second time it stays alone, and each runs with others in at most three deaths.
"""

from dataclasses import dataclass

LOSSES_IN_COMPANY = 2
"""Runners that may die with a request and others before it is served alone."""
LOSSES_ALONE = 3
"""Runners that may die with a request and nobody else before it is taken for the cause."""
PROOF_TOKENS = 8
"""Tokens that a request generates alone before it is served with others again, for once."""


@dataclass(eq=False)
class Suspicion:
    """Of one request.

    Attributes:
        alone: it is to be served alone. ``losses_alone``: runners that died with it and nobody else.
    """

    alone: bool = False
    losses_alone: int = 0
    _losses: int = 0  # in company
    _tokens: int = 0  # generated alone since it was isolated
    _acquitted: bool = False

    def lost(self, in_company: bool) -> None:
        """A runner died with it in it."""
        if in_company:
            self._losses += 1
        else:
            self.losses_alone += 1
        self._tokens = 0
        self.alone = self.alone or self.losses_alone > 0 or self._losses >= LOSSES_IN_COMPANY

    @property
    def is_cause(self) -> bool:
        """It has to fail."""
        return self.losses_alone >= LOSSES_ALONE

    def survived(self) -> bool:
        """Served alone it has one more token; whether it is served with others from now on."""
        self._tokens += 1
        if self._acquitted or self._tokens < PROOF_TOKENS:
            return False
        self.alone, self._acquitted = False, True
        return True
