"""Public messages of `EmbeddingService` -> raw requests, and vectors -> messages."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from triptych.errors import FieldViolation, InvalidRequest
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.submit import RequestHead
from triptych.v1 import common_pb2, embedding_pb2
from triptych_services.frontend.grpc.convert import CHAT_PATHS, to_chat, unsupported_of_chat
from triptych_services.frontend.pooled_calls import PooledText, check_num_inputs
from triptych_services.frontend.requests.inputs import Passages, PooledCall
from triptych_services.frontend.requests.raw import RawPrompt, RawRequest
from triptych_services.frontend.scores import Comparison, Pairs

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

R = TypeVar(
    "R",
    embedding_pb2.EmbedRequest,
    embedding_pb2.ClassifyRequest,
    embedding_pb2.ScoreRequest,
    embedding_pb2.RerankRequest,
)
T = TypeVar("T")


def base_request(request: R, request_id: str, deadline_s: float | None) -> RawRequest:
    """Return the request without its prompt.

    Args:
        request_id: Its id where its client gives none.

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
        head=RequestHead(
            options.request_id or request_id, options.priority, options.tenant, options.cache_salt
        ),
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


def read_bytes(
    kind: type[R],
    read: Callable[[R, str, float | None], T],
    request_id: str,
    deadline_s: float | None,
    data: bytes,
) -> T:
    """Return what a function makes of the bytes of a request, in a child process.

    Raises:
        DecodeError: The bytes are no such request.
    """
    return read(kind.FromString(data), request_id, deadline_s)


class EmbedCall(NamedTuple):
    """A call for vectors."""

    requests: PooledCall
    task_type: int
    """The use of the vectors, an `embedding_pb2.TaskType`."""
    encoding: int
    """How they are written, an `embedding_pb2.EmbeddingEncoding`."""

    @property
    def is_of_tokens(self) -> bool:
        """Whether every token has a vector."""
        pooling = self.requests.base.pooling
        return pooling is not None and pooling.task is Task.TOKEN_EMBED


def read_embed(request: embedding_pb2.EmbedRequest, request_id: str, deadline_s: float | None) -> EmbedCall:
    """Return what a request asks for.

    Args:
        request_id: Its id where its client gives none.

    Raises:
        InvalidRequest: As `pooling_params`, `base_request` and `to_call`.
    """
    pooling = pooling_params(request)
    requests = to_call(request.inputs, base_request(request, request_id, deadline_s), pooling)
    return EmbedCall(requests, request.task_type, request.encoding)


def read_classify(
    request: embedding_pb2.ClassifyRequest, request_id: str, deadline_s: float | None
) -> PooledCall:
    """Return the inputs of a request. Arguments and errors are those of `read_embed`."""
    base = base_request(request, request_id, deadline_s)
    return to_call(request.inputs, base, PoolingParams(Task.CLASSIFY, activation=_activation(request)))


def read_score(request: embedding_pb2.ScoreRequest, request_id: str, deadline_s: float | None) -> Comparison:
    """Return the pairs of a request. Arguments are those of `read_embed`.

    Raises:
        InvalidRequest: As `base_request` and `Pairs.check`.
    """
    pairs = Pairs(Passages([*request.queries], "queries"), Passages([*request.documents], "documents"))
    base = base_request(request, request_id, deadline_s)
    return Comparison(base, pairs.check(), _activation(request))


def read_rerank(
    request: embedding_pb2.RerankRequest, request_id: str, deadline_s: float | None
) -> Comparison:
    """Return the pairs of a request. Arguments are those of `read_embed`.

    Raises:
        InvalidRequest: `top_n` is 0; as `base_request` and `Pairs.check`.
    """
    base = base_request(request, request_id, deadline_s)
    if request.HasField("top_n") and request.top_n < 1:
        raise InvalidRequest("top_n", "0 is below the limit 1")
    query = Passages([request.query], "query", is_list=False)
    pairs = Pairs(query, Passages([*request.documents], "documents"))
    top_n = request.top_n if request.HasField("top_n") else None
    return Comparison(base, pairs.check(), _activation(request), top_n)


def _activation(
    request: embedding_pb2.ClassifyRequest | embedding_pb2.ScoreRequest | embedding_pb2.RerankRequest,
) -> bool | None:
    return not request.raw_scores if request.HasField("raw_scores") else None


def to_call(
    inputs: Sequence[embedding_pb2.EmbeddingInput], base: RawRequest, pooling: PoolingParams
) -> PooledCall:
    """Return one request for each input, in their order.

    Raises:
        InvalidRequest: There are none, or too many.
    """
    check_num_inputs(len(inputs), "inputs")
    prompts, paths, changes = list[RawPrompt](), list[str](), dict[int, Mapping[str, Any]]()
    for place, each in enumerate(inputs):
        prompt, path, changed = _read_input(each, f"inputs[{place}]")
        prompts.append(prompt)
        paths.append(path)
        if changed:
            changes[place] = changed
    return PooledCall(replace(base, pooling=pooling), prompts, paths, changes)


def _read_input(given: embedding_pb2.EmbeddingInput, path: str) -> tuple[RawPrompt, str, dict[str, Any]]:
    """Return a prompt, its path, and fields of its request; what only this API can see to be wrong is noted there."""
    match given.WhichOneof("input"):
        case "text":
            text = given.text
            given_special = {"add_special_tokens": text.add_special_tokens}
            has_special = text.HasField("add_special_tokens")
            return text.text, f"{path}.text.text", given_special if has_special else {}
        case "token_ids":
            return array("I", given.token_ids.ids), f"{path}.token_ids.ids", {}
        case "chat":
            chat, violations = to_chat(given.chat)
            noted = {
                "paths": {
                    name: f"{path}.{each}" if each.startswith("chat") else each
                    for name, each in CHAT_PATHS.items()
                },
                "violations": tuple(replace(each, field=f"{path}.{each.field}") for each in violations),
                "unsupported": tuple(f"{path}.{each}" for each in unsupported_of_chat(given.chat)),
            }
            return chat, f"{path}.chat.messages", noted
        case _:
            return None, path, {}


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
