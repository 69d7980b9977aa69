"""engine_core.proto: submissions up, one columnar batch of outputs per step down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import engine_core_pb2, step_pb2
from triptych.prefix_hash import HASH_BYTES
from triptych.types.outputs import (
    CacheNews,
    EngineLoad,
    FinishedRequest,
    FinishReason,
    OutputBatch,
    RequestFailure,
    RequestPromptLogprobs,
    StageTimings,
)
from triptych.types.submit import AttachRequest, EngineLimits, EngineWelcome, PrefixHash, SubmitRequest
from triptych.wire.columns import (
    check_equal_lengths,
    u32_from_bytes,
    u32_to_bytes,
    u64_from_bytes,
    u64_to_bytes,
)
from triptych.wire.kv_transfer import (
    checked_lease,
    endpoint_from_proto,
    endpoint_to_proto,
    role_from_proto,
    role_to_proto,
    source_from_proto,
    source_to_proto,
)
from triptych.wire.result import (
    logprobs_from_proto,
    logprobs_to_proto,
    prompt_logprobs_from_proto,
    prompt_logprobs_to_proto,
)
from triptych.wire.sampling import sampling_from_proto, sampling_to_proto
from triptych.wire.step import check_task
from triptych.wire.worker import model_facts_from_proto, model_facts_to_proto

_LOAD_FIELDS = tuple(field.name for field in dataclasses.fields(EngineLoad))


def submit_to_proto(request: SubmitRequest) -> engine_core_pb2.Submit:
    message = engine_core_pb2.Submit(
        numbers=u32_to_bytes(request.numbers),
        request_id=request.request_id,
        prompt_token_ids=u32_to_bytes(request.prompt_token_ids),
        emitted_token_ids=[u32_to_bytes(token_ids) for token_ids in request.emitted],
        sampling=sampling_to_proto(request.sampling),
        seeds=u64_to_bytes(request.seeds),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        whole_output=request.whole_output,
        task=step_pb2.TASK_GENERATE,
        num_engine_deaths=request.num_engine_deaths,
        is_moved=request.is_moved,
        keep_ms=request.keep_ms,
        resume_secret=request.resume_secret,
        frontend_state=request.frontend_state,
        kv_lease=request.kv_lease,
        kv_source=source_to_proto(request.kv_source),
        num_cached_tokens_plus_one=_optional_u32_to_bytes(request.cached_tokens),
    )
    if request.deadline_remaining_ms is not None:
        message.deadline_remaining_ms = request.deadline_remaining_ms
    return message


def submit_from_proto(message: engine_core_pb2.Submit) -> SubmitRequest:
    """Read a submission.

    Raises:
        ProtocolViolation: the columns of the choices differ in length, or there is no choice.
        FeatureDisabled: the task is not served.
        InvalidRequest: A sampling parameter is out of range.
    """
    check_task(message.task)
    has_deadline = message.HasField("deadline_remaining_ms")
    numbers, seeds = u32_from_bytes(message.numbers), u64_from_bytes(message.seeds)
    prompt_token_ids = u32_from_bytes(message.prompt_token_ids)
    emitted = tuple(map(u32_from_bytes, message.emitted_token_ids))
    cached = _optional_u32_from_bytes(message.num_cached_tokens_plus_one)
    if not 0 < len(numbers) == len(seeds) or len(emitted) not in (0, len(numbers)):
        raise ProtocolViolation(
            f"submit: {len(numbers)} numbers, {len(seeds)} seeds, emitted tokens of {len(emitted)} choices"
        )
    if len(cached) not in (0, len(numbers)):
        raise ProtocolViolation(f"submit: {len(numbers)} numbers, cached tokens of {len(cached)} choices")
    return SubmitRequest(
        request_id=message.request_id,
        numbers=numbers,
        seeds=seeds,
        prompt_token_ids=prompt_token_ids,
        emitted=emitted,
        sampling=sampling_from_proto(message.sampling),
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        deadline_remaining_ms=message.deadline_remaining_ms if has_deadline else None,
        adapter=message.adapter,
        whole_output=message.whole_output,
        num_engine_deaths=message.num_engine_deaths,
        is_moved=message.is_moved,
        keep_ms=message.keep_ms,
        resume_secret=message.resume_secret,
        frontend_state=message.frontend_state,
        kv_lease=checked_lease(message.kv_lease) if message.kv_lease else b"",
        kv_source=source_from_proto(message.kv_source) if message.HasField("kv_source") else None,
        cached_tokens=cached,
    )


def attach_to_proto(request: AttachRequest) -> engine_core_pb2.Attach:
    return engine_core_pb2.Attach(
        secret=request.secret,
        numbers=u32_to_bytes(np.array([request.first_number], np.uint32)),
        num_choices=request.num_choices,
        seen_choices=u32_to_bytes(np.array(list(request.seen), np.uint32)),
        num_tokens_seen=u32_to_bytes(np.array(list(request.seen.values()), np.uint32)),
        tenant=request.tenant,
    )


def attach_from_proto(message: engine_core_pb2.Attach) -> AttachRequest:
    """Read the wish to go on with a request.

    Raises:
        ProtocolViolation: Its columns do not fit each other.
    """
    numbers, num_seen = u32_from_bytes(message.numbers).tolist(), u32_from_bytes(message.num_tokens_seen)
    choices, num_choices = u32_from_bytes(message.seen_choices), message.num_choices
    if not num_choices:  # as frontends of the version before write it: a number and a count for each choice
        num_choices = len(numbers)
        choices = np.arange(num_choices, dtype=np.uint32)
        if numbers and numbers != list(range(numbers[0], numbers[0] + num_choices)):
            raise ProtocolViolation("attach: its numbers do not follow each other")
    check_equal_lengths(seen_choices=choices, num_tokens_seen=num_seen)
    if not numbers or (len(choices) and int(choices.max()) >= num_choices):
        raise ProtocolViolation(f"attach: of {num_choices} choices, it names one that there is not, or none")
    tenant = message.tenant if message.HasField("tenant") else None
    seen = {index: count for index, count in zip(choices.tolist(), num_seen.tolist(), strict=True) if count}
    return AttachRequest(message.secret, numbers[0], num_choices, seen, tenant)


def welcome_to_proto(welcome: EngineWelcome) -> engine_core_pb2.ConnectWelcome:
    """Return the engine's state, without the session that the first welcome of a stream names."""
    return engine_core_pb2.ConnectWelcome(
        engine_id=welcome.engine_id,
        ready=welcome.ready,
        why_not_ready=welcome.why_not_ready,
        model=None if welcome.model is None else model_facts_to_proto(welcome.model),
        limits=engine_core_pb2.EngineLimits(
            has_priorities=welcome.limits.has_priorities,
            max_choices=welcome.limits.max_choices,
            keeps_requests=welcome.limits.keeps_requests,
            max_running=welcome.limits.max_running,
        ),
        prefix_hash=None if welcome.prefix_hash is None else _prefix_hash_to_proto(welcome.prefix_hash),
        boot_id=welcome.boot_id,
        role=role_to_proto(welcome.role),
        kv_endpoint=endpoint_to_proto(welcome.kv_endpoint),
        num_other_frontends=welcome.num_other_frontends,
        takes_streams=welcome.takes_streams,
    )


