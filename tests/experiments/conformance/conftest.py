"""A small folder of the conformance test, written once."""

from typing import Any

import pytest

from experiments.conformance import world as written


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Five adapters of three ranks, and fewer prompts than the command draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "PER_LENGTH", 12)
        patch.setattr(written, "SHARING", 40)
        patch.setattr(written, "LENGTHS", (5, 20))
        return written.make(tmp_path_factory.mktemp("conformance"), 5, [1, 8, 16], 0)
