"""admin.proto: an engine's counters."""

from __future__ import annotations

from triptych.types.facts import EngineStatus
from triptych.v1 import admin_pb2

_PLAIN = tuple(
    f.name for f in admin_pb2.EngineStatus.DESCRIPTOR.fields if f.name not in ("num_finished", "model")
)


def status_to_proto(status: EngineStatus, model: str) -> admin_pb2.EngineStatus:
    return admin_pb2.EngineStatus(
        **{name: getattr(status, name) for name in _PLAIN}, num_finished=status.num_finished, model=model
    )


def status_from_proto(message: admin_pb2.EngineStatus) -> EngineStatus:
    return EngineStatus(
        **{name: getattr(message, name) for name in _PLAIN}, num_finished=dict(message.num_finished)
    )
