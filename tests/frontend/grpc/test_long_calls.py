"""Long requests over gRPC are read in the child processes that read long bodies, with the same results and refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import resource
from array import array
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.frontend.http.openai.test_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER, length_score, pool
from tests.helpers import http_api
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fuzz import MESSAGES, Fuzzer
from tests.helpers.grpc_api import Api, alphabet, ask, error_of, open_api
from tests.helpers.written_chats import read_written
from triptych.admin.v1 import admin_pb2
from triptych.compat import vllm_engine_pb2, vllm_engine_pb2_grpc
from triptych.config.api_keys import entry_line
from triptych.errors import InvalidRequest, TriptychError
from triptych.internal.v1 import long_request_pb2
from triptych.rpc.status import from_rich_status
from triptych.v1 import embedding_pb2, embedding_pb2_grpc, generation_pb2, model_pb2
from triptych_services.frontend import app
from triptych_services.frontend.grpc import generation_servicer, long_calls
from triptych_services.frontend.grpc.convert import (
    to_raw_request,
    to_tokenize_prompt,
    write_answer,
)
from triptych_services.frontend.grpc.embedding_convert import (
    EmbedCall,
    read_bytes,
    read_classify,
    read_embed,
    read_rerank,
    read_score,
)
from triptych_services.frontend.grpc.long_calls import name_call, read_generation, read_tokenize
from triptych_services.frontend.grpc.vllm import convert as vllm
from triptych_services.frontend.http import app as http_app
from triptych_services.frontend.offload import fair_threads
from triptych_services.frontend.requests import body_process, long_reader
from triptych_services.frontend.requests.inputs import PooledCall
from triptych_services.frontend.requests.long_reader import LONG_REQUEST, LongReader
from triptych_services.frontend.requests.parse import MAX_REQUEST_ID_BYTES
from triptych_services.frontend.requests.raw import MAX_ABORTS, RawChat, RawRequest
from triptych_services.frontend.scores import Comparison
from triptych_services.frontend.text_calls import MAX_DETOKENIZE

TOOL = {"name": "add", "description": "Adds", "parameters_json": '{"type": "object"}'}
CALL = {"id": "1", "name": "add", "arguments_json": "{}"}
CHAT = {
    "messages": [
        {"role": "system", "parts": [{"text": "Be"}, {"text": "brief"}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "user", "parts": [{"text": "Hello 世界"}]},
    ],
    "tools": [TOOL],
    "documents": [{"title": "One", "text": "Two"}],
    "template_kwargs_json": '{"x": {"y": [1, "ü"]}, "z": false}',
}
PROMPTS: tuple[dict[str, Any], ...] = (
    {"chat": CHAT},
    {"text": {"text": "x"}},
    {"token_ids": {"ids": [5, 6]}},
    {},
)
STUCK = """
import pathlib, pickle, time

def begin(message):
    here = pathlib.Path(__file__)
    def answer(message):
        here.with_name(f"seen-{time.monotonic_ns()}").touch()
        while here.exists():
            time.sleep(0.01)
        return {"data": pickle.dumps(None)}
    return {}, answer
