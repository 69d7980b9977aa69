"""Hello and welcome: how a stream begins a session, or goes on with one.

client                                  server
hello {versions, session?, last} ─────► known, and everything after `last` is kept?
                                        yes: RESUMED, no: a new session
       ◄───────────────────── welcome {version, session, last, time to live}
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from triptych.errors import EngineUnavailable, HandshakeMismatch, ProtocolViolation, TriptychError
from triptych.internal.v1 import session_pb2
from triptych.rpc.session.replay_buffer import ReplayBuffer
from triptych.rpc.status import from_rpc_error, is_broken_write

PROTOCOL_VERSION = 3
HELLO_TIMEOUT_S = 10.0
WELCOME_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """Terms of a session that a server grants to a client's stream."""

    name: str
    """Name of the session, to resume it by."""
    is_resumed: bool
    """The session that was asked for goes on. False: this is a new one."""
    last_received: int
    """Number of the client's last message that has taken effect."""
    resume_ttl_s: float
    """How long the session outlives a broken stream, in seconds. 0: not at all."""

    def to_proto(self) -> session_pb2.SessionWelcome:
        """Return the server's part of its welcome."""
        return session_pb2.SessionWelcome(
            protocol=PROTOCOL_VERSION,
            name=self.name,
            is_resumed=self.is_resumed,
            last_received=self.last_received,
            resume_ttl_ms=round(self.resume_ttl_s * 1000),
        )

    @staticmethod
    def from_proto(message: session_pb2.SessionWelcome) -> SessionTerms:
        """Return what a server grants.

        Raises:
            HandshakeMismatch: It has chosen a version of the protocol that this client does not speak.
        """
        if message.protocol != PROTOCOL_VERSION:
            raise HandshakeMismatch(
                f"protocol: the server speaks {message.protocol}, the client {PROTOCOL_VERSION}"
            )
        return SessionTerms(
            name=message.name,
            is_resumed=message.is_resumed,
            last_received=message.last_received,
            resume_ttl_s=message.resume_ttl_ms / 1000,
        )


def session_hello(resume_session: str, last_received: int) -> session_pb2.SessionHello:
    """Return the client's part of its hello.

    Args:
        resume_session: Name of the session to resume. Empty: begin a new one.
        last_received: Number of the last message that has arrived in it.
    """
    return session_pb2.SessionHello(
        min_protocol=PROTOCOL_VERSION,
        max_protocol=PROTOCOL_VERSION,
        resume_session=resume_session,
        last_received=last_received,
    )


async def read_hello(requests: AsyncIterator[Any]) -> Any:
    """Return the hello that a new stream begins with.

    Args:
        requests: The client's messages, of which each has a oneof called `message`, and hello a `session`.

    Raises:
        ProtocolViolation: There is no hello within 10 s, or something else comes first.
        HandshakeMismatch: The client speaks other versions of the protocol.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(requests, None)
    except TimeoutError:
        raise ProtocolViolation(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise ProtocolViolation("the first message must be a hello")
    versions = first.hello.session
    if not versions.min_protocol <= PROTOCOL_VERSION <= versions.max_protocol:
        raise HandshakeMismatch(
            f"protocol: the client speaks {versions.min_protocol}..{versions.max_protocol}, the server "
            f"{PROTOCOL_VERSION}"
        )
    return first.hello


async def greet(call: grpc.aio.StreamStreamCall, request: Any) -> Any:
    """Send the hello on a new stream and return the server's welcome.

    Args:
        request: The message that holds the hello.

    Raises:
        EngineUnavailable: The server has not answered within 10 s, or has closed the stream.
        ProtocolViolation: It has answered with something else.
        grpc.aio.AioRpcError: It refuses, or cannot be reached.
    """
    try:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            with suppress(asyncio.InvalidStateError):  # the stream has ended already: reading says why
                await call.write(request)
            response = await call.read()
    except TimeoutError:
        raise EngineUnavailable(f"no welcome within {WELCOME_TIMEOUT_S:g} s") from None
    except grpc.aio.AioRpcError as error:
        if is_broken_write(error):
            raise EngineUnavailable("the stream ended while the hello was written") from error
        raise
    if response is grpc.aio.EOF:
        raise EngineUnavailable("the stream was closed without a welcome")
    kind = response.WhichOneof("message")
    if kind != "welcome":
        raise ProtocolViolation(f"expected a welcome, got {kind}")
    return response.welcome


async def end_of(call: grpc.aio.StreamStreamCall) -> TriptychError:
    """Wait until a stream has ended and return why; EngineUnavailable if the server has closed it in order."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return EngineUnavailable("the stream was closed")
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    return from_rpc_error(grpc.aio.AioRpcError(code, initial, trailing, details=await call.details()))


def check_resumed(terms: SessionTerms, asked_session: str, sent: ReplayBuffer[Any] | None) -> None:
    """Check that a server resumes what this client has asked it to resume.

    Args:
        asked_session: Name of the session. Empty: none was asked for.
        sent: The client's messages in it. None: none was asked for.

    Raises:
        ProtocolViolation: It is another session, or not what this client has sent in it.
    """
    if sent is None or not asked_session or terms.name != asked_session:
        raise ProtocolViolation(f"session {terms.name!r} was resumed, but {asked_session!r} was asked for")
    sent.check_received(terms.last_received)
