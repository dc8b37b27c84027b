"""Expected ranges: what another run on recorded hardware should give, and the rows and claims that are outside.

    ranges.py       the rule, and ranges of measurements from recorded repeats.
    scales.py       scales of the quantities behind the claims, and which values are possible.
    claims.py       ranges of those quantities.
    held.py         rows and verdicts of this machine beside the ranges.
    speeds.py       the machine's speed beside the recorded one, by the calibrations between points.
    files.py        `results/<hardware>/expected/`.

The rule: a range reaches twice as far as the farthest recorded repeat, and never less than a tenth, or
than a factor of 1.5 for times and ratios that a CPU measured.
"""
