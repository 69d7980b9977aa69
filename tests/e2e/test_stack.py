"""Three real processes with the real model, seen by clients that are not ours where possible."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import jsonschema
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.e2e.conftest import MAX_NUM_SEQS, MAX_NUM_WAITING, READY_S
from tests.e2e.test_simulated_stack import once
from triptych import LLM, SamplingParams
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.errors import InvalidRequest, QueueFull
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.events import AdmittedEvent, DeltaEvent, FinishedEvent
from triptych.types.outputs import FinishReason

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY = {"temperature": 0.0}
IDLE_S = 60.0


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[GenerationClient]:
    async with GenerationClient(cluster.address) as client:
        yield client


async def status_of(cluster: LocalCluster) -> admin_pb2.EngineStatus:
    async with grpc.aio.insecure_channel(cluster.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return (await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=60)).status


async def wait_idle(cluster: LocalCluster) -> None:
    """Nothing runs, nothing waits, every block is home."""
    async with asyncio.timeout(IDLE_S):
        while True:
            status = await status_of(cluster)
            if (status.num_running, status.num_waiting, status.num_used_blocks) == (0, 0, 0):
                return
            await asyncio.sleep(0.02)


def test_a_prompt_is_scored_the_same_by_every_way_in(cluster: LocalCluster) -> None:
    """As lm-eval's `local-completions` asks, by gRPC, and beside other requests."""
    client = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)
    with LLM(address=cluster.address) as llm:
        texts = [
            "The capital of France is Paris, of course: größer gibt es nicht.",
            "Hello",
            "Hello there! " * 100,
        ]
        scored = llm.generate(
            texts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1), use_tqdm=False
        )
        again = llm.generate(
            texts, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0), use_tqdm=False
        )
    prompts = [output.prompt_token_ids for output in scored]
    answer = client.completions.create(
        model="embedded", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    for text, output, unsaid, choice in zip(texts, scored, again, answer.choices, strict=True):
        entries, logprobs = output.prompt_logprobs, choice.logprobs
        assert entries is not None
        assert entries[0] is None
        assert len(entries) == len(output.prompt_token_ids)
        own = [entry.chosen.logprob for entry in entries[1:]]
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:-1] == pytest.approx(own, abs=1e-4)
        best = [max(candidates.values()) for candidates in logprobs.top_logprobs[1:-1]]
        assert best == pytest.approx([entry.top[0].logprob for entry in entries[1:]], abs=1e-4)
        assert [entry.chosen.logprob for entry in unsaid.prompt_logprobs[1:]] == pytest.approx(own, abs=1e-4)
        assert (unsaid.outputs[0].text, unsaid.outputs[0].finish_reason) == ("", "length")
        assert choice.text == text + output.outputs[0].text
        ends = [*logprobs.text_offset[1:], len(choice.text)]
        pieces = [choice.text[start:end] for start, end in zip(logprobs.text_offset, ends, strict=True)]
        assert all(
            piece == token or token.startswith("bytes:")
            for piece, token in zip(pieces, logprobs.tokens, strict=True)
        )
    assert answer.usage.completion_tokens == len(texts)
    go_on = {"ignore_eos": True}
    (choice,) = client.completions.create(
        model="embedded", prompt="Hi<|im_end|>", max_tokens=3, temperature=0, logprobs=0, extra_body=go_on
    ).choices
    assert choice.logprobs.tokens == ["\n", "<|im_start|>", "ass"]
    assert choice.logprobs.text_offset == [0, 1, 1], "a special token has no text"


async def test_the_answer_is_paris_token_by_token(client: GenerationClient) -> None:
    events = [event async for event in client.generate(QUESTION, {**GREEDY, "max_tokens": 32})]
    assert isinstance(events[0], AdmittedEvent)
    assert isinstance(events[-1], FinishedEvent)
    deltas = [event for event in events if isinstance(event, DeltaEvent)]
    assert len(deltas) > 3, "it came in one piece"
    assert "".join(delta.text for delta in deltas) == ANSWER
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.STOP]
    usage = events[-1].usage
    assert usage.num_prompt_tokens == len(events[0].prompt_token_ids)
    assert usage.num_output_tokens == sum(len(delta.token_ids) for delta in deltas)
    assert events[-1].timings.prefill_ns > 0


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("num_seen", [1, 6])
async def test_a_cut_answer_goes_on_with_penalties_and_stop_strings(
    client: GenerationClient, num_seen: int
) -> None:
    sampling = {
        "max_tokens": 24, "temperature": 0.8, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "min_tokens": 2, "stop": ["zzz"],
    }  # fmt: skip

    async def deltas_of(options: RequestOptions) -> list[DeltaEvent]:
        events = client.generate("Once upon a time", sampling, options)
        return [event async for event in events if isinstance(event, DeltaEvent)]

    whole = await deltas_of(RequestOptions())
    token_ids = [token_id for delta in whole for token_id in delta.token_ids]
    rest = await deltas_of(RequestOptions(emitted={0: token_ids[:num_seen]}))
    assert [token_id for delta in rest for token_id in delta.token_ids] == token_ids[num_seen:]
    assert "".join(delta.text for delta in whole).endswith("".join(delta.text for delta in rest))
    assert (rest[-1].finish_reason, rest[-1].stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)


