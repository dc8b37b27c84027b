"""From raw samples to the statistics that a row carries.

Timings are skewed to the right (an interrupt only ever adds time), so rows carry the median with the 10th and 90th
percentile and the number of samples, never a mean.
"""

from collections.abc import Sequence

import numpy as np


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """`{"median", "p10", "p90", "count"}` of `samples`, in the unit of `samples`.

    Raises `ValueError` when there is no sample or one is not finite.
    """
    if len(samples) == 0:
        raise ValueError("samples is empty: at least one sample is needed (raise scale.repeats)")
    values = np.asarray(samples, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"samples holds a value that is not finite: {values[~np.isfinite(values)][0]}")
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(p10), "p90": float(p90), "count": float(values.size)}
