"""admin.proto: an engine's counters, and what an operator may ask of it."""

from __future__ import annotations

from triptych.admin.v1 import admin_pb2
from triptych.errors import InvalidRequest
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import EngineStatus, GroupStatus, PauseMode, SleepLevel
from triptych.wire.codec import codec

_PAUSE_MODES = {
    admin_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.WAIT,
    admin_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    admin_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    admin_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}
_LOG_LEVELS = {
    admin_pb2.LOG_LEVEL_DEBUG: "debug",
    admin_pb2.LOG_LEVEL_INFO: "info",
    admin_pb2.LOG_LEVEL_WARNING: "warning",
    admin_pb2.LOG_LEVEL_ERROR: "error",
}
_PROTO_LOG_LEVELS = {name: number for number, name in _LOG_LEVELS.items()}
LOG_LEVELS = tuple(_PROTO_LOG_LEVELS)
"""Names of the levels, the least severe first."""
_PROTO_PAUSE_MODES = {mode: number for number, mode in _PAUSE_MODES.items()}  # the last wins: WAIT has two
_SLEEP_LEVELS = {
    admin_pb2.SLEEP_LEVEL_UNSPECIFIED: SleepLevel.WEIGHTS_ON_HOST,
    admin_pb2.SLEEP_LEVEL_WEIGHTS_ON_HOST: SleepLevel.WEIGHTS_ON_HOST,
    admin_pb2.SLEEP_LEVEL_WEIGHTS_DROPPED: SleepLevel.WEIGHTS_DROPPED,
}
_PROTO_SLEEP_LEVELS = {level: number for number, level in _SLEEP_LEVELS.items()}
_GROUP = codec(GroupStatus, admin_pb2.GroupStatus)
_STATUS = codec(
    EngineStatus,
    admin_pb2.EngineStatus,
    names={"steps_in_flight": "max_steps_in_flight"},
    apart=("state", "ready", "paused", "asleep", "draining", "num_finished", "model", "journal", "groups"),
    left_out=(
        *("oldest_waiting_s", "num_waiting_by_priority", "kv_transfers", "page_bytes"),
        *("journal_bytes", "journal_oldest_at_ms", "num_kept"),
        *("num_adapters", "num_resident_adapters", "resident_adapter_bytes"),
        *("num_adapter_reads", "num_adapter_drops"),
    ),
)


def adapter_to_proto(facts: AdapterFacts, engine_id: str, *, is_resident: bool) -> admin_pb2.Adapter:
    """Return an adapter with the engine that has it, and whether it is in memory there."""
    return admin_pb2.Adapter(
        name=facts.name,
        digest=facts.digest,
        rank=facts.rank,
        source=facts.source,
        engine_ids=[engine_id],
        resident_engine_ids=[engine_id] if is_resident else [],
    )


def status_to_proto(status: EngineStatus, model: str) -> admin_pb2.EngineStatus:
    return _STATUS.encode(
        status,
        state=_state(status),
        num_finished=[
            admin_pb2.OutcomeCount(outcome=f"OUTCOME_{reason.upper()}", count=count)
            for reason, count in status.counters.num_finished.items()
        ],
        model=model,
        groups=[_GROUP.encode(group) for group in status.groups],
        journal=f"JOURNAL_STATE_{status.journal.upper()}",
    )


def status_from_proto(message: admin_pb2.EngineStatus) -> tuple[str, EngineStatus]:
    """Return the model's name, and the status less the ends of requests by reason and the journal's state."""
    status = _STATUS.decode(
        message,
        num_finished={},
        journal="off",
        groups=tuple(map(_GROUP.decode, message.groups)),
        ready=message.state == admin_pb2.ENGINE_STATE_READY and not message.why_not_ready,
        paused=message.state == admin_pb2.ENGINE_STATE_PAUSED,
        asleep=message.state == admin_pb2.ENGINE_STATE_ASLEEP,
        draining=message.state == admin_pb2.ENGINE_STATE_DRAINING,
    )
    return message.model, status


def _state(status: EngineStatus) -> admin_pb2.EngineState:
    if status.asleep:
        return admin_pb2.ENGINE_STATE_ASLEEP
    if status.paused:
        return admin_pb2.ENGINE_STATE_PAUSED
    if status.draining:
        return admin_pb2.ENGINE_STATE_DRAINING
    return admin_pb2.ENGINE_STATE_READY if status.ready else admin_pb2.ENGINE_STATE_NOT_READY


def pause_mode_from_proto(mode: int) -> PauseMode:
    """Raises InvalidRequest for a mode of a later version."""
    known = _PAUSE_MODES.get(mode)  # type: ignore[call-overload]
    if known is None:
        raise InvalidRequest("mode", f"{mode} is none of the modes known here, 1 to {max(_PAUSE_MODES)}")
    return known


def pause_mode_to_proto(mode: PauseMode) -> admin_pb2.PauseMode:
    return _PROTO_PAUSE_MODES[mode]


def sleep_level_to_proto(level: SleepLevel) -> admin_pb2.SleepLevel:
    return _PROTO_SLEEP_LEVELS[level]


def sleep_level_from_proto(level: int) -> SleepLevel:
    """Raises InvalidRequest for a level of a later version."""
    known = _SLEEP_LEVELS.get(level)  # type: ignore[call-overload]
    if known is None:
        raise InvalidRequest("level", f"{level} is none of the levels known here, 1 to {max(_SLEEP_LEVELS)}")
    return known


def log_level_from_proto(level: int) -> str:
    """Return the level's name in the config.

    Raises:
        InvalidRequest: It is none that is known here.
    """
    known = _LOG_LEVELS.get(level)  # type: ignore[call-overload]
    if known is None:
        raise InvalidRequest(
            "log_level", f"{level} is none of the levels known here, 1 to {max(_LOG_LEVELS)}"
        )
    return known


def log_level_to_proto(level: str) -> admin_pb2.LogLevel:
    return _PROTO_LOG_LEVELS[level]
