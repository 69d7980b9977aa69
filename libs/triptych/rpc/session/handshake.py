"""Hello and welcome: how a stream begins a session, or goes on with one.

client                                            server
hello {versions, features, session?, last} ─────► known, and everything after `last` is kept?
                                                  yes: RESUMED, no: a new session
       ◄───────────────────── welcome {version, features, session, last, time to live}

Servers are upgraded before their clients: a client speaks the version of its build, a server that one and the one
before. What can be left out is a feature, which is off unless both ends have it (docs/wire.md, "Versions").
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
from triptych.types.facts import KvLayout

HELLO_TIMEOUT_S = 10.0
WELCOME_TIMEOUT_S = 10.0
HIDDEN_STATUS_S = 0.5  # for the status of a server whose stream ended while something was written


@dataclass(frozen=True, slots=True)
class Agreement:
    """Terms on which the two ends of a stream have agreed."""

    version: int
    """Version of the protocol."""
    features: int = 0
    """Bits of the features that both ends have."""

    def has(self, feature: int) -> bool:
        """Return whether both ends have this feature."""
        return self.features & feature == feature


@dataclass(frozen=True, slots=True)
class Protocol:
    """One kind of stream, as this build speaks it."""

    client: str
    """The end that dials, in words."""
    server: str
    version: int
    """The newest version. A change that the other end must know of raises it; one that it may miss is a feature."""
    features: int = 0
    """Bits of the features that this build has. A bit is never used for something else."""

    @property
    def oldest(self) -> int:
        """The oldest version that a server accepts."""
        return self.version - 1

    def agree(self, hello: session_pb2.SessionHello) -> Agreement:
        """Return what a server answers to a client's hello.

        Raises:
            HandshakeMismatch: They have no version in common; says which of the two to upgrade.
        """
        low, high = hello.min_protocol, hello.max_protocol
        version = min(self.version, high)
        if low > self.version or high < self.oldest:
            behind = self.server if low > self.version else self.client
            raise HandshakeMismatch(
                f"protocol: the {self.client} speaks {_span(low, high)}, the {self.server} "
                f"{_span(self.oldest, self.version)}; upgrade the {behind} first ({UPGRADE_ORDER})"
            )
        return Agreement(version, self.features & hello.features)

    def check(self, welcome: session_pb2.SessionWelcome) -> Agreement:
        """Return what a client learns from a server's welcome.

        Raises:
            HandshakeMismatch: The server has chosen a version that this client does not speak.
        """
        if welcome.protocol != self.version:
            raise HandshakeMismatch(
                f"protocol: the {self.server} answers in {welcome.protocol}, the {self.client} speaks "
                f"{self.version}"
            )
        return Agreement(welcome.protocol, self.features & welcome.features)


UPGRADE_ORDER = "workers before engine cores before frontends; back in the reverse order"
BEATS = 1 << 0
"""Feature of an engine core: it answers beats."""
HANDOVER = 1 << 1
"""Feature of an engine core: it knows which frontends take up streams, and understands `detach` and short attaches."""
ENGINE_PROTOCOL = Protocol("frontend", "engine core", version=4, features=BEATS | HANDOVER)
KV_GROUPS = 1 << 0
"""Feature of a worker: its cache may have other groups than one full one, and its rows a block table for each."""
KV_GROUP_TRANSFERS = 1 << 1
"""Feature of a worker: it may transfer blocks of several groups, and pages of states."""
WORKER_PROTOCOL = Protocol("engine core", "worker", version=4, features=KV_GROUPS | KV_GROUP_TRANSFERS)


def check_kv_groups(kv: KvLayout, agreement: Agreement, *, other: str, transfers: bool = False) -> None:
    """Check that both ends of a step stream know groups of KV blocks, if the worker's cache has any but one full one.

    Args:
        other: The end that this one talks to: it may be too old.
        transfers: Whether the worker serves its blocks to others.

    Raises:
        HandshakeMismatch: The other end does not know them; says what to upgrade.
    """
    kinds = ", ".join(group.kind.name.lower() for group in kv.groups)
    if transfers and not kv.is_one_full_group and not agreement.has(KV_GROUP_TRANSFERS):
        raise HandshakeMismatch(
            f"worker.kv_transfer: the worker transfers blocks of other groups than one full one ({kinds}), and the "
            f"{other} does not know how; upgrade the {other} first ({UPGRADE_ORDER}), or turn worker.kv_transfer off"
        )
    if kv.is_plain or agreement.has(KV_GROUPS):
        return
    raise HandshakeMismatch(
        f"kv.groups: the worker's cache has other groups than one full one ({kinds}), and the {other} does not know "
        f"groups; upgrade the {other} first ({UPGRADE_ORDER})"
    )


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
    agreement: Agreement

    def to_proto(self) -> session_pb2.SessionWelcome:
        """Return the server's part of its welcome."""
        return session_pb2.SessionWelcome(
            protocol=self.agreement.version,
            features=self.agreement.features,
            name=self.name,
            is_resumed=self.is_resumed,
            last_received=self.last_received,
            resume_ttl_ms=round(self.resume_ttl_s * 1000),
        )

    @staticmethod
    def from_proto(message: session_pb2.SessionWelcome, protocol: Protocol) -> SessionTerms:
        """Return what a server grants.

        Raises:
            HandshakeMismatch: It has chosen a version of the protocol that this client does not speak.
        """
        return SessionTerms(
            name=message.name,
            is_resumed=message.is_resumed,
            last_received=message.last_received,
            resume_ttl_s=message.resume_ttl_ms / 1000,
            agreement=protocol.check(message),
        )


def session_hello(protocol: Protocol, resume_session: str, last_received: int) -> session_pb2.SessionHello:
    """Return the client's part of its hello.

    Args:
        protocol: What the client speaks. Its newest version only: its server may be newer, never older.
        resume_session: Name of the session to resume. Empty: begin a new one.
        last_received: Number of the last message that has arrived in it.
    """
    return session_pb2.SessionHello(
        min_protocol=protocol.version,
        max_protocol=protocol.version,
        features=protocol.features,
        resume_session=resume_session,
        last_received=last_received,
    )


async def read_hello(requests: AsyncIterator[Any], protocol: Protocol) -> tuple[Any, Agreement]:
    """Return the hello that a new stream begins with, and what the server agrees to.

    Args:
        requests: The client's messages, of which each has a oneof called `message`, and hello a `session`.
        protocol: What the server speaks.

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
    return first.hello, protocol.agree(first.hello.session)


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
    """Wait until a stream has ended and return why; EngineUnavailable if the server has closed it in order.

    A write that failed puts a status of its own before that of the server, which takes its place when it arrives.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + HIDDEN_STATUS_S
    while True:
        code = await call.code()
        if code is grpc.StatusCode.OK:
            return EngineUnavailable("the stream was closed")
        initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
        error = grpc.aio.AioRpcError(code, initial, trailing, details=await call.details())
        if not is_broken_write(error) or loop.time() >= until:
            return from_rpc_error(error)
        await asyncio.sleep(0.01)


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


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"
