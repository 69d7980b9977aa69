"""Hypothesis strategies for every type that crosses the wire, within what its declaration promises."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.wire_codecs import kv_strategies
from triptych.rpc.session.handshake import Agreement, Protocol, SessionTerms
from triptych.types.events import (
    AdmittedEvent,
    DeltaEvent,
    FinishedEvent,
    PromptLogprobsEvent,
    ResumableEvent,
)
from triptych.types.facts import EngineStatus, KvShape, ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.output_limits import RepetitionDetection, ThinkingBudget
from triptych.types.outputs import (
    CacheNews,
    EngineLoad,
    FinishedRequest,
    FinishReason,
    Logprob,
    OutputBatch,
    RequestFailure,
    RequestPromptLogprobs,
    StageTimings,
    TokenLogprobs,
    Usage,
)
from triptych.types.sampling import SAMPLING_FIELDS, SamplingParams
from triptych.types.step import (
    LogprobColumns,
    NewRow,
    PromptLogprobs,
    RowContent,
    RowError,
    RowErrorCode,
    RowKey,
    StepPlan,
    StepResult,
    StepTimings,
)
from triptych.types.structured import compiled
from triptych.types.submit import AttachRequest, EngineLimits, EngineWelcome, PrefixHash, SubmitRequest

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
logprob_values = st.floats(width=32, allow_nan=False, max_value=0.0)  # -inf is a token that was masked
words = st.text(st.characters(codec="utf-8"), max_size=12)
token_ids = st.lists(u32, max_size=8).map(tuple)


def u32_column(length: int | None = None) -> st.SearchStrategy:
    lengths = {"max_size": 6} if length is None else {"min_size": length, "max_size": length}
    return st.lists(u32, **lengths).map(lambda values: np.array(values, dtype=np.uint32))


def build(cls: type, **fields: st.SearchStrategy) -> st.SearchStrategy:
    """`cls` with every field drawn: a field added to the type and not here fails the test that uses it."""
    assert {field.name for field in dataclasses.fields(cls) if field.init} == set(fields), cls
    return st.builds(cls, **fields)


def number(name: str) -> st.SearchStrategy:
    """A sampling field's values, which are of 32 bits."""
    spec = SAMPLING_FIELDS[name]
    return st.floats(spec.low, spec.high, exclude_min=spec.excludes_low, width=32)


