"""Requests that no client should send: bodies and messages with fields of any value, drawn from a seed."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from triptych.compat import vllm_engine_pb2
from triptych.types.sampling import SAMPLING_FIELDS
from triptych.v1 import embedding_pb2, generation_pb2, model_pb2
from triptych_services.frontend.http.anthropic.schema import MessagesRequest
from triptych_services.frontend.http.body import Body
from triptych_services.frontend.http.generation_body import AbortRequest, LoadAdapterBody, UnloadAdapterBody
from triptych_services.frontend.http.openai import schema
from triptych_services.frontend.http.openai.pooling import schema as pooling_schema
from triptych_services.frontend.http.openai.responses.schema import ResponsesRequest

M = TypeVar("M", bound=Message)
Bases = Sequence[tuple[str, type[Body], dict[str, Any]]]
HttpRequest = tuple[str, bytes, dict[str, str]]
_HUGE = "@huge@"
"""Stands for an integer of more digits than Python reads."""
INTEGERS = (
    0,
    1,
    2,
    16,
    -1,
    -2,
    3,
    63,
    255,
    4095,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 64,
)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 2.0, 1e-7, 1e-320, 1e300, math.inf, -math.inf, math.nan)
TEXTS = (
    "", "a", " ", "Hello, my name is", "\x00", "\n" * 9, "🙂é世界", "\u202eabc", "\ufeff", "<|im_end|>", "{{ 1 }}",
    "null", "true", "system", "user", "assistant", "tool", "auto", "none", "required", "function", "text",
    "json_schema", "[0-9]+", "(((", 'root ::= "a"', "x" * 300, "word " * 3000, "ä" * 20000,
)  # fmt: skip
LONE_SURROGATES = ("\ud800", "a\udfffb")
SCHEMAS = (
    {},
    {"type": "object"},
    {"type": "integer"},
    {"type": "nonsense"},
    {"$ref": "#/nowhere"},
    {"$ref": "#"},
    {"type": "array", "items": {"$ref": "#"}},
    {"enum": []},
    {"type": "string", "pattern": "((("},
    {"anyOf": [{"type": "string"}, {"minimum": 3}]},
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 3}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BASES: Bases = (
    ("/v1/completions", schema.CompletionRequest, {"prompt": "Hello", "max_tokens": 3}),
    (
        "/v1/completions",
        schema.CompletionRequest,
        {"prompt": ["Hello", "you"], "max_tokens": 2, "logprobs": 2},
    ),
    ("/v1/completions", schema.CompletionRequest, {"prompt": [5, 6, 7], "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", schema.ChatCompletionRequest, CHAT),
    ("/v1/chat/completions", schema.ChatCompletionRequest, {**CHAT, "tools": [TOOL], "tool_choice": "auto"}),
    (
        "/v1/chat/completions",
        schema.ChatCompletionRequest,
        {
            **CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object"}},
            },
        },
    ),
    (
        "/v1/chat/completions",
        schema.ChatCompletionRequest,
        {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 1},
    ),
    ("/v1/responses", ResponsesRequest, {"input": "Say a word.", "max_output_tokens": 3}),
    ("/v1/messages", MessagesRequest, {**CHAT, "model": "embedded"}),
    ("/tokenize", schema.TokenizeRequest, {"prompt": "Hello"}),
    ("/tokenize", schema.TokenizeRequest, {"messages": CHAT["messages"]}),
    ("/detokenize", schema.DetokenizeRequest, {"tokens": [5, 6, 7]}),
    ("/v1/embeddings", pooling_schema.EmbeddingRequest, {"input": "Hello"}),
    (
        "/v1/embeddings",
        pooling_schema.EmbeddingRequest,
        {"input": [[5, 6], [7]], "encoding_format": "base64"},
    ),
    ("/pooling", pooling_schema.PoolingRequest, {"input": ["Hello", "you"], "task": "token_embed"}),
    ("/classify", pooling_schema.ClassificationRequest, {"input": "Hello"}),
    ("/score", pooling_schema.ScoreRequest, {"queries": "Hello", "documents": ["Hi", "Bye"]}),
    ("/v1/score", pooling_schema.ScoreRequest, {"text_1": "Hello", "text_2": "Hi"}),
    *(
        (path, pooling_schema.RerankRequest, {"query": "Hello", "documents": ["Hi", {"text": "Bye"}]})
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
)
OPERATORS_BASES: Bases = (
    ("/v1/load_lora_adapter", LoadAdapterBody, {"lora_name": "a", "lora_path": "a"}),
    ("/v1/unload_lora_adapter", UnloadAdapterBody, {"lora_name": "a"}),
    ("/abort_requests", AbortRequest, {"request_ids": ["a"]}),
)
"""Routes of the operators' server."""
_INPUTS = [{"text": {"text": "Hello"}}, {"token_ids": {"ids": [5, 6]}}]
_BASE_GENERATION = {"text": {"text": "Hello"}, "length": {"max_tokens": 3}}
_BASE_OF_VLLM = vllm_engine_pb2.GenerateRequest(text="Hello", sampling_params={"max_tokens": 3})
MESSAGES: tuple[tuple[str, Message], ...] = (
    ("triptych.v1.GenerationService/Generate", generation_pb2.GenerateRequest(generation=_BASE_GENERATION)),
    (
        "triptych.v1.GenerationService/StreamGenerate",
        generation_pb2.StreamGenerateRequest(generation=_BASE_GENERATION),
    ),
    ("triptych.v1.GenerationService/Tokenize", generation_pb2.TokenizeRequest(text={"text": "Hello"})),
    ("triptych.v1.GenerationService/Detokenize", generation_pb2.DetokenizeRequest(token_ids=[5, 6])),
    ("triptych.v1.GenerationService/Abort", generation_pb2.AbortRequest(request_ids=["a"])),
    ("triptych.v1.ModelService/ListModels", model_pb2.ListModelsRequest()),
    ("triptych.v1.ModelService/GetModel", model_pb2.GetModelRequest()),
    ("triptych.v1.ModelService/GetServerInfo", model_pb2.GetServerInfoRequest()),
    ("vllm.grpc.engine.VllmEngine/Generate", _BASE_OF_VLLM),
    ("triptych.v1.EmbeddingService/Embed", embedding_pb2.EmbedRequest(inputs=_INPUTS)),
    ("triptych.v1.EmbeddingService/Classify", embedding_pb2.ClassifyRequest(inputs=_INPUTS)),
    (
        "triptych.v1.EmbeddingService/Score",
        embedding_pb2.ScoreRequest(queries=["Hello"], documents=["Hi", "Bye"]),
    ),
    (
        "triptych.v1.EmbeddingService/Rerank",
        embedding_pb2.RerankRequest(query="Hello", documents=["Hi", "Bye"]),
    ),
)
"""Methods without a stream of requests, each with a message that is right."""


