"""Measuring: clocks, ceilings, other work on the machine, provenance, and rows on disk. Only `timing` needs torch."""
