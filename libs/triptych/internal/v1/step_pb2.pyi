from triptych.internal.v1 import kv_transfer_pb2 as _kv_transfer_pb2
from triptych.internal.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_GENERATE: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]
    TASK_TOKEN_EMBED: _ClassVar[Task]
    TASK_CLASSIFY: _ClassVar[Task]

class PoolingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_KIND_UNSPECIFIED: _ClassVar[PoolingKind]
    POOLING_KIND_FIRST: _ClassVar[PoolingKind]
    POOLING_KIND_LAST: _ClassVar[PoolingKind]
    POOLING_KIND_MEAN: _ClassVar[PoolingKind]

class RowErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_ERROR_CODE_UNSPECIFIED: _ClassVar[RowErrorCode]
    ROW_ERROR_CODE_ENGINE_FAILURE: _ClassVar[RowErrorCode]
    ROW_ERROR_CODE_INVALID_REQUEST: _ClassVar[RowErrorCode]
    ROW_ERROR_CODE_NOT_READY: _ClassVar[RowErrorCode]
TASK_UNSPECIFIED: Task
TASK_GENERATE: Task
TASK_EMBED: Task
TASK_TOKEN_EMBED: Task
TASK_CLASSIFY: Task
POOLING_KIND_UNSPECIFIED: PoolingKind
POOLING_KIND_FIRST: PoolingKind
POOLING_KIND_LAST: PoolingKind
POOLING_KIND_MEAN: PoolingKind
ROW_ERROR_CODE_UNSPECIFIED: RowErrorCode
ROW_ERROR_CODE_ENGINE_FAILURE: RowErrorCode
ROW_ERROR_CODE_INVALID_REQUEST: RowErrorCode
ROW_ERROR_CODE_NOT_READY: RowErrorCode

class Step(_message.Message):
    __slots__ = ("step_id", "last_result_seen", "removed_slots", "new_rows", "chunk_slots", "chunk_lengths", "skipped_slots", "block_slots", "block_ids", "num_tokens", "new_contents", "sample_slots", "sample_limits", "may_defer_rows", "block_groups", "state_slots", "state_pages", "kv_orders")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_RESULT_SEEN_FIELD_NUMBER: _ClassVar[int]
    REMOVED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NEW_ROWS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_CONTENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_LIMITS_FIELD_NUMBER: _ClassVar[int]
    MAY_DEFER_ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGES_FIELD_NUMBER: _ClassVar[int]
    KV_ORDERS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    last_result_seen: int
    removed_slots: bytes
    new_rows: _containers.RepeatedCompositeFieldContainer[NewRow]
    chunk_slots: bytes
    chunk_lengths: bytes
    skipped_slots: bytes
    block_slots: bytes
    block_ids: bytes
    num_tokens: int
    new_contents: _containers.RepeatedCompositeFieldContainer[RowContent]
    sample_slots: bytes
    sample_limits: bytes
    may_defer_rows: bool
    block_groups: bytes
    state_slots: bytes
    state_pages: bytes
    kv_orders: _kv_transfer_pb2.KvOrders
    def __init__(self, step_id: _Optional[int] = ..., last_result_seen: _Optional[int] = ..., removed_slots: _Optional[bytes] = ..., new_rows: _Optional[_Iterable[_Union[NewRow, _Mapping]]] = ..., chunk_slots: _Optional[bytes] = ..., chunk_lengths: _Optional[bytes] = ..., skipped_slots: _Optional[bytes] = ..., block_slots: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., new_contents: _Optional[_Iterable[_Union[RowContent, _Mapping]]] = ..., sample_slots: _Optional[bytes] = ..., sample_limits: _Optional[bytes] = ..., may_defer_rows: bool = ..., block_groups: _Optional[bytes] = ..., state_slots: _Optional[bytes] = ..., state_pages: _Optional[bytes] = ..., kv_orders: _Optional[_Union[_kv_transfer_pb2.KvOrders, _Mapping]] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("task", "kind", "normalize", "dimensions", "activation")
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    task: Task
    kind: PoolingKind
    normalize: bool
    dimensions: int
    activation: bool
    def __init__(self, task: _Optional[_Union[Task, str]] = ..., kind: _Optional[_Union[PoolingKind, str]] = ..., normalize: bool = ..., dimensions: _Optional[int] = ..., activation: bool = ...) -> None: ...

class RowContent(_message.Message):
    __slots__ = ("id", "prompt_token_ids", "sampling", "task", "pooling", "adapter", "draft_scope")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SCOPE_FIELD_NUMBER: _ClassVar[int]
    id: int
    prompt_token_ids: bytes
    sampling: _sampling_pb2.SamplingParams
    task: Task
    pooling: PoolingParams
    adapter: str
    draft_scope: str
    def __init__(self, id: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., task: _Optional[_Union[Task, str]] = ..., pooling: _Optional[_Union[PoolingParams, _Mapping]] = ..., adapter: _Optional[str] = ..., draft_scope: _Optional[str] = ...) -> None: ...

class NewRow(_message.Message):
    __slots__ = ("slot", "slot_version", "emitted_token_ids", "content_id", "num_computed_tokens", "num_cached_tokens", "block_ids", "seed", "prompt_logprobs_start", "group_block_ids")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    GROUP_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_version: int
    emitted_token_ids: bytes
    content_id: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: bytes
    seed: int
    prompt_logprobs_start: int
    group_block_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, slot: _Optional[int] = ..., slot_version: _Optional[int] = ..., emitted_token_ids: _Optional[bytes] = ..., content_id: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., seed: _Optional[int] = ..., prompt_logprobs_start: _Optional[int] = ..., group_block_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("step_id", "token_ids", "token_counts", "logprobs", "row_errors", "prepare_ns", "forward_ns", "sample_ns", "idle_ns", "gap_ns", "prompt_logprobs", "mask_ns", "vectors", "guess_counts", "guesses")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    IDLE_NS_FIELD_NUMBER: _ClassVar[int]
    GAP_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MASK_NS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    GUESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    token_ids: bytes
    token_counts: bytes
    logprobs: LogprobColumns
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    idle_ns: int
    gap_ns: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowPromptLogprobs]
    mask_ns: int
    vectors: _containers.RepeatedCompositeFieldContainer[RowVectors]
    guess_counts: bytes
    guesses: _containers.RepeatedCompositeFieldContainer[VerifiedGuesses]
    def __init__(self, step_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., prepare_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., idle_ns: _Optional[int] = ..., gap_ns: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowPromptLogprobs, _Mapping]]] = ..., mask_ns: _Optional[int] = ..., vectors: _Optional[_Iterable[_Union[RowVectors, _Mapping]]] = ..., guess_counts: _Optional[bytes] = ..., guesses: _Optional[_Iterable[_Union[VerifiedGuesses, _Mapping]]] = ...) -> None: ...

