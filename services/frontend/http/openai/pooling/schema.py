"""Bodies of requests for vectors, scores and classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from triptych_services.frontend.http.body import Body, JsonObject, ignored, must_be, not_served
from triptych_services.frontend.http.fields import (
    FirstOnly,
    Integral,
    Text,
    TokenIds,
    TruncatedLength,
    document_as,
    schema,
)
from triptych_services.frontend.pooled_calls import MAX_INPUTS
from triptych_services.frontend.requests.parse import MAX_LABEL_BYTES, MAX_REQUEST_ID_BYTES


class PooledBody(Body):
    """Fields that all requests for vectors, scores and classes have in common."""

    model: str | None = None
    """Name of the model; null: the one served."""
    truncate_prompt_tokens: TruncatedLength | None = None
    """Keep only so many tokens of each text, -1: as many as the model takes. Of two texts that are compared, the longer
    one is cut. Null: refuse what is too long."""
    truncation_side: Literal["left", "right"] | None = None
    """The side on which truncate_prompt_tokens cuts. Null: right."""
    request_id: Annotated[str, schema(pattern=f"^[ -~]{{1,{MAX_REQUEST_ID_BYTES}}}$")] | None = None
    """Name of the request in logs. Null: the X-Request-Id."""
    priority: Annotated[int, Integral, schema(minimum=-(1 << 31), maximum=(1 << 31) - 1)] | None = None
    """Lower runs first. Null: 0."""
    tenant: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """Tenant, at most 256 bytes. With an API key, the key decides. Null: `user`."""
    user: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """OpenAI's name of the end user, at most 256 bytes: the tenant where none is given."""
    cache_salt: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """Prefixes are shared only between requests of equal salt."""

    mm_processor_kwargs: Any = not_served()
    chat_template: Any = not_served()


_Ids = Annotated[TokenIds, schema(minItems=1)]
_Texts = Annotated[list[Text], FirstOnly(), schema(minItems=1, maxItems=MAX_INPUTS)]
_INPUTS = "a string, a list of token ids, or a list of strings or of lists of token ids"
Inputs = Annotated[
    Text | _Texts | _Ids | Annotated[list[_Ids], FirstOnly(), schema(minItems=1, maxItems=MAX_INPUTS)] | None,
    must_be(_INPUTS),
]


class InputsBody(PooledBody):
    """Fields of requests with inputs of one kind."""

    model_config = document_as("input")

    input: Inputs = None
    """At least one token each, at most 2,048 inputs."""
    add_special_tokens: bool | None = None
    """Begin and end each text as the model's inputs do. Null: true."""
    prompt_name: str | None = None
    """Name of the checkpoint's text that precedes each input: query, document. Null: its default, or none."""


class EmbeddingRequest(InputsBody):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    """How vectors are written: as numbers, or as the base64 of little-endian float32. Null: float."""
    dimensions: Annotated[int, Integral, schema(minimum=1)] | None = None
    """Numbers of each vector to keep, the first ones, scaled after that. Null: all."""
    normalize: bool | None = None
    """Scale vectors to length 1. Null: as the model has it."""
    messages: Any = not_served()
    input_type: Any = ignored()


class PoolingRequest(InputsBody):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "classify"] | None = None
    """One vector, one for each token, or one number for each label. Null: embed, or classify where the model does not
    embed."""
    encoding_format: Literal["float", "base64"] | None = None
    """As in /v1/embeddings."""
    dimensions: Annotated[int, Integral, schema(minimum=1)] | None = None
    """As in /v1/embeddings."""
    normalize: bool | None = None
    """As in /v1/embeddings."""
    activation: bool | None = None
    """Return probabilities of a classifier, not what it computes. Null: as the model has it."""


class ClassificationRequest(InputsBody):
    """POST /classify."""

    activation: bool | None = None
    """Return probabilities, not what the classifier computes. Null: as the model has it."""


class Document(JsonObject):
    """A document as Jina's clients write it."""

    text: Text
    """The text."""


_DocumentTexts = Annotated[list[Text | Document], FirstOnly(), schema(minItems=1, maxItems=MAX_INPUTS)]


class RerankRequest(PooledBody):
    """POST /v1/rerank, /v2/rerank and /rerank."""

    model_config = document_as("query", "documents")

    query: Text | None = None
    """The text that documents are to fit."""
    documents: Annotated[_DocumentTexts | None, must_be("a list of strings or of objects with `text`")] = None
    """At least one, at most 2,048."""
    top_n: Annotated[int, Integral, schema(minimum=0)] | None = None
    """Documents to return, the best ones. Null and 0: all."""
    return_documents: bool | None = None
    """Send the texts as well. Null: true."""
    activation: bool | None = None
    """As in /score."""
    max_tokens_per_doc: Any = not_served()
    rank_fields: Any = not_served()
    max_chunks_per_doc: Any = not_served()


_Side = Annotated[Text | _Texts | None, must_be("a string or a list of strings")]


def _given(*names: str) -> dict[str, Any]:
    """Say in the document that these fields are given, and not as null."""
    return {"required": list(names), "properties": {name: {"not": {"enum": [None]}} for name in names}}


class ScoreRequest(PooledBody):
    """POST /score and /v1/score: `queries` and `documents`, or, as older clients name them, text_1 and text_2."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [_given("queries", "documents"), _given("text_1", "text_2")]}
    )

    queries: _Side = None
    """One, for all documents, or one for each document."""
    documents: _Side = None
    """At most 2,048."""
    text_1: _Side = None
    """The older name of queries."""
    text_2: _Side = None
    """The older name of documents."""
    activation: bool | None = None
    """Return what a classifier's activation makes of its number. Null: as the model has it."""
