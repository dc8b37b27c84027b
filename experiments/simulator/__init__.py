"""Virtual clock around the cluster's policy, without torch.

simulator.py      discrete-event simulation of `punica.cluster.ClusterPolicy`
latency.py        cost model of a step, fitted to timed steps
residency.py      adapters of one simulated GPU: slots, host memory, disk
other_systems.py  scheduling rules of other systems
"""

from experiments.simulator import other_systems
from experiments.simulator.latency import ModelBytes, Residuals, StepCost, TimedStep, fit_step_cost, residuals
from experiments.simulator.residency import LoadCost, Residency, ResidencyConfig
from experiments.simulator.simulator import SimulationResult, Trace, simulate
