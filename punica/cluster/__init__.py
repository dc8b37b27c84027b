"""Many GPUs, one scheduler (section 5 of the paper). No torch in here.

gpu.py              what the scheduler knows of a GPU: its working set, its pages
placement.py        the rules: Punica's, the released code's, and those of newer systems
policy.py           the queue and the decisions, the same in every world
latency.py          what a step costs: fitted to steps that were timed, or a roofline
simulator.py        a virtual clock around the policy
"""

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.latency import (
    ModelBytes,
    Residuals,
    StepCost,
    StepWork,
    TimedStep,
    fit_step_cost,
    residuals,
    roofline_cost,
)
from punica.cluster.placement import SCHEDULING_RULES, SchedulingRule
from punica.cluster.policy import PAGE_SIZE, ClusterPolicy, ClusterStep, PlacedRequest, ScaleSignal
from punica.cluster.simulator import SimulationResult, Trace, simulate
