"""Scheduling over many GPUs (section 5 of the paper). The names exported here need no torch.

gpu.py              scheduler's model of one GPU: working set, KV pages
placement.py        placement rules: registry, the paper's; GPUs with room, in the order of a rule
policy.py           queue and decisions
quarantine.py       crash history of a request; suspected ones are served alone on a reserved GPU

`punica.cluster.ray_cluster.RayCluster` schedules real engines; it needs torch, and Ray (the extra ``cluster``):

adapter_files.py    adapter files from a store: LRU cache of folders; versions of folders over all runners
runner.py           engine that executes the scheduler's steps
dispatcher.py       commands to runners, replies to results, recovery from lost runners
ray_runners.py      Ray actors: start, step, kill
ray_cluster.py      interface of one large engine
"""

from punica.cluster.gpu import ClusterRequest, Gpu, StepWork
from punica.cluster.placement import SCHEDULING_RULES
from punica.cluster.policy import PAGE_SIZE, ClusterPolicy, ClusterStep, PlacedRequest, ScaleSignal
