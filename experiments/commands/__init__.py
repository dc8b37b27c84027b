"""Commands of `make`: reproduce, report, figures, record, check, compare; `conformance` is for any LoRA server."""