"""
"""A process that answers nothing."""
LONG = ask(text="x" * LONG_REQUEST)
LONG_INPUT = embedding_pb2.EmbedRequest(inputs=[{"text": {"text": "x" * LONG_REQUEST}}])  # type: ignore[list-item]
READ = {
    "Embed": read_embed, "Classify": read_classify, "Score": read_score, "Rerank": read_rerank,
}  # fmt: skip
VARIABLES = json.dumps(dict.fromkeys(map(str, range(101)), 0))
TENANTS = ("one", "two", "three", "four", "five", "bystander")


def as_read(value: Any) -> Any:
    """Return a result with repeated fields as lists, and with conversations as objects."""
    match value:
        case RawChat():
            return read_written(value)
        case RawRequest():
            prompt = value.prompt
            if prompt is not None and not isinstance(prompt, (str, RawChat)):
                prompt = list(prompt)
            sampling = {name: _plain(each) for name, each in value.sampling.items()}
            emitted = {index: list(token_ids) for index, token_ids in value.emitted.items()}
            return dataclasses.replace(value, prompt=as_read(prompt), sampling=sampling, emitted=emitted)
        case PooledCall():
            return [as_read(value[place]) for place in range(len(value))]
        case Comparison():
            pairs = [(value.pairs[place], value.pairs.query_of(place)) for place in range(len(value.pairs))]
            return as_read(value.base), pairs, value.activation, value.top_n
        case EmbedCall():
            return as_read(value.requests), value.task_type, value.encoding, value.is_of_tokens
    return value


def _plain(value: Any) -> Any:
    """Return a repeated field as a list, and a map as a dict."""
    if isinstance(value, array) or type(value).__module__.startswith("google"):
        return dict(value) if hasattr(value, "items") else list(value)
    return value


async def outcome(read: Awaitable[tuple[Any, ...]]) -> str:
    try:
        return repr(tuple(map(as_read, await read)))
    except TriptychError as error:
        return repr((type(error), str(error), vars(error)))


@pytest.fixture(scope="module")
def reader() -> LongReader:
    return LongReader()


@pytest.fixture
async def served(reader: LongReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers read long requests by `reader`, of which a process runs already."""
    assert await reader.read(1, int) == 0
    monkeypatch.setattr(app, "LongReader", lambda: reader)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [generation_pb2.GenerateRequest, generation_pb2.StreamGenerateRequest])
async def test_a_child_reads_the_requests_that_this_process_reads(kind: Any, reader: LongReader) -> None:
    async def here(data: bytes) -> tuple[Any, ...]:
        request = kind.FromString(data)
        name_call(request, "own")
        raw = to_raw_request(request.request_id, request.generation, 2.5)
        return raw, write_answer(request.generation), getattr(request, "resumes", None)

    async def there(data: bytes) -> tuple[Any, ...]:
        rest, raw = await reader.read(len(data), partial(read_generation, kind, "own", 2.5, data))
        assert rest.request_id == raw.head.request_id
        return raw, write_answer(rest.generation), getattr(rest, "resumes", None)

    fuzzer = Fuzzer(11)
    bases = [kind(generation={**prompt, "length": {"max_tokens": 3}}) for prompt in PROMPTS]
    for request in [*bases, *(fuzzer.changed(base) for base in bases for _ in range(8))]:
        data = request.SerializeToString()
        assert await outcome(there(data)) == await outcome(here(data)), request


async def test_a_child_reads_what_is_to_be_tokenized(reader: LongReader) -> None:
    async def here(data: bytes) -> tuple[Any, ...]:
        request = generation_pb2.TokenizeRequest.FromString(data)
        return *to_tokenize_prompt(request), request.model, request.with_bytes, request.with_offsets

    async def there(data: bytes) -> tuple[Any, ...]:
        rest, asked = await reader.read(len(data), partial(read_tokenize, data))
        return *asked, rest.model, rest.with_bytes, rest.with_offsets

    fuzzer = Fuzzer(12)
    bases = [generation_pb2.TokenizeRequest(**prompt) for prompt in PROMPTS if "token_ids" not in prompt]
    for request in [*bases, *(fuzzer.changed(base) for base in bases for _ in range(8))]:
        data = request.SerializeToString()
        assert await outcome(there(data)) == await outcome(here(data)), request


@pytest.mark.thorough
async def test_a_child_reads_what_is_to_become_vectors(reader: LongReader) -> None:
    async def here(data: bytes) -> tuple[Any, ...]:
        return (read(kind.FromString(data), "own", 2.5),)

    async def there(data: bytes) -> tuple[Any, ...]:
        return (await reader.read(len(data), partial(read_bytes, kind, read, "own", 2.5, data)),)

    fuzzer = Fuzzer(13)
    for method, base in MESSAGES:
        if (read := READ.get(method.rpartition("/")[2])) is None:
            continue
        kind: Any = type(base)
        many = {"inputs": [{}] * 2049} if "inputs" in kind.DESCRIPTOR.fields_by_name else {}
        chat = {"inputs": [{"chat": CHAT}]} if many else {}
        for request in [base, kind(**many), kind(**chat), *(fuzzer.changed(base) for _ in range(8))]:
            data = request.SerializeToString()
            assert await outcome(there(data)) == await outcome(here(data)), request


