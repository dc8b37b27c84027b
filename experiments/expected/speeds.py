"""Speed of a machine beside the recorded one, by the calibrations between points (`calib_gemm_us`, `calib_copy_us`).

A virtual machine shares its host's memory, whose speed may change from one figure to the next.
"""

import math

import pandas as pd

SPEED_LIMIT = 1.25
"""Largest ratio, either way, of the median calibration to that of the nearest recorded repeat. Of two days on one
virtual CPU a copy took 1.57 times as long, and 233 of 545 lines were more than a tenth off."""
CALIBRATIONS = {"calib_gemm_us": "a product", "calib_copy_us": "a copy"}


def other_speed(recorded: pd.DataFrame, here: pd.DataFrame) -> str:
    """Describe the calibrations of ``here`` that differ from those of the same figures in ``recorded``; empty where
    none does, or rows have none.

    Each is held against the medians of the recorded repeats: a host may have had several speeds then.
    """
    recorded, here = recorded[recorded["figure"].isin(here["figure"])], here[here["figure"].isin(recorded["figure"])]
    off = []
    for name, what in CALIBRATIONS.items():
        known, ours = recorded.groupby("repeat", dropna=False)[name].median(), here[name].median()
        ratio = ours / min(max(ours, known.min()), known.max())
        if abs(math.log(ratio)) > math.log(SPEED_LIMIT):
            off.append(f"{what} takes {ratio:.2f} of the recorded time")
    return ", ".join(off)


def other_speeds(recorded: pd.DataFrame, here: pd.DataFrame) -> dict[str, str]:
    """Map those figures to `other_speed` that were measured at another speed than recorded."""
    parts = {str(figure): other_speed(recorded, rows) for figure, rows in here.groupby("figure", sort=False)}
    return {figure: said for figure, said in parts.items() if said}
