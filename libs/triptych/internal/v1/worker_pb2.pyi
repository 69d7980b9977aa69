from triptych.internal.v1 import session_pb2 as _session_pb2
from triptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_KIND_UNSPECIFIED: _ClassVar[SessionKind]
    SESSION_KIND_FRESH: _ClassVar[SessionKind]
    SESSION_KIND_RESUMED: _ClassVar[SessionKind]

class RowErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_ERROR_CODE_UNSPECIFIED: _ClassVar[RowErrorCode]
    ROW_ERROR_CODE_ENGINE_FAILURE: _ClassVar[RowErrorCode]
    ROW_ERROR_CODE_INVALID_REQUEST: _ClassVar[RowErrorCode]
SESSION_KIND_UNSPECIFIED: SessionKind
SESSION_KIND_FRESH: SessionKind
SESSION_KIND_RESUMED: SessionKind
ROW_ERROR_CODE_UNSPECIFIED: RowErrorCode
ROW_ERROR_CODE_ENGINE_FAILURE: RowErrorCode
ROW_ERROR_CODE_INVALID_REQUEST: RowErrorCode

class ExecuteRequest(_message.Message):
    __slots__ = ("hello", "step", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: Step
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("welcome", "result", "draining")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    result: Result
    draining: Draining
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("session", "engine_id", "epoch", "fingerprint", "shared_config", "max_steps_in_flight")
    class SharedConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.SessionHello
    engine_id: str
    epoch: int
    fingerprint: str
    shared_config: _containers.ScalarMap[str, str]
    max_steps_in_flight: int
    def __init__(self, session: _Optional[_Union[_session_pb2.SessionHello, _Mapping]] = ..., engine_id: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., shared_config: _Optional[_Mapping[str, str]] = ..., max_steps_in_flight: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "max_steps_in_flight", "facts")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.SessionWelcome
    max_steps_in_flight: int
    facts: WorkerFacts
    def __init__(self, session: _Optional[_Union[_session_pb2.SessionWelcome, _Mapping]] = ..., max_steps_in_flight: _Optional[int] = ..., facts: _Optional[_Union[WorkerFacts, _Mapping]] = ...) -> None: ...

class WorkerFacts(_message.Message):
    __slots__ = ("boot_id", "model", "kv", "max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight", "device_name", "weight_bytes", "load_s", "kernels")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    model: ModelFacts
    kv: KvShape
    max_num_seqs: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    device_name: str
    weight_bytes: int
    load_s: float
    kernels: str
    def __init__(self, boot_id: _Optional[str] = ..., model: _Optional[_Union[ModelFacts, _Mapping]] = ..., kv: _Optional[_Union[KvShape, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_steps_in_flight: _Optional[int] = ..., device_name: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., load_s: _Optional[float] = ..., kernels: _Optional[str] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("name", "fingerprint", "vocab_size", "max_model_len", "eos_token_ids", "dtype", "kv_dtype", "quantization")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    kv_dtype: str
    quantization: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., quantization: _Optional[str] = ...) -> None: ...

class KvShape(_message.Message):
    __slots__ = ("num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim", "dtype")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "last_result_seen", "removed_slots", "new_rows", "chunk_slots", "chunk_lengths", "skipped_slots", "block_slots", "block_ids", "num_tokens", "new_contents")
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
    def __init__(self, step_id: _Optional[int] = ..., last_result_seen: _Optional[int] = ..., removed_slots: _Optional[bytes] = ..., new_rows: _Optional[_Iterable[_Union[NewRow, _Mapping]]] = ..., chunk_slots: _Optional[bytes] = ..., chunk_lengths: _Optional[bytes] = ..., skipped_slots: _Optional[bytes] = ..., block_slots: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., new_contents: _Optional[_Iterable[_Union[RowContent, _Mapping]]] = ...) -> None: ...

class RowContent(_message.Message):
    __slots__ = ("id", "prompt_token_ids", "sampling")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    id: int
    prompt_token_ids: bytes
    sampling: _common_pb2.SamplingParams
    def __init__(self, id: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class NewRow(_message.Message):
    __slots__ = ("slot", "slot_version", "emitted_token_ids", "content_id", "num_computed_tokens", "num_cached_tokens", "block_ids", "seed", "prompt_logprobs_start")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_version: int
    emitted_token_ids: bytes
    content_id: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: bytes
    seed: int
    prompt_logprobs_start: int
    def __init__(self, slot: _Optional[int] = ..., slot_version: _Optional[int] = ..., emitted_token_ids: _Optional[bytes] = ..., content_id: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., seed: _Optional[int] = ..., prompt_logprobs_start: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("step_id", "token_ids", "token_counts", "logprobs", "row_errors", "prepare_ns", "forward_ns", "sample_ns", "idle_ns", "gap_ns", "prompt_logprobs")
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
    def __init__(self, step_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., prepare_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., idle_ns: _Optional[int] = ..., gap_ns: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowPromptLogprobs, _Mapping]]] = ...) -> None: ...

class RowPromptLogprobs(_message.Message):
    __slots__ = ("slot", "slot_version", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_version: int
    logprobs: PromptLogprobs
    def __init__(self, slot: _Optional[int] = ..., slot_version: _Optional[int] = ..., logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("slot", "slot_version", "message", "code", "kv_is_valid")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    KV_IS_VALID_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_version: int
    message: str
    code: RowErrorCode
    kv_is_valid: bool
    def __init__(self, slot: _Optional[int] = ..., slot_version: _Optional[int] = ..., message: _Optional[str] = ..., code: _Optional[_Union[RowErrorCode, str]] = ..., kv_is_valid: bool = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("phase", "progress", "facts", "held_by")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    phase: str
    progress: float
    facts: WorkerFacts
    held_by: str
    def __init__(self, phase: _Optional[str] = ..., progress: _Optional[float] = ..., facts: _Optional[_Union[WorkerFacts, _Mapping]] = ..., held_by: _Optional[str] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("session_name", "level")
    SESSION_NAME_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    session_name: str
    level: int
    def __init__(self, session_name: _Optional[str] = ..., level: _Optional[int] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("released_bytes",)
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    released_bytes: int
    def __init__(self, released_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
