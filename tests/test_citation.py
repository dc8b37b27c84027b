"""Files that cite the package agree with each other: title, version, date, licence, authors, the paper."""

import json
import tomllib
from pathlib import Path

import yaml

import punica

ROOT = Path(__file__).parents[1]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ZENODO, CODEMETA = (json.loads((ROOT / name).read_text(encoding="utf-8")) for name in (".zenodo.json", "codemeta.json"))
PAPER = "arXiv:2310.18547"


def test_version_and_date_are_one():
    versions = {CITATION["version"], PROJECT["version"], ZENODO["version"], CODEMETA["version"], punica.__version__}
    assert len(versions) == 1
    dates = {str(CITATION["date-released"]), ZENODO["publication_date"], CODEMETA["datePublished"]}
    assert len(dates) == 1
    assert f"\n## {versions.pop()} ({dates.pop()})\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_licence_and_authors_are_one():
    assert {CITATION["license"], PROJECT["license"], ZENODO["license"]} == {"Apache-2.0"}
    assert CODEMETA["license"].endswith("/Apache-2.0")
    authors = [author["name"] for author in CITATION["authors"]]
    assert [author["name"] for author in ZENODO["creators"]] == authors
    assert [author["name"] for author in CODEMETA["author"]] == authors


def test_the_paper_and_the_description_are_one():
    (reference,) = CITATION["references"]
    assert reference["identifiers"][0]["value"] == ZENODO["related_identifiers"][0]["identifier"] == PAPER
    assert CODEMETA["referencePublication"]["identifier"] == PAPER
    assert len(CODEMETA["referencePublication"]["author"]) == len(reference["authors"])
    assert ZENODO["description"] == CODEMETA["description"] == CITATION["abstract"].strip()


def test_codemeta_names_what_the_package_requires():
    required = {text.split(">")[0].split(";")[0].strip() for text in PROJECT["dependencies"]}
    assert set(CODEMETA["softwareRequirements"]) == required
