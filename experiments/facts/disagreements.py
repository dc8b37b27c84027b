"""Places where text, figures and released code of the paper disagree, and what this repository does about each."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from experiments.facts.paper import paper_file

ANSWERS = "disagreement_answers.csv"
_TITLE = re.compile(r"^\* \*\*(D\d\d) (.+?)\*\*", re.MULTILINE)


@dataclass(frozen=True)
class Disagreement:
    """One disagreement: id, title, our answer, and the claims whose measured values belong to it."""

    id: str
    title: str
    answer: str
    claims: tuple[str, ...]


def read_disagreements(folder: str | Path) -> list[Disagreement]:
    """Read the disagreements in ``folder`` (``paper_results``), D01 first; titles are in its README.

    ValueError names those that have a title without an answer, or the reverse.
    """
    readme, table = paper_file(folder, "README.md"), paper_file(folder, ANSWERS)
    titles = {id: title.rstrip(".") for id, title in _TITLE.findall(readme.read_text(encoding="utf-8"))}
    with table.open(newline="", encoding="utf-8") as stream:
        answers = {line["disagreement"]: line for line in csv.DictReader(stream)}
    if odd := sorted(set(titles) ^ set(answers)):
        raise ValueError(f"{table}: {', '.join(odd)} must be in it and in {readme}, each once: add what is missing")
    return [
        Disagreement(id, titles[id], answers[id]["answer"], tuple(answers[id]["claims"].split()))
        for id in sorted(titles)
    ]
