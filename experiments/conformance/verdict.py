"""Owners of tokens: which model or other request a wrong answer's tokens belong to; and faults of the protocol."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.conformance.client import Answer, some
from experiments.conformance.expected import Prompt, Tokens, World
from experiments.conformance.oracle import BASE
from experiments.conformance.weights import WARMER

PASS, FAIL, UNJUDGED, NOT_OFFERED = "pass", "FAIL", "unjudged", "not offered"
"""Verdicts by tokens alone. Unjudged: all that came were right, and some answers had none."""
CUT = "an answer of fewer tokens than max_tokens, right so far"
LONG = "an answer of more tokens than max_tokens"
EMPTY = "an answer without tokens"


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
    """Outcome of a case: answers and how many had tokens to judge, findings with how often each was made, a note.

    ``findings`` are of tokens: another's, or other ones. ``protocol`` has each fault of the protocol, with the models
    that met it.
    """

    case: str
    answers: int = 0
    judged: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    protocol: dict[str, Counter[str]] = field(default_factory=dict)
    note: str = ""
    is_offered: bool = True

    @property
    def status(self) -> str:
        """Verdict by tokens alone."""
        if self.findings:
            return FAIL
        if not self.is_offered:
            return NOT_OFFERED
        return PASS if self.judged == self.answers else UNJUDGED

    def not_offered(self, why: str) -> None:
        """Note that the server has nothing to try here."""
        self.is_offered, self.note = False, why

    def fault(self, model: str, text: str) -> None:
        """Count a departure from the protocol that a request of `model` met."""
        self.protocol.setdefault(text, Counter())[model] += 1

    def as_json(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return {"case": self.case, "status": self.status, **vars(self)}


class Judge:
    """Comparison of answers with the right tokens of all models and prompts."""

    def __init__(self, world: World) -> None:
        self._about = {tenant.name: f"{tenant.name} (rank {tenant.rank}, {tenant.subset})" for tenant in world.tenants}
        self._about[BASE] = "the base model"
        self._owners: dict[Tokens, list[str]] = {}
        for prompt in world.prompts:
            for model, tokens in prompt.answers.items():
                self._owners.setdefault(tokens, []).append(model)

    def judge(self, result: Result, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
        """Add the answers of one wave, which were given beside each other."""
        for place, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            got = self.tokens(result, ask, answer)
            if got != ask.prompt.answers[ask.model][: len(got)]:
                beside = [*asks[:place], *asks[place + 1 :]]
                result.findings[f"{self.label(ask)} got {self.owner(ask, got, beside)}"] += 1

    def tokens(self, result: Result, ask: Ask, answer: Answer) -> Tokens:
        """Count an answer and its faults of the protocol; return its tokens, as many as were asked for at most."""
        own, faults = ask.prompt.answers[ask.model], [*answer.faults]
        got = answer.tokens[: len(own)]
        is_wrong = got != own[: len(got)]
        if answer.tokens != got:
            faults.append(LONG)
        elif got != own and not is_wrong and (got or not faults):
            faults.append(CUT if got else EMPTY)
        for fault in faults:
            result.fault(ask.asked, fault)
        result.answers += 1
        result.judged += is_wrong or got == own
        return got

    def label(self, ask: Ask) -> str:
        """Describe the tenant of a request."""
        about = self._about[ask.model]
        return f"{ask.name}, now {about}," if ask.name else about

    def owner(self, ask: Ask, got: Tokens, beside: Sequence[Ask]) -> str:
        """Describe whose tokens a wrong answer has.

        In this order: another model's for the same prompt; this model's over another adapter's cached prefix; those of
        a request beside, whole or between its own; any model's for any prompt.
        """
        own, prompt = ask.prompt.answers[ask.model], ask.prompt
        if len(got) != len(own):
            return f"{len(got)} tokens of {len(own)}, not the right ones"
        for model, tokens in prompt.answers.items():
            if tokens == got:
                return f"the tokens of {self._about[model]}"
        if prompt.leaked.get(ask.model) == got:
            return f"its own tokens over the cached prefix of {self._about[WARMER]}"
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
    """Draw the results as text: a line for each case, below it at most `most` findings; then faults of the protocol."""
    width = max(len(result.case) for result in results)
    lines = []
    for result in results:
        head = f"{result.case.ljust(width)}  {result.status.ljust(11)}  {result.judged:5d} of {result.answers} answers"
        lines.append(f"{head}  {result.note}".rstrip())
        lines += [f"    {number} x {finding}" for finding, number in result.findings.most_common(most)]
        if len(result.findings) > most:
            lines.append(f"    and {len(result.findings) - most} other findings: out=FILE has all")
    faults = protocol(results)
    if faults:
        lines += ["", "protocol, whatever the tokens are:"]
    for fault, models in sorted(faults.items(), key=lambda one: -one[1].total()):
        lines.append(f"    {models.total()} x {fault} ({some(sorted(models))})")
    return "\n".join(lines)


def protocol(results: Sequence[Result]) -> dict[str, Counter[str]]:
    """Merge the faults of all cases: each is one, with the models that met it."""
    merged = Result("")
    for result in results:
        for text, models in result.protocol.items():
            merged.protocol.setdefault(text, Counter()).update(models)
    return merged.protocol


def summary(results: Sequence[Result]) -> str:
    """Count the cases by status, and apart from them the protocol's faults."""
    cases = ", ".join(f"{number} {status}" for status, number in Counter(one.status for one in results).items())
    faults = protocol(results)
    times = sum(models.total() for models in faults.values())
    return f"tokens: {cases}\nprotocol: {len(faults)} faults, {times} times"
