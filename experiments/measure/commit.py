"""Commit of the source tree: from git, or in a copy from the file that its sender wrote. `python -m
experiments.measure.commit` writes `.commit.json` (git ignores it) into a clean checkout: the commit, and the hash of
all sources. A tree that carries the file, but for a clean checkout, is of that commit as long as its sources have that
hash, and `-dirty` from then on.
"""

import hashlib
import json
import subprocess
from functools import cache
from pathlib import Path

from experiments.measure.records import RowsError

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".commit.json"
UNKNOWN = "unknown"
SOURCES = ("punica", "experiments", "conf")
_SUFFIXES = (".py", ".yaml", ".json")
_NOT_SENT = ("__pycache__", "local", ".ipynb_checkpoints")


@cache
def commit(root: Path = ROOT) -> str:
    """Short commit of the tree at ``root``, `-dirty` when files differ, `unknown` where none tells it."""
    revision, changed = _state(root)
    if revision and changed == []:
        return revision
    sent, sources = "", ""
    if (stamp := root / STAMP).exists():
        try:
            content = json.loads(stamp.read_text(encoding="utf-8"))
            sent, sources = str(content["commit"]), str(content["sources"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            again = (
                "write it again where the tree was sent from, with python -m experiments.measure.commit, or delete it"
            )
            raise RowsError(f"{stamp} is damaged ({type(error).__name__}: {error}): {again}") from None
    if sent and tree_hash(root) == sources:  # a copy, which may lack files that are no sources, with any history
        return sent
    return f"{revision or sent}-dirty" if revision or sent else UNKNOWN


def is_uncommitted(revision: str) -> bool:
    """Check whether rows with this commit are of code that no commit has."""
    return revision.endswith("-dirty") or revision in ("", UNKNOWN)


def write_stamp(root: Path = ROOT) -> Path:
    """Write the stamp of the clean checkout at ``root``; `RowsError` where it is dirty or has no history."""
    commit.cache_clear()
    revision, changed = _state(root)
    if not revision or changed is None:
        raise RowsError(f"{root} has no git history: stamp the checkout that is sent, not the copy")
    if changed:
        listed = ", ".join(line.strip() for line in changed[:5])
        raise RowsError(f"{len(changed)} files differ from commit {revision} ({listed}): commit them, then stamp again")
    (root / STAMP).write_text(json.dumps({"commit": revision, "sources": tree_hash(root)}) + "\n", encoding="utf-8")
    return root / STAMP


def tree_hash(root: Path) -> str:
    """Return the SHA-256 over names and contents of all sources below ``root``: code and configuration."""
    digest = hashlib.sha256()
    found = {path.relative_to(root).as_posix(): path for name in SOURCES for path in (root / name).rglob("*")}
    for name, path in sorted(found.items()):
        if path.suffix in _SUFFIXES and not {*name.split("/")} & {*_NOT_SENT} and path.is_file():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _state(root: Path) -> tuple[str, list[str] | None]:
    """Short commit and changed files of the checkout at ``root``; empty and None where that is none, or git fails."""
    if not (root / ".git").exists():  # else git finds one around it
        return "", None
    try:
        revision, changed = (
            subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True, cwd=root).stdout
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return "", None
    return revision.strip(), changed.splitlines()


if __name__ == "__main__":
    try:
        print(write_stamp())
    except RowsError as error:
        raise SystemExit(f"error: {error}") from None
