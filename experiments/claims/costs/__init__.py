"""Cost formulas of the claims on times and ratios, in terms of the machine: bytes, products, launches.

    machine.py                      speeds and floors of a machine
    operators.py steps.py text.py   terms of a row in seconds
    prices.py ends.py explain.py    predicted values, deciding points, sentences

A claim's value is predicted by its own function on rows that hold predictions in place of times. No formula reads the
time that it predicts, and none has a constant of its own.
"""

from experiments.claims.costs import operators, steps, text  # they fill FORMULAS
from experiments.claims.costs.formula import COSTS, FORMULAS
