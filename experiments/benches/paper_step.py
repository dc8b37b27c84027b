"""The paper's step, one prompt and many decodes in one batch, for `ext_paper_step`.

===========  ==========================================================================
SGMV         the whole step in one call of a layer (`operators.layer_calls`).
apart        the prompt in one call of a layer, then the decodes in another.
Loop         one product pair per adapter, the decodes' of one row each.
grouped_mm   torch's grouped products.
===========  ==========================================================================

Importing this module registers ``apart`` in `experiments.benches.operators.OPERATORS`.
"""

from dataclasses import replace
from functools import partial

from experiments.benches import operators
from experiments.benches.operator_conf import operator_conf
from experiments.benches.operator_shapes import Operator
from experiments.benches.operators import OPERATORS, Prepared, Problem, layer_calls
from experiments.harness.schema import Config


def sizes_of(requests: int, prompt: int) -> tuple[int, ...]:
    """Rows of each adapter: the prompt's, then one for each of the other requests, all of different adapters."""
    return (prompt, *[1] * (requests - 1))


def bytes_moved(cfg: Config, requests: int, prompt: int, rank: int) -> int:
    """Bytes that the step must move: A and B of its adapters, x [T, h1] read, y [T, h2] read and written."""
    figure = operator_conf(cfg)
    halves = Operator(figure.h1, (figure.h2,), rank, sizes_of(requests, prompt)).bytes()
    return halves * figure.dtype.bytes // 2


def steps(cfg: Config, requests: int, prompt: int, rank: int) -> list[Problem]:
    """The step on its own x, y and adapters, as often as the timer needs it: under `cuda_graph` often enough to move
    more bytes than the caches hold.
    """
    figure, copies = operator_conf(cfg), operators.copies(cfg, bytes_moved(cfg, requests, prompt, rank))
    slots = max(figure.resident(cfg), copies * requests)
    a, b = operators.bank(slots, rank, figure.h1, figure.h2, figure.dtype, cfg.hardware.device)
    if cfg.timer.name != "cuda_graph":  # systems share no memory, so that one flush serves a round of them
        a, b = a.clone(), b.clone()
    return operators.rotated(cfg, sizes_of(requests, prompt), copies, (a, b, None))


@OPERATORS.register("apart")
def _apart(batch: Problem) -> Prepared:
    parts = [_part(batch, of_prompt) for of_prompt in (True, False)]
    return operators.adding(batch, partial(operators.in_turn, layer_calls(parts)))


def _part(batch: Problem, of_prompt: bool) -> Problem:
    """The rows of the first segment, or all others."""
    first, *others = batch.sizes
    rows = slice(0, first) if of_prompt else slice(first, None)
    sizes = (first,) if of_prompt else tuple(others)
    return replace(batch, x=batch.x[rows], y=batch.y[rows], slots=batch.slots[rows], sizes=sizes)
