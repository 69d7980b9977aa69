"""The error table both ways: what a servicer raises is what the caller catches, and UNKNOWN never leaves a server."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from triptych import errors
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.errors import FieldViolation, TriptychError
from triptych.rpc.channel import open_channel
from triptych.rpc.interceptors import set_request_id
from triptych.rpc.status import error_from_code, from_rpc_error, internal_status, row_of, to_status
from triptych.v1 import generation_pb2

VIOLATIONS = (
    FieldViolation("sampling.temperature", "3.0 is above the limit 2"),
    FieldViolation("prompt", "is empty"),
)
# error -> gRPC code, HTTP status
TABLE = [
    (errors.InvalidRequest(VIOLATIONS), "INVALID_ARGUMENT", 400),
    (errors.ContextLengthExceeded("prompt", "64 tokens are too many"), "INVALID_ARGUMENT", 400),
    (errors.ModelNotFound("no such model: x"), "NOT_FOUND", 404),
    (errors.FeatureDisabled("chat.tools", "is not served yet"), "UNIMPLEMENTED", 400),
    (errors.Unauthenticated("no valid API key"), "UNAUTHENTICATED", 401),
    (errors.PermissionDenied("tenant: not yours"), "PERMISSION_DENIED", 403),
    (errors.WrongState("Wake: it does not sleep"), "FAILED_PRECONDITION", 409),
    (errors.DuplicateRequest("request x is alive"), "ALREADY_EXISTS", 409),
    (errors.QueueFull("64 requests wait, the limit is 64", 2.5), "RESOURCE_EXHAUSTED", 429),
    (errors.RateLimited("61 requests within a minute", 1.5), "RESOURCE_EXHAUSTED", 429),
    (errors.DeadlineUnreachable("needs 9 s, has 2 s", 7.0), "RESOURCE_EXHAUSTED", 429),
    (errors.DeadlineExceeded("2 s are over"), "DEADLINE_EXCEEDED", 504),
    (errors.EngineUnavailable("no engine is ready"), "UNAVAILABLE", 503),
    (errors.GenerationLost("the engine was lost after 3 tokens"), "ABORTED", 503),
    (errors.NotKept("no stream of this token is kept"), "NOT_FOUND", 404),
    (errors.AttachedElsewhere("another frontend goes on with it"), "ABORTED", 409),
    (errors.HandshakeMismatch("cache.block_size: 16 here, 32 there"), "FAILED_PRECONDITION", 500),
    (errors.WorkerAsleep("the worker is asleep"), "UNAVAILABLE", 503),
    (errors.MemoryShort("waking takes 9 MiB, 2 are free"), "RESOURCE_EXHAUSTED", 503),
    (errors.WorkerHeld("held by engine-0"), "ALREADY_EXISTS", 500),
    (errors.StaleEpoch("epoch 7, epoch 8 holds the worker"), "FAILED_PRECONDITION", 500),
    (errors.SequenceGap("step 9 after step 7"), "ABORTED", 500),
    (errors.ProtocolViolation("expected a step, got a welcome"), "ABORTED", 500),
    (errors.ConfigError("scheduler.steps_in_flight: 9 is out of range"), "FAILED_PRECONDITION", 500),
    (errors.ModelError("config.json: no such file"), "FAILED_PRECONDITION", 500),
    (errors.RankUnavailable("rank 1 of 2 is gone"), "UNAVAILABLE", 503),
    (errors.EngineFailure("the row gave no finite logits"), "INTERNAL", 500),
    (TriptychError("something else"), "INTERNAL", 500),
]
IDS = [type(error).__name__ for error, _, _ in TABLE]


def every_error_class(root: type[TriptychError] = TriptychError) -> set[type[TriptychError]]:
    """Those that cross the wire; a client's own are not."""
    children = (child for child in root.__subclasses__() if child.__module__ == root.__module__)
    return {root}.union(*map(every_error_class, children))


def assert_same_error(actual: TriptychError, expected: TriptychError) -> None:
    assert type(actual) is type(expected)
    assert actual.message == expected.message
    assert actual.code == expected.code
    for name in ("violations", "retry_after_s", "feature"):
        assert getattr(actual, name, None) == getattr(expected, name, None)


def raising(error: Exception):
    async def behave():
        raise error

    return behave