def welcome_from_proto(message: engine_core_pb2.ConnectWelcome) -> EngineWelcome:
    return EngineWelcome(
        engine_id=message.engine_id,
        ready=message.ready,
        why_not_ready=message.why_not_ready,
        model=model_facts_from_proto(message.model) if message.HasField("model") else None,
        limits=EngineLimits(
            message.limits.has_priorities,
            message.limits.max_choices,
            message.limits.keeps_requests,
            message.limits.max_running,
        ),
        prefix_hash=_prefix_hash_from_proto(message.prefix_hash) if message.HasField("prefix_hash") else None,
        boot_id=message.boot_id,
        role=role_from_proto(message.role),
        kv_endpoint=endpoint_from_proto(message.kv_endpoint) if message.HasField("kv_endpoint") else None,
        num_other_frontends=message.num_other_frontends,
        takes_streams=message.takes_streams,
    )


def outputs_to_proto(batch: OutputBatch, messages_received: int = 0) -> engine_core_pb2.OutputBatch:
    """Return a batch as a message.

    Args:
        messages_received: Number of the last submit or abort that has taken effect.
    """
    message = engine_core_pb2.OutputBatch(
        batch_id=batch.batch_id,
        admitted=u32_to_bytes(batch.admitted),
        numbers=u32_to_bytes(batch.numbers),
        token_counts=u32_to_bytes(batch.token_counts),
        token_ids=u32_to_bytes(batch.token_ids),
        logprobs=None if batch.logprobs is None else logprobs_to_proto(batch.logprobs),
        finished=_finished_to_proto(batch.finished) if batch.finished else None,
        failures=[
            engine_core_pb2.RequestFailure(
                number=failure.number,
                code=failure.code,
                message=failure.message,
                field=failure.field,
                retry_after_ms=failure.retry_after_ms,
            )
            for failure in batch.failures
        ],
        messages_received=messages_received,
        num_free_places=batch.num_free_places,
        released=u32_to_bytes(batch.released),
        attached=map(submit_to_proto, batch.attached),
        stored_hashes=batch.cache.stored if batch.cache is not None else b"",
        evicted_hashes=batch.cache.evicted if batch.cache is not None else b"",
        is_cache_cleared=batch.cache is not None and batch.cache.is_cleared,
        load=_load_to_proto(batch.load) if batch.load is not None else None,
        prompt_logprobs=[
            engine_core_pb2.RequestPromptLogprobs(
                number=part.number, logprobs=prompt_logprobs_to_proto(part.logprobs)
            )
            for part in batch.prompt_logprobs
        ],
    )
    if len(batch.first_numbers):  # in one batch of hundreds
        message.first_numbers = u32_to_bytes(batch.first_numbers)
        message.first_cached_tokens = u32_to_bytes(batch.first_cached_tokens)
    return message


