"""What runs in the next step, decided in pure Python: requests, admission rules, KV blocks, the layout of a step.

Importing this package leaves torch out of the process, so that the same policy serves an engine, a simulator of a
cluster and a test.
"""

from punica.scheduling.admission import ADMISSION_RULES, AdmissionRule
from punica.scheduling.block_manager import BlockManager
from punica.scheduling.layout import ADAPTER_INDEX_RULES, Span, StepLayout, lay_out
from punica.scheduling.request import Request, RequestStatus
from punica.scheduling.scheduler import Scheduler, StepPlan

__all__ = [
    "ADAPTER_INDEX_RULES",
    "ADMISSION_RULES",
    "AdmissionRule",
    "BlockManager",
    "Request",
    "RequestStatus",
    "Scheduler",
    "Span",
    "StepLayout",
    "StepPlan",
    "lay_out",
]
