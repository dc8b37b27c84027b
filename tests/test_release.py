"""`make release`: a commit as archives, with checksums."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "#!/bin/sh\nmkdir -p outputs/site && echo built > outputs/site/index.html\n"
"""In place of make: `make docs` has tests of its own."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    place = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", place], check=True)
    (place / ".venv").symlink_to(sys.prefix)
    (place / ".git/info/exclude").write_text(".venv\n")
    shutil.copy(ROOT / ".ci/release", place / ".ci/release")  # as it is here, be it committed or not
    author = ["-c", "user.name=t", "-c", "user.email=t"]
    subprocess.run(["git", *author, "commit", "--quiet", "--all", "--allow-empty", "-m", "x"], cwd=place, check=True)
    (tmp_path / "make").write_text(BUILD)
    (tmp_path / "make").chmod(0o755)
    return place


def release(checkout: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PATH": f"{checkout.parent}:{os.environ['PATH']}"}
    return subprocess.run([".ci/release"], cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_archives_hold_the_commit_and_have_their_checksums(checkout: Path) -> None:
    done = release(checkout)
    assert done.returncode == 0, done.stderr
    target = checkout / "outputs/release"
    sums = [line.split() for line in (target / "SHA256SUMS").read_text().splitlines()]
    assert len(sums) == 3
    assert all(hashlib.sha256((target / name).read_bytes()).hexdigest() == said for said, name in sums)
    source, docs = sorted(target.glob("*.tar.gz"), key=lambda path: "docs" in path.name)
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    assert held >= {*listed.splitlines(), ".commit.json"}
    with tarfile.open(docs) as archive:
        assert "site/index.html" in archive.getnames()


def test_uncommitted_changes_are_refused(checkout: Path) -> None:
    (checkout / "README.md").write_text("changed")
    done = release(checkout)
    assert done.returncode == 1
    assert "commit them first" in done.stderr
    assert not (checkout / "outputs").exists()
