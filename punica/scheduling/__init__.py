"""What runs in the next step, decided in pure Python.

    request.py          what is asked for: prompt, length, adapter; how far it has come
    sampling_params.py  how its tokens are chosen, and when it ends
    scheduler.py        the queue and the batch: who joins, grows, is preempted, retires; the next step is a `StepPlan`
    admission.py        the rule by which the head of the queue may join: what tells serving systems apart
    block_manager.py    who owns which block of the KV cache
    layout.py           from the plan to the rows of one model invocation, grouped by adapter slot

Importing this package leaves torch out of the process, so that the same policy serves an engine, a simulator of a
cluster and a test.
"""

from punica.scheduling.admission import ADMISSION_RULES, AdmissionRule
from punica.scheduling.block_manager import BlockManager
from punica.scheduling.layout import ADAPTER_INDEX_RULES, Span, StepLayout, lay_out, next_decode_step
from punica.scheduling.request import FinishReason, Request, RequestState, RequestStatus
from punica.scheduling.sampling_params import SamplingParams, as_sampling_params
from punica.scheduling.scheduler import Scheduler, StepPlan
