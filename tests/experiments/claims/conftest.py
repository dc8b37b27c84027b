"""Fixtures of the claims' tests."""

import pytest
from fakes import PAPER

from experiments.facts import paper


@pytest.fixture(scope="session")
def paper_rows():
    """The paper's own numbers as rows of an A100: what any rule must call reproduced. Do not write into it."""
    return paper.paper_rows(PAPER)
