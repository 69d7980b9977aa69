"""Three real processes around a simulated model: what a stranger sees of them, through both doors."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import grpc
import grpc.aio
import openai
import pytest

from tests.e2e.conftest import READY_S
from tests.helpers.time_slice import needs_slices, read_slice
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.cli import main
from triptych.client.collect import OutputCollector
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions, Sampling
from triptych.config.loader import load_config
from triptych.errors import DeadlineUnreachable, InvalidRequest
from triptych.launcher.local_cluster import LocalCluster
from triptych.rpc.time_slice import SERVICE_NS
from triptych.types.events import DeltaEvent
from triptych.types.outputs import FinishReason, RequestOutput

pytestmark = pytest.mark.model  # of which the config and the tokenizer are read

PROMPT = "The story begins"
STEP_MS = 4.0
ENDLESS = 4000
"""Tokens that take the simulated worker so long that nothing ends before a busy machine has submitted all."""


FREE_PORTS = {
    "frontend.admin_port": "0",
    "frontend.http_port": "0",
    **{f"{leaf}.port": "0" for leaf in ("frontend", "engine", "worker")},
    **{f"{leaf}.metrics_port": "0" for leaf in ("frontend", "engine", "worker")},
}


@pytest.fixture(scope="module")
def simulated() -> Iterator[LocalCluster]:
    with started_cluster() as stack:
        yield stack


@contextmanager
def started_cluster(options: Mapping[str, str] = MappingProxyType({})) -> Iterator[LocalCluster]:
    """A simulated stack that is ready, with these options of the config."""
    flags = {"simulation.enabled": "true", "simulation.base_ms": str(STEP_MS), **FREE_PORTS, **options}
    lines: list[str] = []
    with LocalCluster(load_config(env={}, flags=flags), on_log_line=lines.append) as stack:
        try:
            stack.wait_ready(READY_S)
            yield stack
        finally:
            print("\n".join(lines[-40:]))


async def stream(
    client: GenerationClient, seed: int, max_tokens: int, on_delta: Callable[[], None] = lambda: None
) -> tuple[str, list[int]]:
    """Text and tokens of one sampled request."""
    text, tokens = "", list[int]()
    async for event in client.generate(PROMPT, {"max_tokens": max_tokens, "temperature": 0.7, "seed": seed}):
        if isinstance(event, DeltaEvent):
            assert event.finish_reason in (None, FinishReason.LENGTH)
            text += event.text
            tokens += event.token_ids
            on_delta()
    return text, tokens


@needs_slices
def test_threads_of_services_do_not_wait_for_others_slices(simulated: LocalCluster) -> None:
    slices = {
        (name, read_slice(int(thread)))
        for name, pid in simulated.pids.items()
        for thread in os.listdir(f"/proc/{pid}/task")
    }
    assert slices - {(name, 0) for name in simulated.pids} == {(name, SERVICE_NS) for name in simulated.pids}


def once(act: Callable[[], None]) -> Callable[[], None]:
    """Return what acts the first time that it is called: as soon as a stream has begun, before any can end."""
    calls = iter([act])
    return lambda: next(calls, lambda: None)()


async def test_both_doors_say_the_same_words_and_say_them_again(simulated: LocalCluster) -> None:
    async with GenerationClient(simulated.address) as client:
        answers = [await stream(client, seed=1, max_tokens=20) for _ in range(2)]
        other, _ = await stream(client, seed=2, max_tokens=20)
    (text, tokens), again = answers
    assert again == (text, tokens)
    assert other != text
    assert len(tokens) == len(text.split()) == 20, "each token is a word"
    assert text.replace(" ", "").isalpha()
    async with openai.AsyncOpenAI(base_url=f"http://{simulated.http_address}/v1", api_key="none") as http:
        completion = await http.completions.create(
            model="embedded", prompt=PROMPT, max_tokens=20, temperature=0.7, seed=1, logprobs=2
        )
    (choice,) = completion.choices
    assert choice.text == text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert all(logprob is not None and logprob < 0 for logprob in choice.logprobs.token_logprobs)


async def test_an_answer_takes_at_least_the_time_of_its_steps(simulated: LocalCluster) -> None:
    async with GenerationClient(simulated.address) as client:
        started_s = time.monotonic()
        await asyncio.gather(*(stream(client, seed, max_tokens=50) for seed in range(8)))
        assert time.monotonic() - started_s >= 50 * STEP_MS / 1e3


@pytest.mark.thorough
async def test_several_tokens_a_step_are_the_same_in_less_time(simulated: LocalCluster) -> None:
    async def answers(cluster: LocalCluster) -> list[tuple[str, list[int]]]:
        async with GenerationClient(cluster.address) as client:
            return await asyncio.gather(*(stream(client, seed, max_tokens=50 + seed) for seed in range(6)))

    one_by_one = await answers(simulated)
    with started_cluster({"simulation.tokens_per_step": "8"}) as several:
        async with GenerationClient(several.address) as client:
            await stream(client, seed=0, max_tokens=50)
        assert (await status_of(several)).num_steps < 50
        assert await answers(several) == one_by_one


@pytest.mark.parametrize("num_seen", [1, 7, 29])
async def test_an_answer_cut_off_goes_on_through_its_emitted_tokens(
    simulated: LocalCluster, num_seen: int
) -> None:
    sampling = {"max_tokens": 30, "temperature": 0.7, "seed": 5, "n": 2}
    async with GenerationClient(simulated.address) as client:
        whole = await collected(client, sampling, RequestOptions())
        token_ids = [choice.token_ids for choice in whole.outputs]
        emitted = {index: token_ids[index][:num_seen] for index in (0, 1)}
        rest = await collected(client, sampling, RequestOptions(emitted=emitted))
    assert [choice.token_ids for choice in rest.outputs] == [ids[num_seen:] for ids in token_ids]
    assert all(w.text.endswith(r.text) for w, r in zip(whole.outputs, rest.outputs, strict=True))
    assert rest.usage.num_output_tokens == whole.usage.num_output_tokens == 60


async def test_many_prompts_share_one_stream_and_fail_alone(simulated: LocalCluster) -> None:
    async with GenerationClient(simulated.address) as client:
        expected, _ = await stream(client, seed=3, max_tokens=8)
        batch = client.open_batch()
        sampling = {"max_tokens": 8, "temperature": 0.7, "seed": 3}
        answers = await asyncio.gather(
            *(batch.answer(PROMPT, sampling, RequestOptions(whole_choices=True)) for _ in range(40)),
            batch.answer(PROMPT, {"temperature": 9.0}, RequestOptions()),
            return_exceptions=True,
        )
        await batch.close()
    *outputs, refused = answers
    assert isinstance(refused, InvalidRequest)
    assert {output.outputs[0].text for output in outputs if isinstance(output, RequestOutput)} == {expected}
    assert len(outputs) == 40


async def collected(client: GenerationClient, sampling: Sampling, options: RequestOptions) -> RequestOutput:
    collector = OutputCollector(PROMPT)
    async for event in client.generate(PROMPT, sampling, options):
        collector.add(event)
    return collector.output


async def test_a_worker_killed_mid_stream_costs_no_token(simulated: LocalCluster) -> None:
    async with GenerationClient(simulated.address) as client:
        undisturbed = await asyncio.gather(*(stream(client, seed, max_tokens=150) for seed in range(4)))
        before = simulated.pids["worker"]
        kill_once = once(partial(os.kill, before, signal.SIGKILL))
        async with asyncio.timeout(READY_S):
            disturbed = await asyncio.gather(*(stream(client, seed, 150, kill_once) for seed in range(4)))
        assert disturbed == undisturbed
        assert simulated.pids["worker"] != before


async def test_serve_sim_says_that_it_is_simulated_and_leaves_in_order() -> None:
    flags = [word for key, text in FREE_PORTS.items() for word in (f"--{key.replace('_', '-')}", text)]
    serve = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "triptych.cli", "serve", "--sim", *flags, stdout=asyncio.subprocess.PIPE
    )
    assert serve.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            while "ready after" not in (line := (await serve.stdout.readline()).decode()):
                assert line, "it left before it was ready"
            assert "simulated" in line
            serve.send_signal(signal.SIGINT)
            assert await serve.wait() == 0
    finally:
        if serve.returncode is None:
            serve.kill()
            await serve.wait()


@pytest.mark.thorough
async def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_wait_to_expect() -> None:
    num_rows, num_tokens = 2, 200
    with started_cluster({"scheduler.max_num_seqs": str(num_rows)}) as small:
        async with GenerationClient(small.address) as client:
            for _ in range(8):  # after which the pace knows nothing but runs of this length
                await asyncio.gather(*(stream(client, seed, num_tokens) for seed in range(num_rows)))
            crowd = [asyncio.create_task(stream(client, seed, ENDLESS)) for seed in range(81 * num_rows)]
            async with asyncio.timeout(READY_S):
                while (await status_of(small)).num_waiting < 80 * num_rows:
                    await asyncio.sleep(0.02)
            least_wait_s = (
                80 * num_tokens * STEP_MS / 1e3
            )  # 64 s: a simulated step takes no less than its time
            late = client.generate(PROMPT, {"max_tokens": 4}, timeout_s=least_wait_s / 2)
            with pytest.raises(
                DeadlineUnreachable, match="deadline"
            ) as refusal:  # not DeadlineExceeded, later
                await anext(late)
            assert refusal.value.retry_after_s > least_wait_s / 2
            for request in crowd:
                request.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
            async with asyncio.timeout(READY_S):
                while (await status_of(small)).num_used_blocks:
                    await asyncio.sleep(0.02)


async def status_of(cluster: LocalCluster) -> admin_pb2.EngineStatus:
    async with grpc.aio.insecure_channel(cluster.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return (await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=60)).status


def test_an_operator_steers_it_from_the_command_line(
    simulated: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def admin(*words: str) -> str:
        code = main(["admin", *words, "--address", simulated.admin_address])
        said = capsys.readouterr()
        return said.out.strip() if code == 0 else f"exit {code}: {said.err.strip()}"

    def counters() -> dict[str, str]:
        return dict(line.split(maxsplit=1) for line in admin("status").splitlines() if " " in line.strip())

    assert admin("engines").startswith("engine-0 ")
    assert counters()["state"] == "ready"
    assert admin("watch", "--count", "2", "--interval-s", "0.1").splitlines()[2].split()[1] == "ready"
    assert admin("pause", "--mode", "keep") == "paused"
    assert counters()["state"] == "paused"
    assert admin("resume") == "resumed"
    assert counters()["state"] == "ready"
    assert admin("sleep", "--level", "2") == "asleep; 0 MiB are free again"
    assert counters()["state"] == "asleep"
    assert admin("wake") == "awake"
    assert admin("reset-prefix-cache").startswith("forgot ")
    assert admin("requests") == ""
    assert admin("abort", "long-gone") == "aborted: none; they are not alive here"
    assert admin("log-level", "debug", "--engine-id", "engine-0") == "set"
    assert admin("log-level", "info", "--engine-id", "engine-0") == "set"
    assert admin("log-level", "error") == "set"
    assert admin("log-level", "info") == "set"
    assert admin("drain") == "drained"
    assert admin("resume") == "resumed"
    refused = admin("status", "--engine-id", "nobody")
    assert refused.startswith("exit 1: triptych admin: "), refused
    assert "nobody" in refused
