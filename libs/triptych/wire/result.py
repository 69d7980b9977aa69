"""step.proto: results, the worker's half."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import step_pb2
from triptych.types.step import (
    LogprobColumns,
    PromptLogprobs,
    RowError,
    RowErrorCode,
    RowKey,
    StepResult,
    StepTimings,
)
from triptych.wire.columns import (
    check_equal_lengths,
    check_offsets,
    f32_from_bytes,
    f32_to_bytes,
    u32_from_bytes,
    u32_to_bytes,
)

_Entry = TypeVar("_Entry", step_pb2.RowError, step_pb2.RowPromptLogprobs)
_T = TypeVar("_T")

_CODE_TO_PROTO = {
    RowErrorCode.ENGINE_FAILURE: step_pb2.ROW_ERROR_CODE_ENGINE_FAILURE,
    RowErrorCode.INVALID_REQUEST: step_pb2.ROW_ERROR_CODE_INVALID_REQUEST,
    RowErrorCode.NOT_READY: step_pb2.ROW_ERROR_CODE_NOT_READY,
}
_PROTO_TO_CODE = {number: code for code, number in _CODE_TO_PROTO.items()}


def result_to_proto(result: StepResult) -> step_pb2.Result:
    timings = result.timings
    return step_pb2.Result(
        step_id=result.step_id,
        token_ids=u32_to_bytes(result.token_ids),
        token_counts=u32_to_bytes(result.token_counts),
        logprobs=None if result.logprobs is None else logprobs_to_proto(result.logprobs),
        row_errors=[
            step_pb2.RowError(
                row=_key_to_proto(key),
                message=error.message,
                code=_CODE_TO_PROTO[error.code],
                kv_is_valid=error.kv_is_valid,
            )
            for key, error in result.row_errors.items()
        ],
        prepare_ns=timings.prepare_ns,
        forward_ns=timings.forward_ns,
        sample_ns=timings.sample_ns,
        idle_ns=timings.idle_ns,
        gap_ns=timings.gap_ns,
        mask_ns=timings.mask_ns,
        prompt_logprobs=[
            step_pb2.RowPromptLogprobs(row=_key_to_proto(key), logprobs=prompt_logprobs_to_proto(entries))
            for key, entries in result.prompt_logprobs.items()
        ],
    )


def result_from_proto(message: step_pb2.Result) -> StepResult:
    """Read a result. Raises ProtocolViolation for columns that do not fit together, and for a row twice in a table."""
    token_ids, token_counts = u32_from_bytes(message.token_ids), u32_from_bytes(message.token_counts)
    if len(token_counts) and int(token_counts.sum()) != len(token_ids):
        raise ProtocolViolation(
            f"Result.token_counts sum up to {token_counts.sum()}, but there are {len(token_ids)} token_ids"
        )
    return StepResult(
        step_id=message.step_id,
        token_ids=token_ids,
        token_counts=token_counts,
        logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
        row_errors=_table_from_proto("row_errors", message.row_errors, _row_error_from_proto),
        timings=StepTimings(
            prepare_ns=message.prepare_ns,
            forward_ns=message.forward_ns,
            sample_ns=message.sample_ns,
            idle_ns=message.idle_ns,
            gap_ns=message.gap_ns,
            mask_ns=message.mask_ns,
        ),
        prompt_logprobs=_table_from_proto(
            "prompt_logprobs",
            message.prompt_logprobs,
            lambda entry: prompt_logprobs_from_proto(entry.logprobs),
        ),
    )


def logprobs_to_proto(columns: LogprobColumns) -> step_pb2.LogprobColumns:
    return step_pb2.LogprobColumns(
        rows=u32_to_bytes(columns.rows),
        offsets=u32_to_bytes(columns.offsets),
        token_ids=u32_to_bytes(columns.token_ids),
        logprobs=f32_to_bytes(columns.logprobs),
        ranks=u32_to_bytes(columns.ranks),
    )


def logprobs_from_proto(message: step_pb2.LogprobColumns) -> LogprobColumns:
    columns = LogprobColumns(
        rows=u32_from_bytes(message.rows),
        offsets=u32_from_bytes(message.offsets),
        token_ids=u32_from_bytes(message.token_ids),
        logprobs=f32_from_bytes(message.logprobs),
        ranks=u32_from_bytes(message.ranks),
    )
    check_equal_lengths(rows=columns.rows, ranks=columns.ranks, offsets_less_one=columns.offsets[1:])
    check_equal_lengths(token_ids=columns.token_ids, logprobs=columns.logprobs)
    check_offsets(columns.offsets, len(columns.token_ids))
    return columns


def prompt_logprobs_to_proto(entries: PromptLogprobs) -> step_pb2.PromptLogprobs:
    return step_pb2.PromptLogprobs(
        first_position=entries.first_position,
        num_candidates=entries.token_ids.shape[1],
        token_ids=u32_to_bytes(entries.token_ids),
        logprobs=f32_to_bytes(entries.logprobs),
        ranks=u32_to_bytes(entries.ranks),
    )


def prompt_logprobs_from_proto(message: step_pb2.PromptLogprobs) -> PromptLogprobs:
    """Read a part of a prompt. Raises ProtocolViolation unless every position has as many candidates."""
    token_ids, logprobs = u32_from_bytes(message.token_ids), f32_from_bytes(message.logprobs)
    ranks = u32_from_bytes(message.ranks)
    shape = len(ranks), message.num_candidates
    if not shape[1] or {len(token_ids), len(logprobs)} != {shape[0] * shape[1]}:
        raise ProtocolViolation(
            f"prompt_logprobs: {len(token_ids)} token_ids and {len(logprobs)} logprobs are not {shape[1]} candidates "
            f"for each of {shape[0]} positions"
        )
    return PromptLogprobs(message.first_position, token_ids.reshape(shape), logprobs.reshape(shape), ranks)


def _key_to_proto(key: RowKey) -> step_pb2.RowKey:
    return step_pb2.RowKey(slot=key.slot, slot_version=key.slot_version)


def _table_from_proto(
    name: str, entries: Iterable[_Entry], decode: Callable[[_Entry], _T]
) -> dict[RowKey, _T]:
    """Return what each row reports. Raises ProtocolViolation for a row that is in the table twice."""
    table: dict[RowKey, _T] = {}
    for entry in entries:
        key = RowKey(entry.row.slot, entry.row.slot_version)
        if key in table:
            raise ProtocolViolation(f"{name}: slot {key.slot} with version {key.slot_version} comes twice")
        table[key] = decode(entry)
    return table


def _row_error_from_proto(entry: step_pb2.RowError) -> RowError:
    return RowError(
        entry.message, _PROTO_TO_CODE.get(entry.code, RowErrorCode.ENGINE_FAILURE), entry.kv_is_valid
    )
