"""`AdapterFolder`: an open PEFT folder, config and weights."""

import hashlib
from pathlib import Path

from punica.adapters.peft_config import CONFIG_FILE, PEFTHelper, read_config_text
from punica.adapters.read import WeightsFile


class AdapterFolder:
    """An open PEFT folder, a context manager: its config as it was read, and its open weights file.

    Attributes:
        weights: the file.
        content: value that tells this config and this header from all others. It has no part of the numbers.

    Raises as :func:`read_config_text` and :class:`WeightsFile`.
    """

    def __init__(self, path: str, most_tensors: int) -> None:
        self._path, self._text = Path(path), read_config_text(path)
        self.weights = WeightsFile(path, most_tensors)
        digests = (hashlib.sha256(part).digest() for part in (self._text, self.weights.header))
        self.content = (*digests, self.weights.size)

    def __enter__(self) -> "AdapterFolder":
        self.weights.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.weights.__exit__(*error)

    def config(self) -> PEFTHelper:
        """Parse the config. ValueError, TypeError: as :meth:`PEFTHelper.from_local_dir`."""
        return PEFTHelper.from_text(self._text, self._path / CONFIG_FILE)