@pytest.mark.thorough
async def test_a_child_reads_what_gateways_of_vllm_send(reader: LongReader) -> None:
    async def here(data: bytes) -> tuple[Any, ...]:
        request = vllm_engine_pb2.GenerateRequest.FromString(data)
        return request.stream, vllm.to_raw_request(request.request_id or "own", request, 2.5)

    async def there(data: bytes) -> tuple[Any, ...]:
        return await reader.read(len(data), partial(vllm.read_generate, "own", 2.5, data))

    fuzzer = Fuzzer(14)
    prompts: tuple[dict[str, Any], ...] = ({"text": "Hi"}, {"tokenized": {"input_ids": [5, 6]}}, {})
    bases = [vllm_engine_pb2.GenerateRequest(**prompt) for prompt in prompts]
    for request in [*bases, *(fuzzer.changed(base) for base in bases for _ in range(8))]:
        data = request.SerializeToString()
        assert await outcome(there(data)) == await outcome(here(data)), request


async def _answers(api: Api) -> list[Any]:
    """Return what every method that takes long requests answers."""
    stub = api.generation
    prompts = [{"chat": CHAT}, {"text": {"text": "Hello"}}, {"token_ids": {"ids": [5, 6]}}]
    length = {"max_tokens": 4, "stop": ["zz"], "stop_token_ids": [3]}
    options = {
        "sampling": {"seed": 7, "bad_words": ["no"]},
        "length": length,
        "truncation": {"max_tokens": 9},
        "response": {"whole_choices": True, "prompt_token_ids": True},
    }
    answers: list[Any] = []
    for number, prompt in enumerate(prompts):
        whole = generation_pb2.GenerateRequest(request_id=f"g{number}", generation={**prompt, **options})
        answers.append(await stub.Generate(whole))
        stream = generation_pb2.StreamGenerateRequest(
            request_id=f"s{number}", generation=whole.generation, resumes=True
        )
        answers += [message async for message in stub.StreamGenerate(stream)]
        item = generation_pb2.BatchGenerateRequest(tag=number + 1, request=stream)
        answers += [message async for message in stub.BatchGenerate(iter([item]))]
    answers.append(await stub.Tokenize(generation_pb2.TokenizeRequest(chat=CHAT, with_bytes=True)))
    text = {"text": "Hello world", "add_special_tokens": False}
    answers.append(await stub.Tokenize(generation_pb2.TokenizeRequest(text=text, with_offsets=True)))
    gateway = vllm_engine_pb2.GenerateRequest(
        request_id="v", tokenized={"input_ids": [5, 6]}, sampling_params={"max_tokens": 4}, stream=True
    )
    generated = vllm_engine_pb2_grpc.VllmEngineStub(api.channel).Generate(gateway)
    pieces = [message async for message in generated]
    token_ids = [each for piece in pieces for each in piece.chunk.token_ids]
    # How many tokens a piece has depends on when they come. The last piece repeats the latest.
    last = pieces[-1].complete
    last.ClearField("output_ids")
    last.ClearField("completion_tokens")
    assert len(token_ids) == 4
    return [*map(_without_times, answers), token_ids, last]


def _without_times(message: Any) -> Any:
    for each in (message, getattr(message, "event", None)):
        if each is not None and "finished" in each.DESCRIPTOR.fields_by_name and each.HasField("finished"):
            each.finished.ClearField("timings")
        if each is not None and "admitted" in each.DESCRIPTOR.fields_by_name and each.HasField("admitted"):
            each.admitted.ClearField("resume_token")
    return message


