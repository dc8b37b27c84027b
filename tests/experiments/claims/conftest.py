"""Fixtures of the claims' tests."""

import claim_rows
import pytest


@pytest.fixture(scope="session")
def paper_rows():
    """The paper's own numbers as rows; not to be written into."""
    return claim_rows.paper_rows()
