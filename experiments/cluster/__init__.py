"""Worlds that serve the hour of Figure 13, and what else the cost models of steps predict. No world imports a claim.

    hour.py              the paper's hour of requests, and its GPUs.
    served.py            an hour as any world served it, and its readings.
    simulated_hour.py    the world on a virtual clock, and what its cost models predict beside.
    ray_hour.py ray_world.py    runners on Ray: points and readings; the hour that they serve
    ray_session.py ray_serving.py  runners that stay for several hours; one trace served
    step_costs.py        cost models of a step: the paper's A100, other GPUs from our rows, a roofline
    load_costs.py        cost models of adapter loads, from recorded rows
    recorded.py          cost models and windows from recorded rows; a cost model by name
    windows.py loads.py  recorded windows and loads, predicted from others
    placed.py scaled.py  scheduling rules beside one another; a thousand GPUs
"""
