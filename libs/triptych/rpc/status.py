"""THE error table, both ways: what each typed error is in gRPC and HTTP, and back again.

`google.rpc` details travel in the trailing metadata: ErrorInfo always (reason = the error's code),
BadRequest with every field violation, RetryInfo where a retry helps, RequestInfo where the request has an id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from triptych import errors
from triptych.errors import FieldViolation, TriptychError

ERROR_DOMAIN = "triptych.dev"
UNAVAILABLE_RETRY_S = 1.0  # an engine that is gone is dialled again within a second, and another may be there

# Clients refuse more than 8 KiB of trailing metadata and see RESOURCE_EXHAUSTED in place of the status. It
# holds the message twice, once percent-encoded, which makes three bytes of one; and the violations once.
_MAX_MESSAGE_BYTES = 1024
_MAX_VIOLATIONS_BYTES = 2560


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One line of the table."""

    error: type[TriptychError]
    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str


TABLE = (
    ErrorRow(errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    ErrorRow(errors.ContextLengthExceeded, grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    ErrorRow(errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED, 401, "invalid_request_error"),
    ErrorRow(errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED, 403, "invalid_request_error"),
    ErrorRow(errors.ModelNotFound, grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    ErrorRow(errors.FeatureDisabled, grpc.StatusCode.UNIMPLEMENTED, 400, "invalid_request_error"),
    ErrorRow(errors.WrongState, grpc.StatusCode.FAILED_PRECONDITION, 409, "invalid_request_error"),
    ErrorRow(errors.DuplicateRequest, grpc.StatusCode.ALREADY_EXISTS, 409, "invalid_request_error"),
    ErrorRow(errors.QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    ErrorRow(errors.RateLimited, grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    ErrorRow(errors.DeadlineUnreachable, grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    ErrorRow(errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    ErrorRow(errors.EngineUnavailable, grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error"),
    ErrorRow(errors.GenerationLost, grpc.StatusCode.ABORTED, 503, "service_unavailable_error"),
    ErrorRow(errors.NotKept, grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    ErrorRow(errors.AttachedElsewhere, grpc.StatusCode.ABORTED, 409, "invalid_request_error"),
    ErrorRow(errors.HandshakeMismatch, grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    ErrorRow(errors.WorkerAsleep, grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error"),
    ErrorRow(errors.MemoryShort, grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "server_error"),
    ErrorRow(errors.WorkerHeld, grpc.StatusCode.ALREADY_EXISTS, 500, "server_error"),
    ErrorRow(errors.StaleEpoch, grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    ErrorRow(errors.SequenceGap, grpc.StatusCode.ABORTED, 500, "server_error"),
    ErrorRow(errors.ProtocolViolation, grpc.StatusCode.ABORTED, 500, "server_error"),
    ErrorRow(errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    ErrorRow(errors.ModelError, grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    ErrorRow(errors.RankUnavailable, grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error"),
    ErrorRow(errors.EngineFailure, grpc.StatusCode.INTERNAL, 500, "server_error"),
    ErrorRow(TriptychError, grpc.StatusCode.INTERNAL, 500, "server_error"),
)
_ROW_BY_CODE = {row.error.code: row for row in TABLE}
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
# For a status that carries no ErrorInfo: the peer was no Triptych servicer, or gRPC itself ended the call.
_ERROR_BY_GRPC_CODE: dict[grpc.StatusCode, type[TriptychError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.EngineUnavailable,
    grpc.StatusCode.CANCELLED: errors.GenerationLost,
}


def row_of(error: TriptychError) -> ErrorRow:
    """The line of the table for this error."""
    return _ROW_BY_CODE[error.code]


def to_status(error: TriptychError, request_id: str = "") -> grpc.Status:
    """Return what ends a call: `to_rich_status` for gRPC."""
    return rpc_status.to_status(to_rich_status(error, request_id))


def to_rich_status(error: TriptychError, request_id: str = "") -> status_pb2.Status:
    """Return the status with all its details, cut to what a client's gRPC accepts.

    Args:
        request_id: Of the request that failed; empty: it has none.
    """
    row = row_of(error)
    violations = _violations_of(error)
    details: list[Any] = [_error_info(error.code, error.metadata or _metadata_of(violations))]
    if violations:
        details.append(_bad_request(violations))
    if isinstance(error, errors.QueueFull):
        details.append(_retry_info(error.retry_after_s))
    elif isinstance(error, (errors.EngineUnavailable, errors.GenerationLost)):
        details.append(_retry_info(UNAVAILABLE_RETRY_S))
    return _status(row.grpc_code.value[0], _cut(error.message, _MAX_MESSAGE_BYTES), details, request_id)


def _violations_of(error: TriptychError) -> Sequence[FieldViolation]:
    """Return what is wrong field by field; empty for an error that is not about fields."""
    if isinstance(error, errors.InvalidRequest):
        return error.violations
    if isinstance(error, errors.FeatureDisabled):
        return [FieldViolation(feature, error.why) for feature in error.features]
    return ()


def _metadata_of(violations: Sequence[FieldViolation]) -> dict[str, str]:
    """Return the field, the value and the limit of a single violation, where they are known."""
    if len(violations) != 1:
        return {}
    violation = violations[0]
    found = {"field": violation.field, "value": violation.value, "limit": violation.limit}
    return {key: text for key, text in found.items() if text}


def _retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(max(1, round(delay_s * 1000)))
    return retry


def _error_info(reason: str, metadata: Mapping[str, str]) -> error_details_pb2.ErrorInfo:
    cut = {_cut(key, 64): _cut(value, 256) for key, value in metadata.items()}
    return error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=cut)


def _status(code: int, text: str, details: Sequence[Any], request_id: str) -> status_pb2.Status:
    message = status_pb2.Status(code=code, message=text)
    if request_id:
        details = [*details, error_details_pb2.RequestInfo(request_id=_cut(request_id, 128))]
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        message.details.append(packed)
    return message


def _bad_request(violations: Sequence[FieldViolation]) -> error_details_pb2.BadRequest:
    message, room = error_details_pb2.BadRequest(), _MAX_VIOLATIONS_BYTES
    for index, violation in enumerate(violations):
        field, description = _cut(violation.field, 256), _cut(violation.description, _MAX_MESSAGE_BYTES)
        room -= len(field.encode()) + len(description.encode())
        if room < 0:
            message.field_violations.add(description=f"and {len(violations) - index} more")
            break
        message.field_violations.add(field=field, description=description)
    return message


def _cut(text: str, max_bytes: int) -> str:
    """`text`, or as much of its beginning as fits in `max_bytes` of UTF-8 with an ellipsis."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - len("…".encode())].decode(errors="ignore") + "…"


def internal_status(request_id: str = "") -> grpc.Status:
    """Return what ends a call that failed by a bug: `internal_rich_status` for gRPC."""
    return rpc_status.to_status(internal_rich_status(request_id))


def internal_rich_status(request_id: str = "") -> status_pb2.Status:
    """Return the status of a bug: it says that there is one and where to look."""
    where = f" (request {request_id})" if request_id else ""
    text = f"internal error{where}; the server's log has the details"
    return _status(code_pb2.INTERNAL, text, [_error_info(TriptychError.code, {})], request_id)


def is_connection_refused(error: BaseException | None) -> bool:
    """Return whether a call failed because no process listens at the address, while its machine runs."""
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return "connection refused" in (error.details() or "").lower()


def has_reason(error: BaseException | None) -> bool:
    """Return whether a call failed because the server refused it with an error of ours: it was reached."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    status = _rich_status(error)
    return status is not None and len(status.details) > 0


def from_rpc_error(error: grpc.RpcError) -> TriptychError:
    """Return the typed error that a status means; UNKNOWN and the like become plain TriptychError."""
    code = error.code()
    return _typed_error(code, error.details() or code.name, _rich_status(error))


def is_broken_write(error: grpc.RpcError) -> bool:
    """Return whether grpc.aio lost the status of a call because it was writing when the server ended it."""
    return error.code() is grpc.StatusCode.INTERNAL and "Internal error from Core" in (error.details() or "")


def from_rich_status(status: status_pb2.Status) -> TriptychError:
    """Return the typed error that a status in a message means."""
    code = _STATUS_CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _typed_error(code, status.message or code.name, status)


def _typed_error(code: grpc.StatusCode, text: str, status: status_pb2.Status | None) -> TriptychError:
    reason, retry_after_s = "", 0.0
    metadata: dict[str, str] = {}
    violations: list[FieldViolation] = []
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            violations = [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    if reason in _ROW_BY_CODE:
        typed = error_from_code(reason, text, violations, retry_after_s)
        typed.metadata = metadata
        return typed
    return _ERROR_BY_GRPC_CODE.get(code, TriptychError)(f"{code.name}: {text}")


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    """The details that came with a status; None if there are none, or if a proxy in between has changed
    the one and not the other: then only the plain status can be believed."""
    call: Any = error  # grpc.aio's errors have the methods of a Call without being one
    try:
        return rpc_status.from_call(call)
    except (ValueError, DecodeError):
        return None


def error_from_code(
    code: str, message: str, violations: Sequence[FieldViolation] = (), retry_after_s: float = 0.0
) -> TriptychError:
    """Rebuild an error from what travels: its code, its message and its details."""
    row = _ROW_BY_CODE.get(code)
    kind = row.error if row is not None else TriptychError
    if issubclass(kind, errors.InvalidRequest):
        return kind(violations or [FieldViolation("", message)])
    if issubclass(kind, errors.QueueFull):
        return kind(message, retry_after_s)
    if issubclass(kind, errors.FeatureDisabled):
        features, _, why = message.partition(": ")
        return kind(features.split(", "), why)
    return kind(message)
