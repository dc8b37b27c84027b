"""Commands of `make`: reproduce, report, figures, record, tune and compare.

`reliability` runs trials of load and faults. `stamp` is for a tree that is sent somewhere, `conformance` for any
multi-LoRA server.
"""
