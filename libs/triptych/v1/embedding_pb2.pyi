from google.rpc import status_pb2 as _status_pb2
from triptych.v1 import chat_pb2 as _chat_pb2
from triptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_TYPE_UNSPECIFIED: _ClassVar[TaskType]
    TASK_TYPE_QUERY: _ClassVar[TaskType]
    TASK_TYPE_DOCUMENT: _ClassVar[TaskType]
    TASK_TYPE_SIMILARITY: _ClassVar[TaskType]

class PoolingType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_TYPE_UNSPECIFIED: _ClassVar[PoolingType]
    POOLING_TYPE_FIRST: _ClassVar[PoolingType]
    POOLING_TYPE_LAST: _ClassVar[PoolingType]
    POOLING_TYPE_MEAN: _ClassVar[PoolingType]
    POOLING_TYPE_ALL: _ClassVar[PoolingType]

class EmbeddingEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBEDDING_ENCODING_UNSPECIFIED: _ClassVar[EmbeddingEncoding]
    EMBEDDING_ENCODING_FLOAT: _ClassVar[EmbeddingEncoding]
    EMBEDDING_ENCODING_FLOAT32_BYTES: _ClassVar[EmbeddingEncoding]
    EMBEDDING_ENCODING_INT8: _ClassVar[EmbeddingEncoding]
    EMBEDDING_ENCODING_BINARY: _ClassVar[EmbeddingEncoding]
TASK_TYPE_UNSPECIFIED: TaskType
TASK_TYPE_QUERY: TaskType
TASK_TYPE_DOCUMENT: TaskType
TASK_TYPE_SIMILARITY: TaskType
POOLING_TYPE_UNSPECIFIED: PoolingType
POOLING_TYPE_FIRST: PoolingType
POOLING_TYPE_LAST: PoolingType
POOLING_TYPE_MEAN: PoolingType
POOLING_TYPE_ALL: PoolingType
EMBEDDING_ENCODING_UNSPECIFIED: EmbeddingEncoding
EMBEDDING_ENCODING_FLOAT: EmbeddingEncoding
EMBEDDING_ENCODING_FLOAT32_BYTES: EmbeddingEncoding
EMBEDDING_ENCODING_INT8: EmbeddingEncoding
EMBEDDING_ENCODING_BINARY: EmbeddingEncoding

class PoolingCallOptions(_message.Message):
    __slots__ = ("request_id", "priority", "tenant", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    priority: int
    tenant: str
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "task_type", "pooling", "normalize", "dimensions", "truncation", "encoding", "options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbeddingInput]
    task_type: TaskType
    pooling: PoolingType
    normalize: bool
    dimensions: int
    truncation: _common_pb2.Truncation
    encoding: EmbeddingEncoding
    options: PoolingCallOptions
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbeddingInput, _Mapping]]] = ..., task_type: _Optional[_Union[TaskType, str]] = ..., pooling: _Optional[_Union[PoolingType, str]] = ..., normalize: bool = ..., dimensions: _Optional[int] = ..., truncation: _Optional[_Union[_common_pb2.Truncation, _Mapping]] = ..., encoding: _Optional[_Union[EmbeddingEncoding, str]] = ..., options: _Optional[_Union[PoolingCallOptions, _Mapping]] = ...) -> None: ...

class EmbeddingInput(_message.Message):
    __slots__ = ("text", "token_ids", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: _common_pb2.TextPrompt
    token_ids: _common_pb2.TokenIds
    chat: _chat_pb2.Chat
    def __init__(self, text: _Optional[_Union[_common_pb2.TextPrompt, _Mapping]] = ..., token_ids: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_chat_pb2.Chat, _Mapping]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings", "usage")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    usage: _common_pb2.Usage
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("floats", "packed", "token_vectors", "num_tokens")
    FLOATS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_VECTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    floats: FloatVector
    packed: bytes
    token_vectors: TokenVectors
    num_tokens: int
    def __init__(self, floats: _Optional[_Union[FloatVector, _Mapping]] = ..., packed: _Optional[bytes] = ..., token_vectors: _Optional[_Union[TokenVectors, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class FloatVector(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenVectors(_message.Message):
    __slots__ = ("num_columns", "values")
    NUM_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    num_columns: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_columns: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class EmbedStreamRequest(_message.Message):
    __slots__ = ("tag", "request", "timeout_ms")
    TAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    tag: int
    request: EmbedRequest
    timeout_ms: int
    def __init__(self, tag: _Optional[int] = ..., request: _Optional[_Union[EmbedRequest, _Mapping]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class EmbedStreamResponse(_message.Message):
    __slots__ = ("tag", "response", "error")
    TAG_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    tag: int
    response: EmbedResponse
    error: _status_pb2.Status
    def __init__(self, tag: _Optional[int] = ..., response: _Optional[_Union[EmbedResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class ClassifyRequest(_message.Message):
    __slots__ = ("model", "inputs", "raw_scores", "truncation", "options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    RAW_SCORES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbeddingInput]
    raw_scores: bool
    truncation: _common_pb2.Truncation
    options: PoolingCallOptions
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbeddingInput, _Mapping]]] = ..., raw_scores: bool = ..., truncation: _Optional[_Union[_common_pb2.Truncation, _Mapping]] = ..., options: _Optional[_Union[PoolingCallOptions, _Mapping]] = ...) -> None: ...

class ClassifyResponse(_message.Message):
    __slots__ = ("classifications", "labels", "usage")
    CLASSIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    classifications: _containers.RepeatedCompositeFieldContainer[Classification]
    labels: _containers.RepeatedScalarFieldContainer[str]
    usage: _common_pb2.Usage
    def __init__(self, classifications: _Optional[_Iterable[_Union[Classification, _Mapping]]] = ..., labels: _Optional[_Iterable[str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class Classification(_message.Message):
    __slots__ = ("scores", "num_tokens")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    num_tokens: int
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "queries", "documents", "raw_scores", "truncation", "options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    RAW_SCORES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    queries: _containers.RepeatedScalarFieldContainer[str]
    documents: _containers.RepeatedScalarFieldContainer[str]
    raw_scores: bool
    truncation: _common_pb2.Truncation
    options: PoolingCallOptions
    def __init__(self, model: _Optional[str] = ..., queries: _Optional[_Iterable[str]] = ..., documents: _Optional[_Iterable[str]] = ..., raw_scores: bool = ..., truncation: _Optional[_Union[_common_pb2.Truncation, _Mapping]] = ..., options: _Optional[_Union[PoolingCallOptions, _Mapping]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "usage")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    usage: _common_pb2.Usage
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("model", "query", "documents", "top_n", "raw_scores", "truncation", "options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    RAW_SCORES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    query: str
    documents: _containers.RepeatedScalarFieldContainer[str]
    top_n: int
    raw_scores: bool
    truncation: _common_pb2.Truncation
    options: PoolingCallOptions
    def __init__(self, model: _Optional[str] = ..., query: _Optional[str] = ..., documents: _Optional[_Iterable[str]] = ..., top_n: _Optional[int] = ..., raw_scores: bool = ..., truncation: _Optional[_Union[_common_pb2.Truncation, _Mapping]] = ..., options: _Optional[_Union[PoolingCallOptions, _Mapping]] = ...) -> None: ...

class RerankResponse(_message.Message):
    __slots__ = ("results", "usage")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[RankedDocument]
    usage: _common_pb2.Usage
    def __init__(self, results: _Optional[_Iterable[_Union[RankedDocument, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class RankedDocument(_message.Message):
    __slots__ = ("index", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    score: float
    def __init__(self, index: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...
