"""API keys: which opens which model. Without torch, so that the command line checks them at once."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from punica.checks import clip
from punica.serve.errors import ApiError


@dataclass(frozen=True)
class Keys:
    """API keys, sent as ``Authorization: Bearer KEY``; without any, everything is open.

    ``api_key`` opens the base model, adapters without a key of their own, and loading and unloading.
    ``adapter_keys``: name -> key, the only one that opens that adapter.

    ValueError: a key that no header can carry as it is, such as the empty one of an unset variable. TypeError: no text.
    """

    api_key: str | None = None
    adapter_keys: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = [] if self.api_key is None else [("the server", self.api_key)]
        for name, key in (*own, *self.adapter_keys.items()):
            if not isinstance(key, str):
                raise TypeError(f"the API key of {clip(name)} must be a str, got {type(key).__name__}")
            if not key or key != key.strip() or not key.isprintable() or max(key) > "\xff":
                raise ValueError(
                    f"the API key of {clip(name)} must be printable Latin-1 without spaces at its ends, and not empty"
                )

    def check(self, given: str | None) -> None:
        """ApiError 401 for a missing or unknown key, where the base model needs one."""
        if self.api_key is None or _equal(given, self.api_key):
            return
        if not any(_equal(given, key) for key in self.adapter_keys.values()):
            raise ApiError(401, "missing or unknown API key; send Authorization: Bearer KEY", code="invalid_api_key")

    def opens(self, given: str | None, name: str) -> bool:
        """Return whether a key may use this model."""
        needed = self.adapter_keys.get(name, self.api_key)
        return needed is None or _equal(given, needed)

    def check_manager(self, given: str | None) -> None:
        """ApiError 401 for a key that may not load or unload adapters: the server's may, or any where none has one.

        An adapter's own key may not: it could serve the folder of another tenant under its own name.
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
