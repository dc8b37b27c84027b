"""Facts that measuring, judging and drawing share, each written once. No torch.

    paper.py      the paper's numbers, from `paper_results/`
    models.py     the paper's models and their smaller substitutes
    frames.py     rows as pandas frames; one row of several repeats
    systems.py    serving systems: how each is served, compared, named and drawn
"""
