"""Public messages of `EmbeddingService` -> raw requests, and vectors -> messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from triptych.errors import FieldViolation, InvalidRequest
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.submit import RequestHead
from triptych.v1 import common_pb2, embedding_pb2
from triptych_services.frontend.grpc.convert import CHAT_PATHS, to_chat, unsupported_of_chat
from triptych_services.frontend.pooled_calls import PooledText, check_num_inputs
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.scores import Passage, number_requests

_KINDS = {
    embedding_pb2.POOLING_TYPE_FIRST: PoolingKind.FIRST,
    embedding_pb2.POOLING_TYPE_LAST: PoolingKind.LAST,
    embedding_pb2.POOLING_TYPE_MEAN: PoolingKind.MEAN,
}
_PROMPT_NAMES: Mapping[int, Sequence[str]] = {
    embedding_pb2.TASK_TYPE_QUERY: ("query",),
    embedding_pb2.TASK_TYPE_DOCUMENT: ("document", "passage", "corpus"),
    embedding_pb2.TASK_TYPE_SIMILARITY: ("similarity", "sts"),
}
"""The use of vectors -> the names that checkpoints have for it, as sentence-transformers looks for them."""
_PATHS = {
    "truncate_prompt_tokens": "truncation.max_tokens",
    "request_id": "options.request_id",
    "priority": "options.priority",
    "tenant": "tenant",
    "cache_salt": "options.cache_salt",
    "deadline_s": "the call's deadline",
}
_INT8_SCALE = 127
"""A component of a vector of length 1 is within -1..1."""

_AnyRequest = (
    embedding_pb2.EmbedRequest
    | embedding_pb2.ClassifyRequest
    | embedding_pb2.ScoreRequest
    | embedding_pb2.RerankRequest
)


def base_request(request: _AnyRequest, deadline_s: float | None) -> RawRequest:
    """Return the request without its prompt.

    Raises:
        InvalidRequest: The side of the truncation is not known.
    """
    options = request.options
    truncation = request.truncation if request.HasField("truncation") else None
    if truncation is not None and truncation.side not in common_pb2.TruncationSide.values():
        raise InvalidRequest("truncation.side", f"{truncation.side} is none of 0..2")
    return RawRequest(
        api="grpc",
        prompt=None,
        head=RequestHead(options.request_id, options.priority, options.tenant, options.cache_salt),
        model=request.model,
        truncate_prompt_tokens=None if truncation is None else truncation.max_tokens,
        keeps_beginning=truncation is not None and truncation.side == common_pb2.TRUNCATION_SIDE_RIGHT,
        deadline_s=deadline_s,
        paths=_PATHS,
    )


def pooling_params(request: embedding_pb2.EmbedRequest) -> PoolingParams:
    """Return how inputs become vectors.

    Raises:
        InvalidRequest: Everything in the fields that is no value of theirs.
    """
    violations = [
        FieldViolation(name, f"{value} is none of 0..{len(kind.values()) - 1}")
        for name, value, kind in (
            ("task_type", request.task_type, embedding_pb2.TaskType),
            ("pooling", request.pooling, embedding_pb2.PoolingType),
            ("encoding", request.encoding, embedding_pb2.EmbeddingEncoding),
        )
        if value not in kind.values()
    ]
    if request.HasField("dimensions") and request.dimensions < 1:
        violations.append(FieldViolation("dimensions", "0 is below the limit 1", "0", "1"))
    is_of_tokens = request.pooling == embedding_pb2.POOLING_TYPE_ALL
    plain = (embedding_pb2.EMBEDDING_ENCODING_UNSPECIFIED, embedding_pb2.EMBEDDING_ENCODING_FLOAT)
    if is_of_tokens and request.encoding not in plain:
        violations.append(FieldViolation("encoding", "vectors of all tokens are written as floats only"))
    if violations:
        raise InvalidRequest(violations)
    return PoolingParams(
        Task.TOKEN_EMBED if is_of_tokens else Task.EMBED,
        kind=_KINDS.get(request.pooling),
        normalize=request.normalize if request.HasField("normalize") else None,
        dimensions=request.dimensions,
    )


def prompt_name_of(task_type: int, prompts: Mapping[str, str]) -> str:
    """Return the checkpoint's name of the text that precedes such inputs; empty if it has none."""
    return next((name for name in _PROMPT_NAMES.get(task_type, ()) if name in prompts), "")


def input_requests(
    base: RawRequest,
    pooling: PoolingParams,
    inputs: Sequence[embedding_pb2.EmbeddingInput],
    prompt_name: str,
) -> list[RawRequest]:
    """Return one raw request for each input, in their order.

    Raises:
        InvalidRequest: There are none, or too many, or what is wrong with how they are written.
    """
    check_num_inputs(len(inputs), "inputs")
    base = replace(base, prompt_name=prompt_name)
    raws = number_requests(base, pooling, [(None, f"inputs[{place}]") for place in range(len(inputs))])
    return [_with_input(raw, each) for raw, each in zip(raws, inputs, strict=True)]


def _with_input(raw: RawRequest, given: embedding_pb2.EmbeddingInput) -> RawRequest:
    """Return a request with its prompt; what only this API can see to be wrong is noted in it."""
    path, kind = raw.path("prompt"), given.WhichOneof("input")
    match kind:
        case "text":
            text, paths = given.text, {**raw.paths, "prompt": f"{path}.text.text"}
            adds_special = text.add_special_tokens if text.HasField("add_special_tokens") else None
            return replace(raw, prompt=text.text, paths=paths, add_special_tokens=adds_special)
        case "token_ids":
            return replace(
                raw, prompt=given.token_ids.ids, paths={**raw.paths, "prompt": f"{path}.token_ids.ids"}
            )
        case "chat":
            chat, violations = to_chat(given.chat)
            inner = {
                name: f"{path}.{each}" if each.startswith("chat") else each
                for name, each in CHAT_PATHS.items()
            }
            return replace(
                raw,
                prompt=chat,
                paths={**raw.paths, **inner, "prompt": f"{path}.chat.messages"},
                violations=tuple(replace(each, field=f"{path}.{each.field}") for each in violations),
                unsupported=tuple(f"{path}.{each}" for each in unsupported_of_chat(given.chat)),
            )
        case _:
            return raw


def to_passages(texts: Sequence[str], path: str, *, is_list: bool = True) -> list[Passage]:
    """Return texts with their paths."""
    return [Passage(text, f"{path}[{place}]" if is_list else path) for place, text in enumerate(texts)]


def write_embedding(text: PooledText, encoding: int, *, is_of_tokens: bool) -> embedding_pb2.Embedding:
    """Return the message of the vectors of one input."""
    embedding, vectors = embedding_pb2.Embedding(num_tokens=text.num_tokens), text.vectors
    if is_of_tokens:
        embedding.token_vectors.num_columns = vectors.shape[1]
        embedding.token_vectors.values.extend(vectors.reshape(-1).tolist())
        return embedding
    match encoding:
        case embedding_pb2.EMBEDDING_ENCODING_FLOAT32_BYTES:
            embedding.packed = vectors[0].astype("<f4").tobytes()
        case embedding_pb2.EMBEDDING_ENCODING_INT8:
            scaled = np.rint(vectors[0] * np.float32(_INT8_SCALE))
            embedding.packed = np.clip(scaled, -_INT8_SCALE, _INT8_SCALE).astype(np.int8).tobytes()
        case embedding_pb2.EMBEDDING_ENCODING_BINARY:
            embedding.packed = np.packbits(vectors[0] > 0).tobytes()
        case _:
            embedding.floats.values.extend(vectors[0].tolist())
    return embedding
