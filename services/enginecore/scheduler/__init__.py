"""Who computes what in the next step, and what the last step's tokens mean."""

from services.enginecore.scheduler.admission import check_config
from services.enginecore.scheduler.counters import SchedulerCounters
from services.enginecore.scheduler.scheduler import Scheduler
from services.enginecore.scheduler.step_results import Failed, Finished, StepOutput

__all__ = ["Failed", "Finished", "Scheduler", "SchedulerCounters", "StepOutput", "check_config"]
