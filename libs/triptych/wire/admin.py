"""admin.proto: an engine's counters, and what an operator may ask of it."""

from __future__ import annotations

from triptych.errors import InvalidRequest
from triptych.types.facts import EngineStatus, PauseMode, SleepLevel
from triptych.v1 import admin_pb2

_PAUSE_MODES = {
    admin_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.WAIT,
    admin_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    admin_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    admin_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}
_PROTO_PAUSE_MODES = {mode: number for number, mode in _PAUSE_MODES.items()}  # the last wins: WAIT has two
_PLAIN = tuple(
    f.name for f in admin_pb2.EngineStatus.DESCRIPTOR.fields if f.name not in ("num_finished", "model")
)


def status_to_proto(status: EngineStatus, model: str) -> admin_pb2.EngineStatus:
    return admin_pb2.EngineStatus(
        **{name: getattr(status, name) for name in _PLAIN}, num_finished=status.num_finished, model=model
    )


def pause_mode_from_proto(mode: int) -> PauseMode:
    """Raises InvalidRequest for a mode of a later version."""
    known = _PAUSE_MODES.get(mode)  # type: ignore[call-overload]
    if known is None:
        raise InvalidRequest("mode", f"{mode} is none of the modes known here, 1 to {max(_PAUSE_MODES)}")
    return known


def sleep_level(number: int) -> SleepLevel:
    """Raises InvalidRequest for a number that is no level."""
    try:
        return SleepLevel(number)
    except ValueError:
        known = " or ".join(str(level.value) for level in SleepLevel)
        raise InvalidRequest("level", f"{number} is no level of sleep; it must be {known}") from None


def pause_mode_to_proto(mode: PauseMode) -> admin_pb2.PauseMode:
    return _PROTO_PAUSE_MODES[mode]
