"""The stream to one engine: dialled, redialled, dispatched; one request's trouble is no other's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc.aio import Metadata

from tests.helpers.fake_engine import FakeEngine, eventually, u32
from tests.helpers.frontend import FrontendCore, answer, collect, frontend_core, raw_request
from triptych.errors import (
    EngineFailure,
    EngineUnavailable,
    GenerationLost,
    InvalidRequest,
    NotKept,
    ProtocolViolation,
    QueueFull,
)
from triptych.rpc.session import dialer, handshake
from triptych.types.events import DeltaEvent
from triptych.types.outputs import (
    CacheNews,
    FinishedRequest,
    FinishReason,
    OutputBatch,
    RequestFailure,
    StageTimings,
)
from triptych.types.sampling import SamplingParams
from triptych.types.submit import AttachRequest, RequestHead, SubmitRequest, single_choice
from triptych.wire.columns import u32_from_bytes
from triptych_services.frontend.engines import outbox as outbox_module
from triptych_services.frontend.engines import session as engine_session_module
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.outbox import Outbox
from triptych_services.frontend.engines.session import EngineLoss, EngineSession
from triptych_services.frontend.routing.prefix_index import PrefixIndex, keys_of


def hello_reply(request: SubmitRequest) -> list[int]:
    return [65 + i for i in range(20)]


async def test_the_hello_names_this_frontend() -> None:
    async with FakeEngine() as engine, frontend_core(engine):
        assert (engine.hellos[0].frontend_id, engine.hellos[0].boot_id) == ("test", "boot")


async def test_a_lost_engine_is_redialled_and_serves_again() -> None:
    async with FakeEngine(hello_reply) as engine, frontend_core(engine) as core:
        client = core.router.engines[0]
        await engine.die()
        await eventually(lambda: not client.is_ready)
        assert "engine-0" in core.generator.why_not_ready
        await engine.start()
        await eventually(lambda: client.is_ready)
        assert (await answer(core.generator, raw_request())).token_ids() == hello_reply(None)[:16]  # type: ignore[arg-type]


async def test_an_engine_without_a_session_gets_no_requests() -> None:
    async with FakeEngine(hello_reply, resume_ttl_s=10.0) as engine, frontend_core(engine) as core:
        client = core.router.engines[0]
        client.give_up("no sign of life")
        assert not client.is_ready, "its stream has not ended yet"
        assert client.why_not_ready == "its session was given up"
        await eventually(lambda: client.is_ready)
        await answer(core.generator, raw_request())


async def test_an_engine_that_comes_later_is_found() -> None:
    engine = FakeEngine(hello_reply)
    await engine.start()
    await engine.die()
    async with frontend_core(engine, waits=False) as core:
        await eventually(lambda: core.router.engines[0].why_not_ready != "not connected yet")
        await engine.start()
        await eventually(lambda: core.generator.is_ready)
        await engine.die()


async def test_readiness_follows_the_welcomes() -> None:
    async with FakeEngine(is_ready=False) as engine, frontend_core(engine, waits=False) as core:
        await eventually(lambda: "loading" in core.generator.why_not_ready)
        with pytest.raises(EngineUnavailable, match="engine-0: loading"):
            await collect(core.generator, raw_request())
        engine.set_ready(True)
        await eventually(lambda: core.generator.is_ready)
        engine.set_ready(False, "worker lost")
        await eventually(lambda: not core.generator.is_ready)
        assert "worker lost" in core.generator.why_not_ready


async def test_loss_before_any_token_is_unavailable() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        waiting = asyncio.create_task(collect(core.generator, raw_request()))
        await engine.next_submit()
        await engine.die()
        with pytest.raises(EngineUnavailable, match="engine-0 was lost"):
            await waiting
        assert core.count("ENGINE_UNAVAILABLE") == 1


async def test_loss_after_tokens_names_the_resume_point() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        events = core.generator.generate(raw_request())
        await_first = asyncio.ensure_future(anext(events))
        request = await engine.next_submit()
        engine.emit(request, [65, 66, 67])
        await await_first
        assert list((await anext(events)).token_ids) == [65, 66, 67]  # type: ignore[union-attr]
        engine.close_streams()
        with pytest.raises(GenerationLost, match=r"3 of choice 0; to go on from there"):
            await anext(events)


async def test_tokens_of_several_steps_in_one_batch_all_arrive() -> None:
    """The engine may send several steps at once: the same number stands in the columns more than once."""
    async with FakeEngine() as engine, frontend_core(engine) as core:
        both = [asyncio.create_task(answer(core.generator, raw_request())) for _ in range(2)]
        first, second = await engine.next_submit(0), await engine.next_submit(1)
        ends = tuple(
            FinishedRequest(r.number, FinishReason.LENGTH, None, 0, StageTimings()) for r in (first, second)
        )
        batch = OutputBatch(
            0,
            numbers=u32([first.number, second.number, first.number, second.number]),
            token_ids=u32([65, 75, 66, 76]),
            finished=ends,
        )
        engine.send(first, batch)
        assert [(await task).token_ids() for task in both] == [[65, 66], [75, 76]]


@pytest.mark.parametrize("retry_after_ms", [1500])
async def test_a_refusal_of_the_engine_arrives_as_its_error(retry_after_ms: int) -> None:
    async with FakeEngine(is_mute=True) as engine, frontend_core(engine) as core:
        tasks = [asyncio.create_task(collect(core.generator, raw_request())) for _ in range(3)]
        requests = [await engine.next_submit(index) for index in range(3)]
        engine.fail(requests[0], "QUEUE_FULL", "64 requests wait", retry_after_ms=retry_after_ms)
        engine.fail(requests[1], "INVALID_REQUEST", "too long", field="prompt")
        engine.fail(requests[2], "ENGINE_FAILURE", "row 3 exploded")
        with pytest.raises(QueueFull) as full:
            await tasks[0]
        assert full.value.retry_after_s == 1.5
        with pytest.raises(InvalidRequest, match=r"^prompt: too long$"):
            await tasks[1]
        with pytest.raises(EngineFailure, match="row 3 exploded"):
            await tasks[2]


async def test_an_error_in_its_tokens_ends_only_that_request() -> None:
    """This one asked for log-probabilities, which the engine forgot: a bug, and only its own."""
    async with FakeEngine() as engine, frontend_core(engine) as core:
        broken = asyncio.create_task(collect(core.generator, raw_request(sampling={"logprobs": 1})))
        healthy = asyncio.create_task(answer(core.generator, raw_request()))
        first, second = await engine.next_submit(0), await engine.next_submit(1)
        batch = OutputBatch(0, numbers=u32([first.number, second.number]), token_ids=u32([65, 66]))
        engine.send(first, batch)
        with pytest.raises(LookupError):
            await broken
        await eventually(lambda: engine.aborted == [first.request_id])
        engine.emit(second, [67], finish=FinishReason.LENGTH)
        assert (await healthy).token_ids() == [66, 67]
        assert core.count("INTERNAL") == 1


async def test_batch_that_breaks_the_protocol_costs_only_the_stream() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        waiting = asyncio.create_task(collect(core.generator, raw_request()))
        request = await engine.next_submit()
        engine.send(request, OutputBatch(0, numbers=u32([1, 2]), token_ids=u32([1])))
        with pytest.raises(EngineUnavailable, match="differ in length"):
            await waiting
        await eventually(lambda: core.router.engines[0].is_ready and len(engine.hellos) == 2)


async def test_a_silent_peer_is_given_up_and_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "WELCOME_TIMEOUT_S", 0.02)

    async def say_nothing(self: FakeEngine, requests: Any, context: Any) -> Any:
        self.hellos.append((await anext(requests)).hello)
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(FakeEngine, "Connect", say_nothing)
    async with FakeEngine() as engine, frontend_core(engine, waits=False) as core:
        await eventually(lambda: len(engine.hellos) >= 2)
        assert "no welcome within 0.02 s" in core.generator.why_not_ready


async def test_used_up_numbers_renew_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session_module, "MAX_NUMBER", 2)
    async with FakeEngine(hello_reply) as engine, frontend_core(engine) as core:
        for _ in range(2):
            await answer(core.generator, raw_request())
        with pytest.raises(EngineUnavailable, match="try again"):
            await answer(core.generator, raw_request())
        await eventually(lambda: len(engine.hellos) == 2 and core.generator.is_ready)
        await answer(core.generator, raw_request())
        assert [request.number for request in engine.submitted] == [1, 2, 1]


# Broken streams


async def resume_after(
    engine: FakeEngine, core: FrontendCore, disturb: Callable[[SubmitRequest], Awaitable[None]]
) -> list[int]:
    """The output tokens of a request that is disturbed after its first three tokens."""
    events = core.generator.generate(raw_request())
    admission = asyncio.ensure_future(anext(events))
    request = await engine.next_submit()
    engine.emit(request, [65, 66, 67])
    await admission
    token_ids = list((await anext(events)).token_ids)  # type: ignore[union-attr]
    await disturb(request)
    engine.emit(request, [68, 69], finish=FinishReason.LENGTH)
    async for event in events:
        if isinstance(event, DeltaEvent):
            token_ids += event.token_ids
    return token_ids


async def test_a_broken_stream_is_resumed_and_the_client_sees_a_delay() -> None:
    async with FakeEngine(resume_ttl_s=60) as engine, frontend_core(engine) as core:

        async def cut(request: SubmitRequest) -> None:
            engine.cut_streams()
            await eventually(lambda: not core.generator.is_ready)
            engine.emit(request, [70])  # meanwhile
            await eventually(lambda: core.generator.is_ready)

        assert await resume_after(engine, core, cut) == [65, 66, 67, 70, 68, 69]
        assert [hello.session.resume_session for hello in engine.hellos] == ["", "session-1"]
        assert engine.hellos[1].session.last_received == 2
        assert len(engine.submitted) == 1, "submitted twice"


async def test_an_engine_out_of_reach_for_a_while_is_resumed() -> None:
    async with FakeEngine(resume_ttl_s=60) as engine, frontend_core(engine) as core:

        async def go_away(request: SubmitRequest) -> None:
            await engine.die()
            await eventually(lambda: not core.generator.is_ready)
            await engine.start()
            await eventually(lambda: core.generator.is_ready)

        assert await resume_after(engine, core, go_away) == [65, 66, 67, 68, 69]


async def test_a_batch_that_comes_twice_counts_once() -> None:
    async with FakeEngine(resume_ttl_s=60) as engine, frontend_core(engine) as core:

        async def repeat(request: SubmitRequest) -> None:
            engine.send_again(2)

        assert await resume_after(engine, core, repeat) == [65, 66, 67, 68, 69]
        assert len(engine.hellos) == 1


async def test_a_gap_in_the_batches_is_filled_by_resuming() -> None:
    async with FakeEngine(resume_ttl_s=60) as engine, frontend_core(engine) as core:

        async def leave_out(request: SubmitRequest) -> None:
            engine.lose_batch(request, [70])

        assert await resume_after(engine, core, leave_out) == [65, 66, 67, 70, 68, 69]
        assert [hello.session.last_received for hello in engine.hellos] == [0, 2]


async def test_a_gap_that_stays_ends_the_requests_after_three_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "MAX_REDIAL_S", 0.05)
    async with FakeEngine(resume_ttl_s=60) as engine, frontend_core(engine) as core:

        async def forget(request: SubmitRequest) -> None:
            engine.forget_batch()

        with pytest.raises(GenerationLost, match="output batch 4 after 2"):
            await resume_after(engine, core, forget)
        assert [hello.session.resume_session for hello in engine.hellos[:4]] == ["", *["session-1"] * 3]
        await eventually(lambda: len(engine.hellos) == 5 and core.generator.is_ready)
        assert engine.hellos[4].session.resume_session == ""


async def test_forgotten_session_ends_its_requests() -> None:
    async with FakeEngine(resume_ttl_s=60) as engine, frontend_core(engine) as core:
        waiting = asyncio.create_task(collect(core.generator, raw_request()))
        await engine.next_submit()
        engine.cut_streams()
        engine.forget_sessions()
        with pytest.raises(EngineUnavailable, match="it has not kept the session"):
            await waiting
        await eventually(lambda: core.generator.is_ready)
        again = asyncio.create_task(answer(core.generator, raw_request()))
        engine.emit(await engine.next_submit(1), [65], finish=FinishReason.LENGTH)
        assert (await again).token_ids() == [65]


async def test_absent_engine_is_given_up_after_the_time_to_live() -> None:
    async with FakeEngine(resume_ttl_s=0.1) as engine, frontend_core(engine) as core:
        waiting = asyncio.create_task(collect(core.generator, raw_request()))
        await engine.next_submit()
        await engine.die()
        with pytest.raises(EngineUnavailable, match=r"not back within 0\.1 s"):
            await waiting


async def test_output_batches_are_acknowledged_now_and_then() -> None:
    async with FakeEngine(lambda _: range(65, 265), resume_ttl_s=60) as engine, frontend_core(engine) as core:
        for _ in range(5):
            await answer(core.generator, raw_request(prompt="H", sampling={"max_tokens": 60}))
        await eventually(lambda: engine.last_acknowledged == [4 * engine_session_module.ACKNOWLEDGE_EVERY])


async def test_a_frontend_that_stops_says_goodbye() -> None:
    async with FakeEngine(resume_ttl_s=60) as engine:
        async with frontend_core(engine):
            assert len(engine.last_acknowledged) == 1
        assert engine.last_acknowledged == [], "the session is still there"


class RecordingCall:
    """The writing half of a stream; `gate` holds writes back."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.gate = asyncio.Event()

    async def write(self, message: Any) -> None:
        await self.gate.wait()
        self.written.append(message)


