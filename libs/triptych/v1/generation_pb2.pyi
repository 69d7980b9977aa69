from google.rpc import status_pb2 as _status_pb2
from triptych.v1 import chat_pb2 as _chat_pb2
from triptych.v1 import common_pb2 as _common_pb2
from triptych.v1 import output_pb2 as _output_pb2
from triptych.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Generation(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "sampling", "length", "structured_outputs", "response", "cache", "truncation", "priority", "tenant", "adapter", "emitted")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: _common_pb2.TextPrompt
    token_ids: _common_pb2.TokenIds
    chat: _chat_pb2.Chat
    sampling: _sampling_pb2.SamplingParams
    length: _sampling_pb2.Length
    structured_outputs: _sampling_pb2.StructuredOutputs
    response: ResponseOptions
    cache: CacheOptions
    truncation: _common_pb2.Truncation
    priority: int
    tenant: str
    adapter: str
    emitted: _containers.RepeatedCompositeFieldContainer[EmittedTokens]
    def __init__(self, model: _Optional[str] = ..., text: _Optional[_Union[_common_pb2.TextPrompt, _Mapping]] = ..., token_ids: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_chat_pb2.Chat, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., length: _Optional[_Union[_sampling_pb2.Length, _Mapping]] = ..., structured_outputs: _Optional[_Union[_sampling_pb2.StructuredOutputs, _Mapping]] = ..., response: _Optional[_Union[ResponseOptions, _Mapping]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., truncation: _Optional[_Union[_common_pb2.Truncation, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., emitted: _Optional[_Iterable[_Union[EmittedTokens, _Mapping]]] = ...) -> None: ...

class EmittedTokens(_message.Message):
    __slots__ = ("index", "token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ResponseOptions(_message.Message):
    __slots__ = ("text", "token_ids", "prompt_token_ids", "logprobs", "prompt_logprobs", "timings", "echo", "skip_special_tokens", "spaces_between_special_tokens", "min_interval_tokens", "whole_choices")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_CHOICES_FIELD_NUMBER: _ClassVar[int]
    text: bool
    token_ids: bool
    prompt_token_ids: bool
    logprobs: LogprobOptions
    prompt_logprobs: LogprobOptions
    timings: bool
    echo: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    min_interval_tokens: int
    whole_choices: bool
    def __init__(self, text: bool = ..., token_ids: bool = ..., prompt_token_ids: bool = ..., logprobs: _Optional[_Union[LogprobOptions, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[LogprobOptions, _Mapping]] = ..., timings: bool = ..., echo: bool = ..., skip_special_tokens: bool = ..., spaces_between_special_tokens: bool = ..., min_interval_tokens: _Optional[int] = ..., whole_choices: bool = ...) -> None: ...

class LogprobOptions(_message.Message):
    __slots__ = ("top", "whole_vocabulary", "token_ids", "with_bytes")
    TOP_FIELD_NUMBER: _ClassVar[int]
    WHOLE_VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WITH_BYTES_FIELD_NUMBER: _ClassVar[int]
    top: int
    whole_vocabulary: WholeVocabulary
    token_ids: _common_pb2.TokenIds
    with_bytes: bool
    def __init__(self, top: _Optional[int] = ..., whole_vocabulary: _Optional[_Union[WholeVocabulary, _Mapping]] = ..., token_ids: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., with_bytes: bool = ...) -> None: ...

class WholeVocabulary(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("salt", "bypass")
    SALT_FIELD_NUMBER: _ClassVar[int]
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    salt: str
    bypass: bool
    def __init__(self, salt: _Optional[str] = ..., bypass: bool = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: Generation
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("admitted", "prompt_logprobs", "choices", "finished")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    admitted: _output_pb2.Admitted
    prompt_logprobs: _output_pb2.PromptLogprobs
    choices: _containers.RepeatedCompositeFieldContainer[_output_pb2.ChoiceOutput]
    finished: _output_pb2.Finished
    def __init__(self, admitted: _Optional[_Union[_output_pb2.Admitted, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_output_pb2.PromptLogprobs, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[_output_pb2.ChoiceOutput, _Mapping]]] = ..., finished: _Optional[_Union[_output_pb2.Finished, _Mapping]] = ...) -> None: ...

class StreamGenerateRequest(_message.Message):
    __slots__ = ("request_id", "generation", "resumes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: Generation
    resumes: bool
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ..., resumes: bool = ...) -> None: ...

class StreamGenerateResponse(_message.Message):
    __slots__ = ("sequence", "admitted", "output", "prompt_logprobs", "finished", "resumable")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    admitted: _output_pb2.Admitted
    output: _output_pb2.ChoiceOutput
    prompt_logprobs: _output_pb2.PromptLogprobs
    finished: _output_pb2.Finished
    resumable: _output_pb2.Resumable
    def __init__(self, sequence: _Optional[int] = ..., admitted: _Optional[_Union[_output_pb2.Admitted, _Mapping]] = ..., output: _Optional[_Union[_output_pb2.ChoiceOutput, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_output_pb2.PromptLogprobs, _Mapping]] = ..., finished: _Optional[_Union[_output_pb2.Finished, _Mapping]] = ..., resumable: _Optional[_Union[_output_pb2.Resumable, _Mapping]] = ...) -> None: ...

class BatchGenerateRequest(_message.Message):
    __slots__ = ("tag", "request", "timeout_ms")
    TAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    tag: int
    request: StreamGenerateRequest
    timeout_ms: int
    def __init__(self, tag: _Optional[int] = ..., request: _Optional[_Union[StreamGenerateRequest, _Mapping]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class BatchGenerateResponse(_message.Message):
    __slots__ = ("tag", "event", "error")
    TAG_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    tag: int
    event: StreamGenerateResponse
    error: _status_pb2.Status
    def __init__(self, tag: _Optional[int] = ..., event: _Optional[_Union[StreamGenerateResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "last_sequence", "resume_token", "seen")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    last_sequence: int
    resume_token: str
    seen: _containers.RepeatedCompositeFieldContainer[SeenChoice]
    def __init__(self, request_id: _Optional[str] = ..., last_sequence: _Optional[int] = ..., resume_token: _Optional[str] = ..., seen: _Optional[_Iterable[_Union[SeenChoice, _Mapping]]] = ...) -> None: ...

class SeenChoice(_message.Message):
    __slots__ = ("index", "num_tokens", "finished")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_tokens: int
    finished: bool
    def __init__(self, index: _Optional[int] = ..., num_tokens: _Optional[int] = ..., finished: bool = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: StreamGenerateResponse
    def __init__(self, event: _Optional[_Union[StreamGenerateResponse, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted_request_ids",)
    ABORTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    aborted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "with_bytes", "with_offsets")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    WITH_BYTES_FIELD_NUMBER: _ClassVar[int]
    WITH_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: _common_pb2.TextPrompt
    chat: _chat_pb2.Chat
    with_bytes: bool
    with_offsets: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[_Union[_common_pb2.TextPrompt, _Mapping]] = ..., chat: _Optional[_Union[_chat_pb2.Chat, _Mapping]] = ..., with_bytes: bool = ..., with_offsets: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len", "token_bytes", "start_offsets", "end_offsets")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    START_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    END_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    start_offsets: _containers.RepeatedScalarFieldContainer[int]
    end_offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ..., token_bytes: _Optional[_Iterable[bytes]] = ..., start_offsets: _Optional[_Iterable[int]] = ..., end_offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
