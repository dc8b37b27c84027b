"""Facts that measuring, judging and drawing share, each written once. No torch.

    paper.py      the paper's numbers, from `paper_results/`
    models.py     the paper's models and their smaller substitutes
    systems.py    serving systems: how each is served, compared, named and drawn
"""