def test_reflection_and_health_list_the_services_of_each_tier(cluster: LocalCluster) -> None:
    config = cluster.config
    expected = {
        cluster.address: {"triptych.v1.GenerationService", "triptych.v1.ModelService"},
        cluster.admin_address: {"triptych.admin.v1.AdminService"},
        config.engine.worker_address: {"triptych.internal.v1.WorkerService"},
        config.frontend.engine_addresses: {"triptych.internal.v1.EngineCoreService"},
    }
    for address, names in expected.items():
        with grpc.insecure_channel(address) as channel:
            listed = set(ProtoReflectionDescriptorDatabase(channel).get_services())
            assert names | {"grpc.health.v1.Health"} <= listed
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", *names):
                response = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
                assert response.status == health_pb2.HealthCheckResponse.SERVING, (address, name)
            statuses = health.List(health_pb2.HealthListRequest(), timeout=60).statuses
            assert names <= set(statuses)


def test_every_tier_serves_its_metrics(cluster: LocalCluster) -> None:
    config = cluster.config
    for port, name in (
        (config.frontend.metrics_port, "triptych_frontend_requests_total"),
        (config.engine.metrics_port, "triptych_engine_steps_total"),
        (config.worker.metrics_port, "triptych_worker_stage_seconds_total"),
    ):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
            assert name in response.read().decode()


def test_the_official_client_chats_streams_and_completes(cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert sum(bool(c.choices and c.choices[0].finish_reason) for c in chunks) == 1
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    completion = client.completions.create(
        model=model, prompt="Hello, my name is", max_tokens=5, temperature=0
    )
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 5


@pytest.mark.thorough
def test_a_demanded_call_holds_to_its_schema(cluster: LocalCluster) -> None:
    """From the official client, streamed and whole, and from Python."""
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "forecast", "parameters": parameters}}
    asked: Any = {
        "messages": QUESTION,
        "tools": [tool],
        "tool_choice": "required",
        "temperature": 1,
        "seed": 7,
    }
    client = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none")
    with client:
        whole = client.chat.completions.create(model="embedded", **asked).choices[0]
        with client.chat.completions.stream(model="embedded", **asked) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    calls = whole.message.tool_calls
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "forecast"
        jsonschema.validate(json.loads(call.function.arguments), parameters)
    told = [call.function.arguments for call in streamed.message.tool_calls or ()]
    assert told == [call.function.arguments for call in calls if call.type == "function"]
    named = {"type": "function", "function": {"name": "forecast"}}
    with LLM(address=cluster.address) as llm:
        (output,) = llm.chat(QUESTION, SamplingParams(max_tokens=64), False, tools=[tool], tool_choice=named)
    (own,) = output.outputs[0].tool_calls
    assert (own.name, output.outputs[0].finish_reason) == ("forecast", "stop")
    jsonschema.validate(json.loads(own.arguments), parameters)


def test_logprobs_come_with_the_tokens(cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="embedded", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).startswith(ANSWER)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token, "greedy takes the best"
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= 0


async def test_the_official_async_client_too(cluster: LocalCluster) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)
    stream = await client.chat.completions.create(
        model="embedded", messages=QUESTION, temperature=0, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == ANSWER
    with pytest.raises(openai.NotFoundError, match="embedded"):
        await client.chat.completions.create(model="gpt-5", messages=QUESTION)


def test_the_classic_example_runs_against_a_stack_that_stands(cluster: LocalCluster) -> None:
    prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=8)
    with LLM(address=cluster.address) as llm:
        first = llm.generate(prompts, sampling_params, use_tqdm=False)
        again = llm.generate(prompts, sampling_params, use_tqdm=False)
    assert [output.prompt for output in first] == prompts
    assert all(output.outputs[0].text for output in first)
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]