sampling = build(
    SamplingParams,
    n=st.integers(1, 16384),
    max_tokens=st.none() | u32,
    min_tokens=u32,
    temperature=number("temperature"),
    top_p=number("top_p"),
    top_k=st.integers(-1, 2**31 - 1),
    min_p=number("min_p"),
    presence_penalty=number("presence_penalty"),
    frequency_penalty=number("frequency_penalty"),
    repetition_penalty=number("repetition_penalty"),
    seed=st.none() | u64,
    stop=st.lists(words, max_size=3).map(tuple),
    stop_token_ids=token_ids,
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(-1, 20),
    prompt_logprobs=st.none() | st.integers(-1, 20),
    logit_bias=st.dictionaries(u32, f32, max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
    allowed_token_ids=token_ids,
    logprob_token_ids=token_ids,
    thinking_token_budget=st.none()
    | build(ThinkingBudget, num_tokens=u32, opening_id=u32, closing_id=u32, is_open=st.booleans()),
    repetition_detection=st.none()
    | build(RepetitionDetection, max_pattern_size=u32, min_count=u32, min_pattern_size=u32),
    structured_outputs=st.none() | words.filter(bool).map(compiled),
    bad_words=st.lists(st.lists(u32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    detokenize=st.booleans(),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    output_kind=st.just(SamplingParams().output_kind),  # travels with the request, not with the parameters
)

timings = build(StageTimings, queued_ns=u64, prefill_ns=u64, decode_ns=u64)
usage = build(
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


row_contents = build(RowContent, prompt_token_ids=u32_column(), sampling=sampling)
new_rows = build(
    NewRow,
    slot=u32,
    slot_version=u32,
    content=row_contents,
    emitted_token_ids=u32_column(),
    num_computed_tokens=u32,
    num_cached_tokens=u32,
    block_ids=u32_column(),
    seed=u64,
    prompt_logprobs_start=u32,
)


@st.composite
def plans(draw: Any) -> StepPlan:
    num_chunks, num_blocks, num_samples = (draw(st.integers(0, 4)) for _ in range(3))
    return draw(
        build(
            StepPlan,
            step_id=u64,
            last_result_seen=u64,
            removed_slots=u32_column(),
            new_rows=st.lists(new_rows, max_size=2).map(tuple),
            chunk_slots=u32_column(num_chunks),
            chunk_lengths=u32_column(num_chunks),
            skipped_slots=u32_column(),
            block_slots=u32_column(num_blocks),
            block_ids=u32_column(num_blocks),
            sample_slots=u32_column(num_samples),
            sample_limits=u32_column(num_samples),
            num_tokens=u32,
            kv_orders=st.none() | kv_strategies.orders,
            may_defer_rows=st.booleans(),
        )
    )


row_keys = st.builds(RowKey, u32, u32)


@st.composite
def results(draw: Any) -> StepResult:
    counts = draw(st.lists(st.integers(0, 3), max_size=4))
    token_ids = u32_column(sum(counts)) if counts else u32_column()
    return draw(
        build(
            StepResult,
            step_id=u64,
            token_ids=token_ids,
            token_counts=st.just(np.array(counts, dtype=np.uint32)),
            logprobs=st.none() | logprob_columns(),
            prompt_logprobs=st.dictionaries(row_keys, prompt_logprobs(), max_size=2),
            row_errors=st.dictionaries(
                row_keys,
                build(RowError, message=words, code=st.sampled_from(RowErrorCode), kv_is_valid=st.booleans()),
                max_size=2,
            ),
            timings=build(
                StepTimings,
                prepare_ns=u64,
                forward_ns=u64,
                sample_ns=u64,
                idle_ns=u64,
                gap_ns=u64,
                mask_ns=u64,
            ),
        )
    )


model_facts = build(
    ModelFacts,
    name=words,
    identity=build(
        ModelIdentity,
        fingerprint=words,
        weights=words,
        adapter=words,
        numerics=words,
        is_batch_invariant=st.booleans(),
    ),
    vocab_size=u32,
    max_model_len=u32,
    eos_token_ids=token_ids,
    dtype=words,
    kv_dtype=words,
    quantization=words,
)
worker_facts = build(
    WorkerFacts,
    boot_id=words,
    model=model_facts,
    kv=build(
        KvShape,
        num_blocks=u32,
        block_size=u32,
        num_layers=u32,
        num_kv_heads=u32,
        head_dim=u32,
        dtype=words,
        soft_num_blocks=st.none() | u32,
    ),
    max_num_seqs=u32,
    max_num_batched_tokens=u32,
    max_steps_in_flight=u32,
    max_samples_per_row=u32,
    num_stages=st.integers(1, 2**32 - 1),
    device_name=words,
    kernels=words,
    weight_bytes=u64,
    load_s=st.floats(allow_nan=False),
    kv_endpoint=st.none() | kv_strategies.endpoints,
)


@st.composite
def submits(draw: Any) -> SubmitRequest:
    num_choices = draw(st.integers(1, 3))
    return draw(
        build(
            SubmitRequest,
            request_id=words,
            numbers=u32_column(num_choices),
            seeds=st.lists(u64, min_size=num_choices, max_size=num_choices).map(
                lambda seeds: np.array(seeds, np.uint64)
            ),
            prompt_token_ids=u32_column(),
            emitted=st.just(()) | st.tuples(*[u32_column()] * num_choices),
            sampling=sampling,
            priority=i32,
            tenant=words,
            cache_salt=words,
            deadline_remaining_ms=st.none() | u64,
            adapter=words,
            whole_output=st.booleans(),
            num_engine_deaths=u32,
            is_moved=st.booleans(),
            kv_lease=st.just(b"") | kv_strategies.leases,
            kv_source=st.none() | kv_strategies.sources,
            keep_ms=u32,
            resume_secret=st.binary(max_size=16),
            frontend_state=st.binary(max_size=5),
            cached_tokens=st.just(()) | st.tuples(*[st.none() | st.integers(0, 2**32 - 2)] * num_choices),
        )
    )


@st.composite
def attach_requests(draw: Any) -> AttachRequest:
    num_choices = draw(st.integers(1, 4))
    return draw(
        build(
            AttachRequest,
            secret=st.binary(max_size=16),
            first_number=st.integers(1, 1 << 31),
            num_choices=st.just(num_choices),
            seen=st.dictionaries(st.integers(0, num_choices - 1), st.integers(1, 1 << 31)),
            tenant=st.none() | words,
        )
    )


welcomes = build(
    EngineWelcome,
    engine_id=words,
    ready=st.booleans(),
    why_not_ready=words,
    model=st.none() | model_facts,
    limits=st.builds(
        EngineLimits,
        has_priorities=st.booleans(),
        max_choices=u32,
        keeps_requests=st.booleans(),
        max_running=u32,
    ),
    prefix_hash=st.none() | st.builds(PrefixHash, words, u32, st.binary(max_size=16)),
    boot_id=words,
    role=kv_strategies.roles,
    kv_endpoint=st.none() | kv_strategies.endpoints,
    num_other_frontends=u32,
    takes_streams=st.booleans(),
)


EVERYTHING = Protocol("client", "server", version=7, features=(1 << 64) - 1)
session_terms = build(
    SessionTerms,
    name=words,
    is_resumed=st.booleans(),
    last_received=u64,
    resume_ttl_s=st.integers(0, 10**9).map(lambda ms: ms / 1000),
    agreement=st.builds(Agreement, st.just(EVERYTHING.version), u64),
)


hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(b"".join)
# Told or not, an empty change is none.
cache_news = build(CacheNews, is_cleared=st.booleans(), stored=hashes, evicted=hashes).filter(
    lambda news: news != CacheNews()
)
seconds = st.floats(0, 1e6)
engine_loads = build(
    EngineLoad,
    num_prefill_tokens=u64,
    num_running=u32,
    num_waiting=u32,
    num_free_blocks=u32,
    num_free_rows=i32,
    prefill_token_s=seconds,
    decode_step_s=seconds,
    row_interval_s=seconds,
)


@st.composite
def output_batches(draw: Any) -> OutputBatch:
    num_requests, num_first = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    counts = draw(
        st.just([]) | st.lists(st.integers(1, 3), min_size=num_requests, max_size=num_requests),
    )
    return draw(
        build(
            OutputBatch,
            batch_id=u64,
            admitted=u32_column(),
            numbers=u32_column(num_requests),
            token_counts=st.just(np.array(counts, dtype=np.uint32)),
            token_ids=u32_column(sum(counts) if counts else num_requests),
            logprobs=st.none() | logprob_columns(),
            num_free_places=st.none() | u32,
            released=u32_column(),
            first_numbers=u32_column(num_first),
            first_cached_tokens=u32_column(num_first),
            attached=st.lists(submits(), max_size=1).map(tuple),
            cache=st.none() | cache_news,
            load=st.none() | engine_loads,
            prompt_logprobs=st.lists(
                build(RequestPromptLogprobs, number=u32, logprobs=prompt_logprobs()), max_size=2
            ).map(tuple),
            finished=st.lists(
                build(
                    FinishedRequest,
                    number=u32,
                    reason=st.sampled_from(FinishReason),
                    stop_token_id=st.none() | st.integers(0, 2**32 - 2),
                    num_cached_tokens=u32,
                    timings=timings,
                ),
                max_size=3,
            ).map(tuple),
            failures=st.lists(
                build(RequestFailure, number=u32, code=words, message=words, field=words, retry_after_ms=u32),
                max_size=2,
            ).map(tuple),
        )
    )


statuses = build(
    EngineStatus,
    **{
        field.name: {"str": words, "bool": st.booleans(), "int": u32, "int | None": st.none() | u32}.get(
            str(field.type), st.dictionaries(words, u64, max_size=3)
        )
        for field in dataclasses.fields(EngineStatus)
    },
)
