"""Facts that measuring, judging and drawing share, each written once: the paper's numbers, and serving systems."""
