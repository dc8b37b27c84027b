"""Access: API keys of models, folders of adapters. Without torch: the command line checks both at once."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from punica.checks import clip
from punica.serve.errors import ApiError

MOST_ENTRIES = 1024
"""Entries of one adapter folder that are looked at; a folder with more is refused."""


@dataclass(frozen=True)
class Keys:
    """API keys, sent as ``Authorization: Bearer KEY``; without any, everything is open.

    ``api_key`` opens the base model, adapters without a key of their own, and loading. ``adapter_keys``: name -> key,
    the only one that opens that adapter. ValueError: a key that no header can carry, such as an empty one.
    """

    api_key: str | None = None
    adapter_keys: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = [] if self.api_key is None else [("the server", self.api_key)]
        for name, key in (*own, *self.adapter_keys.items()):
            if not key or key != key.strip() or not key.isprintable() or max(key) > "\xff":
                raise ValueError(
                    f"the API key of {clip(name)} must be printable Latin-1 without spaces at its ends, and not empty"
                )

    def check(self, given: str | None) -> None:
        """ApiError 401: a missing or unknown key, where the base model needs one."""
        if self.api_key is None or _equal(given, self.api_key):
            return
        if not any(_equal(given, key) for key in self.adapter_keys.values()):
            raise ApiError(401, "missing or unknown API key; send Authorization: Bearer KEY", code="invalid_api_key")

    def opens(self, given: str | None, name: str) -> bool:
        needed = self.adapter_keys.get(name, self.api_key)
        return needed is None or _equal(given, needed)

    def check_manager(self, given: str | None) -> None:
        """ApiError 401 unless a key may load or unload adapters: the server's may, or any where none has one. With an
        adapter's own key a tenant could serve the folder of another under its own name.
        """
        if self.api_key is None and self.adapter_keys:
            raise ApiError(
                401, "this API key may not load or unload adapters: some have keys, so that needs the server's own; "
                "start it with --api-key", code="invalid_api_key",
            )  # fmt: skip
        if self.api_key is not None and not _equal(given, self.api_key):
            raise ApiError(401, "this API key may not load or unload adapters", code="invalid_api_key")


def _equal(given: str | None, key: str) -> bool:
    """Compare in constant time."""
    return given is not None and hmac.compare_digest(given.encode(errors="replace"), key.encode())


def allowed_roots(folders: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders with symbolic links resolved. FileNotFoundError, NotADirectoryError: no such folder."""
    roots = tuple(Path(folder).expanduser().resolve(strict=True) for folder in folders)
    for root in roots:
        if not root.is_dir():
            raise NotADirectoryError(f"--allow-folder {str(root)!r} is not a folder")
    return roots


def allowed_folder(path: str, roots: Sequence[Path]) -> str:
    """Return the real path of an adapter folder inside one of ``roots``, with links resolved, those of entries too.

    The answer about files outside is the same whether they exist. Write access to the roots is trusted. ApiError 403
    (outside, or no roots), 404 (no folder), 400 (more than ``MOST_ENTRIES`` entries).
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
