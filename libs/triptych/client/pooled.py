"""Vectors, scores and classes of texts, over EmbeddingService: a call's inputs go in pieces, several at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from triptych.client.conversation import fill_messages
from triptych.client.dialer import Dialer
from triptych.client.prompts import AnyPrompts, ParsedPrompt, parse_prompts
from triptych.errors import InvalidRequest, QueueFull
from triptych.types.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledRequestOutput,
    PoolingOutput,
    ScoringOutput,
)
from triptych.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc

_T = TypeVar("_T")
_PIECE = 64
"""Inputs of one message: as many as fill a step of a small model, and vectors of 1 MB at most."""
_MAX_PIECES = 8  # in flight
_PATIENCE_S = 120.0  # for which a server that is full is asked again


@dataclass(frozen=True, slots=True)
class PooledOptions:
    """How a call is run."""

    model: str = ""
    truncate_prompt_tokens: int | None = None
    """Tokens of each text to keep, the first ones. None: what is too long is refused."""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None
    """Seconds for each message of a call."""
    adapter: str = ""
    """Name of a LoRA adapter, which these calls take in place of the model's."""

    def fields(self) -> dict[str, Any]:
        """Return the fields that all messages have.

        Raises:
            InvalidRequest: A value does not fit into a message.
        """
        try:
            options = embedding_pb2.PoolingCallOptions(
                priority=self.priority, tenant=self.tenant, cache_salt=self.cache_salt
            )
            fields: dict[str, Any] = {"model": self.adapter or self.model, "options": options}
            if self.truncate_prompt_tokens is not None:
                fields["truncation"] = common_pb2.Truncation(
                    max_tokens=self.truncate_prompt_tokens, side=common_pb2.TRUNCATION_SIDE_RIGHT
                )
        except (TypeError, ValueError) as error:
            raise InvalidRequest("options", f"a value cannot be sent: {error}") from None
        return fields


class PooledCalls:
    """The calls of EmbeddingService. Made by a `GenerationClient`, for use on its event loop."""

    def __init__(
        self, dialer: Dialer, ask: Callable[[Callable[[], Awaitable[Any]]], Coroutine[Any, Any, Any]]
    ) -> None:
        """`ask`: Makes a call, again where a frontend does not answer."""
        self._dialer = dialer
        self._ask = ask

    async def embed(
        self,
        prompts: AnyPrompts,
        options: PooledOptions,
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> list[PooledRequestOutput[EmbeddingOutput]]:
        """Return one vector for each text, token ids or conversation."""
        answers = await self._embed(
            prompts,
            options,
            normalize=normalize,
            dimensions=dimensions,
            encoding=embedding_pb2.EMBEDDING_ENCODING_FLOAT32_BYTES,
        )
        return [
            PooledRequestOutput(EmbeddingOutput(np.frombuffer(each.packed, "<f4").tolist()), each.num_tokens)
            for each in answers
        ]

    async def encode(
        self, prompts: AnyPrompts, options: PooledOptions, *, normalize: bool | None = None
    ) -> list[PooledRequestOutput[PoolingOutput]]:
        """Return the vectors of all tokens of each input."""
        answers = await self._embed(
            prompts, options, piece=1, normalize=normalize, pooling=embedding_pb2.POOLING_TYPE_ALL
        )
        return [
            PooledRequestOutput(PoolingOutput(_to_matrix(each.token_vectors)), each.num_tokens)
            for each in answers
        ]

    async def classify(
        self, prompts: AnyPrompts, options: PooledOptions, *, activation: bool | None = None
    ) -> list[PooledRequestOutput[ClassificationOutput]]:
        """Return one number for each label, for each input."""
        fields, inputs = options.fields(), _to_inputs(parse_prompts(prompts))
        if activation is not None:
            fields["raw_scores"] = not activation

        async def send(part: Sequence[embedding_pb2.EmbeddingInput]) -> list[Any]:
            request = embedding_pb2.ClassifyRequest(inputs=part, **fields)
            answer = await self._ask(lambda: self._stub.Classify(request, timeout=options.timeout_s))
            labels = tuple(answer.labels)
            return [
                PooledRequestOutput(ClassificationOutput(list(each.scores), labels), each.num_tokens)
                for each in answer.classifications
            ]

        return await _in_pieces(inputs, send, _PIECE)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        options: PooledOptions,
        *,
        activation: bool | None = None,
    ) -> list[PooledRequestOutput[ScoringOutput]]:
        """Return how well each document fits the query, or its own one where there are several."""
        fields = options.fields()
        firsts = [queries] if isinstance(queries, str) else list(queries)
        seconds = [documents] if isinstance(documents, str) else list(documents)
        if len(firsts) not in (1, len(seconds)):
            why = f"{len(firsts)} texts are neither 1 nor as many as the {len(seconds)} documents"
            raise InvalidRequest("queries", why)
        pairs = [(firsts[0] if len(firsts) == 1 else firsts[i], text) for i, text in enumerate(seconds)]
        if activation is not None:
            fields["raw_scores"] = not activation

        async def send(part: Sequence[tuple[str, str]]) -> list[Any]:
            try:
                request = embedding_pb2.ScoreRequest(
                    queries=[first for first, _ in part],
                    documents=[second for _, second in part],
                    **fields,
                )
            except (TypeError, ValueError) as error:
                raise InvalidRequest("documents", f"a value cannot be sent: {error}") from None
            answer = await self._ask(lambda: self._stub.Score(request, timeout=options.timeout_s))
            return [PooledRequestOutput(ScoringOutput(value)) for value in answer.scores]

        return await _in_pieces(pairs, send, _PIECE)

    @property
    def _stub(self) -> embedding_pb2_grpc.EmbeddingServiceStub:
        return self._dialer.stub(embedding_pb2_grpc.EmbeddingServiceStub)

    async def _embed(
        self, prompts: AnyPrompts, options: PooledOptions, *, piece: int = _PIECE, **given: Any
    ) -> list[embedding_pb2.Embedding]:
        fields, inputs = options.fields(), _to_inputs(parse_prompts(prompts))

        async def send(part: Sequence[embedding_pb2.EmbeddingInput]) -> list[embedding_pb2.Embedding]:
            try:
                request = embedding_pb2.EmbedRequest(inputs=part, **given, **fields)
            except (TypeError, ValueError) as error:
                raise InvalidRequest("dimensions", f"a value cannot be sent: {error}") from None
            answer = await self._ask(lambda: self._stub.Embed(request, timeout=options.timeout_s))
            return list(answer.embeddings)

        return await _in_pieces(inputs, send, piece)


