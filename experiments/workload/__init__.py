"""The paper's request streams, defined once. No torch in here.

    popularity.py       who asks for which adapter
    changing.py         the same over time: a flash crowd, drift
    lengths.py          how much: tokens of prompts and outputs
    arrivals.py         when
    replay.py           how many steps that takes under each scheduling rule of the paper

>>> from experiments.workload import popularity, released_lengths
>>> popularity("Skewed").group_sizes(8)
[3, 2, 1, 1, 1]
>>> released_lengths(100).total_tokens
99703
"""

from experiments.workload.arrivals import (
    RateProfile,
    independent_seeds,
    plotted_rate,
    poisson_arrivals,
    profile_arrivals,
    released_rate,
)
from experiments.workload.changing import drifting, flash_crowd
from experiments.workload.lengths import RequestLengths, released_lengths, rescaled, scaled_lengths, stated_lengths
from experiments.workload.popularity import (
    PAPER_WORKLOADS,
    RELEASED_SEED,
    WORKLOADS,
    Popularity,
    adapter_shares,
    drawn_adapters,
    popularity,
    zipf,
)
from experiments.workload.replay import MAX_BATCH, Replay, replay_continuous, replay_one_adapter, replay_static
