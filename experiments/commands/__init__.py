"""Commands of `make`: reproduce, report, figures, record, tune and compare; and `stamp`, before a tree is sent."""