async def _in_pieces(
    inputs: Sequence[Any], send: Callable[[Sequence[Any]], Awaitable[list[_T]]], piece: int
) -> list[_T]:
    """Send inputs in pieces, several at a time, and return the answers in their order. The first error ends all."""
    places = asyncio.Semaphore(_MAX_PIECES)

    async def run(part: Sequence[Any]) -> list[_T]:
        async with places:
            until = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    return await send(part)
                except QueueFull as error:
                    if time.monotonic() + error.retry_after_s > until:
                        raise
                    await asyncio.sleep(error.retry_after_s)

    parts = [inputs[start : start + piece] for start in range(0, len(inputs), piece)]
    tasks = [asyncio.create_task(run(part)) for part in parts]
    try:
        return [answer for answers in await asyncio.gather(*tasks) for answer in answers]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _to_inputs(prompts: Sequence[ParsedPrompt]) -> list[embedding_pb2.EmbeddingInput]:
    """Return the messages of inputs.

    Raises:
        InvalidRequest: A value does not fit into one; names it.
    """
    inputs = []
    for place, prompt in enumerate(prompts):
        message, content = embedding_pb2.EmbeddingInput(), prompt.content
        where = f"prompts[{place}]"
        try:
            if isinstance(content, str):
                message.text.text = content
            elif content and not isinstance(content[0], int):
                fill_messages(message.chat, content, where)  # type: ignore[arg-type] # the other kind of list
            else:
                message.token_ids.ids.extend(content)  # type: ignore[arg-type] # as above
                message.token_ids.SetInParent()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(where, f"a value cannot be sent: {error}") from None
        inputs.append(message)
    return inputs


def _to_matrix(vectors: embedding_pb2.TokenVectors) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(vectors.values, np.float32).reshape(-1, vectors.num_columns)


class PooledMethods:
    """The methods of `LLM` that return vectors, scores and classes."""

    def _pool(self, call: Callable[[PooledCalls], Coroutine[Any, Any, _T]]) -> _T:
        raise NotImplementedError

    def _pooled_options(self, **given: Any) -> PooledOptions:
        raise NotImplementedError

    def embed(
        self,
        prompts: AnyPrompts,
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        adapter: str = "",
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> list[PooledRequestOutput[EmbeddingOutput]]:
        """Return one vector for each prompt, in their order.

        Args:
            prompts: as `generate` takes them.
            normalize: scale vectors to length 1. None: as the model has it.
            dimensions: numbers of each vector to keep. None: all.
            adapter: name of a LoRA adapter that is applied.
            truncate_prompt_tokens: keep only the first tokens of a prompt, this many. None: what is too long is
                refused.
            priority, tenant, cache_salt: as `generate` takes them.
            timeout_s: seconds for each message of up to 64 prompts.

        Raises:
            InvalidRequest: a prompt is refused; names it.
            FeatureDisabled: the model serves no embeddings; says what it serves.
        """
        options = self._pooled_options(
            adapter=adapter,
            truncate_prompt_tokens=truncate_prompt_tokens,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        return self._pool(
            lambda calls: calls.embed(prompts, options, normalize=normalize, dimensions=dimensions)
        )

    def encode(
        self, prompts: AnyPrompts, *, normalize: bool | None = None, **options: Any
    ) -> list[PooledRequestOutput[PoolingOutput]]:
        """Return the vectors of all tokens of each prompt. `options`: as those of `embed`."""
        given = self._pooled_options(**options)
        return self._pool(lambda calls: calls.encode(prompts, given, normalize=normalize))

    def classify(
        self, prompts: AnyPrompts, *, activation: bool | None = None, **options: Any
    ) -> list[PooledRequestOutput[ClassificationOutput]]:
        """Return one number for each label of the model, for each prompt.

        Args:
            activation: return probabilities, not what the classifier computes. None: as the model has it.
            options: as those of `embed`.
        """
        given = self._pooled_options(**options)
        return self._pool(lambda calls: calls.classify(prompts, given, activation=activation))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activation: bool | None = None,
        **options: Any,
    ) -> list[PooledRequestOutput[ScoringOutput]]:
        """Return how well each document fits the query: what a classifier with one label says of both texts, else the
        cosine of their embeddings.

        Args:
            queries: one, for all documents, or one for each.
            activation: return what a classifier's activation makes of its number. None: as the model has it.
            options: as those of `embed`.
        """
        given = self._pooled_options(**options)
        return self._pool(lambda calls: calls.score(queries, documents, given, activation=activation))