def submission(number: int, num_tokens: int = 1, **sampling: Any) -> SubmitRequest:
    return single_choice(number, f"r{number}", [1] * num_tokens, SamplingParams(**sampling), seed=0)


def group(numbers: Sequence[int], prompt: np.ndarray) -> SubmitRequest:
    """One request with several choices."""
    return SubmitRequest(
        head=RequestHead("group"),
        numbers=np.array(numbers, np.uint32),
        seeds=np.array(numbers, np.uint64),
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
    )


def numbers_of(message: Any) -> list[int]:
    """The choices in a message, in order."""
    return [
        number for request in message.submit.requests for number in u32_from_bytes(request.numbers).tolist()
    ]


async def written_by(outbox: Outbox, call: RecordingCall) -> list[Any]:
    """Return what a stream writes until it has nothing more to write."""
    writer = asyncio.create_task(outbox.write_to(call))  # type: ignore[arg-type]
    call.gate.set()
    for _ in range(20):  # more turns of the event loop than it takes
        await asyncio.sleep(0)
    writer.cancel()
    return call.written


async def test_what_is_not_confirmed_is_written_again_in_order() -> None:
    outbox = Outbox(lambda number, error: None)
    for number in (1, 2):
        outbox.submit(submission(number))
        await written_by(outbox, RecordingCall())
    outbox.abort(1)
    first, second, abort = await written_by(outbox, RecordingCall())
    assert numbers_of(first) == [1]
    outbox.confirm(1)
    outbox.submit(submission(3))
    again = await written_by(outbox, RecordingCall())
    assert again[:2] == [second, abort]
    assert numbers_of(again[2]) == [3]
    outbox.confirm(4)
    assert await written_by(outbox, RecordingCall()) == []
    with pytest.raises(ProtocolViolation, match=r"message 5 .* only 4 were sent"):
        outbox.confirm(5)


