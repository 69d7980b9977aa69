"""Who calls, and what it expects: an engine's hello, without gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineHello:
    """The first message of a step stream."""

    engine_id: str
    epoch: int
    """Unix ms at the engine's start."""
    min_protocol: int
    max_protocol: int
    fingerprint: str
    """Empty: whatever the worker has."""
    shared_config: Mapping[str, str]
    steps_in_flight: int
    resume_session: str = ""
    """Empty: start anew."""
    last_result_seen: int = 0

    def is_of_same_engine(self, other: EngineHello) -> bool:
        """The same process: an epoch is drawn at its start."""
        return (self.engine_id, self.epoch) == (other.engine_id, other.epoch)

    def __str__(self) -> str:
        return f"engine {self.engine_id} (epoch {self.epoch})"
