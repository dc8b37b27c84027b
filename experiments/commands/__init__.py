"""Commands of `make`: reproduce, report, figures, record, tune and compare."""
