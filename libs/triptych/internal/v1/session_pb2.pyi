from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SessionHello(_message.Message):
    __slots__ = ("min_protocol", "max_protocol", "resume_session", "last_received", "features")
    MIN_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MAX_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RESUME_SESSION_FIELD_NUMBER: _ClassVar[int]
    LAST_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    min_protocol: int
    max_protocol: int
    resume_session: str
    last_received: int
    features: int
    def __init__(self, min_protocol: _Optional[int] = ..., max_protocol: _Optional[int] = ..., resume_session: _Optional[str] = ..., last_received: _Optional[int] = ..., features: _Optional[int] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("protocol", "name", "is_resumed", "last_received", "resume_ttl_ms", "features")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_RESUMED_FIELD_NUMBER: _ClassVar[int]
    LAST_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RESUME_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    is_resumed: bool
    last_received: int
    resume_ttl_ms: int
    features: int
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., is_resumed: bool = ..., last_received: _Optional[int] = ..., resume_ttl_ms: _Optional[int] = ..., features: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
