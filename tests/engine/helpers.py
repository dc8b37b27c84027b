"""What tests of the engine share."""

from punica.engine import GenerationResult


def tokens_of(results: list[GenerationResult]) -> list[list[int]]:
    """What was generated; every request must have ended well."""
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]
