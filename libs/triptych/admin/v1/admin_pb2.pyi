from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_NOT_READY: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_PAUSED: _ClassVar[EngineState]
    ENGINE_STATE_ASLEEP: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_STOP: _ClassVar[Outcome]
    OUTCOME_LENGTH: _ClassVar[Outcome]
    OUTCOME_ABORT: _ClassVar[Outcome]
    OUTCOME_ERROR: _ClassVar[Outcome]
    OUTCOME_REPETITION: _ClassVar[Outcome]

class JournalState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOURNAL_STATE_UNSPECIFIED: _ClassVar[JournalState]
    JOURNAL_STATE_OFF: _ClassVar[JournalState]
    JOURNAL_STATE_RECORDING: _ClassVar[JournalState]
    JOURNAL_STATE_FULL: _ClassVar[JournalState]
    JOURNAL_STATE_FAILED: _ClassVar[JournalState]
    JOURNAL_STATE_CLOSED: _ClassVar[JournalState]

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]

class SleepLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLEEP_LEVEL_UNSPECIFIED: _ClassVar[SleepLevel]
    SLEEP_LEVEL_WEIGHTS_ON_HOST: _ClassVar[SleepLevel]
    SLEEP_LEVEL_WEIGHTS_DROPPED: _ClassVar[SleepLevel]

class LogLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_LEVEL_UNSPECIFIED: _ClassVar[LogLevel]
    LOG_LEVEL_DEBUG: _ClassVar[LogLevel]
    LOG_LEVEL_INFO: _ClassVar[LogLevel]
    LOG_LEVEL_WARNING: _ClassVar[LogLevel]
    LOG_LEVEL_ERROR: _ClassVar[LogLevel]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_NOT_READY: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_PAUSED: EngineState
ENGINE_STATE_ASLEEP: EngineState
ENGINE_STATE_DRAINING: EngineState
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_STOP: Outcome
OUTCOME_LENGTH: Outcome
OUTCOME_ABORT: Outcome
OUTCOME_ERROR: Outcome
OUTCOME_REPETITION: Outcome
JOURNAL_STATE_UNSPECIFIED: JournalState
JOURNAL_STATE_OFF: JournalState
JOURNAL_STATE_RECORDING: JournalState
JOURNAL_STATE_FULL: JournalState
JOURNAL_STATE_FAILED: JournalState
JOURNAL_STATE_CLOSED: JournalState
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_KEEP: PauseMode
SLEEP_LEVEL_UNSPECIFIED: SleepLevel
SLEEP_LEVEL_WEIGHTS_ON_HOST: SleepLevel
SLEEP_LEVEL_WEIGHTS_DROPPED: SleepLevel
LOG_LEVEL_UNSPECIFIED: LogLevel
LOG_LEVEL_DEBUG: LogLevel
LOG_LEVEL_INFO: LogLevel
LOG_LEVEL_WARNING: LogLevel
LOG_LEVEL_ERROR: LogLevel

class ListEnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("engine_id", "address", "ready", "why_not_ready", "model", "why_no_affinity")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_READY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WHY_NO_AFFINITY_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    address: str
    ready: bool
    why_not_ready: str
    model: str
    why_no_affinity: str
    def __init__(self, engine_id: _Optional[str] = ..., address: _Optional[str] = ..., ready: bool = ..., why_not_ready: _Optional[str] = ..., model: _Optional[str] = ..., why_no_affinity: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("engine_id", "interval_ms", "unchanged_interval_ms")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    interval_ms: int
    unchanged_interval_ms: int
    def __init__(self, engine_id: _Optional[str] = ..., interval_ms: _Optional[int] = ..., unchanged_interval_ms: _Optional[int] = ...) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "state", "why_not_ready", "num_running", "num_waiting", "num_blocks", "num_used_blocks", "num_cached_blocks", "num_steps", "max_steps_in_flight", "step_ns", "prefix_queries", "prefix_hits", "num_preemptions", "num_scheduled_tokens", "num_finished", "model", "journal", "num_touched_blocks", "soft_num_blocks", "block_bytes", "block_size", "groups", "num_guesses", "num_accepted_guesses")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOUCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOFT_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_GUESSES_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_GUESSES_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    state: EngineState
    why_not_ready: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_steps: int
    max_steps_in_flight: int
    step_ns: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_scheduled_tokens: int
    num_finished: _containers.RepeatedCompositeFieldContainer[OutcomeCount]
    model: str
    journal: JournalState
    num_touched_blocks: int
    soft_num_blocks: int
    block_bytes: int
    block_size: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    num_guesses: int
    num_accepted_guesses: int
    def __init__(self, engine_id: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., why_not_ready: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_steps: _Optional[int] = ..., max_steps_in_flight: _Optional[int] = ..., step_ns: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ..., num_finished: _Optional[_Iterable[_Union[OutcomeCount, _Mapping]]] = ..., model: _Optional[str] = ..., journal: _Optional[_Union[JournalState, str]] = ..., num_touched_blocks: _Optional[int] = ..., soft_num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., num_guesses: _Optional[int] = ..., num_accepted_guesses: _Optional[int] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("name", "num_groups", "num_blocks", "num_used_blocks", "num_hit_blocks", "num_released_blocks", "num_snapshots")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_groups: int
    num_blocks: int
    num_used_blocks: int
    num_hit_blocks: int
    num_released_blocks: int
    num_snapshots: int
    def __init__(self, name: _Optional[str] = ..., num_groups: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_hit_blocks: _Optional[int] = ..., num_released_blocks: _Optional[int] = ..., num_snapshots: _Optional[int] = ...) -> None: ...

class OutcomeCount(_message.Message):
    __slots__ = ("outcome", "count")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    count: int
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., count: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("engine_id", "mode")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    mode: PauseMode
    def __init__(self, engine_id: _Optional[str] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("engine_id", "level", "mode")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    level: SleepLevel
    mode: PauseMode
    def __init__(self, engine_id: _Optional[str] = ..., level: _Optional[_Union[SleepLevel, str]] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("released_bytes",)
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    released_bytes: int
    def __init__(self, released_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("engine_id", "name", "source")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    name: str
    source: str
    def __init__(self, engine_id: _Optional[str] = ..., name: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("engine_id", "name")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    name: str
    def __init__(self, engine_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "rank", "source", "engine_ids", "resident_engine_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    source: str
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    resident_engine_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., source: _Optional[str] = ..., engine_ids: _Optional[_Iterable[str]] = ..., resident_engine_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[AliveRequest]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[AliveRequest, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class AliveRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "priority", "age_ms", "num_choices", "num_output_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    priority: int
    age_ms: int
    num_choices: int
    num_output_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., priority: _Optional[int] = ..., age_ms: _Optional[int] = ..., num_choices: _Optional[int] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortRequestsResponse(_message.Message):
    __slots__ = ("aborted_request_ids",)
    ABORTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    aborted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("engine_id", "log_level")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    log_level: LogLevel
    def __init__(self, engine_id: _Optional[str] = ..., log_level: _Optional[_Union[LogLevel, str]] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
