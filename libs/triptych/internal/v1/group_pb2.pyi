from triptych.admin.v1 import admin_pb2 as _admin_pb2
from triptych.internal.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowerMessage(_message.Message):
    __slots__ = ("join", "ready", "call_done", "leaving")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CALL_DONE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    join: Join
    ready: RankReady
    call_done: CallDone
    leaving: Leaving
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., ready: _Optional[_Union[RankReady, _Mapping]] = ..., call_done: _Optional[_Union[CallDone, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class LeaderMessage(_message.Message):
    __slots__ = ("joined", "refused", "session_begins", "step", "call", "leave")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SESSION_BEGINS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    refused: Refused
    session_begins: SessionBegins
    step: _step_pb2.Step
    call: Call
    leave: Leave
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., session_begins: _Optional[_Union[SessionBegins, _Mapping]] = ..., step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol", "rank", "num_ranks", "host", "relay_port")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RELAY_PORT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    rank: int
    num_ranks: int
    host: str
    relay_port: int
    def __init__(self, protocol: _Optional[int] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., host: _Optional[str] = ..., relay_port: _Optional[int] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("generation", "store_port", "beat_port", "relay_port", "hosts")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    BEAT_PORT_FIELD_NUMBER: _ClassVar[int]
    RELAY_PORT_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    generation: str
    store_port: int
    beat_port: int
    relay_port: int
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[str] = ..., store_port: _Optional[int] = ..., beat_port: _Optional[int] = ..., relay_port: _Optional[int] = ..., hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "is_temporary")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_TEMPORARY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_temporary: bool
    def __init__(self, reason: _Optional[str] = ..., is_temporary: bool = ...) -> None: ...

class SessionBegins(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Call(_message.Message):
    __slots__ = ("id", "sleep", "wake", "load_adapter", "settle_adapter", "unload_adapter")
    ID_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SETTLE_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    id: int
    sleep: _admin_pb2.SleepLevel
    wake: bool
    load_adapter: LoadAdapter
    settle_adapter: bool
    unload_adapter: str
    def __init__(self, id: _Optional[int] = ..., sleep: _Optional[_Union[_admin_pb2.SleepLevel, str]] = ..., wake: bool = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ..., settle_adapter: bool = ..., unload_adapter: _Optional[str] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("name", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class CallDone(_message.Message):
    __slots__ = ("id", "released_bytes", "digest", "refusal", "is_memory_short")
    ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    IS_MEMORY_SHORT_FIELD_NUMBER: _ClassVar[int]
    id: int
    released_bytes: int
    digest: str
    refusal: str
    is_memory_short: bool
    def __init__(self, id: _Optional[int] = ..., released_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., refusal: _Optional[str] = ..., is_memory_short: bool = ...) -> None: ...

class RankReady(_message.Message):
    __slots__ = ("num_blocks", "max_model_len", "weight_bytes")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    max_model_len: int
    weight_bytes: int
    def __init__(self, num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
