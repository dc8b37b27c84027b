"""Measuring: timers, ceilings, statistics, provenance and the rows that hold the results.

* `timing`: three clocks with one interface (`host_clock`, `events`, `cuda_graph`), systems interleaved
* `roofline`: the paper's FLOP and I/O formulas, and the machine's measured ceilings
* `statistics`: quantiles of samples
* `disturbance`: other work on the machine during a measurement, and repeats that it must have slowed
* `environment`: machine and software of a number; `python -m experiments.measure.environment`
* `commit`: commit of the source tree, also of a copy without history
* `records`: tidy rows on disk, written atomically

Nothing here imports the rest of the library. `records`, `statistics`, `environment` and `commit` do not import torch.
"""