def outputs_from_proto(message: engine_core_pb2.OutputBatch) -> OutputBatch:
    """Read a batch. Raises ProtocolViolation if columns of one table differ in length."""
    batch = OutputBatch(
        batch_id=message.batch_id,
        admitted=u32_from_bytes(message.admitted),
        numbers=u32_from_bytes(message.numbers),
        token_counts=u32_from_bytes(message.token_counts),
        token_ids=u32_from_bytes(message.token_ids),
        logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
        prompt_logprobs=tuple(
            RequestPromptLogprobs(part.number, prompt_logprobs_from_proto(part.logprobs))
            for part in message.prompt_logprobs
        ),
        finished=_finished_from_proto(message.finished) if message.HasField("finished") else (),
        failures=tuple(
            RequestFailure(f.number, f.code, f.message, f.field, f.retry_after_ms) for f in message.failures
        ),
        num_free_places=message.num_free_places if message.HasField("num_free_places") else None,
        released=u32_from_bytes(message.released),
        first_numbers=u32_from_bytes(message.first_numbers),
        first_cached_tokens=u32_from_bytes(message.first_cached_tokens),
        attached=tuple(map(submit_from_proto, message.attached)),
        cache=_cache_from_proto(message),
        load=_load_from_proto(message.load) if message.HasField("load") else None,
    )
    if len(batch.token_counts):
        check_equal_lengths(numbers=batch.numbers, token_counts=batch.token_counts)
        if int(batch.token_counts.sum()) != len(batch.token_ids):
            raise ProtocolViolation(
                f"token_counts sum up to {batch.token_counts.sum()}, but there are {len(batch.token_ids)} token_ids"
            )
    else:
        check_equal_lengths(numbers=batch.numbers, token_ids=batch.token_ids)
    if len(batch.first_numbers) != len(batch.first_cached_tokens):
        raise ProtocolViolation(
            f"{len(batch.first_numbers)} first_numbers, but {len(batch.first_cached_tokens)} first_cached_tokens"
        )
    return batch


