"""One config object, many leaves; what an operator said, never what a machine answered."""

from triptych.config.architecture import ModelArchitecture, RopeParameters
from triptych.config.fields import (
    CacheConfig,
    EngineConfig,
    EngineCoreConfig,
    FrontendConfig,
    LoadConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from triptych.config.resolved import ResolvedConfig

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "EngineCoreConfig",
    "FrontendConfig",
    "LoadConfig",
    "LogConfig",
    "ModelArchitecture",
    "ModelConfig",
    "ParallelConfig",
    "ResolvedConfig",
    "RopeParameters",
    "SchedulerConfig",
    "WorkerConfig",
]
