"""Many GPUs, one scheduler (section 5 of the paper). What is offered here has no torch in it.

gpu.py              what the scheduler knows of a GPU: its working set, its pages
placement.py        the rules: Punica's, the released code's, and those of newer systems
policy.py           the queue and the decisions, the same in every world
isolation.py        requests that are served alone, on a GPU set apart
latency.py          what a step costs: fitted to steps that were timed, or a roofline
simulator.py        a virtual clock around the policy

Around real engines it is `punica.cluster.ray_cluster.RayCluster`, which needs torch, and Ray (the extra ``cluster``):

folders.py          files of adapters that come from elsewhere, in folders of a runner's machine
runner.py           an engine under the scheduler's orders
suspicion.py        which requests may be the cause when runners die
dispatch.py         from requests to the orders of runners, and back from their replies; what is lost with a runner
ray_runners.py      runners as Ray actors
output.py           what a step of a cluster brings
ray_cluster.py      one large engine to its users
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