def _cache_from_proto(message: engine_core_pb2.OutputBatch) -> CacheNews | None:
    stored, evicted = message.stored_hashes, message.evicted_hashes
    if not (stored or evicted or message.is_cache_cleared):
        return None
    if (len(stored) | len(evicted)) % HASH_BYTES:
        raise ProtocolViolation(
            f"{len(stored)} and {len(evicted)} bytes are not both a whole number of hashes of {HASH_BYTES} bytes"
        )
    return CacheNews(message.is_cache_cleared, stored, evicted)


def _load_to_proto(load: EngineLoad) -> engine_core_pb2.EngineLoad:
    return engine_core_pb2.EngineLoad(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def _load_from_proto(message: engine_core_pb2.EngineLoad) -> EngineLoad:
    return EngineLoad(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def _prefix_hash_to_proto(prefix_hash: PrefixHash) -> engine_core_pb2.PrefixHash:
    return engine_core_pb2.PrefixHash(
        name=prefix_hash.name, block_size=prefix_hash.block_size, test_vector=prefix_hash.test_vector
    )


def _prefix_hash_from_proto(message: engine_core_pb2.PrefixHash) -> PrefixHash:
    return PrefixHash(message.name, message.block_size, message.test_vector)


def _optional_u32_to_bytes(values: Sequence[int | None]) -> bytes:
    """Return a column of values plus one, with 0 for None."""
    if not values:
        return b""
    return u32_to_bytes(np.array([0 if value is None else value + 1 for value in values], np.uint32))


def _optional_u32_from_bytes(data: bytes) -> tuple[int | None, ...]:
    """Return the values of such a column."""
    return tuple([value - 1 if value else None for value in u32_from_bytes(data).tolist()]) if data else ()


def _finished_to_proto(finished: tuple[FinishedRequest, ...]) -> engine_core_pb2.FinishedColumns:
    def u32(values: list[int]) -> bytes:
        return u32_to_bytes(np.array(values, dtype=np.uint32))

    return engine_core_pb2.FinishedColumns(
        numbers=u32([f.number for f in finished]),
        reasons=bytes(f.reason for f in finished),
        stop_token_ids_plus_one=_optional_u32_to_bytes([f.stop_token_id for f in finished]),
        num_cached_tokens=u32([f.num_cached_tokens for f in finished]),
        queued_ns=u64_to_bytes([f.timings.queued_ns for f in finished]),
        prefill_ns=u64_to_bytes([f.timings.prefill_ns for f in finished]),
        decode_ns=u64_to_bytes([f.timings.decode_ns for f in finished]),
    )


def _finished_from_proto(message: engine_core_pb2.FinishedColumns) -> tuple[FinishedRequest, ...]:
    columns: dict[str, NDArray[Any]] = {
        "numbers": u32_from_bytes(message.numbers),
        "reasons": np.frombuffer(message.reasons, dtype=np.uint8),
        "stops": u32_from_bytes(message.stop_token_ids_plus_one),
        "cached": u32_from_bytes(message.num_cached_tokens),
        "queued": u64_from_bytes(message.queued_ns),
        "prefill": u64_from_bytes(message.prefill_ns),
        "decode": u64_from_bytes(message.decode_ns),
    }
    check_equal_lengths(**columns)
    return tuple(
        FinishedRequest(
            number,
            FinishReason(reason),
            stop - 1 if stop else None,
            cached,
            StageTimings(queued, prefill, decode),
        )
        for number, reason, stop, cached, queued, prefill, decode in zip(
            *(column.tolist() for column in columns.values()), strict=True
        )
    )