@pytest.mark.thorough
async def test_choices_have_their_own_seeds_and_repeat(client: GenerationClient) -> None:
    async def choices(seed: int) -> dict[int, list[int]]:
        sampling = {"n": 3, "temperature": 1.0, "seed": seed, "max_tokens": 12, "ignore_eos": True}
        tokens: dict[int, list[int]] = {}
        async for event in client.generate("Once upon a time", sampling):
            if isinstance(event, DeltaEvent):
                tokens.setdefault(event.index, []).extend(event.token_ids)
        return tokens

    first, again, other = await choices(42), await choices(42), await choices(43)
    assert sorted(first) == [0, 1, 2]
    assert first == again
    assert first != other
    assert len({tuple(tokens) for tokens in first.values()}) == 3


@pytest.mark.thorough
async def test_three_hundred_at_once_are_served_or_refused_with_a_retry_time(
    cluster: LocalCluster, client: GenerationClient
) -> None:
    async def one(number: int) -> str:
        try:
            sampling = {**GREEDY, "max_tokens": 8, "ignore_eos": True}
            async for event in client.generate([100 + number, 200, 300], sampling):
                if isinstance(event, FinishedEvent):
                    assert event.usage.num_output_tokens == 8
        except QueueFull as refusal:
            return "refused" if refusal.retry_after_s > 0 else "refused without a time"
        return "served"

    async with all_rows_taken(client):
        calls = [asyncio.create_task(one(number)) for number in range(300)]
        async with asyncio.timeout(IDLE_S):
            while sum(call.done() for call in calls) < 300 - MAX_NUM_WAITING:
                await asyncio.sleep(0.01)
    outcomes = await asyncio.gather(*calls)
    assert outcomes.count("served") == MAX_NUM_WAITING
    assert outcomes.count("refused") == 300 - MAX_NUM_WAITING
    await wait_idle(cluster)


@asynccontextmanager
async def all_rows_taken(client: GenerationClient) -> AsyncIterator[None]:
    """Keep each row busy for longer than any machine takes to ask: what comes meanwhile waits, or is refused."""

    async def run(number: int, has_begun: asyncio.Event) -> None:
        sampling = {"max_tokens": 2000, "ignore_eos": True, "temperature": 1.0, "seed": number}
        async for event in client.generate([number + 1, 2, 3], sampling):
            if isinstance(event, DeltaEvent):
                has_begun.set()

    begun = [asyncio.Event() for _ in range(MAX_NUM_SEQS)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(number, has_begun)) for number, has_begun in enumerate(begun)]
        async with asyncio.timeout(IDLE_S):
            for has_begun in begun:
                await has_begun.wait()
        yield
        for task in tasks:
            task.cancel()


async def test_the_http_door_refuses_with_429_and_retry_after(
    cluster: LocalCluster, client: GenerationClient
) -> None:
    async with (
        openai.AsyncOpenAI(
            base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0
        ) as http,
        all_rows_taken(client),
    ):
        calls = [
            asyncio.create_task(
                http.completions.create(model="embedded", prompt=[number + 50, 7, 8], max_tokens=4)
            )
            for number in range(MAX_NUM_WAITING + 10)
        ]
        async with asyncio.timeout(IDLE_S):
            while sum(call.done() for call in calls) < 10:
                await asyncio.sleep(0.01)
        refusals = [call.exception() for call in calls if call.done()]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    assert len(refusals) == 10
    for refusal in refusals:
        assert isinstance(refusal, openai.RateLimitError), refusal
        assert int(refusal.response.headers["retry-after"]) >= 1


@pytest.mark.thorough
@pytest.mark.parametrize("num_prompts", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_more_prompts_than_the_queue_holds_simply_work(cluster: LocalCluster, num_prompts: int) -> None:
    prompts = [[number + 17] for number in range(num_prompts)]
    with LLM(address=cluster.address) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and len(output.outputs[0].token_ids) == 1 for output in outputs)


async def test_clients_that_leave_free_their_blocks(cluster: LocalCluster, client: GenerationClient) -> None:
    async def leave_early(number: int) -> None:
        stream = client.generate([number + 1, 2, 3], {"max_tokens": 1500, "ignore_eos": True})
        async for event in stream:
            if isinstance(event, DeltaEvent):
                break
        await stream.aclose()

    await asyncio.gather(*(leave_early(number) for number in range(MAX_NUM_SEQS)))
    await wait_idle(cluster)


