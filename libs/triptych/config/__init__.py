"""One config object, many leaves; what an operator said, never what a machine answered."""

from triptych.config.architecture import ModelArchitecture, RopeParameters
from triptych.config.fields import (
    CacheConfig,
    EngineConfig,
    EngineCoreConfig,
    FrontendConfig,
    JournalConfig,
    LoadConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SimulationConfig,
    WorkerConfig,
)
from triptych.config.resolved import ResolvedConfig

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "EngineCoreConfig",
    "FrontendConfig",
    "JournalConfig",
    "LoadConfig",
    "LogConfig",
    "ModelArchitecture",
    "ModelConfig",
    "ParallelConfig",
    "ResolvedConfig",
    "RopeParameters",
    "SchedulerConfig",
    "SimulationConfig",
    "WorkerConfig",
]
