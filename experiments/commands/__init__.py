"""Commands of `make`: reproduce, report, figures, record, tune and compare.

`reliability` runs trials of load and faults. `conformance` is for any multi-LoRA server.
"""
