from triptych.admin.v1 import admin_pb2 as _admin_pb2
from triptych.internal.v1 import engine_core_pb2 as _engine_core_pb2
from triptych.internal.v1 import kv_transfer_pb2 as _kv_transfer_pb2
from triptych.internal.v1 import step_pb2 as _step_pb2
from triptych.internal.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalHeader(_message.Message):
    __slots__ = ("magic", "version", "started_at_ms", "engine_id", "engine_version", "config")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MAGIC_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    magic: str
    version: int
    started_at_ms: int
    engine_id: str
    engine_version: str
    config: _containers.ScalarMap[str, str]
    def __init__(self, magic: _Optional[str] = ..., version: _Optional[int] = ..., started_at_ms: _Optional[int] = ..., engine_id: _Optional[str] = ..., engine_version: _Optional[str] = ..., config: _Optional[_Mapping[str, str]] = ...) -> None: ...

class JournalEvent(_message.Message):
    __slots__ = ("at_s", "step", "no_step", "result", "expire", "submit", "abort", "session_opened", "session_closed", "worker_ready", "worker_lost", "cache_reset", "paused", "resumed", "closed", "kv_progress", "adapters_awaited", "adapter_gone", "worker_refused")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NO_STEP_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_OPENED_FIELD_NUMBER: _ClassVar[int]
    SESSION_CLOSED_FIELD_NUMBER: _ClassVar[int]
    WORKER_READY_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    CACHE_RESET_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    KV_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_AWAITED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_GONE_FIELD_NUMBER: _ClassVar[int]
    WORKER_REFUSED_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    step: _step_pb2.Step
    no_step: JournalNoStep
    result: _step_pb2.Result
    expire: JournalExpire
    submit: JournalSubmit
    abort: JournalAbort
    session_opened: int
    session_closed: int
    worker_ready: JournalWorkerReady
    worker_lost: JournalWorkerLost
    cache_reset: JournalCacheReset
    paused: _admin_pb2.PauseMode
    resumed: JournalResume
    closed: str
    kv_progress: _kv_transfer_pb2.KvProgress
    adapters_awaited: JournalAdaptersAwaited
    adapter_gone: JournalAdapterGone
    worker_refused: JournalWorkerRefused
    def __init__(self, at_s: _Optional[float] = ..., step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., no_step: _Optional[_Union[JournalNoStep, _Mapping]] = ..., result: _Optional[_Union[_step_pb2.Result, _Mapping]] = ..., expire: _Optional[_Union[JournalExpire, _Mapping]] = ..., submit: _Optional[_Union[JournalSubmit, _Mapping]] = ..., abort: _Optional[_Union[JournalAbort, _Mapping]] = ..., session_opened: _Optional[int] = ..., session_closed: _Optional[int] = ..., worker_ready: _Optional[_Union[JournalWorkerReady, _Mapping]] = ..., worker_lost: _Optional[_Union[JournalWorkerLost, _Mapping]] = ..., cache_reset: _Optional[_Union[JournalCacheReset, _Mapping]] = ..., paused: _Optional[_Union[_admin_pb2.PauseMode, str]] = ..., resumed: _Optional[_Union[JournalResume, _Mapping]] = ..., closed: _Optional[str] = ..., kv_progress: _Optional[_Union[_kv_transfer_pb2.KvProgress, _Mapping]] = ..., adapters_awaited: _Optional[_Union[JournalAdaptersAwaited, _Mapping]] = ..., adapter_gone: _Optional[_Union[JournalAdapterGone, _Mapping]] = ..., worker_refused: _Optional[_Union[JournalWorkerRefused, _Mapping]] = ...) -> None: ...

class JournalNoStep(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JournalExpire(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JournalSubmit(_message.Message):
    __slots__ = ("session", "request")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    session: int
    request: _engine_core_pb2.Submit
    def __init__(self, session: _Optional[int] = ..., request: _Optional[_Union[_engine_core_pb2.Submit, _Mapping]] = ...) -> None: ...

class JournalAbort(_message.Message):
    __slots__ = ("session", "number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: int
    number: int
    def __init__(self, session: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class JournalWorkerReady(_message.Message):
    __slots__ = ("facts", "after_crash")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    AFTER_CRASH_FIELD_NUMBER: _ClassVar[int]
    facts: _worker_pb2.WorkerFacts
    after_crash: bool
    def __init__(self, facts: _Optional[_Union[_worker_pb2.WorkerFacts, _Mapping]] = ..., after_crash: bool = ...) -> None: ...

class JournalWorkerLost(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JournalWorkerRefused(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class JournalAdaptersAwaited(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class JournalAdapterGone(_message.Message):
    __slots__ = ("digest", "why")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    digest: str
    why: str
    def __init__(self, digest: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class JournalResume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JournalCacheReset(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
