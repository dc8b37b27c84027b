"""What to say of a claim without a verdict: that it was not measured here and how it would be, or why it cannot be."""

from functools import lru_cache

from experiments.facts.paper import Statement
from experiments.facts.models import MODELS, STAND_INS
from experiments.harness.catalogue import experiments
from experiments.harness.schema import model_conf

MEASURED_IN = {"abstract": "11", "text 7.2": "11", "README": "README backbone-vs-sgmv"}
"""A place in the paper that is no figure of ours -> the figure whose rows answer it."""
ROLES = {"C27": "13B", "C38": "70B", "C39": "70B", "C40": "70B"}
"""Claims about a model that is not the paper's 7B."""


@lru_cache(maxsize=1)
def scripts() -> dict[str, str]:
    """Figure -> script, of all that is implemented."""
    return {experiment.figure: experiment.name for experiment in experiments()}


def scripts_of(statement: Statement) -> list[str]:
    """The scripts that measure what ``statement`` is about; none where nothing is implemented."""
    figures = [MEASURED_IN.get(name, name) for name in statement.figure.split(", ")]
    return [scripts()[figure] for figure in figures if figure in scripts()]


def command(statement: Statement, hardware: str) -> str:
    """The command that measures it on ``hardware``."""
    prefixes = ",".join(dict.fromkeys(name.partition("_")[0] for name in scripts_of(statement)))
    options = [] if hardware in ("", "cpu") else ["scale=paper"]
    if options and (role := ROLES.get(statement.id)):
        options.append(f"model={MODELS[role][0]}")
    given = f' ARGS="{" ".join(options)}"' if options else ""
    return f"make figure FIG={prefixes}{given}"


def impossible(statement: Statement, hardware: str) -> str:
    """Why no rows of ``hardware`` can answer; empty when they could."""
    role = ROLES.get(statement.id)
    if hardware != "cpu" or role is None or role in STAND_INS.values():
        return ""
    gigabytes = 2 * model_conf(MODELS[role][0]).backbone_parameters() / 1e9
    return f"no model stands in for {role} on a CPU, and {gigabytes:.0f} GB of float16 weights are no model for one"
