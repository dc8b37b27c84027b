"""What the figures of the cluster stand on.

hour.py             the paper's hour of requests, and its GPUs
served.py           what any world tells of an hour it served, and the readings that follow
simulated_hour.py   the world on a virtual clock, and what else its cost models predict
slowed_hour.py      the same hour with slower steps: what one factor explains
step_costs.py       cost models of a step: the paper's A100, other GPUs from our rows, a roofline
chosen_cost.py      one of them by name
recorded.py         the rows in the repository that tell a cost model
windows.py loads.py recorded windows and loads, predicted from what was not
placed.py scaled.py scheduling rules beside one another; a thousand GPUs
"""
