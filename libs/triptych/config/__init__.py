"""The one config object: values that an operator has set, never facts that a machine has told."""

from triptych.config.fields import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from triptych.config.process_fields import (
    EngineCoreConfig,
    FrontendConfig,
    JournalConfig,
    LogConfig,
    SimulationConfig,
    WorkerConfig,
)
from triptych.config.tls_fields import TlsConfig

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "EngineCoreConfig",
    "FrontendConfig",
    "JournalConfig",
    "LoadConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SimulationConfig",
    "SpeculativeConfig",
    "TlsConfig",
    "WorkerConfig",
]