async def test_the_goodbye_comes_last() -> None:
    outbox, call = Outbox(lambda number, error: None), RecordingCall()
    call.gate.set()
    outbox.leave()
    outbox.acknowledge(64)
    outbox.submit(submission(1))
    await outbox.write_to(call)  # type: ignore[arg-type]
    assert [message.WhichOneof("message") for message in call.written] == [
        "last_batch_seen",
        "submit",
        "goodbye",
    ]


async def test_submissions_that_gather_go_out_in_one_message() -> None:
    outbox, call = Outbox(lambda number, error: None), RecordingCall()
    for number in range(1, 6):
        outbox.submit(submission(number))
    outbox.abort(3)  # never sent: the engine need not know
    (message,) = await written_by(outbox, call)
    assert numbers_of(message) == [1, 2, 4, 5]


async def test_large_submissions_are_spread_over_messages() -> None:
    outbox, call = Outbox(lambda number, error: None), RecordingCall()
    for number in range(1, 5):
        outbox.submit(submission(number, num_tokens=100_000))
    sizes = [len(message.submit.requests) for message in await written_by(outbox, call)]
    assert sizes == [2, 2]


async def test_an_unsendable_submission_harms_no_other() -> None:
    unsendable: list[int] = []
    outbox, call = Outbox(lambda numbers, error: unsendable.extend(numbers)), RecordingCall()
    outbox.submit(submission(1, stop_token_ids=(-1,)))
    outbox.submit(submission(2))
    (message,) = await written_by(outbox, call)
    assert (unsendable, numbers_of(message)) == ([1], [2])


