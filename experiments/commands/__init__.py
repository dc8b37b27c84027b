"""What `make` calls: reproduce, report, figures, record, tune and compare."""
