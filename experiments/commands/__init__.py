"""Commands of `make`: reproduce, report, figures, record, check and compare. `conformance` is for any multi-LoRA
server.
"""