async def test_an_engine_that_stopped_reading_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_UNCONFIRMED", 2)
    outbox = Outbox(lambda numbers, error: None)
    for number in (1, 2):
        outbox.check_free_places(1, 100)
        outbox.submit(submission(number))
    with pytest.raises(QueueFull, match=r"2 choices of \d+ bytes wait .* limits are 2 and"):
        outbox.check_free_places(1, 100)
    await written_by(outbox, RecordingCall())
    with pytest.raises(QueueFull):  # sent, and maybe to be sent again
        outbox.check_free_places(1, 100)
    outbox.confirm(1)
    outbox.check_free_places(2, 100)


async def test_unconfirmed_submissions_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_UNCONFIRMED_BYTES", 10_000)
    outbox = Outbox(lambda numbers, error: None)
    request = submission(1, num_tokens=2000)
    outbox.check_free_places(1, request.num_bytes)
    outbox.submit(request)
    with pytest.raises(QueueFull, match="the limits are 32768 and 10000"):
        outbox.check_free_places(1, request.num_bytes)
    outbox.abort(1)  # before it was sent
    outbox.check_free_places(1, request.num_bytes)


async def test_a_request_above_the_limit_is_refused_before_it_is_kept() -> None:
    outbox = Outbox(lambda numbers, error: None)
    request = submission(1, allowed_token_ids=tuple(range(7_000_000)))
    with pytest.raises(InvalidRequest, match="above the limit 33554432"):
        outbox.check_free_places(1, request.num_bytes)