class Fuzzer:
    """Draws requests; equal seeds draw equal ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def http_request(self, bases: Bases = BASES) -> HttpRequest:
        """Return a path, a body and headers.

        Args:
            bases: Routes of one server, each with a body that is right.
        """
        rng = self._random
        path, kind, base = rng.choice(bases)
        body: Any = copy.deepcopy(base)
        names = [info.alias or name for name, info in kind.model_fields.items()]
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            name = rng.choice(names)
            body[name] = self._field(name)
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            self._spoil(body)
        if rng.random() < 0.02:
            body = self._json(3)
        content = json.dumps(body).replace(f'"{_HUGE}"', "9" * 5000).encode()
        headers = {"Content-Type": "application/json"}
        if rng.random() < 0.04:
            content = self._corrupted(content)
        if rng.random() < 0.1:
            headers["X-Request-Id"] = rng.choice(("a", "x" * 200, "a b", "%00"))
        if rng.random() < 0.1:
            headers["X-Request-Timeout-S"] = rng.choice(("0", "-1", "nan", "inf", "1e-9", "5", "x", ""))
        return path, content, headers

    def grpc_request(self) -> tuple[str, bytes]:
        """Return a method and a message as bytes."""
        rng = self._random
        method, base = rng.choice(MESSAGES)
        message = type(base)()
        message.CopyFrom(base)
        self._fill(message, rng.choice((0.1, 0.3, 0.5)), 6)
        content = message.SerializeToString()
        return method, self._corrupted(content) if rng.random() < 0.04 else content

    def changed(self, base: M) -> M:
        """Return a copy of a message, of which some fields are set to anything that they can hold."""
        message = type(base)()
        message.CopyFrom(base)
        self._fill(message, self._random.choice((0.05, 0.1, 0.3, 0.6)), 4)
        return message

    def flipped(self, content: bytes) -> bytes:
        """Return bytes of which a few have changed."""
        data = bytearray(content)
        for _ in range(self._random.choice((0, 1, 3)) if data else 0):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return bytes(data)

    def _field(self, name: str) -> Any:
        spec = SAMPLING_FIELDS.get(name)
        if spec is not None and self._random.random() < 0.5 and math.isfinite(spec.low + spec.high):
            edge = self._random.choice((spec.low, spec.high))
            return type(spec.default or 0)(edge) + self._random.choice((-1, 0, 0, 1))
        return self._json(3)

    def _json(self, depth: int) -> Any:
        rng = self._random
        match rng.randrange(12 if depth else 8):
            case 0:
                return None
            case 1:
                return rng.random() < 0.5
            case 2:
                return rng.choice((*INTEGERS, 10**400, _HUGE))
            case 3:
                return rng.choice(FLOATS)
            case 4 | 5:
                return rng.choice((*TEXTS, *LONE_SURROGATES))
            case 6:
                return [rng.choice(INTEGERS[:8]) for _ in range(rng.choice((0, 1, 3, 300)))]
            case 7:
                return copy.deepcopy(rng.choice(SCHEMAS))
            case 8:
                return [self._json(depth - 1) for _ in range(rng.choice((0, 1, 2, 40)))]
            case 9:
                return {self._key(): self._json(depth - 1) for _ in range(rng.choice((0, 1, 3)))}
            case 10:
                return [copy.deepcopy(TOOL), self._json(depth - 1)]
            case _:
                nested: Any = []
                for _ in range(rng.choice((5, 100, 900))):
                    nested = [nested] if rng.random() < 0.5 else {"a": nested}
                return nested

    def _key(self) -> str:
        known = (
            "type",
            "name",
            "role",
            "content",
            "text",
            "schema",
            "json",
            "regex",
            "choice",
            "5",
            "-1",
            "include_usage",
        )
        return self._random.choice((*known, *TEXTS[:9], *LONE_SURROGATES))

    def _spoil(self, value: Any) -> None:
        """Replace, add or take away something somewhere inside."""
        rng = self._random
        while isinstance(value, (dict, list)) and value:
            key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
            if not isinstance(value[key], (dict, list)) or rng.random() < 0.3:
                match rng.randrange(4):
                    case 0:
                        del value[key]
                    case 1 if isinstance(value, dict):
                        value[self._key()] = self._json(2)
                    case _:
                        value[key] = self._json(2)
                return
            value = value[key]

    def _corrupted(self, content: bytes) -> bytes:
        rng = self._random
        data = bytearray(content or b"\x00")
        for _ in range(rng.choice((1, 3))):
            place = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    data[place:place] = rng.randbytes(3)
                case _:
                    del data[max(1, place) :]
        return bytes(data)

    def _fill(self, message: Message, probability: float, depth: int) -> None:
        """Set some of the fields to anything that they can hold."""
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < probability:
                self._set(message, field, probability, depth)

    def _set(self, message: Message, field: FieldDescriptor, probability: float, depth: int) -> None:
        rng, kind = self._random, field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            entries = getattr(message, field.name)
            for _ in range(rng.choice((0, 1, 3))):
                key = self._scalar(kind.fields_by_name["key"])
                value = kind.fields_by_name["value"]
                if value.message_type is None:
                    entries[key] = self._scalar(value)
                elif depth:
                    self._fill(entries[key], probability, depth - 1)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(rng.choice((0, 1, 2, 2, 40, 300 if kind is None else 3))):
                if kind is None:
                    values.append(self._scalar(field))
                else:
                    self._fill(values.add(), probability, depth - 1)
        elif kind is None:
            setattr(message, field.name, self._scalar(field))
        elif depth:
            part = getattr(message, field.name)
            part.SetInParent()
            self._fill(part, max(probability, 0.2), depth - 1)

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng = self._random
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return rng.randbytes(rng.choice((0, 1, 4, 8, 16, 30)))
            case FieldDescriptor.CPPTYPE_STRING:
                return rng.choice((*TEXTS, json.dumps(rng.choice(SCHEMAS))))
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return rng.choice(FLOATS)
            case FieldDescriptor.CPPTYPE_ENUM:
                return rng.choice((*range(len(field.enum_type.values)), 77))
        low, high = {
            FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
            FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
            FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
            FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
        }[field.cpp_type]
        return min(high, max(low, rng.choice(INTEGERS)))
