"""Decides what each request computes in the next step, and reads the tokens of the last one."""

from services.enginecore.scheduler.admission import check_config, limits_of
from services.enginecore.scheduler.scheduler import Scheduler
from services.enginecore.scheduler.step_results import (
    Failed,
    Finished,
    SchedulerCounters,
    SchedulerSnapshot,
    StepOutput,
)

__all__ = [
    "Failed",
    "Finished",
    "Scheduler",
    "SchedulerCounters",
    "SchedulerSnapshot",
    "StepOutput",
    "check_config",
    "limits_of",
]
