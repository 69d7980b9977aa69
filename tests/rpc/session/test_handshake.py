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
    ENGINE_PROTOCOL,
    KV_GROUP_TRANSFERS,
    KV_GROUPS,
    WORKER_PROTOCOL,
    Agreement,
    Protocol,
    SessionTerms,
    check_kv_groups,
    check_resumed,
    end_of,
    greet,
    read_hello,
    session_hello,
)
from triptych.rpc.session.replay_buffer import ReplayBuffer
from triptych.types.facts import KvKind, KvLayout

FAST, SMALL, STRICT = 1, 2, 4
PROTOCOL = Protocol("frontend", "engine core", version=8, features=FAST | SMALL)
TERMS = SessionTerms(
    "boot/1", is_resumed=True, last_received=2, resume_ttl_s=1.5, agreement=Agreement(8, FAST)
)


class Message:
    """A message with a oneof, as both protos have it."""

    def __init__(self, **field: Any) -> None:
        self._field = field

    def __getattr__(self, name: str) -> Any:
        return self._field[name]

    def WhichOneof(self, name: str) -> str:
        return next(iter(self._field))


class Hello:
    def __init__(self, min_protocol: int = 8, max_protocol: int = 8, features: int = 0) -> None:
        self.session = session_hello(PROTOCOL, "boot/1", 7)
        self.session.min_protocol, self.session.max_protocol = min_protocol, max_protocol
        self.session.features = features


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


@pytest.mark.parametrize(
    ("versions", "agreed"), [((8, 8), 8), ((7, 7), 7), ((7, 9), 8), ((5, 7), 7), ((8, 11), 8)]
)
async def test_the_newest_version_that_both_speak(versions: tuple[int, int], agreed: int) -> None:
    sent = Hello(*versions)
    hello, agreement = await read_hello(stream(Message(hello=sent)), PROTOCOL)
    assert hello is sent
    assert agreement.version == agreed
    assert (hello.session.resume_session, hello.session.last_received) == ("boot/1", 7)


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ((3, 6), r"frontend speaks 3\.\.6, the engine core 7\.\.8; upgrade the frontend first"),
        (
            (9, 9),
            r"frontend speaks 9, the engine core 7\.\.8; upgrade the engine core first \(workers before",
        ),
    ],
)
async def test_versions_in_a_wrong_order_are_refused_by_name(versions: tuple[int, int], told: str) -> None:
    with pytest.raises(HandshakeMismatch, match=told):
        await read_hello(stream(Message(hello=Hello(*versions))), PROTOCOL)


async def test_a_feature_is_on_if_both_have_it() -> None:
    _, agreement = await read_hello(stream(Message(hello=Hello(features=SMALL | STRICT))), PROTOCOL)
    assert agreement == Agreement(8, SMALL)
    assert agreement.has(SMALL)
    assert not agreement.has(FAST)
    assert not agreement.has(FAST | SMALL)
    welcome = replace(TERMS, agreement=Agreement(8, STRICT | FAST)).to_proto()
    assert SessionTerms.from_proto(welcome, PROTOCOL).agreement.features == FAST


def test_a_client_offers_what_its_build_speaks() -> None:
    hello = session_hello(PROTOCOL, "", 0)
    assert (hello.min_protocol, hello.max_protocol, hello.features) == (8, 8, FAST | SMALL)


@pytest.mark.parametrize("protocol", [ENGINE_PROTOCOL, WORKER_PROTOCOL])
def test_each_server_accepts_the_version_before_its_own(protocol: Protocol) -> None:
    before = replace(protocol, version=protocol.version - 1, features=0)
    agreement = protocol.agree(session_hello(before, "", 0))
    assert agreement == Agreement(protocol.version - 1)
    SessionTerms.from_proto(replace(TERMS, agreement=agreement).to_proto(), before)
    with pytest.raises(HandshakeMismatch, match=f"upgrade the {protocol.server} first"):
        before.agree(session_hello(protocol, "", 0))


@pytest.mark.parametrize("other", ["engine core", "worker"])
def test_groups_of_kv_blocks_need_both_ends(other: str) -> None:
    before, now = Agreement(4), Agreement(4, KV_GROUPS)
    full = KvLayout(9, 16, 1, 1, 8, "float32")
    window = replace(full, groups=(replace(full.groups[0], kind=KvKind.WINDOW, window=32),))
    for layout, agreement in ((full, before), (full, now), (window, now)):
        check_kv_groups(layout, agreement, other=other)
    with pytest.raises(HandshakeMismatch, match=rf"\(window\).*upgrade the {other} first"):
        check_kv_groups(window, before, other=other)
    check_kv_groups(full, before, other=other, transfers=True)
    check_kv_groups(window, Agreement(4, KV_GROUPS | KV_GROUP_TRANSFERS), other=other, transfers=True)
    with pytest.raises(
        HandshakeMismatch, match=rf"worker.kv_transfer.*\(window\).*upgrade the {other} first"
    ):
        check_kv_groups(window, now, other=other, transfers=True)


@pytest.mark.parametrize("messages", [(), (Message(step=1),)], ids=["nothing", "a step"])
async def test_first_message_must_be_a_hello(messages: tuple[Message, ...]) -> None:
    with pytest.raises(ProtocolViolation, match="the first message must be a hello"):
        await read_hello(stream(*messages), PROTOCOL)


async def test_client_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HELLO_TIMEOUT_S", 0.01)

    async def silence() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    with pytest.raises(ProtocolViolation, match=r"no hello within 0\.01 s"):
        await read_hello(silence(), PROTOCOL)


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
    assert SessionTerms.from_proto(TERMS.to_proto(), PROTOCOL) == TERMS
    message = TERMS.to_proto()
    message.protocol = 1
    with pytest.raises(HandshakeMismatch, match="the engine core answers in 1, the frontend speaks 8"):
        SessionTerms.from_proto(message, PROTOCOL)


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


class EndedCall:
    """A stream that a failed write has ended before the server's status came."""

    def __init__(self, *, num_looks: int) -> None:
        self.num_looks = num_looks
        """The server's status is there after so many looks."""

    async def code(self) -> grpc.StatusCode:
        self.num_looks -= 1
        return grpc.StatusCode.INTERNAL if self.num_looks >= 0 else grpc.StatusCode.FAILED_PRECONDITION

    async def details(self) -> str:
        return "Internal error from Core" if self.num_looks >= 0 else "step 1 failed"

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata


async def test_the_status_of_the_server_follows_that_of_a_failed_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call: Any = EndedCall(num_looks=3)
    assert "step 1 failed" in (await end_of(call)).message
    monkeypatch.setattr(handshake, "HIDDEN_STATUS_S", 0.02)
    call = EndedCall(num_looks=1000)
    assert "Internal error from Core" in (await end_of(call)).message
    assert call.num_looks > 900
