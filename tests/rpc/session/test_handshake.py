"""Hello and welcome: what either end accepts as the first message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from triptych.errors import EngineUnavailable, HandshakeMismatch, ProtocolViolation
from triptych.rpc.session import handshake
from triptych.rpc.session.handshake import (
    PROTOCOL_VERSION,
    SessionTerms,
    check_resumed,
    greet,
    read_hello,
    session_hello,
)
from triptych.rpc.session.replay_buffer import ReplayBuffer

TERMS = SessionTerms("boot/1", is_resumed=True, last_received=2, resume_ttl_s=1.5)


class Message:
    """A message with a oneof, as both protos have it."""

    def __init__(self, **field: Any) -> None:
        self._field = field

    def __getattr__(self, name: str) -> Any:
        return self._field[name]

    def WhichOneof(self, name: str) -> str:
        return next(iter(self._field))


class Hello:
    def __init__(self, min_protocol: int = PROTOCOL_VERSION, max_protocol: int = PROTOCOL_VERSION) -> None:
        self.session = session_hello("boot/1", 7)
        self.session.min_protocol, self.session.max_protocol = min_protocol, max_protocol


async def stream(*messages: Any) -> AsyncIterator[Any]:
    for message in messages:
        yield message


class Call:
    """The client's end of a stream, on which the server answers with `response`, or not at all."""

    def __init__(self, response: Any = None, *, has_ended: bool = False) -> None:
        self.written: list[Any] = []
        self._response = response
        self._has_ended = has_ended

    async def write(self, message: Any) -> None:
        if self._has_ended:
            raise asyncio.InvalidStateError
        self.written.append(message)

    async def read(self) -> Any:
        if self._response is None:
            await asyncio.Event().wait()
        return self._response


async def test_hello_of_a_known_version() -> None:
    hello = Hello(PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1)
    assert await read_hello(stream(Message(hello=hello))) is hello
    assert (hello.session.resume_session, hello.session.last_received) == ("boot/1", 7)


@pytest.mark.parametrize("versions", [(1, PROTOCOL_VERSION - 1), (PROTOCOL_VERSION + 1, 99)])
async def test_hello_of_other_versions(versions: tuple[int, int]) -> None:
    low, high = versions
    with pytest.raises(HandshakeMismatch, match=rf"speaks {low}\.\.{high}, the server {PROTOCOL_VERSION}"):
        await read_hello(stream(Message(hello=Hello(*versions))))


@pytest.mark.parametrize("messages", [(), (Message(step=1),)], ids=["nothing", "a step"])
async def test_first_message_must_be_a_hello(messages: tuple[Message, ...]) -> None:
    with pytest.raises(ProtocolViolation, match="the first message must be a hello"):
        await read_hello(stream(*messages))


async def test_client_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HELLO_TIMEOUT_S", 0.01)

    async def silence() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    with pytest.raises(ProtocolViolation, match=r"no hello within 0\.01 s"):
        await read_hello(silence())


async def test_welcome_answers_the_hello() -> None:
    call = Call(Message(welcome="w"))
    assert await greet(call, "hello") == "w"  # type: ignore[arg-type]
    assert call.written == ["hello"]


async def test_stream_that_ended_before_the_hello_says_why() -> None:
    assert await greet(Call(Message(welcome="w"), has_ended=True), "hello") == "w"  # type: ignore[arg-type]


class _EndedWhileWritten(Call):
    """A call that its server ended while the hello was written."""

    async def read(self) -> Any:
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, metadata, metadata, details="Internal error from Core"
        )


async def test_stream_that_ended_while_the_hello_was_written_may_be_dialed_again() -> None:
    with pytest.raises(EngineUnavailable, match="ended while the hello was written"):
        await greet(_EndedWhileWritten(), "hello")  # type: ignore[arg-type]


async def test_other_answers_than_a_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "WELCOME_TIMEOUT_S", 0.01)
    with pytest.raises(EngineUnavailable, match="closed without a welcome"):
        await greet(Call(grpc.aio.EOF), "hello")  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation, match="expected a welcome, got result"):
        await greet(Call(Message(result=1)), "hello")  # type: ignore[arg-type]
    with pytest.raises(EngineUnavailable, match=r"no welcome within 0\.01 s"):
        await greet(Call(), "hello")  # type: ignore[arg-type]


def test_terms_survive_the_wire() -> None:
    assert SessionTerms.from_proto(TERMS.to_proto()) == TERMS
    message = TERMS.to_proto()
    message.protocol = 1
    with pytest.raises(HandshakeMismatch, match=f"the server speaks 1, the client {PROTOCOL_VERSION}"):
        SessionTerms.from_proto(message)


def test_only_what_was_asked_for_is_resumed() -> None:
    sent: ReplayBuffer[str] = ReplayBuffer()
    for _ in range(3):
        sent.append("message")
    check_resumed(TERMS, "boot/1", sent)
    for asked in ("", "boot/2"):
        with pytest.raises(ProtocolViolation, match="'boot/1' was resumed"):
            check_resumed(TERMS, asked, sent)
    with pytest.raises(ProtocolViolation, match="message 4"):
        check_resumed(replace(TERMS, last_received=4), "boot/1", sent)
