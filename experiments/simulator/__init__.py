"""Virtual clock around the cluster's policy, no torch in it. simulator.py   discrete-event simulation of
`punica.cluster.ClusterPolicy` latency.py     cost model of a step: fitted to timed steps, or a roofline residency.py
adapters of one simulated GPU: slots, host memory, disk other_systems.py  their scheduling rules
"""

from experiments.simulator import other_systems
from experiments.simulator.latency import (
    ModelBytes,
    Residuals,
    StepCost,
    TimedStep,
    fit_step_cost,
    residuals,
    roofline_cost,
)
from experiments.simulator.residency import LoadCost, Residency, ResidencyConfig
from experiments.simulator.simulator import SimulationResult, Trace, simulate