class VerifiedGuesses(_message.Message):
    __slots__ = ("proposer", "verified", "accepted", "rows", "row_counts")
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    proposer: str
    verified: bytes
    accepted: bytes
    rows: bytes
    row_counts: bytes
    def __init__(self, proposer: _Optional[str] = ..., verified: _Optional[bytes] = ..., accepted: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., row_counts: _Optional[bytes] = ...) -> None: ...

class RowVectors(_message.Message):
    __slots__ = ("row", "vectors")
    ROW_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    row: RowKey
    vectors: Vectors
    def __init__(self, row: _Optional[_Union[RowKey, _Mapping]] = ..., vectors: _Optional[_Union[Vectors, _Mapping]] = ...) -> None: ...

class Vectors(_message.Message):
    __slots__ = ("num_columns", "values")
    NUM_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    num_columns: int
    values: bytes
    def __init__(self, num_columns: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class RowKey(_message.Message):
    __slots__ = ("slot", "slot_version")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_version: int
    def __init__(self, slot: _Optional[int] = ..., slot_version: _Optional[int] = ...) -> None: ...

class RowPromptLogprobs(_message.Message):
    __slots__ = ("row", "logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: RowKey
    logprobs: PromptLogprobs
    def __init__(self, row: _Optional[_Union[RowKey, _Mapping]] = ..., logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "num_candidates", "token_ids", "logprobs", "ranks")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    num_candidates: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    def __init__(self, first_position: _Optional[int] = ..., num_candidates: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("rows", "offsets", "token_ids", "logprobs", "ranks")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    offsets: bytes
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    def __init__(self, rows: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "message", "code", "kv_is_valid")
    ROW_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    KV_IS_VALID_FIELD_NUMBER: _ClassVar[int]
    row: RowKey
    message: str
    code: RowErrorCode
    kv_is_valid: bool
    def __init__(self, row: _Optional[_Union[RowKey, _Mapping]] = ..., message: _Optional[str] = ..., code: _Optional[_Union[RowErrorCode, str]] = ..., kv_is_valid: bool = ...) -> None: ...
