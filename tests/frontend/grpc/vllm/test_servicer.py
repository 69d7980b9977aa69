"""vLLM's gRPC service, called with the messages that SMG publishes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf import descriptor_pb2

from tests.helpers.byte_tokenizer import EOS, write_model_directory
from tests.helpers.fake_engine import DEADLINE_S, MODEL, NUM_CACHED, FakeEngine, eventually
from tests.helpers.grpc_api import TOKENIZER, alphabet, error_of, open_api
from tests.helpers.vllm_grpc import PublishedVllm, published_files
from triptych import errors
from triptych.compat import common_pb2, vllm_engine_pb2
from triptych.types.events import AdmittedEvent, DeltaEvent, FinishedEvent, PromptLogprobsEvent
from triptych.types.logprobs import Logprob, TokenLogprobs
from triptych.types.outputs import FinishReason, StageTimings, Usage
from triptych.types.step import PromptLogprobs
from triptych_services.frontend.grpc.vllm.convert import VllmEncoder

A = TOKENIZER.encode("a")[0]
WITH_ITS_EOS = replace(MODEL, eos_token_ids=(TOKENIZER.token_id(EOS),))
"""Grammars end with a token that the tokenizer has."""


@pytest.fixture(scope="module")
def vllm() -> PublishedVllm:
    return PublishedVllm()


async def gather(call: Any) -> list[Any]:
    return [getattr(message, message.WhichOneof("response")) async for message in call]


def test_the_proto_is_the_published_one() -> None:
    ours = []
    for file in (common_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR):
        copy = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copy)
        copy.name = copy.name.rpartition("/")[2]
        copy.dependency[:] = [name.rpartition("/")[2] for name in copy.dependency]
        ours.append(copy)
    assert ours == published_files()


async def test_a_stream_has_chunks_and_ends_with_complete(vllm: PublishedVllm) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        request = vllm.GenerateRequest(
            request_id="mine",
            tokenized={"input_ids": [1, 2, 3]},
            sampling_params={"max_tokens": 4},
            stream=True,
        )
        *chunks, complete = await gather(vllm.stub(api.channel).Generate(request))
    assert [chunk.DESCRIPTOR.name for chunk in chunks] == ["GenerateStreamChunk"] * len(chunks)
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [A, A + 1, A + 2, A + 3]
    assert sum(chunk.completion_tokens for chunk in chunks) == 4
    assert {chunk.prompt_tokens for chunk in chunks} == {3}
    assert complete.DESCRIPTOR.name == "GenerateComplete"
    assert (complete.finish_reason, complete.prompt_tokens) == ("length", 3)
    assert complete.cached_tokens == NUM_CACHED
    assert list(complete.output_ids) == list(chunks[-1].token_ids)  # as vLLM has it
    assert [submitted.request_id for submitted in engine.submitted] == ["mine"]
    assert list(engine.submitted[0].token_ids) == [1, 2, 3]


async def test_without_stream_each_choice_comes_whole(vllm: PublishedVllm) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        request = vllm.GenerateRequest(text="Hello", sampling_params={"n": 2, "max_tokens": 3, "seed": 7})
        first, second = await gather(vllm.stub(api.channel).Generate(request))
    assert (first.index, second.index) == (0, 1)
    for complete in (first, second):
        assert list(complete.output_ids) == [A, A + 1, A + 2]
        assert complete.completion_tokens == 3
    assert engine.submitted[0].whole_output
    assert list(engine.submitted[0].token_ids) == TOKENIZER.encode("Hello")


async def test_a_stop_string_ends_it_and_is_named(vllm: PublishedVllm) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        params = {"max_tokens": 9, "stop": ["cd"]}
        request = vllm.GenerateRequest(text="Hello", sampling_params=params, stream=True)
        *chunks, complete = await gather(vllm.stub(api.channel).Generate(request))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 4
        params = {"max_tokens": 9, "stop_token_ids": [A + 1]}
        request = vllm.GenerateRequest(text="Hello", sampling_params=params)
        (by_token,) = await gather(vllm.stub(api.channel).Generate(request))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "cd")
    assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", A + 1)
    assert list(by_token.output_ids) == [A, A + 1]


async def test_fields_left_out_have_vllms_defaults(vllm: PublishedVllm) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        request = vllm.GenerateRequest(text="Hello", sampling_params={"temperature": 0.0})
        await gather(vllm.stub(api.channel).Generate(request))
        request = vllm.GenerateRequest(text="Hello")
        await gather(vllm.stub(api.channel).Generate(request))
    greedy, default = (submitted.sampling for submitted in engine.submitted)
    assert (greedy.temperature, default.temperature) == (0.0, 1.0)
    assert (default.n, default.top_p, default.top_k, default.repetition_penalty) == (1, 1.0, 0, 1.0)
    assert default.max_tokens == 64 - len(TOKENIZER.encode("Hello"))  # the rest of the context
    assert default.logprobs is None
    assert not default.detokenize


async def test_every_field_arrives(vllm: PublishedVllm) -> None:
    params = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.25, "frequency_penalty": 0.5,
        "presence_penalty": 1.0, "repetition_penalty": 2.0, "max_tokens": 8, "min_tokens": 2, "stop": ["x"],
        "stop_token_ids": [7], "ignore_eos": True, "seed": 3, "include_stop_str_in_output": True,
        "skip_special_tokens": True, "spaces_between_special_tokens": True,
    }  # fmt: skip
    async with FakeEngine() as engine, open_api(engine) as api:
        request = vllm.GenerateRequest(
            tokenized={"input_ids": [1, 2, 3]},
            sampling_params={**params, "logit_bias": {4: 2.0}, "truncate_prompt_tokens": 2},
        )
        call = vllm.stub(api.channel).Generate(request)
        submitted = (await eventually(lambda: engine.submitted))[0]
        call.cancel()
        await eventually(lambda: engine.num_alive == 0)
    for name, value in params.items():
        got = submitted.seed if name == "seed" else getattr(submitted.sampling, name)
        assert got == (tuple(value) if isinstance(value, list) else value), name
    assert submitted.sampling.logit_bias == ((4, 2.0),)
    assert list(submitted.token_ids) == [2, 3]


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json_schema": '{"type": "object"}'}, '"type"'),
        ({"regex": "[ab]+"}, "[ab]+"),
        ({"choice": {"choices": ["yes", "no"]}}, "yes"),
        ({"json_object": True}, "json"),
        ({"grammar": 'root ::= "a"'}, 'start: "a"'),
    ],
)
async def test_structured_outputs_reach_the_engine(
    vllm: PublishedVllm, constraint: dict[str, Any], words: str
) -> None:
    async with FakeEngine(alphabet, model=WITH_ITS_EOS) as engine, open_api(engine) as api:
        request = vllm.GenerateRequest(text="Hello", sampling_params={"max_tokens": 1, **constraint})
        await gather(vllm.stub(api.channel).Generate(request))
    form = engine.submitted[0].sampling.structured_outputs
    assert form is not None
    assert words in form.grammar


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({}, errors.InvalidRequest, "input: no prompt is given"),
        (
            {"tokenized": {"input_ids": [999]}},
            errors.InvalidRequest,
            r"tokenized\.input_ids\[0\]: 999 is not",
        ),
        (
            {"text": "x", "sampling_params": {"top_p": 2.0, "min_p": 3.0}},
            errors.InvalidRequest,
            r"(?s)sampling_params\.top_p: 2.*sampling_params\.min_p: 3",
        ),
        (
            {"text": "x", "sampling_params": {"regex": "["}},
            errors.InvalidRequest,
            r"sampling_params\.regex: ",
        ),
        (
            {"text": "x", "sampling_params": {"structural_tag": "{}"}},
            errors.InvalidRequest,
            r"sampling_params\.structural_tag: has no triggers",
        ),
        (
            {"text": "x", "kv_transfer_params_json": "{}", "data_parallel_rank": 1},
            errors.FeatureDisabled,
            r"kv_transfer_params_json, data_parallel_rank: |data_parallel_rank, kv_transfer_params_json: ",
        ),
        ({"text": "x", "kv_transfer_params_json": "{}"}, errors.FeatureDisabled, "kv_transfer_params_json: "),
        ({"text": "x", "mm_inputs": {"mm_hashes": ["a"]}}, errors.FeatureDisabled, "mm_inputs: "),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    vllm: PublishedVllm, fields: dict[str, Any], kind: type[errors.TriptychError], words: str
) -> None:
    async with FakeEngine(alphabet, model=WITH_ITS_EOS) as engine, open_api(engine) as api:
        error = await error_of(vllm.stub(api.channel).Generate(vllm.GenerateRequest(**fields)))
        assert not engine.submitted
    assert isinstance(error, kind)
    assert re.search(words, str(error)) is not None


async def test_abort_ends_a_request_with_what_it_has(vllm: PublishedVllm) -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        stub = vllm.stub(api.channel)
        call = stub.Generate(vllm.GenerateRequest(request_id="mine", text="Hello", stream=True))
        submitted = (await eventually(lambda: engine.submitted))[0]
        engine.emit(submitted, [A])
        messages = call.__aiter__()
        chunk = (await anext(messages)).chunk
        await stub.Abort(vllm.AbortRequest(request_ids=["mine", "another"]))
        *_, complete = await gather(messages)
    assert list(chunk.token_ids) == [A]
    assert complete.finish_reason == "abort"


async def test_the_model_is_described(vllm: PublishedVllm, tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path)
    (directory / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    async with FakeEngine() as engine, open_api(engine, directory=directory) as api:
        stub = vllm.stub(api.channel)
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        chunks = [chunk async for chunk in stub.GetTokenizer(vllm.GetTokenizerRequest())]
        again = [chunk async for chunk in stub.GetTokenizer(vllm.GetTokenizerRequest())]
    assert (info.served_model_name, info.is_generation) == ("tiny", True)
    assert (info.max_context_length, info.vocab_size, list(info.eos_token_ids)) == (64, 300, [299])
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert str(directory) not in str(info)
    assert info.tokenizer_path == info.model_path == info.served_model_name
    assert info.bos_token_id == TOKENIZER.token_id("<|bos|>")
    archive = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == again[-1].sha256 == hashlib.sha256(archive).hexdigest()
    files = zipfile.ZipFile(io.BytesIO(archive))
    assert json.loads(files.read("tokenizer.json")) == json.loads((directory / "tokenizer.json").read_text())


async def test_health_server_and_load_are_told(vllm: PublishedVllm) -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        stub = vllm.stub(api.channel)
        health = await stub.HealthCheck(vllm.HealthCheckRequest())
        info = await stub.GetServerInfo(vllm.GetServerInfoRequest())

        async with asyncio.timeout(DEADLINE_S):  # the engine's counters have not come yet
            while not (seen := (await stub.GetLoads(vllm.GetLoadsRequest())).loads[0]).num_running_reqs:
                await asyncio.sleep(0.01)
    assert (health.healthy, health.message) == (True, "ready")
    assert (info.server_type, info.data_parallel_size, info.is_paused) == ("vllm-grpc", 1, False)
    assert (seen.num_running_reqs, seen.num_total_reqs) == (3, 3)
    assert (seen.num_used_tokens, seen.max_total_num_tokens, seen.token_usage) == (32, 128, 0.25)


async def test_health_says_why_it_is_not_ready(vllm: PublishedVllm) -> None:
    async with FakeEngine(is_ready=False) as engine, open_api(engine, waits=False) as api:
        health = await vllm.stub(api.channel).HealthCheck(vllm.HealthCheckRequest())
    assert not health.healthy
    assert "no engine is ready" in health.message


@pytest.mark.parametrize(
    "method", ["Embed", "SubscribeKvEvents", "StartProfile", "StopProfile", "FlushCache"]
)
async def test_other_methods_are_unimplemented_by_name(vllm: PublishedVllm, method: str) -> None:
    request = getattr(vllm, f"{method}Request")
    async with FakeEngine() as engine, open_api(engine) as api:
        call = getattr(vllm.stub(api.channel), method)(request())
        with pytest.raises(grpc.aio.AioRpcError, match=method) as caught:
            await (gather(call) if method == "SubscribeKvEvents" else call)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_logprobs_are_columns_by_position(vllm: PublishedVllm) -> None:
    encoder = VllmEncoder(is_streamed=True)
    prompt = PromptLogprobs(
        1,
        np.array([[8, 5], [9, 6]], np.uint32),
        np.array([[-1.0, -0.5], [-2.0, -0.25]], np.float32),
        np.array([2, 3], np.uint32),
    )
    row = TokenLogprobs.of(Logprob(4, -0.5, "a", 2), (Logprob(5, -0.25, "b", 1), Logprob(4, -0.5, "a", 2)))
    events = [
        AdmittedEvent("r", "tiny", 0, [7, 8, 9]),
        PromptLogprobsEvent(prompt, [b""] * 4),
        DeltaEvent(0, "a", [4], (row,)),
        DeltaEvent(0, "b", [4], (row,), FinishReason.STOP, 299),
        FinishedEvent(Usage(3, 2, 1), StageTimings()),
    ]
    sent = [message.SerializeToString() for event in events for message in encoder.encode(event)]
    first, second, complete = map(vllm.GenerateResponse.FromString, sent)
    assert list(first.chunk.output_logprobs.token_ids) == [4]
    assert list(first.chunk.output_logprobs.token_logprobs) == [-0.5]
    assert list(first.chunk.output_logprobs.top_logprobs[0].token_ids) == [5, 4]
    assert list(first.chunk.output_logprobs.top_logprobs[0].values) == [-0.25, -0.5]
    columns = first.chunk.input_logprobs
    assert list(columns.token_ids) == [7, 8, 9]
    assert [entry.HasField("value") for entry in columns.token_logprobs] == [False, True, True]
    assert [list(top.token_ids) for top in columns.top_logprobs] == [[], [5], [6]]
    assert not second.chunk.HasField("input_logprobs")
    assert complete.complete.input_logprobs == columns
    assert complete.complete.matched_token_id == 299
    assert complete.complete.cached_tokens == 1
