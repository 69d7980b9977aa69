"""engine_core.proto: submissions up, one columnar batch of outputs per step down."""

from __future__ import annotations

import struct

import numpy as np

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import engine_core_pb2
from triptych.prefix_hash import HASH_BYTES
from triptych.types.outputs import CacheNews, FinishedRequest, FinishReason, OutputBatch, StageTimings
from triptych.types.step import RequestGuesses
from triptych.types.submit import AttachRequest, EngineWelcome, SubmitRequest
from triptych.wire import result as result  # its codecs are part of a batch's
from triptych.wire import worker as worker  # and its of a welcome's
from triptych.wire.codec import codec
from triptych.wire.columns import (
    check_equal_lengths,
    u32_from_bytes,
    u32_to_bytes,
)
from triptych.wire.result import vectors_from_proto, vectors_to_proto
from triptych.wire.step import check_task, task_number


def _check_guesses(guesses: RequestGuesses, message: object) -> RequestGuesses:
    check_equal_lengths(numbers=guesses.numbers, accepted=guesses.accepted, rejected=guesses.rejected)
    return guesses


def _check_batch(batch: OutputBatch, message: object) -> OutputBatch:
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


def _check_choices(request: SubmitRequest, message: object) -> SubmitRequest:
    """Raise ProtocolViolation if there is no choice, or its columns differ in length."""
    num_choices, num_seeds = len(request.numbers), len(request.seeds)
    num_emitted, num_cached = len(request.emitted), len(request.cached_tokens)
    if not 0 < num_choices == num_seeds or num_emitted not in (0, num_choices):
        raise ProtocolViolation(
            f"submit: {num_choices} numbers, {num_seeds} seeds, emitted tokens of {num_emitted} choices"
        )
    if num_cached not in (0, num_choices):
        raise ProtocolViolation(f"submit: {num_choices} numbers, cached tokens of {num_cached} choices")
    return request


_GUESSES = codec(RequestGuesses, engine_core_pb2.RequestGuesses, finish=_check_guesses)
_SUBMIT = codec(
    SubmitRequest,
    engine_core_pb2.Submit,
    names={"emitted": "emitted_token_ids", "cached_tokens": "num_cached_tokens_plus_one"},
    fixed={"task": lambda request: task_number(request.pooling)},
    start=check_task,
    finish=_check_choices,
)
_WELCOME = codec(EngineWelcome, engine_core_pb2.ConnectWelcome, left_out=("session",))
_BATCH = codec(
    OutputBatch,
    engine_core_pb2.OutputBatch,
    apart=("finished", "messages_received", "cache", "vectors"),
    left_out=("stored_hashes", "evicted_hashes", "is_cache_cleared"),
    finish=_check_batch,
)