@pytest.mark.usefixtures("served")
async def test_answers_are_the_same_wherever_requests_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        expected = await _answers(api)
        monkeypatch.setattr(long_calls, "LONG_REQUEST", 0)
        monkeypatch.setattr(generation_servicer, "_PIECE", 2)
        assert await _answers(api) == expected


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("model", "answer"), [(EMBEDDER, pool), (CLASSIFIER, pool), (CROSS_ENCODER, length_score)]
)
async def test_vectors_are_the_same_wherever_requests_are_read(
    model: Any, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"options": {"request_id": "mine", "tenant": "me"}}
    inputs: Any = {"inputs": [{"text": {"text": "Hello 世界"}}, {"token_ids": {"ids": [5, 6]}}], **options}
    texts: Any = {"documents": ["Hi", "世界", "Hi"], **options}
    embed = embedding_pb2.EmbedRequest(encoding=embedding_pb2.EMBEDDING_ENCODING_FLOAT32_BYTES, **inputs)

    async def answers(api: Api) -> list[str]:
        stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(api.channel)
        outcomes = []
        for method, request in (
            (stub.Embed, embed),
            (stub.Classify, embedding_pb2.ClassifyRequest(raw_scores=True, **inputs)),
            (stub.Score, embedding_pb2.ScoreRequest(queries=["Hello"], **texts)),
            (stub.Rerank, embedding_pb2.RerankRequest(query="Hello", top_n=2, **texts)),
        ):
            try:
                outcomes.append(repr(await method(request)))
            except grpc.aio.AioRpcError as error:
                outcomes.append(repr((error.code(), error.details())))
        items = iter([embedding_pb2.EmbedStreamRequest(tag=7, request=embed)])
        return outcomes + [repr(each) async for each in stub.EmbedStream(items)]

    async with FakeEngine(model=model, pool=answer) as engine, open_api(engine) as api:
        expected = await answers(api)
        assert "mine" in str([each.request.head for each in engine.submitted])
        count = len(engine.submitted)
        monkeypatch.setattr(long_calls, "LONG_REQUEST", 0)
        assert await answers(api) == expected
        first, second = engine.submitted[:count], engine.submitted[count:]
        assert sorted(map(repr, (each.request.head for each in first))) == sorted(
            map(repr, (each.request.head for each in second))
        )


@pytest.mark.usefixtures("served")
async def test_errors_of_a_long_conversation_name_its_messages() -> None:
    messages = [{"role": "user", "parts": [{"text": f"Message {number}"}]} for number in range(16_384)]
    messages[12_345] = {"role": "", "parts": [{"text": "Hi"}]}
    async with FakeEngine() as engine, open_api(engine) as api:
        request = ask(chat={"messages": messages}, sampling={"top_p": 2.0}, length={"max_tokens": 4})
        assert request.ByteSize() > LONG_REQUEST
        message = str(await error_of(api.generation.StreamGenerate(request)))
        assert "chat.messages[12345].role: '' is not a role; it is a word" in message
        assert "sampling.top_p: 2 is above the limit 1" in message
        item = generation_pb2.BatchGenerateRequest(tag=3, request=request)
        (answer,) = [each async for each in api.generation.BatchGenerate(iter([item]))]
        assert answer.tag == 3
        assert "chat.messages[12345].role" in str(from_rich_status(answer.error))


@pytest.mark.usefixtures("served")
async def test_long_bytes_that_are_no_request_are_refused_like_short_ones() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        for method, has_stream in (
            ("/triptych.v1.GenerationService/Generate", False),
            ("/triptych.v1.GenerationService/StreamGenerate", True),
            ("/triptych.v1.GenerationService/Tokenize", False),
            ("/triptych.v1.EmbeddingService/Embed", False),
            ("/triptych.v1.EmbeddingService/Rerank", False),
            ("/vllm.grpc.engine.VllmEngine/Generate", True),
        ):
            open_call = api.channel.unary_stream if has_stream else api.channel.unary_unary
            call: Any = open_call(method)
            short, long = [await error_of(call(b"\xff" * size)) for size in (8, LONG_REQUEST + 1)]
            assert (type(long), str(long)) == (type(short), str(short))
            assert f"no request of {method}: it cannot be parsed" in str(long)


@pytest.mark.usefixtures("served")
async def test_a_long_item_that_is_no_request_fails_alone() -> None:
    broken = long_request_pb2.LongItem(tag=1, request=b"\xff" * LONG_REQUEST)
    good = generation_pb2.BatchGenerateRequest(tag=2, request=ask(text="Hi", length={"max_tokens": 3}))
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        call = api.channel.stream_stream(
            "/triptych.v1.GenerationService/BatchGenerate",
            response_deserializer=generation_pb2.BatchGenerateResponse.FromString,
        )
        messages = iter([broken.SerializeToString(), good.SerializeToString()])
        answers = [each async for each in call(messages)]
    (error,) = [from_rich_status(each.error) for each in answers if each.tag == 1]
    assert "no request of /triptych.v1.GenerationService/BatchGenerate: it cannot be parsed" in str(error)
    assert "".join(each.event.output.text for each in answers if each.tag == 2) == "abc"


