"""The public gRPC API over loopback: protos, statuses, cancelling, health, reflection, the operator's calls."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.helpers.clock import pass_time
from tests.helpers.fake_engine import FakeEngine, eventually
from tests.helpers.grpc_api import TOKENIZER, alphabet, ask, error_of, open_api
from triptych import errors
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.types.events import DeltaEvent, Event
from triptych.types.output_limits import RepetitionDetection
from triptych.types.outputs import FinishReason
from triptych.types.sampling import OutputKind
from triptych.v1 import (
    chat_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    output_pb2,
)
from triptych_services.frontend.grpc import convert
from triptych_services.frontend.grpc.convert import to_raw_request
from triptych_services.frontend.grpc.generation_servicer import SERVICE
from triptych_services.frontend.grpc.stall_watch import StallWatch
from triptych_services.frontend.requests.raw import RawChat, RawRequest


async def test_generate_streams_admitted_deltas_finished() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as servicer:
        request = ask(
            request_id="mine",
            text="Hello",
            length={"max_tokens": 5},
            sampling={"seed": 7},
            response={"prompt_token_ids": True, "timings": True},
        )
        responses = [response async for response in servicer.generation.StreamGenerate(request)]
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds[0] == "admitted"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) == {"output"}
        admitted, finished = responses[0].admitted, responses[-1].finished
        assert (admitted.request_id, admitted.model, admitted.seed) == ("mine", "tiny", 7)
        assert list(admitted.prompt_token_ids) == TOKENIZER.encode("Hello")
        assert "".join(response.output.text for response in responses[1:-1]) == "abcde"
        reasons = [response.output.finish_reason for response in responses[1:-1]]
        assert reasons[-1] == output_pb2.FINISH_REASON_LENGTH
        assert not any(reasons[:-1])
        assert finished.usage.num_output_tokens == 5
        assert finished.timings.tokenize_ns > 0


async def test_bad_words_reach_the_engine_as_tokens() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as servicer:
        await servicer.generation.Generate(ask(text="a", sampling={"bad_words": ["stop", "Hello world"]}))
        error = await error_of(
            servicer.generation.StreamGenerate(ask(text="a", sampling={"bad_words": ["x"] * 129}))
        )
    texts = ("stop", " stop", "Hello world", " Hello world")
    sequences = [tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in texts]
    assert list(engine.submitted[0].sampling.bad_words) == sequences
    assert "sampling.bad_words: 129 strings are above the limit 128" in str(error)


async def test_a_repetition_has_a_reason_of_its_own() -> None:
    detection = {"max_pattern_size": 2, "min_count": 3, "min_pattern_size": 2}
    async with FakeEngine() as engine, open_api(engine) as servicer:
        call = asyncio.ensure_future(
            servicer.generation.Generate(ask(text="a", length={"repetition_detection": detection}))
        )
        choice = await engine.next_submit()
        engine.emit(choice, TOKENIZER.encode("ab"), finish=FinishReason.REPETITION)
        answer = await call
        bad = {**detection, "min_pattern_size": 3}
        error = await error_of(
            servicer.generation.StreamGenerate(ask(text="a", length={"repetition_detection": bad}))
        )
    assert choice.sampling.repetition_detection == RepetitionDetection(**detection)
    assert answer.choices[0].finish_reason == output_pb2.FINISH_REASON_REPETITION
    assert "length.repetition_detection.min_pattern_size: 3 is above the limit 2" in str(error)


async def test_request_id_of_the_metadata_names_the_request() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as servicer:
        metadata = (("x-request-id", "trace-1"),)
        ids = []
        for _ in range(2):
            call = servicer.generation.StreamGenerate(ask(text="Hello"), metadata=metadata)
            ids.append((await call.read()).admitted.request_id)
            assert (await call.initial_metadata()).get("x-request-id") == "trace-1"
        assert all(request_id.startswith("trace-1-") for request_id in ids)
        assert ids[0] != ids[1]  # proxies give one id to several calls


async def test_an_unnamed_request_that_fails_by_a_bug_learns_its_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as servicer:
        monkeypatch.setattr(servicer.core.generator, "prepare", lambda *_: 1 // 0)
        error = await error_of(servicer.generation.StreamGenerate(ask(text="x")))
    assert error.code == "INTERNAL"
    found = re.search(r"\(request ([0-9a-f-]{36})\)", error.message)
    assert found is not None
    (logged,) = [record for record in caplog.records if "failed by a bug" in record.message]
    assert found[0] in logged.getMessage()


async def test_every_violation_travels_with_its_path() -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        request = ask(
            token_ids={"ids": [1, 999999]},
            sampling={"temperature": float("nan"), "top_p": 0.0},
            length={"max_tokens": 0},
            response={"logprobs": {"top": 21}},
            truncation={"max_tokens": 5, "side": 9},
        )
        error = await error_of(servicer.generation.StreamGenerate(request))
        assert isinstance(error, errors.InvalidRequest)
        assert {violation.field for violation in error.violations} == {
            "token_ids.ids[1]",
            "sampling.temperature",
            "sampling.top_p",
            "length.max_tokens",
            "response.logprobs.top",
            "truncation.side",
        }


@pytest.mark.parametrize(
    ("request_", "kind", "words"),
    [
        (ask(), errors.InvalidRequest, "prompt: no prompt is given"),
        (ask(text=""), errors.InvalidRequest, r"text\.text: the prompt is empty"),
        (
            ask(text="x" * 70),
            errors.ContextLengthExceeded,
            "length is 64 tokens.*\\(70 in the prompt",
        ),
        (
            ask(text="x" * 60, length={"max_tokens": 5}),
            errors.ContextLengthExceeded,
            r"length is 64 tokens.*\(60 in the prompt, 5 in the completion",
        ),
        (
            ask(chat={"messages": [{"role": "user"}] * 16385}),
            errors.InvalidRequest,
            r"^chat\.messages: 16385 messages are above the limit 16384$",
        ),
        (ask(text="x", model="gpt-5"), errors.ModelNotFound, "'gpt-5'; served: tiny"),
        (
            ask(text="x", adapter="l"),
            errors.ModelNotFound,
            "adapter: no engine has the adapter 'l'; loaded: none",
        ),
        (
            ask(
                chat={
                    "messages": [{"role": "user", "parts": [{"text": "x"}]}],
                    "continue_final_message": True,
                    "add_generation_prompt": True,
                }
            ),
            errors.InvalidRequest,
            r"^chat\.add_generation_prompt: true contradicts",
        ),
        (
            ask(chat={"messages": [{"role": "user", "parts": [{"image": {"url": "x"}}]}]}),
            errors.FeatureDisabled,
            r"^chat\.messages\[0\]\.parts\[0\]\.image: ",
        ),
        (
            ask(text="x", cache={"bypass": True}, response={"logprobs": {"whole_vocabulary": {}}}),
            errors.FeatureDisabled,
            r"^cache\.bypass, response\.logprobs\.whole_vocabulary: ",
        ),
        (
            ask(chat={"messages": [{"role": "user"}], "template_kwargs_json": "{"}),
            errors.InvalidRequest,
            r"chat\.template_kwargs_json: is not JSON",
        ),
        (
            ask(chat={"messages": [{"role": "user"}], "template_kwargs_json": "[]"}),
            errors.InvalidRequest,
            r"chat\.template_kwargs_json: is not a JSON object",
        ),
        (
            ask(text="x", structured_outputs={"structural_tag_json": "{}"}),
            errors.InvalidRequest,
            r"structured_outputs\.structural_tag_json: has no triggers",
        ),
    ],
)
async def test_bad_input_gets_its_status_and_the_next_request_succeeds(
    request_: generation_pb2.StreamGenerateRequest, kind: type[errors.TriptychError], words: str
) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as servicer:
        error = await error_of(servicer.generation.StreamGenerate(request_))
        assert type(error) is kind
        assert re.search(words, error.message), error.message
        good = ask(text="x", length={"max_tokens": 1})
        assert len([response async for response in servicer.generation.StreamGenerate(good)]) == 3


def test_only_fields_that_the_client_set_count_as_given() -> None:
    generation = generation_pb2.Generation(
        text={"text": "x"},
        sampling={"temperature": 0.0, "logit_bias": {5: 1.0}, "allowed_token_ids": {"ids": []}},
        length={"ignore_eos": False, "stop": ["x"]},
        response={"text": False, "logprobs": {}},
    )
    raw = to_raw_request("id", generation, None)
    assert set(raw.sampling) == {
        "temperature", "logit_bias", "allowed_token_ids", "stop", "detokenize", "logprobs",
    }  # fmt: skip
    assert raw.sampling["logprobs"] == 0  # the chosen token's alone
    assert raw.truncate_prompt_tokens is None
    assert raw.output_kind is OutputKind.DELTA


def test_a_chat_arrives_with_its_names_and_variables() -> None:
    messages = [
        {"role": "user", "parts": [{"text": "x"}, {"text": "z"}], "name": "Ann"},
        {"role": "assistant", "parts": [{"text": "y"}]},
    ]
    chat = {"messages": messages, "add_generation_prompt": False, "template_kwargs_json": '{"a": 1}'}
    raw = to_raw_request("id", generation_pb2.Generation(chat=chat), 2.5)  # type: ignore[arg-type]
    plain = [{"role": "user", "content": "x\nz", "name": "Ann"}, {"role": "assistant", "content": "y"}]
    assert raw.prompt == RawChat(plain, False, {"a": 1})
    assert raw.deadline_s == 2.5


@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_a_client_that_leaves_is_aborted_in_the_engine(num_read: int) -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        call = servicer.generation.StreamGenerate(ask(text="x"))
        request = await engine.next_submit()
        for place in range(num_read):
            engine.emit(request, [65 + place])
            await call.read()
        call.cancel()
        await eventually(lambda: engine.aborted == [request.request_id])
        await eventually(lambda: servicer.core.generator.num_active == 0)


# Without its bandwidth probe gRPC keeps a client's window at 64 kB: more than that waits in the server.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]


async def test_a_client_that_leaves_while_it_does_not_read_is_aborted() -> None:
    """The handler then hangs in a write that flow control holds back, not in a wait for tokens."""
    async with (
        FakeEngine() as engine,
        open_api(engine) as servicer,
        grpc.aio.insecure_channel(servicer.address, options=NARROW) as narrow,
    ):
        call = generation_pb2_grpc.GenerationServiceStub(narrow).StreamGenerate(ask(text="x"))
        request = await engine.next_submit()
        await call.read()
        for _ in range(20):
            engine.emit(request, [65] * 20_000)
            await asyncio.sleep(0)
        call.cancel()
        await eventually(lambda: engine.aborted == [request.request_id])
        await eventually(lambda: servicer.core.generator.num_active == 0)


async def test_a_stalled_client_does_not_delay_the_others() -> None:
    async with (
        FakeEngine() as engine,
        open_api(engine) as servicer,
        grpc.aio.insecure_channel(servicer.address, options=NARROW) as narrow,
    ):
        stalled = generation_pb2_grpc.GenerationServiceStub(narrow).StreamGenerate(ask(text="x"))
        slow = await engine.next_submit(0)
        reader = servicer.generation.StreamGenerate(ask(text="x"))
        fast = await engine.next_submit(1)
        assert (await reader.read()).HasField("admitted")
        for _ in range(50):  # 50 x 60 kB that nobody takes
            engine.emit(slow, [65] * 20_000)
            engine.emit(fast, [66])
            assert list((await reader.read()).output.token_ids) == [66]
        engine.emit(slow, [67], finish=FinishReason.LENGTH)
        reader.cancel()
        responses = [response async for response in stalled]
        deltas = [response.output for response in responses[1:-1]]
        assert sum(len(delta.token_ids) for delta in deltas) == 50 * 20_000 + 1
        assert len(deltas) < 40  # what flow control held back has been merged


async def test_the_call_s_deadline_reaches_the_engine() -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        error = await error_of(servicer.generation.StreamGenerate(ask(text="x"), timeout=2.0))
        assert isinstance(error, errors.DeadlineExceeded)
        (request,) = engine.submitted
        assert request.deadline_remaining_ms is not None
        assert 0 < request.deadline_remaining_ms <= 2100  # gRPC rounds it up on its way, by some hundredths
        await eventually(lambda: engine.aborted == [request.request_id])


async def test_engine_loss_is_unavailable_before_tokens_and_aborted_after() -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        with_token = servicer.generation.StreamGenerate(ask(text="x", request_id="with"))
        engine.emit(await engine.next_submit(0), [65])
        assert (await with_token.read()).HasField("admitted")
        assert (await with_token.read()).output.token_ids == [65]
        without_token = servicer.generation.StreamGenerate(ask(text="x", request_id="without"))
        await engine.next_submit(1)
        assert (await without_token.read()).HasField("admitted")
        await engine.die()
        assert isinstance(await error_of(without_token.read()), errors.EngineUnavailable)
        lost = await error_of(with_token.read())
        assert isinstance(lost, errors.GenerationLost)
        assert "1 of choice 0" in lost.message


async def read_rest(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_call_whose_client_does_not_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = asyncio.Event()

    async def torrent(raw: RawRequest) -> AsyncGenerator[Event, None]:
        try:
            while True:
                yield DeltaEvent(0, "x" * 10_000, [1])
        finally:
            closed.set()

    async with FakeEngine() as engine, open_api(engine, client_timeout_s=0.3) as servicer:
        monkeypatch.setattr(servicer.core.generator, "generate", torrent)
        call = servicer.generation.StreamGenerate(ask(text="x"))
        await call.read()
        await asyncio.wait_for(closed.wait(), 60)
        error = await error_of(read_rest(call))
        assert isinstance(error, errors.DeadlineExceeded)
        assert "read nothing for 0.3 s" in error.message


async def test_a_call_that_waits_for_its_engine_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    is_written, end_write = asyncio.Event(), StallWatch.end_write

    def note_written(watch: StallWatch) -> None:
        end_write(watch)
        is_written.set()

    monkeypatch.setattr(StallWatch, "end_write", note_written)
    async with FakeEngine() as engine, open_api(engine, client_timeout_s=60.0) as servicer:
        call = servicer.generation.StreamGenerate(ask(text="x"))
        request = await engine.next_submit()
        assert (await call.read()).WhichOneof("event") == "admitted"
        await asyncio.wait_for(is_written.wait(), 60)  # a client may have read what the server still writes
        for _ in range(3):
            await pass_time(60.0)
        engine.emit(request, [65], finish=FinishReason.LENGTH)
        assert (await call.read()).WhichOneof("event") == "output"
        assert (await call.read()).WhichOneof("event") == "finished"


async def test_operators_have_a_port_of_their_own_without_any_engine() -> None:
    async with FakeEngine(is_ready=False) as engine, open_api(engine, waits=False) as servicer:
        admin = health_pb2.HealthCheckRequest(service="triptych.admin.v1.AdminService")
        stub = health_pb2_grpc.HealthStub(servicer.admin_channel)
        assert (await stub.Check(admin)).status == health_pb2.HealthCheckResponse.SERVING
        await eventually(lambda: servicer.core.router.engines[0].welcome is not None)
        (info,) = (await servicer.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
        assert (info.engine_id, info.address, info.ready) == ("engine-0", engine.address, False)
        assert (info.why_not_ready, info.model) == ("loading", "tiny")
        public = admin_pb2_grpc.AdminServiceStub(servicer.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await public.GetStatus(admin_pb2.GetStatusRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(servicer.channel).Check(admin)


async def test_connections_grow_no_older_than_asked_for() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine, max_connection_age_s=0.2) as servicer:
        list_models = model_pb2.ListModelsRequest()
        await servicer.models.ListModels(list_models)
        ready = grpc.ChannelConnectivity.READY
        await asyncio.wait_for(servicer.channel.wait_for_state_change(ready), 60)
        assert (await servicer.models.ListModels(list_models)).models[0].name == "tiny"


async def test_a_long_conversation_is_read_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    plain = convert.to_chat

    def to_chat(chat: chat_pb2.Chat) -> Any:
        threads.append(threading.get_ident())
        return plain(chat)

    monkeypatch.setattr(convert, "to_chat", to_chat)
    async with FakeEngine() as engine, open_api(engine) as servicer:
        for num_messages in (1, 200):
            chat = {"messages": [{"role": "user", "parts": [{"text": "x"}]}] * num_messages}
            await servicer.generation.Tokenize(generation_pb2.TokenizeRequest(chat=chat))  # type: ignore[arg-type]
    short, long = threads
    assert short == threading.get_ident() != long


async def test_health_follows_the_engines() -> None:
    async with FakeEngine(is_ready=False) as engine, open_api(engine, waits=False) as servicer:
        health = health_pb2_grpc.HealthStub(servicer.channel)

        async def status(name: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status

        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert (await status(""), await status(SERVICE)) == (serving, not_serving)
        assert isinstance(
            await error_of(servicer.generation.StreamGenerate(ask(text="x"))), errors.EngineUnavailable
        )
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == not_serving
        engine.set_ready(True)
        assert (await watch.read()).status == serving
        engine.set_ready(False, "worker lost")
        assert (await watch.read()).status == not_serving
        assert await status("") == serving
        watch.cancel()


async def test_reflection_lists_the_services() -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        stub = reflection_pb2_grpc.ServerReflectionStub(servicer.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for response in call:
            names = {service.name for service in response.list_services_response.service}
        assert {
            "triptych.v1.GenerationService",
            "triptych.v1.EmbeddingService",
            "triptych.v1.ModelService",
            "grpc.health.v1.Health",
        } <= names
        assert "triptych.admin.v1.AdminService" not in names


async def test_tokenize_and_detokenize() -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        stub = servicer.generation
        tokenized = await stub.Tokenize(generation_pb2.TokenizeRequest(text={"text": "Größe"}))
        assert list(tokenized.token_ids) == TOKENIZER.encode("Größe")
        assert (tokenized.max_model_len, len(tokenized.token_bytes), len(tokenized.start_offsets)) == (
            64,
            0,
            0,
        )
        chat = chat_pb2.Chat(messages=[{"role": "user", "parts": [{"text": "Hi"}]}])
        tokenized = await stub.Tokenize(generation_pb2.TokenizeRequest(chat=chat))
        assert list(tokenized.token_ids) == TOKENIZER.encode("user: Hi\nassistant:")
        text = await stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=TOKENIZER.encode("Größe")))
        assert text.text == "Größe"
        error = await error_of(stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[300])))
        assert error.message == "token_ids[0]: 300 is not in the vocabulary, 0..299"
        assert isinstance(
            await error_of(stub.Tokenize(generation_pb2.TokenizeRequest())), errors.InvalidRequest
        )


async def test_tokens_are_told_with_bytes_and_places() -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        stub = servicer.generation
        request = generation_pb2.TokenizeRequest(text={"text": "Größe"}, with_bytes=True, with_offsets=True)
        tokenized = await stub.Tokenize(request)
        assert b"".join(tokenized.token_bytes) == "Größe".encode()
        offsets = zip(tokenized.start_offsets, tokenized.end_offsets, strict=True)
        assert "".join(dict.fromkeys("Größe"[start:end] for start, end in offsets)) == "Größe"
        chat = {"messages": [{"role": "user", "parts": [{"text": "Hi"}]}]}
        error = await error_of(
            stub.Tokenize(generation_pb2.TokenizeRequest(chat=chat, with_offsets=True))  # type: ignore[arg-type]
        )
        assert isinstance(error, errors.InvalidRequest)
        assert error.violations[0].field == "with_offsets"


async def test_models_come_in_pages() -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        (model,) = (await servicer.models.ListModels(model_pb2.ListModelsRequest())).models
        assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 64, 300)
        assert list(model.capabilities) == [
            model_pb2.CAPABILITY_GENERATE,
            model_pb2.CAPABILITY_STRUCTURED_OUTPUTS,
            model_pb2.CAPABILITY_CHAT,
            model_pb2.CAPABILITY_TOOLS,
        ]
        assert model.create_time.seconds > 1_700_000_000
        found = await servicer.models.GetModel(model_pb2.GetModelRequest(name="tiny"))
        assert found.model == model
        error = await error_of(servicer.models.GetModel(model_pb2.GetModelRequest(name="gpt-5")))
        assert isinstance(error, errors.ModelNotFound)
        page = await servicer.models.ListModels(model_pb2.ListModelsRequest(page_size=1, page_token="tiny"))
        assert (len(page.models), page.next_page_token) == (0, "")
        error = await error_of(servicer.models.ListModels(model_pb2.ListModelsRequest(page_size=1001)))
        assert isinstance(error, errors.InvalidRequest)


async def test_server_info_is_told_whether_it_is_ready_or_not() -> None:
    async with FakeEngine() as engine, open_api(engine) as servicer:
        info = await servicer.models.GetServerInfo(model_pb2.GetServerInfoRequest())
        assert (info.ready, info.why_not_ready, info.num_engines) == (True, "", 1)
        assert info.limits.max_logprobs == 20
        assert info.version
    async with FakeEngine(is_ready=False) as engine, open_api(engine, waits=False) as servicer:
        info = await servicer.models.GetServerInfo(model_pb2.GetServerInfoRequest())
        assert not info.ready
        assert info.why_not_ready


async def test_the_operator_s_calls_reach_the_engine_named() -> None:
    async with FakeEngine() as a, FakeEngine(engine_id="engine-1") as b, open_api(a, b) as servicer:
        for name in ("engine-0", "engine-1"):
            response = await servicer.admin.GetStatus(admin_pb2.GetStatusRequest(engine_id=name))
            assert (response.status.engine_id, response.status.num_running) == (name, 3)
        for name in ("", "engine-7"):
            error = await error_of(servicer.admin.GetStatus(admin_pb2.GetStatusRequest(engine_id=name)))
            assert isinstance(error, errors.InvalidRequest)
            assert "engine-0, engine-1" in error.message
        watch = servicer.admin.WatchStatus(admin_pb2.WatchStatusRequest(engine_id="engine-1"))
        for _ in range(2):
            assert (await watch.read()).status.engine_id == "engine-1"
        watch.cancel()
        await b.die()
        error = await error_of(servicer.admin.GetStatus(admin_pb2.GetStatusRequest(engine_id="engine-1")))
        assert isinstance(error, errors.EngineUnavailable)


async def test_an_id_that_metadata_cannot_carry_is_refused_by_name() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        error = await error_of(api.generation.StreamGenerate(ask("🙂", text="Hello")))
    assert isinstance(error, errors.InvalidRequest)
    assert error.violations[0].field == "request_id"


async def test_a_message_that_cannot_be_parsed_is_the_client_s_error() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        for call in (
            api.channel.unary_unary("/triptych.v1.GenerationService/Generate")(b"\xff\xff"),
            api.channel.unary_stream("/triptych.v1.GenerationService/StreamGenerate")(b"\xff\xff"),
        ):
            error = await error_of(call)
            assert isinstance(error, errors.InvalidRequest)
            assert "cannot be parsed" in error.message


async def test_message_of_a_stream_that_cannot_be_parsed_is_the_client_s_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        call = api.channel.stream_stream("/triptych.v1.GenerationService/BatchGenerate")(
            iter([b"", b"\xff\xff"])
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be parsed" in (caught.value.details() or "")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_an_operator_lists_and_ends_requests_of_all_tenants() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        calls = [
            api.generation.StreamGenerate(ask(f"r{number}", text="x", tenant=f"t{number}", priority=number))
            for number in range(3)
        ]
        submitted = await eventually(lambda: len(engine.submitted) == 3 and engine.submitted)
        engine.emit(submitted[0], [1, 2])
        page = await api.admin.ListRequests(admin_pb2.ListRequestsRequest(page_size=2))
        rest = await api.admin.ListRequests(
            admin_pb2.ListRequestsRequest(page_size=2, page_token=page.next_page_token)
        )
        listed = [*page.requests, *rest.requests]
        assert [(r.request_id, r.tenant, r.priority) for r in listed] == [
            ("r0", "t0", 0),
            ("r1", "t1", 1),
            ("r2", "t2", 2),
        ]
        assert [r.num_choices for r in listed] == [1, 1, 1]
        assert not rest.next_page_token
        request = admin_pb2.AbortRequestsRequest(request_ids=["r2", "gone", "r0", "r1"])
        answer = await api.admin.AbortRequests(request)
        assert sorted(answer.aborted_request_ids) == ["r0", "r1", "r2"]
        for call in calls:
            *_, last, finished = [message async for message in call]
            assert last.output.finish_reason == output_pb2.FINISH_REASON_ABORT
            assert finished.WhichOneof("event") == "finished"
        assert not (await api.admin.ListRequests(admin_pb2.ListRequestsRequest())).requests
        error = await error_of(api.admin.AbortRequests(admin_pb2.AbortRequestsRequest()))
        assert "request_ids: 0 ids are not within the limits 1..4096" in str(error)


async def test_an_operator_sets_the_level_of_the_log() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        await api.admin.SetLogLevel(admin_pb2.SetLogLevelRequest(log_level=admin_pb2.LOG_LEVEL_ERROR))
        assert logging.getLogger().level == logging.ERROR
        await api.admin.SetLogLevel(admin_pb2.SetLogLevelRequest(log_level=admin_pb2.LOG_LEVEL_DEBUG))
        assert logging.getLogger().level == logging.DEBUG
        assert logging.getLogger("asyncio").level == logging.WARNING
        error = await error_of(api.admin.SetLogLevel(admin_pb2.SetLogLevelRequest(log_level=9)))
        assert "log_level: 9 is none of the levels known here, 1 to 4" in str(error)
        at_engine = admin_pb2.SetLogLevelRequest(engine_id="engine-0", log_level=1)
        error = await error_of(api.admin.SetLogLevel(at_engine))
        assert "not served here" in str(error)  # in the fake engine's words