submit_to_proto, submit_from_proto = _SUBMIT.encode, _SUBMIT.decode
"""The second raises ProtocolViolation for columns that do not fit together, FeatureDisabled for a task that is not
served, and InvalidRequest for a sampling parameter out of range."""
welcome_to_proto, welcome_from_proto = _WELCOME.encode, _WELCOME.decode


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
    """Read the demand to go on with a request.

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


def outputs_to_proto(batch: OutputBatch, messages_received: int = 0) -> engine_core_pb2.OutputBatch:
    """Return a batch as a message.

    Args:
        messages_received: Number of the last submit or abort that has taken effect.
    """
    message = _BATCH.encode(
        batch,
        finished=_finished_to_proto(batch.finished) if batch.finished else None,
        messages_received=messages_received,
        vectors=[
            engine_core_pb2.RequestVectors(number=number, vectors=vectors_to_proto(vectors))
            for number, vectors in batch.vectors.items()
        ],
    )
    if batch.cache is not None:
        message.stored_hashes = batch.cache.stored
        message.evicted_hashes = batch.cache.evicted
        message.is_cache_cleared = batch.cache.is_cleared
    return message


def outputs_from_proto(message: engine_core_pb2.OutputBatch) -> OutputBatch:
    """Read a batch. Raises ProtocolViolation if columns of one table differ in length."""
    vectors = message.vectors
    return _BATCH.decode(
        message,
        finished=_finished_from_proto(message.finished) if message.HasField("finished") else (),
        cache=_cache_from_proto(message),
        vectors={entry.number: vectors_from_proto(entry.vectors) for entry in vectors} if vectors else {},
    )


def _cache_from_proto(message: engine_core_pb2.OutputBatch) -> CacheNews | None:
    stored, evicted = message.stored_hashes, message.evicted_hashes
    if not (stored or evicted or message.is_cache_cleared):
        return None
    if (len(stored) | len(evicted)) % HASH_BYTES:
        raise ProtocolViolation(
            f"{len(stored)} and {len(evicted)} bytes are not both a whole number of hashes of {HASH_BYTES} bytes"
        )
    return CacheNews(message.is_cache_cleared, stored, evicted)


def _finished_to_proto(finished: tuple[FinishedRequest, ...]) -> engine_core_pb2.FinishedColumns:
    def column(kind: str, values: list[int]) -> bytes:
        return struct.pack(f"<{len(finished)}{kind}", *values)

    rejected = [f.timings.num_rejected_guesses for f in finished]
    return engine_core_pb2.FinishedColumns(
        numbers=column("I", [f.number for f in finished]),
        reasons=bytes([f.reason for f in finished]),
        stop_token_ids_plus_one=column(
            "I", [0 if f.stop_token_id is None else f.stop_token_id + 1 for f in finished]
        ),
        num_cached_tokens=column("I", [f.num_cached_tokens for f in finished]),
        queued_ns=column("Q", [f.timings.queued_ns for f in finished]),
        prefill_ns=column("Q", [f.timings.prefill_ns for f in finished]),
        decode_ns=column("Q", [f.timings.decode_ns for f in finished]),
        num_accepted_guesses=column("I", [f.timings.num_accepted_guesses for f in finished]),
        num_rejected_guesses=column("I", rejected) if any(rejected) else b"",
    )


_FINISH_REASONS = {int(reason): reason for reason in FinishReason}


def _finished_from_proto(message: engine_core_pb2.FinishedColumns) -> tuple[FinishedRequest, ...]:
    """Read the ends of requests. Mostly there is one in a batch, for which arrays would cost more than all else."""
    reasons = message.reasons
    count = len(reasons)
    u32, u64, none = f"<{count}I", f"<{count}Q", bytes(4 * count)
    unpack = struct.unpack
    try:
        rows = zip(
            [_FINISH_REASONS[reason] for reason in reasons],
            unpack(u32, message.numbers),
            unpack(u32, message.stop_token_ids_plus_one),
            unpack(u32, message.num_cached_tokens),
            unpack(u64, message.queued_ns),
            unpack(u64, message.prefill_ns),
            unpack(u64, message.decode_ns),
            unpack(u32, message.num_accepted_guesses or none),
            unpack(u32, message.num_rejected_guesses or none),
            strict=True,
        )
    except (KeyError, struct.error):
        raise _fault_of_finished(message) from None
    return tuple(
        [
            FinishedRequest(
                number,
                reason,
                stop - 1 if stop else None,
                cached,
                StageTimings(queued, prefill, decode, accepted, rejected),
            )
            for reason, number, stop, cached, queued, prefill, decode, accepted, rejected in rows
        ]
    )


def _fault_of_finished(message: engine_core_pb2.FinishedColumns) -> ProtocolViolation:
    """Return what is wrong with the ends of requests that cannot be read."""
    count = len(message.reasons)
    for name, width, data in (
        ("numbers", 4, message.numbers),
        ("stops", 4, message.stop_token_ids_plus_one),
        ("cached", 4, message.num_cached_tokens),
        ("queued", 8, message.queued_ns),
        ("prefill", 8, message.prefill_ns),
        ("decode", 8, message.decode_ns),
        ("accepted", 4, message.num_accepted_guesses or bytes(4 * count)),
        ("rejected", 4, message.num_rejected_guesses or bytes(4 * count)),
    ):
        num_values, rest = divmod(len(data), width)
        if rest:
            return ProtocolViolation(f"{name}: {len(data)} bytes do not hold whole {width}-byte values")
        if num_values != count:
            return ProtocolViolation(
                f"columns of one table differ in length: {name} {num_values}, reasons {count}"
            )
    unknown = min(reason for reason in message.reasons if reason not in _FINISH_REASONS)
    return ProtocolViolation(f"there is no finish reason {unknown}")
