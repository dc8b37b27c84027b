"""Scheduling of the next step, in pure Python.

    request.py:          requests (prompt, length, adapter) and their state
    sampling_params.py:  choice of tokens, and end of generation
    scheduler.py:        queue and batch: admission, growth, preemption, retirement; the next step is a `StepPlan`
    admission.py:        admission rules, in which serving systems differ
    lookup.py:           drafts of next tokens, from the tokens before
    block_manager.py:    ownership of the blocks of the KV cache
    prefix_cache.py:     blocks that requests share, found again by their tokens
    layout.py:           from the plan to the rows of one model invocation, grouped by adapter slot

The package does not import torch: the same policy serves an engine, a cluster simulator and tests.
"""

from punica.scheduling.admission import ADMISSION_RULES, AdmissionRule
from punica.scheduling.block_manager import BlockManager
from punica.scheduling.layout import ADAPTER_INDEX_RULES, Span, StepLayout, lay_out
from punica.scheduling.prefix_cache import PrefixCache, PrefixKey
from punica.scheduling.request import FinishReason, Mixture, Request, RequestState, RequestStatus, adapters_of
from punica.scheduling.sampling_params import SamplingParams, as_sampling_params
from punica.scheduling.scheduler import Scheduler, StepPlan