def test_the_table_has_every_error_there_is():
    assert {type(error) for error, _, _ in TABLE} == every_error_class()
    codes = [kind.code for kind in every_error_class()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(("error", "grpc_code", "http_status"), TABLE, ids=IDS)
def test_an_error_has_its_line_in_the_table(error, grpc_code, http_status):
    row = row_of(error)
    assert (row.grpc_code.name, row.http_status) == (grpc_code, http_status)


@pytest.mark.parametrize(("error", "grpc_code", "_http"), TABLE, ids=IDS)
async def test_a_unary_call_raises_what_the_door_raised(error, grpc_code, _http, serve):
    async with serve(raising(error)) as running:
        with pytest.raises(grpc.RpcError) as caught:
            await running.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert caught.value.code().name == grpc_code
    assert_same_error(from_rpc_error(caught.value), error)


@pytest.mark.parametrize(("error", "grpc_code", "_http"), TABLE, ids=IDS)
async def test_stream_gives_its_messages_before_its_error(error, grpc_code, _http, serve):
    async with serve(raising(error)) as running:
        call = running.admin.WatchStatus(admin_pb2.WatchStatusRequest())
        assert (await call.read()).status.engine_id == "first"
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
    assert caught.value.code().name == grpc_code
    assert_same_error(from_rpc_error(caught.value), error)


def test_details_say_what_other_clients_look_for():
    def details_of(error):
        message = rpc_status.status_pb2.Status.FromString(
            dict(to_status(error).trailing_metadata)["grpc-status-details-bin"]
        )
        return {detail.type_url.rsplit(".", 1)[-1]: detail for detail in message.details}

    details = details_of(errors.InvalidRequest(VIOLATIONS))
    assert set(details) == {"ErrorInfo", "BadRequest"}
    info = error_details_pb2.ErrorInfo.FromString(details["ErrorInfo"].value)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "triptych.dev")
    bad_request = error_details_pb2.BadRequest.FromString(details["BadRequest"].value)
    assert [(v.field, v.description) for v in bad_request.field_violations] == [
        (violation.field, violation.description) for violation in VIOLATIONS
    ]

    one = errors.FieldViolation("n", "9 is above the limit 5", "9", "5")
    info = error_details_pb2.ErrorInfo.FromString(details_of(errors.InvalidRequest([one]))["ErrorInfo"].value)
    assert dict(info.metadata) == {"field": "n", "value": "9", "limit": "5"}

    details = details_of(errors.FeatureDisabled(["adapter", "cache.bypass"], "is not served yet"))
    bad_request = error_details_pb2.BadRequest.FromString(details["BadRequest"].value)
    assert [violation.field for violation in bad_request.field_violations] == ["adapter", "cache.bypass"]

    details = details_of(errors.QueueFull("full", 0.25))
    assert set(details) == {"ErrorInfo", "RetryInfo"}
    retry = error_details_pb2.RetryInfo.FromString(details["RetryInfo"].value)
    assert retry.retry_delay.ToMilliseconds() == 250

    assert set(details_of(errors.ModelNotFound("x"))) == {"ErrorInfo"}


def test_status_carries_metadata_and_request_id():
    error = errors.ContextLengthExceeded("prompt", "too long")
    error.metadata = {"limit": "64"}
    status = to_status(error, "my-1")
    message = rpc_status.status_pb2.Status.FromString(
        dict(status.trailing_metadata)["grpc-status-details-bin"]
    )
    details = {detail.type_url.rsplit(".", 1)[-1]: detail for detail in message.details}
    assert dict(error_details_pb2.ErrorInfo.FromString(details["ErrorInfo"].value).metadata) == {
        "limit": "64"
    }
    assert error_details_pb2.RequestInfo.FromString(details["RequestInfo"].value).request_id == "my-1"


async def test_a_client_reads_the_metadata_of_an_error(serve):
    error = errors.ContextLengthExceeded("prompt", "too long")
    error.metadata = {"limit": "64"}
    async with serve(raising(error)) as running:
        with pytest.raises(grpc.RpcError) as caught:
            await running.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert from_rpc_error(caught.value).metadata == {"limit": "64"}


async def test_a_bug_names_the_request_to_client_and_log(serve, caplog):
    async def behave():
        set_request_id("my-7")
        raise KeyError("secret")

    async with serve(behave) as running:
        with caplog.at_level(logging.ERROR):
            with pytest.raises(grpc.RpcError) as caught:
                await running.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert "(request my-7)" in caught.value.details()
    error = from_rpc_error(caught.value)
    assert (type(error), error.code) == (TriptychError, "INTERNAL")
    (logged,) = [record for record in caplog.records if "secret" in record.getMessage()]
    assert "(request my-7)" in logged.getMessage()


def test_a_retry_time_is_never_zero():
    status = to_status(errors.QueueFull("full", 0.0))
    message = rpc_status.status_pb2.Status.FromString(
        dict(status.trailing_metadata)["grpc-status-details-bin"]
    )
    retry = error_details_pb2.RetryInfo.FromString(message.details[1].value)
    assert retry.retry_delay.ToMilliseconds() == 1


async def test_bug_is_internal_and_logged_once(serve, caplog):
    async with serve(raising(KeyError("secret"))) as running:
        with caplog.at_level(logging.ERROR):
            with pytest.raises(grpc.RpcError) as caught:
                await running.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    logged = [record for record in caplog.records if "secret" in record.getMessage()]
    assert len(logged) == 1
    assert "/triptych.admin.v1.AdminService/GetStatus" in logged[0].getMessage()
    assert logged[0].exc_info


