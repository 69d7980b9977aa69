"""step.proto: results, the worker's half."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import step_pb2
from triptych.types.step import (
    F32,
    LogprobColumns,
    PromptLogprobs,
    RowError,
    RowKey,
    StepResult,
    VerifiedGuesses,
)
from triptych.wire.codec import codec
from triptych.wire.columns import check_equal_lengths, check_offsets, column_from_bytes

_Entry = TypeVar("_Entry", step_pb2.RowError, step_pb2.RowPromptLogprobs, step_pb2.RowVectors)
_T = TypeVar("_T")


def _check_tokens(result: StepResult, message: step_pb2.Result) -> StepResult:
    counts = result.token_counts
    if len(counts) and int(counts.sum()) != len(result.token_ids):
        raise ProtocolViolation(
            f"Result.token_counts sum up to {counts.sum()}, but there are {len(result.token_ids)} token_ids"
        )
    return result


def _check_logprobs(columns: LogprobColumns, message: object) -> LogprobColumns:
    check_equal_lengths(rows=columns.rows, ranks=columns.ranks, offsets_less_one=columns.offsets[1:])
    check_equal_lengths(token_ids=columns.token_ids, logprobs=columns.logprobs)
    check_offsets(columns.offsets, len(columns.token_ids))
    return columns


def _to_matrix(entries: PromptLogprobs, message: step_pb2.PromptLogprobs) -> PromptLogprobs:
    """Return the part with a row for each position. Raises ProtocolViolation unless all have as many candidates."""
    token_ids, logprobs = entries.token_ids, entries.logprobs
    shape = len(entries.ranks), message.num_candidates
    if not shape[1] or {len(token_ids), len(logprobs)} != {shape[0] * shape[1]}:
        raise ProtocolViolation(
            f"prompt_logprobs: {len(token_ids)} token_ids and {len(logprobs)} logprobs are not {shape[1]} candidates "
            f"for each of {shape[0]} positions"
        )
    return replace(entries, token_ids=token_ids.reshape(shape), logprobs=logprobs.reshape(shape))


_LOGPROBS = codec(LogprobColumns, step_pb2.LogprobColumns, finish=_check_logprobs)
_PROMPT_LOGPROBS = codec(
    PromptLogprobs,
    step_pb2.PromptLogprobs,
    fixed={"num_candidates": lambda entries: entries.token_ids.shape[1]},
    finish=_to_matrix,
)


def _check_guesses(guesses: VerifiedGuesses, message: object) -> VerifiedGuesses:
    check_equal_lengths(verified=guesses.verified, accepted=guesses.accepted)
    check_equal_lengths(rows=guesses.rows, row_counts=guesses.row_counts)
    return guesses


_GUESSES = codec(VerifiedGuesses, step_pb2.VerifiedGuesses, finish=_check_guesses)
_ROW_ERROR = codec(RowError, step_pb2.RowError, apart=("row",))
_RESULT = codec(
    StepResult,
    step_pb2.Result,
    apart=("row_errors", "prompt_logprobs", "vectors", "guesses"),
    finish=_check_tokens,
)

logprobs_to_proto, logprobs_from_proto = _LOGPROBS.encode, _LOGPROBS.decode
prompt_logprobs_to_proto, prompt_logprobs_from_proto = _PROMPT_LOGPROBS.encode, _PROMPT_LOGPROBS.decode


def vectors_to_proto(vectors: F32) -> step_pb2.Vectors:
    """Return [num_vectors, num_columns] as a message."""
    return step_pb2.Vectors(num_columns=vectors.shape[1], values=vectors.astype("<f4", copy=False).tobytes())


def vectors_from_proto(message: step_pb2.Vectors) -> F32:
    """Return [num_vectors, num_columns]. Raises ProtocolViolation for values that do not fill whole vectors."""
    values, num_columns = column_from_bytes(message.values, np.dtype("<f4")), message.num_columns
    if not num_columns or not len(values) or len(values) % num_columns:
        raise ProtocolViolation(f"vectors: {len(values)} values are not vectors of {num_columns} each")
    return values.reshape(-1, num_columns)


def result_to_proto(result: StepResult) -> step_pb2.Result:
    return _RESULT.encode(
        result,
        row_errors=[
            _ROW_ERROR.encode(error, row=_key_to_proto(key)) for key, error in result.row_errors.items()
        ],
        prompt_logprobs=[
            step_pb2.RowPromptLogprobs(row=_key_to_proto(key), logprobs=prompt_logprobs_to_proto(entries))
            for key, entries in result.prompt_logprobs.items()
        ],
        vectors=[
            step_pb2.RowVectors(row=_key_to_proto(key), vectors=vectors_to_proto(vectors))
            for key, vectors in result.vectors.items()
        ],
        guesses=[_GUESSES.encode(guesses) for guesses in result.guesses],
    )


def result_from_proto(message: step_pb2.Result) -> StepResult:
    """Read a result. Raises ProtocolViolation for columns that do not fit together, and for a row twice in a table."""
    return _RESULT.decode(
        message,
        row_errors=_table_from_proto("row_errors", message.row_errors, _ROW_ERROR.decode),
        prompt_logprobs=_table_from_proto(
            "prompt_logprobs",
            message.prompt_logprobs,
            lambda entry: prompt_logprobs_from_proto(entry.logprobs),
        ),
        vectors=_table_from_proto(
            "vectors", message.vectors, lambda entry: vectors_from_proto(entry.vectors)
        ),
        guesses=tuple(_GUESSES.decode(guesses) for guesses in message.guesses),
    )


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