async def test_a_deadline_ends_the_request_in_the_engine_too(cluster: LocalCluster) -> None:
    async with GenerationClient(cluster.address) as client:
        with pytest.raises(Exception, match=r"(?i)deadline"):
            async for _ in client.generate("Count:", {"max_tokens": 1500, "ignore_eos": True}, timeout_s=0.2):
                pass
    await wait_idle(cluster)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, ["prompt"]),
        ([999999], {}, ["999999", "49151"]),
        ([5] * 3000, {}, ["3000", "2048"]),
        ("Hi", {"temperature": float("nan")}, ["temperature", "nan"]),
        ("Hi", {"temperature": -1.0}, ["temperature", "-1"]),
        ("Hi", {"temperature": 3.0}, ["temperature", "3", "2"]),
        ("Hi", {"top_p": 0.0}, ["top_p", "0"]),
        ("Hi", {"max_tokens": 0}, ["max_tokens", "0"]),
        ("Hi", {"n": 2, "temperature": 0.0}, ["n", "greedy"]),
        ("Hi", {"max_tokens": 4000}, ["max_tokens", "4000", "2048"]),
    ],
)
async def test_bad_input_is_refused_by_field_value_and_limit_and_the_next_request_works(
    client: GenerationClient, prompt: object, sampling: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        async for _ in client.generate(prompt, sampling):  # type: ignore[arg-type]
            pass
    message = str(caught.value).lower()
    assert all(word in message for word in words), message
    async for event in client.generate("Hi", {**GREEDY, "max_tokens": 1}):
        if isinstance(event, FinishedEvent):
            assert event.usage.num_output_tokens == 1


async def test_every_violation_is_reported_at_once(client: GenerationClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        async for _ in client.generate("Hi", {"temperature": -1.0, "top_p": 2.0, "max_tokens": 0}):
            pass
    assert len(caught.value.violations) == 3


@pytest.mark.thorough
async def test_a_worker_killed_mid_stream_costs_no_token(
    cluster: LocalCluster, client: GenerationClient
) -> None:
    async def run(number: int, on_delta: Callable[[], None] = lambda: None) -> list[int]:
        tokens: list[int] = []
        sampling = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.7, "seed": number}
        async for event in client.generate("The story begins", sampling):
            if isinstance(event, DeltaEvent):
                tokens += event.token_ids
                on_delta()
        return tokens

    undisturbed = await asyncio.gather(*map(run, range(4)))
    before = cluster.pids["worker"]
    kill_once = once(partial(os.kill, before, signal.SIGKILL))
    async with asyncio.timeout(READY_S):
        assert await asyncio.gather(*(run(number, kill_once) for number in range(4))) == undisturbed
    assert cluster.pids["worker"] != before
    await wait_idle(cluster)


@pytest.mark.thorough
async def test_one_stalled_reader_slows_nobody(cluster: LocalCluster) -> None:
    """The gap between two deltas of fifteen readers, alone and beside one that never reads."""

    async def gaps(stalled: int) -> float:
        found: list[float] = []

        async def read(number: int) -> None:
            async with GenerationClient(cluster.address) as client:
                last = None
                async for event in client.generate([number + 9, 4], {"max_tokens": 24, "ignore_eos": True}):
                    now = time.monotonic()
                    if isinstance(event, DeltaEvent):
                        if last is not None:
                            found.append(now - last)
                        last = now

        async with GenerationClient(cluster.address) as silent:
            streams = [
                silent.generate([7, 7], {"max_tokens": 400, "ignore_eos": True}) for _ in range(stalled)
            ]
            for stream in streams:
                await anext(stream)  # admitted; then it is never read again
            await asyncio.gather(*(read(number) for number in range(MAX_NUM_SEQS - 1)))
            for stream in streams:
                await stream.aclose()
        await wait_idle(cluster)
        return sorted(found)[len(found) // 2]

    # One more row makes a step a little longer. A reader that blocked the others would cost them all of
    # its 400 tokens each time, so a wide margin still tells. What else the machine does costs some of them once.
    looks: list[tuple[float, float]] = []
    while not any(beside < 5 * alone for alone, beside in looks):
        assert len(looks) < 5, f"median gaps in s, alone and beside a stalled reader: {looks}"
        looks.append((await gaps(0), await gaps(1)))
