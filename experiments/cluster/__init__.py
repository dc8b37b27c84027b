"""Worlds that serve the hour of Figure 13, and what else the cost models of steps predict. No world imports a claim.

hour.py served.py             the paper's hour and who serves it; an hour as any world served it, and its readings
simulated_hour.py             the world on a virtual clock, and Figure 11 beside
ray_hour.py ray_serving.py    runners on Ray: points and readings; the traces that they serve
costs.py                      cost models of steps and of loads
"""
