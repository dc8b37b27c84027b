"""Folders that adapters of HTTP requests may be read from."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from punica.checks import clip
from punica.serve.errors import ApiError

MOST_ENTRIES = 1024
"""Entries of one adapter folder that are looked at; a folder with more is refused."""


def allowed_roots(folders: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders with symbolic links resolved. FileNotFoundError, NotADirectoryError: no such folder."""
    roots = tuple(Path(folder).expanduser().resolve(strict=True) for folder in folders)
    for root in roots:
        if not root.is_dir():
            raise NotADirectoryError(f"--allow-folder {str(root)!r} is not a folder")
    return roots


def allowed_folder(path: str, roots: Sequence[Path]) -> str:
    """Return the real path of an adapter folder inside one of ``roots``; relative paths start at the working directory.

    Links are resolved, those of the folder's entries too. Files outside the roots are neither opened nor revealed: the
    answer is the same whether they exist. Write access to the roots is trusted: entries may change after this check.

    Raises ApiError 403 (outside, or no roots), 404 (no folder), 400 (more than ``MOST_ENTRIES`` entries).
    """
    if not roots:
        raise ApiError(
            403, "adapters cannot be loaded from requests here; start the server with --allow-folder DIR", "lora_path"
        )
    folder = _inside(Path(path), roots)
    if folder is None:
        raise ApiError(403, f"{clip(path)} is outside of the folders that this server allows", "lora_path")
    try:
        entries = list(islice(folder.iterdir(), MOST_ENTRIES + 1))
    except OSError:
        raise ApiError(404, f"{clip(path)} is no folder that can be read", "lora_path") from None
    if len(entries) > MOST_ENTRIES:
        raise ApiError(400, f"{clip(path)} has more than {MOST_ENTRIES} entries; pass the adapter's own", "lora_path")
    outside = next((entry.name for entry in entries if _inside(entry, roots) is None), None)
    if outside is not None:
        raise ApiError(403, f"{clip(outside)} in {clip(path)} links to outside of the allowed folders", "lora_path")
    return str(folder)


def _inside(path: Path, roots: Sequence[Path]) -> Path | None:
    """Return the real path if a root contains it; ``None`` for others and for paths that cannot be resolved."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError):  # too long, circular links, a zero byte
        return None
    return real if any(real.is_relative_to(root) for root in roots) else None
