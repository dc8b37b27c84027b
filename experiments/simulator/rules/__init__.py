"""Scheduling rules of other systems, each with its source.

balancers.py        least loaded; round robin
sketches.py         adapters together; ranks together
llm_d.py            llm-d: residency filter and affinity scorer
dynamo.py           NVIDIA Dynamo: rendezvous sets, sized by load
ray_serve.py        Ray Serve: power of two choices with multiplexing
loraserve.py        LoRAServe: adapters placed by rank and demand
chameleon.py        Chameleon: weighted sizes
consolidating.py    the paper's introduction: periodic migration
held.py             adapters of a GPU as these rules see them
"""

from experiments.simulator.rules import (
    balancers,
    chameleon,
    consolidating,
    dynamo,
    llm_d,
    loraserve,
    ray_serve,
    sketches,
)
from punica.cluster.placement import SCHEDULING_RULES
