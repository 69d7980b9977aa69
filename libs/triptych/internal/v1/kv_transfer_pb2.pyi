from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvEndpoint(_message.Message):
    __slots__ = ("address", "layout", "block_bytes", "tails")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    address: str
    layout: str
    block_bytes: int
    tails: _containers.RepeatedCompositeFieldContainer[KvTail]
    def __init__(self, address: _Optional[str] = ..., layout: _Optional[str] = ..., block_bytes: _Optional[int] = ..., tails: _Optional[_Iterable[_Union[KvTail, _Mapping]]] = ...) -> None: ...

class KvTail(_message.Message):
    __slots__ = ("num_tokens", "num_bytes")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_bytes: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("endpoint", "lease", "ready_in_s")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    READY_IN_S_FIELD_NUMBER: _ClassVar[int]
    endpoint: KvEndpoint
    lease: bytes
    ready_in_s: float
    def __init__(self, endpoint: _Optional[_Union[KvEndpoint, _Mapping]] = ..., lease: _Optional[bytes] = ..., ready_in_s: _Optional[float] = ...) -> None: ...

class KvOrders(_message.Message):
    __slots__ = ("exports", "released_leases", "pulls", "stopped_pulls")
    EXPORTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_LEASES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_PULLS_FIELD_NUMBER: _ClassVar[int]
    exports: _containers.RepeatedCompositeFieldContainer[KvExport]
    released_leases: bytes
    pulls: _containers.RepeatedCompositeFieldContainer[KvPull]
    stopped_pulls: bytes
    def __init__(self, exports: _Optional[_Iterable[_Union[KvExport, _Mapping]]] = ..., released_leases: _Optional[bytes] = ..., pulls: _Optional[_Iterable[_Union[KvPull, _Mapping]]] = ..., stopped_pulls: _Optional[bytes] = ...) -> None: ...

class KvExport(_message.Message):
    __slots__ = ("lease", "slot", "slot_version", "first_index", "block_ids", "hashes", "state_pages")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGES_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    slot: int
    slot_version: int
    first_index: int
    block_ids: bytes
    hashes: bytes
    state_pages: bytes
    def __init__(self, lease: _Optional[bytes] = ..., slot: _Optional[int] = ..., slot_version: _Optional[int] = ..., first_index: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., state_pages: _Optional[bytes] = ...) -> None: ...

class KvPull(_message.Message):
    __slots__ = ("pull_id", "address", "lease", "first_index", "block_ids", "hashes", "state_pages")
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGES_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    address: str
    lease: bytes
    first_index: int
    block_ids: bytes
    hashes: bytes
    state_pages: bytes
    def __init__(self, pull_id: _Optional[int] = ..., address: _Optional[str] = ..., lease: _Optional[bytes] = ..., first_index: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., state_pages: _Optional[bytes] = ...) -> None: ...

class KvProgress(_message.Message):
    __slots__ = ("pulls", "leases")
    PULLS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    pulls: _containers.RepeatedCompositeFieldContainer[PullProgress]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseProgress]
    def __init__(self, pulls: _Optional[_Iterable[_Union[PullProgress, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[LeaseProgress, _Mapping]]] = ...) -> None: ...

class PullProgress(_message.Message):
    __slots__ = ("pull_id", "num_blocks", "failure", "is_spoiled")
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    IS_SPOILED_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    num_blocks: int
    failure: str
    is_spoiled: bool
    def __init__(self, pull_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., failure: _Optional[str] = ..., is_spoiled: bool = ...) -> None: ...

class LeaseProgress(_message.Message):
    __slots__ = ("lease", "num_blocks")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    num_blocks: int
    def __init__(self, lease: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...