async def test_a_request_of_many_choices_costs_one_prompt() -> None:
    outbox = Outbox(lambda numbers, error: None)
    prompt = np.arange(100_000, dtype=np.uint32)
    outbox.submit(group(range(1, 1001), prompt))
    (message,) = await written_by(outbox, RecordingCall())
    assert prompt.nbytes < message.ByteSize() < prompt.nbytes + 20_000


async def test_choices_aborted_unsent_end_behind_the_others() -> None:
    outbox = Outbox(lambda numbers, error: None)
    outbox.submit(group([1, 2, 3], np.ones(4, np.uint32)))
    outbox.submit(group([4, 5], np.ones(4, np.uint32)))
    for number in (2, 4, 5):
        outbox.abort(number)
    submit, abort = await written_by(outbox, RecordingCall())
    assert numbers_of(submit) == [1, 2, 3]  # nothing of the second request
    assert u32_from_bytes(abort.abort).tolist() == [2]


async def test_outputs_are_no_progress_while_a_message_is_unconfirmed() -> None:
    session = EngineSession("s")
    session.submit(submission(1), [object()])  # type: ignore[list-item]
    await written_by(session.outbox, RecordingCall())
    assert not session.take_in(OutputBatch(1), 0)  # the submit may be what breaks the streams
    assert session.take_in(OutputBatch(2), 1)
    assert not session.take_in(OutputBatch(2), 1)  # it comes again


