"""Owners of tokens: which model, or which other request, the tokens of a wrong answer belong to."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from experiments.conformance.client import Answer
from experiments.conformance.expected import Prompt, Tokens, World
from experiments.conformance.oracle import BASE

PASS, FAIL, NOT_OFFERED = "pass", "FAIL", "not offered"


@dataclass(frozen=True)
class Ask:
    """One request: the model whose tokens are right, and the name that it is served under where that is another."""

    model: str
    prompt: Prompt
    stream: bool = False
    as_ids: bool = False
    name: str = ""

    @property
    def asked(self) -> str:
        """Name that the request has."""
        return self.name or self.model


@dataclass
class Result:
    """Outcome of a case: number of answers that were judged, the findings with how often each was made, a note."""

    case: str
    status: str = PASS
    answers: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    note: str = ""

    def add(self, finding: str) -> None:
        """Count a finding; the case has failed."""
        self.findings[finding] += 1
        self.status = FAIL

    def as_json(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return {**vars(self), "findings": dict(self.findings)}


class Judge:
    """Comparison of answers with the right tokens of all models and prompts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._about = {tenant.name: f"{tenant.name} (rank {tenant.rank}, {tenant.subset})" for tenant in world.tenants}
        self._about[BASE] = "the base model"
        self._owners: dict[Tokens, list[str]] = {}
        for prompt in world.prompts:
            for model, tokens in prompt.answers.items():
                self._owners.setdefault(tokens, []).append(model)

    def judge(self, result: Result, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
        """Add the answers of one wave, which were given beside each other."""
        result.answers += len(asks)
        for place, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            if answer.error or answer.tokens != ask.prompt.answers[ask.model]:
                beside = [*asks[:place], *asks[place + 1 :]]
                result.add(f"{self.label(ask)} got {self.owner(ask, answer, beside)}")

    def label(self, ask: Ask) -> str:
        """Describe the tenant of a request."""
        about = self._about[ask.model]
        return f"{ask.name}, now {about}," if ask.name else about

    def owner(self, ask: Ask, answer: Answer, beside: Sequence[Ask]) -> str:
        """Describe whose tokens a wrong answer has.

        In this order: another model's for the same prompt; this model's over another adapter's cached prefix; those of
        a request beside, whole or between its own; any model's for any prompt.
        """
        if answer.error:
            return f"an error: {answer.error}"
        got, own, prompt = answer.tokens, ask.prompt.answers[ask.model], ask.prompt
        if len(got) != len(own):
            right = "right ones" if got == own[: len(got)] else "not the right ones"
            return f"{len(got)} tokens of {len(own)}, {right}"
        for model, tokens in prompt.answers.items():
            if tokens == got:
                return f"the tokens of {self._about[model]}"
        if prompt.leaked.get(ask.model) == got:
            return f"its own tokens over the cached prefix of {self._about[self._world.warmer]}"
        for other in beside:
            theirs = other.prompt.answers[other.model]
            if got == theirs:
                return f"the tokens of {self.label(other).rstrip(',')} in a request beside it"
        for other in beside:
            if _is_mixture(got, own, other.prompt.answers[other.model]):
                return f"tokens of {self.label(other).rstrip(',')} in a request beside it, between its own"
        if got in self._owners:
            return f"the tokens of {self._about[self._owners[got][0]]} for another prompt"
        return "tokens of no known model"


def _is_mixture(got: Tokens, own: Tokens, theirs: Tokens) -> bool:
    """Check whether each token is one's own or the other's, and at least two are the other's alone."""
    pairs = list(zip(got, own, theirs, strict=True))
    foreign = sum(token != mine for token, mine, _ in pairs)
    return foreign >= 2 and all(token in (mine, other) for token, mine, other in pairs)


def table(results: Sequence[Result], most: int = 12) -> str:
    """Draw the results as text: a line for each case, and below it at most `most` findings."""
    width = max(len(result.case) for result in results)
    lines = []
    for result in results:
        head = f"{result.case.ljust(width)}  {result.status.ljust(11)}  {result.answers:5d} answers"
        lines.append(f"{head}  {result.note}".rstrip())
        found = result.findings.most_common()
        lines += [f"    {number} x {finding}" for finding, number in found[:most]]
        if len(found) > most:
            left = sum(number for _, number in found[most:])
            lines.append(f"    and {left} more, of {len(found) - most} kinds: out=FILE has all")
    return "\n".join(lines)


def counts(results: Sequence[Result]) -> Mapping[str, int]:
    """Count the cases by status."""
    return Counter(result.status for result in results)
