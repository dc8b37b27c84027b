"""Serving on one GPU (or one tensor-parallel group): continuous batches over many adapters."""

from punica.engine.config import EngineConfig
from punica.engine.engine import Engine, StepOutput, StepStatistics
from punica.engine.request import Request, RequestStatus
from punica.engine.scheduler import ADMISSION_RULES, AdmissionRule, Scheduler, StepPlan

__all__ = [
    "ADMISSION_RULES",
    "AdmissionRule",
    "Engine",
    "EngineConfig",
    "Request",
    "RequestStatus",
    "Scheduler",
    "StepOutput",
    "StepPlan",
    "StepStatistics",
]
