"""Commit of the source tree: from git, or in a copy from the file that its sender wrote.

`python -m experiments.measure.commit` writes `.commit.json` (git ignores it) into a clean checkout: the commit, and the
hash of all sources.
A copy that carries the file, without a clean history of its own, is of that commit as long as its sources have that
hash, and `-dirty` from then on.
"""

import hashlib
import json
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

from experiments.measure.records import RowsError

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".commit.json"
UNKNOWN = "unknown"
SOURCES = ("punica", "experiments", "conf")
_SUFFIXES = (".py", ".yaml", ".json")
_NOT_SENT = ("__pycache__", "local", ".ipynb_checkpoints")


@lru_cache(maxsize=4)
def commit(root: Path = ROOT) -> str:
    """Short commit of the tree at ``root``, with `-dirty` when its files differ from it; `unknown` where none tells.

    Raises `RowsError` for a damaged stamp.
    """
    revision = _git(root, "rev-parse", "--short=12", "HEAD")
    if revision and _git(root, "status", "--porcelain") == "":
        return revision
    sent, sources = _read_stamp(root / STAMP) if (root / STAMP).exists() else ("", "")
    if sent not in ("", revision) and tree_hash(root) == sources:  # a copy, with the history of an older commit if any
        return sent
    return f"{revision or sent}-dirty" if revision or sent else UNKNOWN


def write_stamp(root: Path = ROOT) -> Path:
    """Write the stamp of the clean checkout at ``root``; `RowsError` where it is dirty or has no history."""
    commit.cache_clear()
    revision = _git(root, "rev-parse", "--short=12", "HEAD")
    if not revision:
        raise RowsError(f"{root} has no git history: stamp the checkout that is sent, not the copy")
    status = _git(root, "status", "--porcelain")
    if status is None:
        raise RowsError(f"git status fails in {root}: run it by hand, then stamp again")
    if changed := status.splitlines():
        listed = ", ".join(line.strip() for line in changed[:5])
        raise RowsError(f"{len(changed)} files differ from commit {revision} ({listed}): commit them, then stamp again")
    (root / STAMP).write_text(json.dumps({"commit": revision, "sources": tree_hash(root)}) + "\n", encoding="utf-8")
    return root / STAMP


def tree_hash(root: Path) -> str:
    """Return the SHA-256 over names and contents of all sources below ``root``: code and configuration."""
    digest = hashlib.sha256()
    found = {path.relative_to(root).as_posix(): path for name in SOURCES for path in (root / name).rglob("*")}
    for name, path in sorted(found.items()):
        if path.suffix in _SUFFIXES and not set(path.relative_to(root).parts) & set(_NOT_SENT) and path.is_file():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _read_stamp(path: Path) -> tuple[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["commit"]), str(content["sources"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RowsError(
            f"{path} is damaged ({reason}): write it again where the tree was sent from, with python -m "
            "experiments.measure.commit, or delete it"
        ) from None


def _git(root: Path, *arguments: str) -> str | None:
    """Output of git on the checkout at ``root``; None where that is none, even inside another one, or git fails."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False, cwd=root)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    try:
        print(write_stamp())
    except RowsError as error:
        raise SystemExit(f"error: {error}") from None
