"""Commands of `make`: reproduce, report, figures, record, tune and compare.

`conformance` is for any multi-LoRA server.
"""
