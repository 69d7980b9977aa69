"""The typed client against a GenerationService of twenty lines."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from tests.helpers.fake_frontend import MAX_MODEL_LEN, FakeFrontend
from tests.helpers.processes import free_port
from triptych.client.dialer import Dialer
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.errors import EngineUnavailable, GenerationLost, InvalidRequest, QueueFull
from triptych.types.events import AdmittedEvent, DeltaEvent, FinishedEvent
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych.v1 import generation_pb2
from triptych.wire.generation import event_from_proto


@pytest.fixture
def frontend():
    with FakeFrontend() as fake:
        yield fake


@pytest.fixture
async def client(frontend):
    async with GenerationClient(frontend.address) as made:
        yield made


async def wait_until(condition, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_events_come_typed_and_in_order(client):
    events = [event async for event in client.generate("a b c")]
    assert [type(event) for event in events] == [
        AdmittedEvent,
        DeltaEvent,
        DeltaEvent,
        DeltaEvent,
        FinishedEvent,
    ]
    assert "".join(event.text for event in events[1:-1]) == " a b c"
    assert events[-1].usage.num_output_tokens == 3


async def test_a_refusal_is_the_error_that_the_server_raised(client, frontend):
    with pytest.raises(InvalidRequest) as invalid:
        await anext(client.generate(""))
    assert invalid.value.violations[0].field == "prompt"
    frontend.capacity = 0
    with pytest.raises(QueueFull) as full:
        await anext(client.generate("a"))
    assert full.value.retry_after_s == pytest.approx(frontend.retry_after_s)


async def test_nobody_at_the_address_is_engine_unavailable_and_names_it():
    address = f"127.0.0.1:{free_port()}"
    async with GenerationClient(address) as client:
        with pytest.raises(EngineUnavailable, match=address):
            await anext(client.generate("a"))


async def test_a_connection_that_breaks_after_output_is_generation_lost(client, frontend):
    frontend.breaks_mid_answer = True
    with pytest.raises(GenerationLost):
        async for _ in client.generate("a b c"):
            pass


@pytest.mark.parametrize(("has_output", "kind"), [(False, EngineUnavailable), (True, GenerationLost)])
async def test_a_status_that_grpc_lost_is_no_bug_of_the_server(has_output, kind):
    dialer = Dialer("127.0.0.1:1")
    nothing = grpc.aio.Metadata()
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, nothing, nothing, details="Internal error from Core"
    )
    with pytest.raises(kind, match=r"127\.0\.0\.1:1 ended the call for a reason that was lost"):
        raise dialer.to_typed_error(lost, has_output)
    await dialer.close()


@pytest.mark.parametrize(
    ("has_output", "kind", "why"),
    [(False, EngineUnavailable, "stopped before it read the request"), (True, GenerationLost, "CANCELLED")],
)
async def test_a_call_that_a_stopping_server_does_not_begin_may_be_sent_again(has_output, kind, why):
    dialer = Dialer("127.0.0.1:1")
    nothing = grpc.aio.Metadata()
    cancelled = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, details="CANCELLED")
    assert dialer.is_broken(cancelled)
    with pytest.raises(kind, match=why):
        raise dialer.to_typed_error(cancelled, has_output)
    await dialer.close()


async def test_closing_the_iterator_aborts_the_request(client, frontend):
    stream = client.generate("hang")
    assert isinstance(await anext(stream), AdmittedEvent)
    await stream.aclose()
    await wait_until(lambda: frontend.num_cancelled == 1)


async def test_cancelling_the_reader_aborts_the_request(client, frontend):
    async def read():
        async for _ in client.generate("hang"):
            pass

    reader = asyncio.create_task(read())
    await wait_until(lambda: frontend.num_running == 1)
    reader.cancel()
    await wait_until(lambda: frontend.num_cancelled == 1)


async def test_open_max_tokens_takes_the_rest_of_the_context(client, frontend):
    for prompt in ("a b c", [5, 6, 7], [{"role": "user", "content": "a"}]):
        _ = [event async for event in client.generate(prompt, SamplingParams(max_tokens=None))]
        assert frontend.requests[-1].generation.length.WhichOneof("limit") == "rest_of_context"


async def test_token_ids_of_the_prompt_are_known_without_an_echo(client, frontend):
    admitted = await anext(client.generate([5, 6, 7], options=RequestOptions(truncate_prompt_tokens=2)))
    assert list(admitted.prompt_token_ids) == [6, 7]
    assert not frontend.requests[-1].generation.response.prompt_token_ids
    admitted = await anext(client.generate("a b c"))
    assert list(admitted.prompt_token_ids) == [0, 1, 2]


async def test_unknown_events_and_reasons_are_ignored(client, frontend):
    frontend.adds_unknown = True
    events = [event async for event in client.generate("a b")]
    assert [type(event) for event in events] == [AdmittedEvent, DeltaEvent, DeltaEvent, FinishedEvent]
    output = generation_pb2.StreamGenerateResponse(output={"index": 1})
    output.output.finish_reason = 77
    assert event_from_proto(output).finish_reason is FinishReason.UNKNOWN


async def test_abort_tells_which_requests_were_alive(client):
    assert await client.abort(["one", "two"]) == ["one"]


async def test_unary_calls(client):
    tokenized = await client.tokenize("a b")
    assert (tokenized.token_ids, tokenized.max_model_len) == ([1, 2], MAX_MODEL_LEN)
    assert await client.detokenize([4, 5]) == "4 5"
    with pytest.raises(InvalidRequest, match="token_ids"):
        await client.detokenize([-1])
    assert [model.name for model in await client.list_models()] == ["fake", "fake-2"]  # on two pages
    with pytest.raises(InvalidRequest, match="token ids already"):
        await client.tokenize([1])


async def test_wait_ready_returns_when_the_frontend_turns_ready(client, frontend):
    await asyncio.to_thread(frontend.set_ready, False)
    waiting = asyncio.create_task(client.wait_ready(60.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await asyncio.to_thread(frontend.set_ready, True)
    await asyncio.wait_for(waiting, 60.0)


async def test_wait_ready_finds_a_server_that_comes_later():
    port = free_port()
    async with GenerationClient(f"127.0.0.1:{port}") as client:
        waiting = asyncio.create_task(client.wait_ready(60.0))
        await asyncio.sleep(0.05)
        fake = await asyncio.to_thread(FakeFrontend(port=port).__enter__)
        try:
            await asyncio.wait_for(waiting, 60.0)
        finally:
            await asyncio.to_thread(fake.__exit__, None, None, None)


async def test_wait_ready_gives_up_at_its_deadline_and_says_why(client, frontend):
    await asyncio.to_thread(frontend.set_ready, False)
    for timeout_s in (0.2, 1.0, 5.0, 25.0):  # until a busy machine has brought the first answer
        with pytest.raises(EngineUnavailable, match=f"not ready after {timeout_s:g} s") as refusal:
            await client.wait_ready(timeout_s)
        if "no engine is ready" in str(refusal.value):
            return
    raise refusal.value


@pytest.mark.parametrize(
    ("code", "is_broken"),
    [
        (grpc.StatusCode.UNAVAILABLE, True),
        (grpc.StatusCode.UNKNOWN, True),  # a proxy in front of a frontend that died: "Stream removed"
        (grpc.StatusCode.INVALID_ARGUMENT, False),
    ],
)
async def test_a_stream_that_ends_without_a_word_of_the_server_is_broken(client, code, is_broken):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Stream removed")
    assert client._dialer.is_broken(error) == is_broken
    lost = client._dialer.to_typed_error(error, has_output=True)
    assert isinstance(lost, GenerationLost) == is_broken
