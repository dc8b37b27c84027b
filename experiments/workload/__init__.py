"""The paper's request streams, defined once. No torch in here.

    popularity.py       who asks for which adapter, always or over time
    lengths.py          how much: tokens of prompts and outputs
    arrivals.py         when
    traces.py           production's own, from files

>>> from experiments.workload import popularity, released_lengths
>>> popularity("Skewed").group_sizes(8)
[3, 2, 1, 1, 1]
>>> released_lengths(100).total_tokens
99703
"""

from experiments.workload.arrivals import independent_seeds, plotted_rate, poisson_arrivals, profile_arrivals
from experiments.workload.lengths import (
    MAX_BATCH,
    RequestLengths,
    released_lengths,
    rescaled,
    scaled_lengths,
    stated_lengths,
)
from experiments.workload.popularity import (
    PAPER_WORKLOADS,
    RELEASED_SEED,
    WORKLOADS,
    Popularity,
    adapter_shares,
    drawn_adapters,
    drifting,
    flash_crowd,
    popularity,
)
