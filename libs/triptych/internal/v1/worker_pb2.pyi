from triptych.admin.v1 import admin_pb2 as _admin_pb2
from triptych.internal.v1 import kv_transfer_pb2 as _kv_transfer_pb2
from triptych.internal.v1 import session_pb2 as _session_pb2
from triptych.internal.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_KIND_UNSPECIFIED: _ClassVar[KvKind]
    KV_KIND_FULL: _ClassVar[KvKind]
    KV_KIND_WINDOW: _ClassVar[KvKind]
    KV_KIND_CHUNK: _ClassVar[KvKind]
    KV_KIND_STATE: _ClassVar[KvKind]
KV_KIND_UNSPECIFIED: KvKind
KV_KIND_FULL: KvKind
KV_KIND_WINDOW: KvKind
KV_KIND_CHUNK: KvKind
KV_KIND_STATE: KvKind

class ExecuteRequest(_message.Message):
    __slots__ = ("hello", "step", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: _step_pb2.Step
    goodbye: _session_pb2.Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., goodbye: _Optional[_Union[_session_pb2.Goodbye, _Mapping]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("welcome", "result", "draining", "kv_progress")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    result: _step_pb2.Result
    draining: Draining
    kv_progress: _kv_transfer_pb2.KvProgress
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., result: _Optional[_Union[_step_pb2.Result, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., kv_progress: _Optional[_Union[_kv_transfer_pb2.KvProgress, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("session", "engine_id", "epoch", "fingerprint", "shared_config", "max_steps_in_flight", "boot_id", "last_session")
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
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.SessionHello
    engine_id: str
    epoch: int
    fingerprint: str
    shared_config: _containers.ScalarMap[str, str]
    max_steps_in_flight: int
    boot_id: str
    last_session: str
    def __init__(self, session: _Optional[_Union[_session_pb2.SessionHello, _Mapping]] = ..., engine_id: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., shared_config: _Optional[_Mapping[str, str]] = ..., max_steps_in_flight: _Optional[int] = ..., boot_id: _Optional[str] = ..., last_session: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("boot_id", "model", "kv", "max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight", "device_name", "weight_bytes", "load_s", "kernels", "max_samples_per_row", "num_stages", "kv_endpoint", "max_adapters", "max_adapter_rank")
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
    MAX_SAMPLES_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
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
    max_samples_per_row: int
    num_stages: int
    kv_endpoint: _kv_transfer_pb2.KvEndpoint
    max_adapters: int
    max_adapter_rank: int
    def __init__(self, boot_id: _Optional[str] = ..., model: _Optional[_Union[ModelFacts, _Mapping]] = ..., kv: _Optional[_Union[KvShape, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_steps_in_flight: _Optional[int] = ..., device_name: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., load_s: _Optional[float] = ..., kernels: _Optional[str] = ..., max_samples_per_row: _Optional[int] = ..., num_stages: _Optional[int] = ..., kv_endpoint: _Optional[_Union[_kv_transfer_pb2.KvEndpoint, _Mapping]] = ..., max_adapters: _Optional[int] = ..., max_adapter_rank: _Optional[int] = ...) -> None: ...

class AdapterFacts(_message.Message):
    __slots__ = ("name", "digest", "rank", "source", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    source: str
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., source: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("name", "fingerprint", "vocab_size", "max_model_len", "eos_token_ids", "dtype", "kv_dtype", "quantization", "numerics", "is_batch_invariant", "weights", "adapter", "tasks", "embedding_size", "num_labels", "is_encoder", "last_state_tasks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    IS_BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LABELS_FIELD_NUMBER: _ClassVar[int]
    IS_ENCODER_FIELD_NUMBER: _ClassVar[int]
    LAST_STATE_TASKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    kv_dtype: str
    quantization: str
    numerics: str
    is_batch_invariant: bool
    weights: str
    adapter: str
    tasks: _containers.RepeatedScalarFieldContainer[str]
    embedding_size: int
    num_labels: int
    is_encoder: bool
    last_state_tasks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., numerics: _Optional[str] = ..., is_batch_invariant: bool = ..., weights: _Optional[str] = ..., adapter: _Optional[str] = ..., tasks: _Optional[_Iterable[str]] = ..., embedding_size: _Optional[int] = ..., num_labels: _Optional[int] = ..., is_encoder: bool = ..., last_state_tasks: _Optional[_Iterable[str]] = ...) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ("kind", "num_layers", "block_size", "block_bytes", "window")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    kind: KvKind
    num_layers: int
    block_size: int
    block_bytes: int
    window: int
    def __init__(self, kind: _Optional[_Union[KvKind, str]] = ..., num_layers: _Optional[int] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class KvShape(_message.Message):
    __slots__ = ("num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim", "dtype", "soft_num_blocks", "groups", "num_state_blocks", "continues_states")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SOFT_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_STATES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    soft_num_blocks: int
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    num_state_blocks: int
    continues_states: bool
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., soft_num_blocks: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., num_state_blocks: _Optional[int] = ..., continues_states: bool = ...) -> None: ...

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
    level: _admin_pb2.SleepLevel
    def __init__(self, session_name: _Optional[str] = ..., level: _Optional[_Union[_admin_pb2.SleepLevel, str]] = ...) -> None: ...

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

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterFacts
    def __init__(self, adapter: _Optional[_Union[AdapterFacts, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("digest", "keeps_name")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEEPS_NAME_FIELD_NUMBER: _ClassVar[int]
    digest: str
    keeps_name: bool
    def __init__(self, digest: _Optional[str] = ..., keeps_name: bool = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "absent")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterFacts]
    absent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterFacts, _Mapping]]] = ..., absent: _Optional[_Iterable[str]] = ...) -> None: ...
