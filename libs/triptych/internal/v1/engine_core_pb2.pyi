from triptych.internal.v1 import kv_transfer_pb2 as _kv_transfer_pb2
from triptych.internal.v1 import sampling_pb2 as _sampling_pb2
from triptych.internal.v1 import session_pb2 as _session_pb2
from triptych.internal.v1 import step_pb2 as _step_pb2
from triptych.internal.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ROLE_UNSPECIFIED: _ClassVar[EngineRole]
    ENGINE_ROLE_PREFILL: _ClassVar[EngineRole]
    ENGINE_ROLE_DECODE: _ClassVar[EngineRole]
ENGINE_ROLE_UNSPECIFIED: EngineRole
ENGINE_ROLE_PREFILL: EngineRole
ENGINE_ROLE_DECODE: EngineRole

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "goodbye", "last_batch_seen", "beat", "attach", "stop", "detach", "state")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    LAST_BATCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    hello: ConnectHello
    submit: SubmitBatch
    abort: bytes
    goodbye: _session_pb2.Goodbye
    last_batch_seen: int
    beat: Beat
    attach: Attach
    stop: bytes
    detach: bytes
    state: FrontendState
    def __init__(self, hello: _Optional[_Union[ConnectHello, _Mapping]] = ..., submit: _Optional[_Union[SubmitBatch, _Mapping]] = ..., abort: _Optional[bytes] = ..., goodbye: _Optional[_Union[_session_pb2.Goodbye, _Mapping]] = ..., last_batch_seen: _Optional[int] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., stop: _Optional[bytes] = ..., detach: _Optional[bytes] = ..., state: _Optional[_Union[FrontendState, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("welcome", "outputs")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    welcome: ConnectWelcome
    outputs: OutputBatch
    def __init__(self, welcome: _Optional[_Union[ConnectWelcome, _Mapping]] = ..., outputs: _Optional[_Union[OutputBatch, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FrontendState(_message.Message):
    __slots__ = ("takes_streams",)
    TAKES_STREAMS_FIELD_NUMBER: _ClassVar[int]
    takes_streams: bool
    def __init__(self, takes_streams: bool = ...) -> None: ...

class ConnectHello(_message.Message):
    __slots__ = ("session", "frontend_id", "boot_id", "abandoned_session")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.SessionHello
    frontend_id: str
    boot_id: str
    abandoned_session: str
    def __init__(self, session: _Optional[_Union[_session_pb2.SessionHello, _Mapping]] = ..., frontend_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., abandoned_session: _Optional[str] = ...) -> None: ...

class ConnectWelcome(_message.Message):
    __slots__ = ("session", "engine_id", "ready", "why_not_ready", "model", "limits", "prefix_hash", "boot_id", "role", "kv_endpoint", "num_other_frontends", "takes_streams", "adapters")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_READY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_FRONTENDS_FIELD_NUMBER: _ClassVar[int]
    TAKES_STREAMS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.SessionWelcome
    engine_id: str
    ready: bool
    why_not_ready: str
    model: _worker_pb2.ModelFacts
    limits: EngineLimits
    prefix_hash: PrefixHash
    boot_id: str
    role: EngineRole
    kv_endpoint: _kv_transfer_pb2.KvEndpoint
    num_other_frontends: int
    takes_streams: bool
    adapters: _containers.RepeatedCompositeFieldContainer[_worker_pb2.AdapterFacts]
    def __init__(self, session: _Optional[_Union[_session_pb2.SessionWelcome, _Mapping]] = ..., engine_id: _Optional[str] = ..., ready: bool = ..., why_not_ready: _Optional[str] = ..., model: _Optional[_Union[_worker_pb2.ModelFacts, _Mapping]] = ..., limits: _Optional[_Union[EngineLimits, _Mapping]] = ..., prefix_hash: _Optional[_Union[PrefixHash, _Mapping]] = ..., boot_id: _Optional[str] = ..., role: _Optional[_Union[EngineRole, str]] = ..., kv_endpoint: _Optional[_Union[_kv_transfer_pb2.KvEndpoint, _Mapping]] = ..., num_other_frontends: _Optional[int] = ..., takes_streams: bool = ..., adapters: _Optional[_Iterable[_Union[_worker_pb2.AdapterFacts, _Mapping]]] = ...) -> None: ...

class PrefixHash(_message.Message):
    __slots__ = ("name", "block_size", "test_vector")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TEST_VECTOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    block_size: int
    test_vector: bytes
    def __init__(self, name: _Optional[str] = ..., block_size: _Optional[int] = ..., test_vector: _Optional[bytes] = ...) -> None: ...

class EngineLimits(_message.Message):
    __slots__ = ("has_priorities", "max_choices", "keeps_requests", "max_running")
    HAS_PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    has_priorities: bool
    max_choices: int
    keeps_requests: bool
    max_running: int
    def __init__(self, has_priorities: bool = ..., max_choices: _Optional[int] = ..., keeps_requests: bool = ..., max_running: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("secret", "numbers", "num_tokens_seen", "tenant", "num_choices", "seen_choices")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_SEEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    SEEN_CHOICES_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    numbers: bytes
    num_tokens_seen: bytes
    tenant: str
    num_choices: int
    seen_choices: bytes
    def __init__(self, secret: _Optional[bytes] = ..., numbers: _Optional[bytes] = ..., num_tokens_seen: _Optional[bytes] = ..., tenant: _Optional[str] = ..., num_choices: _Optional[int] = ..., seen_choices: _Optional[bytes] = ...) -> None: ...

class SubmitBatch(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[Submit]
    def __init__(self, requests: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("numbers", "request_id", "prompt_token_ids", "emitted_token_ids", "sampling", "seeds", "priority", "tenant", "cache_salt", "deadline_remaining_ms", "adapter", "whole_output", "task", "num_engine_deaths", "is_moved", "keep_ms", "resume_secret", "frontend_state", "kv_lease", "kv_source", "num_cached_tokens_plus_one", "model_digest", "pooling", "adapter_digest", "guesses")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINE_DEATHS_FIELD_NUMBER: _ClassVar[int]
    IS_MOVED_FIELD_NUMBER: _ClassVar[int]
    KEEP_MS_FIELD_NUMBER: _ClassVar[int]
    RESUME_SECRET_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_STATE_FIELD_NUMBER: _ClassVar[int]
    KV_LEASE_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    numbers: bytes
    request_id: str
    prompt_token_ids: bytes
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    sampling: _sampling_pb2.SamplingParams
    seeds: bytes
    priority: int
    tenant: str
    cache_salt: str
    deadline_remaining_ms: int
    adapter: str
    whole_output: bool
    task: _step_pb2.Task
    num_engine_deaths: int
    is_moved: bool
    keep_ms: int
    resume_secret: bytes
    frontend_state: bytes
    kv_lease: bytes
    kv_source: _kv_transfer_pb2.KvSource
    num_cached_tokens_plus_one: bytes
    model_digest: str
    pooling: _step_pb2.PoolingParams
    adapter_digest: str
    guesses: RequestGuesses
    def __init__(self, numbers: _Optional[bytes] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., emitted_token_ids: _Optional[_Iterable[bytes]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., seeds: _Optional[bytes] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., deadline_remaining_ms: _Optional[int] = ..., adapter: _Optional[str] = ..., whole_output: bool = ..., task: _Optional[_Union[_step_pb2.Task, str]] = ..., num_engine_deaths: _Optional[int] = ..., is_moved: bool = ..., keep_ms: _Optional[int] = ..., resume_secret: _Optional[bytes] = ..., frontend_state: _Optional[bytes] = ..., kv_lease: _Optional[bytes] = ..., kv_source: _Optional[_Union[_kv_transfer_pb2.KvSource, _Mapping]] = ..., num_cached_tokens_plus_one: _Optional[bytes] = ..., model_digest: _Optional[str] = ..., pooling: _Optional[_Union[_step_pb2.PoolingParams, _Mapping]] = ..., adapter_digest: _Optional[str] = ..., guesses: _Optional[_Union[RequestGuesses, _Mapping]] = ...) -> None: ...

class OutputBatch(_message.Message):
    __slots__ = ("batch_id", "admitted", "numbers", "token_counts", "token_ids", "logprobs", "finished", "failures", "messages_received", "prompt_logprobs", "num_free_places", "released", "attached", "stored_hashes", "evicted_hashes", "load", "is_cache_cleared", "first_numbers", "first_cached_tokens", "vectors", "guesses")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PLACES_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    STORED_HASHES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_HASHES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IS_CACHE_CLEARED_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    admitted: bytes
    numbers: bytes
    token_counts: bytes
    token_ids: bytes
    logprobs: _step_pb2.LogprobColumns
    finished: FinishedColumns
    failures: _containers.RepeatedCompositeFieldContainer[RequestFailure]
    messages_received: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RequestPromptLogprobs]
    num_free_places: int
    released: bytes
    attached: _containers.RepeatedCompositeFieldContainer[Submit]
    stored_hashes: bytes
    evicted_hashes: bytes
    load: EngineLoad
    is_cache_cleared: bool
    first_numbers: bytes
    first_cached_tokens: bytes
    vectors: _containers.RepeatedCompositeFieldContainer[RequestVectors]
    guesses: RequestGuesses
    def __init__(self, batch_id: _Optional[int] = ..., admitted: _Optional[bytes] = ..., numbers: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[_step_pb2.LogprobColumns, _Mapping]] = ..., finished: _Optional[_Union[FinishedColumns, _Mapping]] = ..., failures: _Optional[_Iterable[_Union[RequestFailure, _Mapping]]] = ..., messages_received: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RequestPromptLogprobs, _Mapping]]] = ..., num_free_places: _Optional[int] = ..., released: _Optional[bytes] = ..., attached: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., stored_hashes: _Optional[bytes] = ..., evicted_hashes: _Optional[bytes] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., is_cache_cleared: bool = ..., first_numbers: _Optional[bytes] = ..., first_cached_tokens: _Optional[bytes] = ..., vectors: _Optional[_Iterable[_Union[RequestVectors, _Mapping]]] = ..., guesses: _Optional[_Union[RequestGuesses, _Mapping]] = ...) -> None: ...

class RequestGuesses(_message.Message):
    __slots__ = ("numbers", "accepted", "rejected")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    numbers: bytes
    accepted: bytes
    rejected: bytes
    def __init__(self, numbers: _Optional[bytes] = ..., accepted: _Optional[bytes] = ..., rejected: _Optional[bytes] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("num_prefill_tokens", "num_running", "num_waiting", "num_free_blocks", "num_free_rows", "prefill_token_s", "decode_step_s", "row_interval_s")
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    ROW_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_free_rows: int
    prefill_token_s: float
    decode_step_s: float
    row_interval_s: float
    def __init__(self, num_prefill_tokens: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_free_rows: _Optional[int] = ..., prefill_token_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., row_interval_s: _Optional[float] = ...) -> None: ...

class RequestVectors(_message.Message):
    __slots__ = ("number", "vectors")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    number: int
    vectors: _step_pb2.Vectors
    def __init__(self, number: _Optional[int] = ..., vectors: _Optional[_Union[_step_pb2.Vectors, _Mapping]] = ...) -> None: ...

class RequestPromptLogprobs(_message.Message):
    __slots__ = ("number", "logprobs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    number: int
    logprobs: _step_pb2.PromptLogprobs
    def __init__(self, number: _Optional[int] = ..., logprobs: _Optional[_Union[_step_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class FinishedColumns(_message.Message):
    __slots__ = ("numbers", "reasons", "stop_token_ids_plus_one", "num_cached_tokens", "queued_ns", "prefill_ns", "decode_ns", "num_accepted_guesses", "num_rejected_guesses")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_GUESSES_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_GUESSES_FIELD_NUMBER: _ClassVar[int]
    numbers: bytes
    reasons: bytes
    stop_token_ids_plus_one: bytes
    num_cached_tokens: bytes
    queued_ns: bytes
    prefill_ns: bytes
    decode_ns: bytes
    num_accepted_guesses: bytes
    num_rejected_guesses: bytes
    def __init__(self, numbers: _Optional[bytes] = ..., reasons: _Optional[bytes] = ..., stop_token_ids_plus_one: _Optional[bytes] = ..., num_cached_tokens: _Optional[bytes] = ..., queued_ns: _Optional[bytes] = ..., prefill_ns: _Optional[bytes] = ..., decode_ns: _Optional[bytes] = ..., num_accepted_guesses: _Optional[bytes] = ..., num_rejected_guesses: _Optional[bytes] = ...) -> None: ...

class RequestFailure(_message.Message):
    __slots__ = ("number", "code", "message", "field", "retry_after_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    code: str
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, number: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...