async def test_messages_that_have_no_reason_to_be_long_are_refused_unread() -> None:
    attach = generation_pb2.AttachRequest(resume_token="x" * 2**20)
    abort = generation_pb2.AbortRequest(request_ids=["x" * 2**20])
    fits = generation_pb2.AbortRequest(request_ids=["x" * (2**20 - 4)])
    async with FakeEngine() as engine, open_api(engine) as api:
        gateways: Any = vllm_engine_pb2_grpc.VllmEngineStub(api.channel)
        for call, name, request in (
            (api.generation.Attach, "Attach", attach),
            (api.generation.Abort, "Abort", abort),
            (api.generation.Detokenize, "Detokenize", generation_pb2.DetokenizeRequest(model="x" * 2**21)),
            (api.models.GetModel, "GetModel", model_pb2.GetModelRequest(name="x" * 2**20)),
            (gateways.Abort, "Abort", vllm_engine_pb2.AbortRequest(request_ids=["x" * 2**20])),
        ):
            error = await error_of(call(request))
            assert isinstance(error, InvalidRequest)
            limit = 2**21 if name == "Detokenize" else 2**20
            why = f"{request.ByteSize()} bytes are above the limit {limit} of a message to {name}"
            assert why in str(error)
        most = generation_pb2.DetokenizeRequest(token_ids=[65] * MAX_DETOKENIZE)
        assert (await api.generation.Detokenize(most)).text
        assert fits.ByteSize() == 2**20
        assert not (await api.generation.Abort(fits)).aborted_request_ids


async def test_long_messages_of_an_operator_are_refused_unread() -> None:
    aborts = admin_pb2.AbortRequestsRequest(request_ids=["x" * MAX_REQUEST_ID_BYTES] * MAX_ABORTS)
    async with FakeEngine() as engine, open_api(engine) as api:
        assert not (await api.admin.AbortRequests(aborts)).aborted_request_ids
        for method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods:
            limit = 2**20 if method.name == "AbortRequests" else 2**16
            request = getattr(admin_pb2, method.input_type.name).FromString(
                b"\xfa\x01\x80\x80\x40" + bytes(2**20)
            )
            call = getattr(api.admin, method.name)
            error = await error_of(call(request))
            assert isinstance(error, InvalidRequest), method.name
            why = f"{request.ByteSize()} bytes are above the limit {limit} of a message to {method.name}"
            assert why in str(error)


def test_a_long_item_has_the_fields_of_an_item() -> None:
    item = generation_pb2.BatchGenerateRequest(tag=7, request=ask("mine", text="Hi"), timeout_ms=0)
    long = long_request_pb2.LongItem.FromString(item.SerializeToString())
    assert generation_pb2.StreamGenerateRequest.FromString(long.request) == item.request
    assert (long.tag, long.HasField("timeout_ms"), long.timeout_ms, long.request_id) == (7, True, 0, "")
    other = embedding_pb2.EmbedStreamRequest(tag=7, request=LONG_INPUT, timeout_ms=0)
    long = long_request_pb2.LongItem.FromString(other.SerializeToString())
    assert embedding_pb2.EmbedRequest.FromString(long.request) == LONG_INPUT
    assert (long.tag, long.HasField("timeout_ms"), long.timeout_ms, long.request_id) == (7, True, 0, "")


def test_an_answer_that_outgrows_its_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    monkeypatch.setattr(body_process, "_MAX_ANSWER_BYTES", 10_000)
    data = ask(text="x" * 10_000).SerializeToString()
    read = partial(read_generation, generation_pb2.StreamGenerateRequest, "own", None, data)
    _, answer = body_process.begin({})
    assert answer({"data": pickle.dumps(read)})["error"] == "MemoryError"
    assert limits == [(resource.RLIMIT_AS, (2 << 30, 2 << 30))]


