"""Hypothesis strategies for every type that crosses the wire, made from its annotations and its message.

A field that is added to a class and its message is drawn without a line here. Written out are only classes with fields
that depend on each other, in `CONSTRAINED`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any, get_args, get_origin

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from triptych.internal.v1 import engine_core_pb2, kv_transfer_pb2, step_pb2, worker_pb2
from triptych.rpc.session.handshake import Agreement, Protocol, SessionTerms
from triptych.types.events import (
    AdmittedEvent,
    DeltaEvent,
    FinishedEvent,
    PromptLogprobsEvent,
    ResumableEvent,
)
from triptych.types.facts import ModelFacts, WorkerFacts
from triptych.types.kv_transfer import KvExport, KvOrders, KvProgress, KvPull
from triptych.types.logprobs import Logprob, TokenLogprobs
from triptych.types.output_limits import RepetitionDetection, ThinkingBudget
from triptych.types.outputs import CacheNews, FinishedRequest, FinishReason, OutputBatch, StageTimings, Usage
from triptych.types.pooling import PoolingParams, Task
from triptych.types.row_key import RowKey
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind, SamplingField, SamplingParams
from triptych.types.step import (
    F32,
    U32,
    U64,
    LogprobColumns,
    NewRow,
    PromptLogprobs,
    RequestGuesses,
    RowContent,
    RowError,
    StepPlan,
    StepResult,
    VerifiedGuesses,
)
from triptych.types.structured import compiled
from triptych.types.submit import AttachRequest, EngineWelcome, SubmitRequest
from triptych.wire.codec import fields_of, is_record, split_optional, width_of

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
logprob_values = st.floats(width=32, allow_nan=False, max_value=0.0)  # -inf is a token that was masked
words = st.text(st.characters(codec="utf-8"), max_size=12)

CONSTRAINED: dict[type, Callable[[], st.SearchStrategy]] = {}
"""Class with fields that depend on each other -> its strategy. Filled below."""
_SCALARS = {
    FieldDescriptor.TYPE_UINT32: u32,
    FieldDescriptor.TYPE_UINT64: u64,
    FieldDescriptor.TYPE_INT32: i32,
    FieldDescriptor.TYPE_SINT32: i32,
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: words,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=16),
}
_DTYPES = {U32: (np.uint32, u32), U64: (np.uint64, u64), F32: (np.float32, logprob_values)}


def column(kind: Any, length: int | None = None) -> st.SearchStrategy:
    dtype, values = _DTYPES[kind]
    lengths = {"max_size": 6} if length is None else {"min_size": length, "max_size": length}
    return st.lists(values, **lengths).map(lambda drawn: np.array(drawn, dtype=dtype))


def u32_column(length: int | None = None) -> st.SearchStrategy:
    return column(U32, length)


def build(cls: type, message: Any = None, **given: st.SearchStrategy) -> st.SearchStrategy:
    """`cls` with every field drawn: what its message may hold, or what is given."""
    descriptor = getattr(message, "DESCRIPTOR", message)
    annotations = fields_of(cls)
    assert given.keys() <= annotations.keys(), f"{cls.__name__} has no {given.keys() - annotations.keys()}"
    drawn = {
        name: _field_of(cls, name, kind, descriptor)
        for name, kind in annotations.items()
        if name not in given
    }
    return st.builds(cls, **drawn, **given)


def _field_of(cls: type, name: str, annotation: Any, descriptor: Descriptor | None) -> st.SearchStrategy:
    field = descriptor.fields_by_name.get(name) if descriptor is not None else None
    strategy = _values_of(annotation, field, descriptor)
    assert strategy is not None, f"{cls.__name__}.{name}: give a strategy, or a message that has the field"
    return strategy


def _values_of(annotation: Any, field: Any, descriptor: Any) -> st.SearchStrategy | None:
    inner, is_optional = split_optional(annotation)
    if is_optional:
        values = _values_of(inner, field, descriptor)
        return None if values is None else st.none() | values
    if inner in CONSTRAINED:
        return CONSTRAINED[inner]()
    if inner in _DTYPES:
        return column(inner)
    if (width := width_of(inner)) is not None:
        name = st.binary(min_size=width.num_bytes, max_size=width.num_bytes)
        return st.just(b"") | name if width.may_be_empty else name
    if get_origin(inner) is tuple:
        values = _values_of(get_args(inner)[0], field, descriptor)
        values = u32 if get_args(inner)[0] is int else values
        return None if values is None else st.lists(values, max_size=3).map(tuple)
    if isinstance(inner, type) and issubclass(inner, Enum):
        return st.sampled_from(inner)
    if is_record(inner):  # its own message, or fields of this one
        return build(inner, field.message_type if field is not None else descriptor)
    return None if field is None else _SCALARS.get(field.type)


def sampling_values(name: str, spec: SamplingField) -> st.SearchStrategy:
    """Values of a sampling field, as they travel between the tiers."""
    low, high = spec.low, spec.high
    kinds = {
        FieldKind.NUMBER: lambda: st.floats(low, high, exclude_min=spec.excludes_low, width=32),
        FieldKind.INTEGER: lambda: (
            st.integers(int(low), int(high)) | st.sampled_from([*spec.unsupported_values, int(low)])
        ),
        FieldKind.BOOLEAN: st.booleans,
        FieldKind.STRINGS: lambda: st.lists(words, max_size=3).map(tuple),
        FieldKind.TOKEN_IDS: lambda: st.lists(u32, max_size=8).map(tuple),
        FieldKind.WORDS: lambda: st.lists(st.lists(u32, min_size=1, max_size=3).map(tuple), max_size=3).map(
            tuple
        ),
        FieldKind.BIASES: lambda: st.dictionaries(u32, f32, max_size=3).map(
            lambda given: tuple(sorted(given.items()))
        ),
        FieldKind.THINKING: lambda: build(ThinkingBudget, sampling_message("ThinkingBudget")),
        FieldKind.REPETITION: lambda: build(RepetitionDetection, sampling_message("RepetitionDetection")),
        FieldKind.STRUCTURED: lambda: words.filter(bool).map(compiled),
        FieldKind.OUTPUT_KIND: lambda: st.just(spec.default),  # stays in the frontend
    }
    values = kinds[spec.kind]()
    return st.none() | values if spec.default is None or name == "max_tokens" else values


def sampling_message(name: str) -> Descriptor:
    return step_pb2.RowContent.DESCRIPTOR.fields_by_name["sampling"].message_type.file.message_types_by_name[
        name
    ]


sampling = st.builds(
    SamplingParams, **{name: sampling_values(name, spec) for name, spec in SAMPLING_FIELDS.items()}
)

timings = st.builds(
    StageTimings,
    queued_ns=u64,
    prefill_ns=u64,
    decode_ns=u64,
    num_accepted_guesses=u32,
    num_rejected_guesses=u32,
)
usage = st.builds(
    Usage, num_prompt_tokens=u32, num_output_tokens=u32, num_cached_tokens=u32, num_reasoning_tokens=u32
)
public_logprob = st.builds(Logprob.of_bytes, u32, logprob_values, st.binary(max_size=3), st.just(0))


@st.composite
def public_logprobs(draw: Any) -> tuple[TokenLogprobs, ...]:
    """As clients see them: all of one answer have as many rivals, which are ranked from 1."""
    num_top = draw(st.integers(0, 3))
    return tuple(
        TokenLogprobs.of(
            dataclasses.replace(draw(public_logprob), rank=draw(u32)),
            tuple(dataclasses.replace(draw(public_logprob), rank=rank) for rank in range(1, num_top + 1)),
        )
        for _ in range(draw(st.integers(0, 3)))
    )


@st.composite
def prompt_logprobs(draw: Any) -> PromptLogprobs:
    num_positions, num_candidates = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    num_entries = num_positions * num_candidates
    values = draw(st.lists(logprob_values, min_size=num_entries, max_size=num_entries))
    shape = num_positions, num_candidates
    return PromptLogprobs(
        first_position=draw(u32),
        token_ids=draw(u32_column(num_entries)).reshape(shape),
        logprobs=np.array(values, dtype=np.float32).reshape(shape),
        ranks=draw(u32_column(num_positions)),
    )


@st.composite
def prompt_logprobs_events(draw: Any) -> PromptLogprobsEvent:
    part = draw(prompt_logprobs())
    num_entries = part.token_ids.size
    token_bytes = draw(st.lists(st.binary(max_size=3), min_size=num_entries, max_size=num_entries))
    return PromptLogprobsEvent(part, token_bytes, draw(st.binary(max_size=3)))


@st.composite
def delta_events(draw: Any) -> DeltaEvent:
    finish_reason = draw(
        st.none() | st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
    )
    stop_reason = draw(st.none() | u32 | words.filter(bool)) if finish_reason is FinishReason.STOP else None
    token_ids = draw(st.lists(u32, max_size=5))
    return DeltaEvent(draw(u32), draw(words), token_ids, draw(public_logprobs()), finish_reason, stop_reason)


events = st.one_of(
    prompt_logprobs_events(),
    build(
        AdmittedEvent,
        request_id=words,
        model=words,
        seed=u64,
        prompt_token_ids=st.lists(u32, max_size=5),
        is_limited_by_context=st.just(False),  # is told with the end
        index=st.just(0),  # a stream has one prompt
        fingerprint=st.just(""),  # GetModel tells it
        resume_token=words,
        not_enforced=st.lists(words, max_size=3).map(tuple),
    ),
    build(ResumableEvent, resume_token=words),
    delta_events(),
    build(
        FinishedEvent,
        usage=usage,
        timings=timings,
        tokenize_ns=u64,
        num_moves=st.just(0),
        is_exact=st.just(True),
    ),
    build(
        FinishedEvent,
        usage=usage,
        timings=timings,
        tokenize_ns=u64,
        num_moves=st.integers(1, 9),
        is_exact=st.booleans(),
    ),
)


@st.composite
def logprob_columns(draw: Any) -> LogprobColumns:
    counts = draw(st.lists(st.integers(0, 4), max_size=4))
    num_entries = sum(counts)
    values = draw(st.lists(logprob_values, min_size=num_entries, max_size=num_entries))
    return LogprobColumns(
        rows=draw(u32_column(len(counts))),
        offsets=np.array([0, *np.cumsum(counts)], dtype=np.uint32),
        token_ids=draw(u32_column(num_entries)),
        logprobs=np.array(values, dtype=np.float32),
        ranks=draw(u32_column(len(counts))),
    )


@st.composite
def verified_guesses(draw: Any) -> VerifiedGuesses:
    num_places, num_rows = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    columns = (draw(u32_column(size)) for size in (num_places, num_places, num_rows, num_rows))
    return VerifiedGuesses(draw(st.sampled_from(["ngram", "suffix"])), *columns)


@st.composite
def request_guesses(draw: Any) -> RequestGuesses:
    num_requests = draw(st.integers(0, 3))
    return RequestGuesses(*(draw(u32_column(num_requests)) for _ in range(3)))


def row_contents() -> st.SearchStrategy:
    return build(RowContent, step_pb2.RowContent)


def new_rows() -> st.SearchStrategy:
    return build(NewRow, step_pb2.NewRow, content=row_contents())


@st.composite
def plans(draw: Any) -> StepPlan:
    num_chunks, num_blocks, num_samples, num_pages = (draw(st.integers(0, 4)) for _ in range(4))
    return draw(
        build(
            StepPlan,
            step_pb2.Step,
            new_rows=st.lists(new_rows(), max_size=2).map(tuple),
            chunk_slots=u32_column(num_chunks),
            chunk_lengths=u32_column(num_chunks),
            block_slots=u32_column(num_blocks),
            block_ids=u32_column(num_blocks),
            block_groups=u32_column(draw(st.sampled_from([0, num_blocks]))),
            state_slots=u32_column(num_pages),
            state_pages=u32_column(num_pages),
            sample_slots=u32_column(num_samples),
            sample_limits=u32_column(num_samples),
        )
    )


row_keys = st.builds(RowKey, u32, u32)


def pooling_params() -> st.SearchStrategy:
    return build(
        PoolingParams,
        step_pb2.PoolingParams,
        task=st.sampled_from([task for task in Task if task is not Task.GENERATE]),
    )


@st.composite
def vectors(draw: Any) -> np.ndarray:
    num_vectors, num_columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    values = draw(st.lists(f32, min_size=num_vectors * num_columns, max_size=num_vectors * num_columns))
    return np.array(values, np.float32).reshape(num_vectors, num_columns)


def model_facts() -> st.SearchStrategy:
    tasks = st.lists(words.filter(bool), min_size=1, max_size=3).map(tuple)
    return build(ModelFacts, worker_pb2.ModelFacts, tasks=tasks)


@st.composite
def results(draw: Any) -> StepResult:
    counts = draw(st.lists(st.integers(0, 3), max_size=4))
    return draw(
        build(
            StepResult,
            step_pb2.Result,
            token_ids=u32_column(sum(counts)) if counts else u32_column(),
            token_counts=st.just(np.array(counts, dtype=np.uint32)),
            prompt_logprobs=st.dictionaries(row_keys, prompt_logprobs(), max_size=2),
            row_errors=st.dictionaries(row_keys, build(RowError, step_pb2.RowError), max_size=2),
            vectors=st.dictionaries(row_keys, vectors(), max_size=2),
        )
    )


@st.composite
def blocks_of(draw: Any, cls: type, message: Any) -> KvExport | KvPull:
    """KV blocks and pages with a hash each."""
    part = draw(build(cls, message))
    hashes = draw(
        st.lists(st.binary(min_size=16, max_size=16), min_size=len(part.places), max_size=len(part.places))
    )
    return dataclasses.replace(part, hashes=tuple(hashes))


def worker_facts() -> st.SearchStrategy:
    return build(WorkerFacts, worker_pb2.WorkerFacts, num_stages=st.integers(1, 2**32 - 1))


@st.composite
def submits(draw: Any) -> SubmitRequest:
    num_choices = draw(st.integers(1, 3))
    return draw(
        build(
            SubmitRequest,
            engine_core_pb2.Submit,
            numbers=u32_column(num_choices),
            seeds=column(U64, num_choices),
            emitted=st.just(()) | st.tuples(*[u32_column()] * num_choices),
            cached_tokens=st.just(()) | st.tuples(*[st.none() | st.integers(0, 2**32 - 2)] * num_choices),
        )
    )


@st.composite
def attach_requests(draw: Any) -> AttachRequest:
    num_choices = draw(st.integers(1, 4))
    return draw(
        build(
            AttachRequest,
            engine_core_pb2.Attach,
            first_number=st.integers(1, 1 << 31),
            num_choices=st.just(num_choices),
            seen=st.dictionaries(st.integers(0, num_choices - 1), st.integers(1, 1 << 31)),
        )
    )


EVERYTHING = Protocol("client", "server", version=7, features=(1 << 64) - 1)
session_terms = st.builds(
    SessionTerms,
    name=words,
    is_resumed=st.booleans(),
    last_received=u64,
    resume_ttl_s=st.integers(0, 10**9).map(lambda ms: ms / 1000),
    agreement=st.builds(Agreement, st.just(EVERYTHING.version), u64),
)
hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(b"".join)
cache_news = st.builds(CacheNews, is_cleared=st.booleans(), stored=hashes, evicted=hashes).filter(
    lambda news: news != CacheNews()  # sent or not, an empty change is none
)


@st.composite
def output_batches(draw: Any) -> OutputBatch:
    num_requests, num_first = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    counts = draw(
        st.just([]) | st.lists(st.integers(1, 3), min_size=num_requests, max_size=num_requests),
    )
    finished = st.builds(
        FinishedRequest,
        number=u32,
        reason=st.sampled_from(FinishReason),
        stop_token_id=st.none() | st.integers(0, 2**32 - 2),
        num_cached_tokens=u32,
        timings=timings,
    )
    return draw(
        build(
            OutputBatch,
            engine_core_pb2.OutputBatch,
            numbers=u32_column(num_requests),
            token_counts=st.just(np.array(counts, dtype=np.uint32)),
            token_ids=u32_column(sum(counts) if counts else num_requests),
            first_numbers=u32_column(num_first),
            first_cached_tokens=u32_column(num_first),
            cache=st.none() | cache_news,
            finished=st.lists(finished, max_size=3).map(tuple),
            vectors=st.dictionaries(u32, vectors(), max_size=2),
        )
    )


def welcomes() -> st.SearchStrategy:
    return build(EngineWelcome, engine_core_pb2.ConnectWelcome)


CONSTRAINED |= {
    SamplingParams: lambda: sampling,
    LogprobColumns: logprob_columns,
    PromptLogprobs: prompt_logprobs,
    RequestGuesses: request_guesses,
    VerifiedGuesses: verified_guesses,
    StepPlan: plans,
    StepResult: results,
    KvExport: lambda: blocks_of(KvExport, kv_transfer_pb2.KvExport),
    KvPull: lambda: blocks_of(KvPull, kv_transfer_pb2.KvPull),
    PoolingParams: pooling_params,
    ModelFacts: model_facts,
    WorkerFacts: worker_facts,
    SubmitRequest: submits,
    AttachRequest: attach_requests,
    OutputBatch: output_batches,
}


def orders() -> st.SearchStrategy:
    return build(KvOrders, kv_transfer_pb2.KvOrders)


def progress() -> st.SearchStrategy:
    return build(KvProgress, kv_transfer_pb2.KvProgress)
