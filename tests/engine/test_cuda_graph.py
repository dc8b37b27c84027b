"""Shapes of captured graphs; the graphs themselves are tested on a GPU."""

import pytest

from punica.engine.cuda_graph import decode_sizes, prompt_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 32, 33, 100])
def test_decode_rows_are_padded_little(most) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert most <= sizes[-1] < most + 8
    for rows in range(1, most + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows < max(1, min(rows, 8))


@pytest.mark.parametrize("most", [1, 64, 65, 512, 2080, 5000])
def test_prompt_rows_are_padded_by_an_eighth_at_most_or_less_than_64_rows(most) -> None:
    sizes = prompt_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= most
    for rows in range(1, most + 1, 7):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows < max(64, rows / 8)
    assert len(sizes) < 40


def test_without_prompts_there_are_no_sizes() -> None:
    assert prompt_sizes(0) == []