@pytest.mark.parametrize(
    ("generation", "why"),
    [
        ({"length": {"stop": ["x"] * 101}}, "length.stop: 101 entries are above the limit 100"),
        (
            {"sampling": {"logit_bias": dict.fromkeys(range(101), 1.0)}},
            "sampling.logit_bias: 101 entries are above the limit 100",
        ),
        (
            {"structured_outputs": {"choice": {"values": [""] * 101}}},
            "structured_outputs.choice.values: 101 entries are above the limit 100",
        ),
        (
            {"chat": {"tools": [{"name": "f", "parameters_json": json.dumps({"x": [[]] * 95})}]}},
            "101 template variables and values of tools together are above the limit 100",
        ),
        (
            {"chat": {"template_kwargs_json": VARIABLES}},
            "101 template variables and values of tools together are above the limit 100",
        ),
    ],
)
def test_a_child_refuses_what_would_become_many_objects(
    generation: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(body_process, "_MAX_ENTRIES", 100)
    monkeypatch.setattr(body_process, "_MAX_VALUES", 100)
    data = ask(**generation).SerializeToString()
    read = partial(read_generation, generation_pb2.StreamGenerateRequest, "own", None, data)
    _, answer = body_process.begin({})
    assert str(pickle.loads(answer({"data": pickle.dumps(read)})["data"])) == why
    monkeypatch.setattr(body_process, "_MAX_ENTRIES", 101)
    monkeypatch.setattr(body_process, "_MAX_VALUES", 101)
    assert "error" not in answer({"data": pickle.dumps(read)})


def test_conversations_of_a_call_share_the_limit_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(body_process, "_MAX_VALUES", 202)
    chat: Any = {"template_kwargs_json": VARIABLES}
    for count, why in ((2, ""), (3, "303 template variables and values of tools together")):
        data = embedding_pb2.EmbedRequest(inputs=[{"chat": chat}] * count).SerializeToString()  # type: ignore[list-item]
        read = partial(read_bytes, embedding_pb2.EmbedRequest, read_embed, "own", None, data)
        answer = body_process.begin({})[1]({"data": pickle.dumps(read)})
        assert ("error" in answer) == bool(why)
        assert why in str(pickle.loads(answer["data"]))


class SlowReader(LongReader):
    """Reads in this process, after 50 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: list[float] = []

    async def read(self, size: int, read: Callable[[], Any], *, deadline_s: float | None = None) -> Any:
        assert deadline_s is not None
        self.deadlines.append(deadline_s)
        await asyncio.sleep(0.05)
        return read()


async def test_the_time_in_which_a_request_is_read_is_part_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = SlowReader()
    monkeypatch.setattr(app, "LongReader", lambda: reader)
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        generate, times = api.core.generator.generate, []

        def noted(raw: RawRequest) -> Any:
            times.append(raw.deadline_s)
            return generate(raw)

        monkeypatch.setattr(api.core.generator, "generate", noted)
        request = ask(text="Hi", sampling={"bad_words": ["x" * LONG_REQUEST]}, length={"max_tokens": 1})
        item = generation_pb2.BatchGenerateRequest(request=request, timeout_ms=100_000)
        assert [each async for each in api.generation.BatchGenerate(iter([item]))]
        await error_of(api.generation.StreamGenerate(request, timeout=100))
        gateways: Any = vllm_engine_pb2_grpc.VllmEngineStub(api.channel)
        text = vllm_engine_pb2.GenerateRequest(text="x" * LONG_REQUEST)
        await error_of(gateways.Generate(text, timeout=100))
        stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(api.channel)
        late = embedding_pb2.EmbedStreamRequest(request=LONG_INPUT, timeout_ms=40)
        (answer,) = [each async for each in stub.EmbedStream(iter([late]))]
        assert "the deadline of 0.04 s has passed" in str(from_rich_status(answer.error))
        assert reader.deadlines.pop() == 0.04
    assert len(times) == 3
    for left_s, given_s in zip(times, reader.deadlines, strict=True):
        assert left_s <= given_s - 0.05


Use = Callable[[], int]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Use]:
    """Let child processes answer nothing until the test ends; returns what counts the requests that they have."""
    path = tmp_path / "odd_process.py"
    monkeypatch.setattr(long_reader, "_SCRIPT", path)
    path.write_text(STUCK)
    yield lambda: len(list(tmp_path.glob("seen-*")))
    path.unlink()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):  # child processes have a low priority
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_deadline_holds_while_a_request_is_read(stuck: Use) -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        call = api.generation.StreamGenerate(LONG, timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        item = generation_pb2.BatchGenerateRequest(request=LONG, timeout_ms=10)
        (answer,) = [each async for each in api.generation.BatchGenerate(iter([item]))]
        assert "the deadline of 0.01 s has passed" in str(from_rich_status(answer.error))


def waiting(reader: LongReader) -> int:
    """Return how many requests wait for a process."""
    return reader._threads.num_waiting


def of(tenant: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that name a tenant."""
    return (("authorization", f"Bearer key-{tenant}"),)


async def _code(api: Api, tenant: str = "", *, timeout_ms: int = 60_000) -> str:
    """Return how a long request ends: it is refused at once, or its deadline passes."""
    item = generation_pb2.BatchGenerateRequest(request=LONG, timeout_ms=timeout_ms)
    (answer,) = [each async for each in api.generation.BatchGenerate(iter([item]), metadata=of(tenant))]
    return from_rich_status(answer.error).code


async def test_a_call_that_is_cancelled_leaves_the_queue(stuck: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = LongReader()
    monkeypatch.setattr(app, "LongReader", lambda: shared)
    monkeypatch.setattr(fair_threads, "MAX_WAITING_SIZE", LONG.ByteSize() + 100)
    async with FakeEngine() as engine, open_api(engine) as api:
        first = api.generation.StreamGenerate(LONG)
        await until(lambda: stuck() == 1)
        gateways: Any = vllm_engine_pb2_grpc.VllmEngineStub(api.channel)
        texts: Any = embedding_pb2_grpc.EmbeddingServiceStub(api.channel)
        text = vllm_engine_pb2.GenerateRequest(text="x" * LONG_REQUEST)
        for method, request in (
            (api.generation.StreamGenerate, LONG),
            (texts.Embed, LONG_INPUT),
            (gateways.Generate, text),
        ):
            second = method(request)
            await until(lambda: waiting(shared) == 1)
            assert await _code(api) == "QUEUE_FULL"
            second.cancel()
            await until(lambda: waiting(shared) == 0)
        assert await _code(api, timeout_ms=50) == "DEADLINE_EXCEEDED"
        first.cancel()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """Return a file with a key for each of `TENANTS`."""
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(entry_line(name, f"key-{name}") for name in TENANTS))
    os.chmod(file, 0o600)
    return str(file)


async def test_four_tenants_fill_the_children_and_hold_up_nobody_else(
    stuck: Use, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = LongReader()
    for module in (app, http_app):
        monkeypatch.setattr(module, "LongReader", lambda: shared)
    monkeypatch.setattr(fair_threads, "MAX_WAITING_SIZE", LONG.ByteSize() + 100)
    async with FakeEngine(alphabet) as engine, open_api(engine, api_keys_file=keys) as api:
        first = [api.generation.StreamGenerate(LONG, metadata=of(each)) for each in TENANTS[:2]]
        await until(lambda: stuck() == 2)
        first += [api.generation.StreamGenerate(LONG, metadata=of(each)) for each in TENANTS[2:4]]
        await until(lambda: waiting(shared) == 2)
        refused = str(await error_of(api.generation.StreamGenerate(LONG, metadata=of("five"))))
        assert "2 very long requests wait already" in refused

        short = ask(text="Hi", length={"max_tokens": 3})
        events = [each async for each in api.generation.StreamGenerate(short, metadata=of("bystander"))]
        assert "".join(each.output.text for each in events) == "abc"
        async with http_api.open_api(api.core.generator) as http:
            body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3}
            answer = await http.post("/v1/completions", json.dumps(body))
            assert answer.json()["choices"][0]["text"] == "abc"
            answer = await http.post("/v1/completions", json.dumps({**body, "user": "x" * LONG_REQUEST}))
            assert answer.status_code == 429
        assert not any(each.done() for each in first)
        for each in first:
            each.cancel()
