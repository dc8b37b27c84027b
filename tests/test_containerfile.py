"""Containerfile: its Debian packages are those that `.ci/fresh` tests with, and its targets are the Makefile's."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")


def test_debian_packages_are_those_of_the_fresh_root():
    (fresh,) = re.findall(r"--include=(\S+)", (ROOT / ".ci" / "fresh").read_text(encoding="utf-8"))
    (installed,) = re.findall(r"--no-install-recommends ([\w\- ]+) \$more", TEXT)
    assert sorted(installed.split()) == sorted(fresh.split(","))


def test_targets_and_copied_files_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {*re.findall(r"make (\w+)", TEXT), *re.findall(r'CMD \["make", "(\w+)"\]', TEXT)} - {"git"}
    assert targets >= {"setup", "reproduce"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    (copied,) = re.findall(r"^COPY (.+) \./$", TEXT, re.MULTILINE)
    assert all((ROOT / name).is_file() for name in copied.split())


def test_the_history_goes_along_and_measurements_do_not():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert ".git" not in ignored
    assert {".venv", "outputs"} <= set(ignored)