async def test_a_failed_call_does_not_disturb_the_next_one(serve):
    outcomes = [KeyError("a bug"), errors.QueueFull("full", 1.0), None]

    async def behave():
        error = outcomes.pop(0)
        if error is not None:
            raise error

    async with serve(behave) as running:
        for _ in range(2):
            with pytest.raises(grpc.RpcError):
                await running.admin.GetStatus(admin_pb2.GetStatusRequest())
        response = await running.admin.GetStatus(admin_pb2.GetStatusRequest(engine_id="e"))
    assert response.status.engine_id == "e"


def test_an_internal_status_names_the_request():
    assert "(request abc)" in internal_status("abc").details


# Errors too large for a status


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest([errors.FieldViolation(f"stop[{i}]", "x" * 100) for i in range(300)]),
        errors.InvalidRequest("stop", "é" * 5000),
        errors.InvalidRequest("€" * 5000, "%" * 5000),
        errors.EngineUnavailable("\n" * 20_000),
    ],
    ids=["many violations", "one of many bytes", "a long field", "a long message"],
)
async def test_a_large_error_arrives_cut_and_keeps_its_code(error, serve):
    async def behave():
        raise error

    async with serve(behave) as running:
        with pytest.raises(grpc.RpcError) as caught:
            await running.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert caught.value.code() is row_of(error).grpc_code
    assert caught.value.details().endswith("…")
    rebuilt = from_rpc_error(caught.value)
    assert type(rebuilt) is type(error)


async def test_violations_beyond_what_fits_are_counted(serve):
    async def behave():
        raise errors.InvalidRequest([errors.FieldViolation(f"stop[{i}]", "x" * 100) for i in range(300)])

    async with serve(behave) as running:
        with pytest.raises(grpc.RpcError) as caught:
            await running.admin.GetStatus(admin_pb2.GetStatusRequest())
    *shown, last = from_rpc_error(caught.value).violations
    assert len(shown) > 20
    assert [violation.field for violation in shown] == [f"stop[{i}]" for i in range(len(shown))]
    assert last.description == f"and {300 - len(shown)} more"


# Statuses that no Triptych server wrote


@pytest.mark.parametrize("details", [b"\xff", internal_status().trailing_metadata[0][1]])
def test_details_that_contradict_their_status_are_not_believed(details):
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="no healthy upstream"
    )
    rebuilt = from_rpc_error(error)
    assert type(rebuilt) is errors.EngineUnavailable
    assert rebuilt.message == "UNAVAILABLE: no healthy upstream"


async def test_unknown_method_is_a_plain_error(serve):
    async with serve() as running:
        with pytest.raises(grpc.RpcError) as caught:
            await running.generation.Tokenize(generation_pb2.TokenizeRequest())
    error = from_rpc_error(caught.value)
    assert type(error) is TriptychError
    assert error.message == "UNIMPLEMENTED: /triptych.v1.GenerationService/Tokenize is not served here"


async def test_nobody_listening_is_engine_unavailable(unused_tcp_port):
    async with open_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=60)
    assert isinstance(from_rpc_error(caught.value), errors.EngineUnavailable)


async def test_the_callers_own_deadline_is_deadline_exceeded(serve):
    async def behave():
        await asyncio.Event().wait()

    async with serve(behave) as running:
        with pytest.raises(grpc.RpcError) as caught:
            await running.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=0.05)
    assert isinstance(from_rpc_error(caught.value), errors.DeadlineExceeded)


async def test_a_message_above_the_limit_is_refused_by_the_server(serve):
    async with serve(limit_bytes=1000) as running:
        with pytest.raises(grpc.RpcError) as caught:
            await running.generation.Detokenize(generation_pb2.DetokenizeRequest(model="x" * 2000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        response = await running.generation.Detokenize(generation_pb2.DetokenizeRequest(model="x" * 900))
        assert len(response.text) == 900


# Errors that travel as a code, inside a message


@pytest.mark.parametrize(("error", "_code", "_http"), TABLE, ids=IDS)
def test_an_error_is_rebuilt_from_its_code_and_message(error, _code, _http):
    rebuilt = error_from_code(
        error.code,
        error.message,
        getattr(error, "violations", ()),
        getattr(error, "retry_after_s", 0.0),
    )
    assert_same_error(rebuilt, error)


def test_an_invalid_request_without_violations_keeps_its_message():
    assert error_from_code("INVALID_REQUEST", "too long").message == "too long"


def test_a_code_of_a_newer_version_is_a_plain_error():
    error = error_from_code("FROM_THE_FUTURE", "what happened")
    assert type(error) is TriptychError
    assert error.message == "what happened"