async def test_what_an_engine_caches_is_forgotten_with_its_session() -> None:
    index = PrefixIndex()
    session, other = EngineSession("s", index=index), EngineSession("t", index=index)
    for each in (session, other):
        assert each.take_in(OutputBatch(1, cache=CacheNews(stored=bytes(range(16)))), 0)
    (key,) = keys_of(bytes(range(16)))
    assert index.cached_at(key).bit_count() == 2
    session.end(EngineLoss("it was lost"))
    assert index.cached_at(key) == 1 << other.load.cached.member


async def test_a_redial_that_fails_with_the_same_status_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC words one failure in many ways; an operator wants to read it once a minute."""
    caplog.set_level("INFO", logger="triptych_services.frontend.engines.client")
    client = EngineClient("127.0.0.1:1", frontend_id="f", boot_id="b")
    dialing = asyncio.create_task(client.run())
    for details in ("no route to host", "connection timed out", "handshaker shutdown"):
        client._note_end(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details))
    client._note_end(grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, Metadata(), Metadata(), "no key"))
    dialing.cancel()
    await asyncio.gather(dialing, return_exceptions=True)
    lines = [record.getMessage() for record in caplog.records if "not reached" in record.getMessage()]
    assert len(lines) == 2
    assert "no route to host" in lines[0]


async def test_sessions_are_counted_by_their_fate() -> None:
    seen: list[str] = []
    async with FakeEngine(resume_ttl_s=10.0) as engine:
        client = EngineClient(engine.address, frontend_id="f", boot_id="b", on_session=seen.append)
        serving = asyncio.create_task(client.run())
        await eventually(lambda: client.is_ready)
        engine.cut_streams()
        await eventually(lambda: seen == ["begun", "resumed"])
        client.give_up("nobody is there")
        await eventually(lambda: seen == ["begun", "resumed", "begun"])
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_an_attach_waits_for_the_requests_before_it_and_packs_no_more_at_once() -> None:
    outbox = Outbox(lambda number, error: None)
    for number in range(1, 8):
        outbox.submit(submission(number, num_tokens=100_000))
    outbox.attach(AttachRequest(b"secret", 100, 16_384, {3: 5}))
    outbox.submit(submission(8, num_tokens=100_000))
    call = RecordingCall()
    writer = asyncio.create_task(outbox.write_to(call))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert outbox.sent.last_number <= 1, "one message is packed, and then others have their turn"
    writer.cancel()
    kinds = [message.WhichOneof("message") for message in await written_by(outbox, RecordingCall())]
    assert kinds == ["submit"] * 4 + ["attach"]
    assert kinds.index("attach") >= 4


async def test_a_detach_waits_for_the_requests_before_it() -> None:
    outbox = Outbox(lambda number, error: None)
    for number in range(1, 5):
        outbox.submit(submission(number, num_tokens=100_000))
    outbox.detach([4])
    outbox.detach([1, 2])
    *submits, detach = await written_by(outbox, RecordingCall())
    assert [number for message in submits for number in numbers_of(message)] == [1, 2, 3, 4]
    assert u32_from_bytes(detach.detach).tolist() == [4, 1, 2]


async def test_numbers_of_refused_attaches_are_given_out_again() -> None:
    session = EngineSession("s", keeps_requests=True, hands_over=True)
    first = session.take_numbers_to_attach(16_384)
    attachment = session.attach(AttachRequest(b"made up", first.start, len(first)))
    refusal = RequestFailure(first.start, NotKept.code, "no such stream", "", 0)
    session.take_in(OutputBatch(1, failures=(refusal,)), 0)
    with pytest.raises(NotKept):
        await attachment.wait(60.0)
    assert (session.num_in_flight, attachment._held) == (0, ())
    assert session.take_numbers_to_attach(100) == range(first.start, first.start + 100)
    assert session.take_numbers(1).start == first.stop
