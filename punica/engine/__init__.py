"""Serving on one GPU (or one tensor-parallel group): continuous batches over many adapters."""

from punica.engine.config import EngineConfig
from punica.engine.engine import Engine
from punica.engine.output import StepOutput, StepStatistics
from punica.scheduling import ADMISSION_RULES, AdmissionRule, Request, RequestStatus, Scheduler, StepPlan

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
