"""Several processes are one worker: they start, serve, sleep, stop and die as one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from tests.e2e.test_simulated_stack import once
from tests.worker.ranks import save_checkpoint
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.client.grpc_client import GenerationClient
from triptych.config.loader import load_config
from triptych.errors import ConfigError
from triptych.hub import resolve_model
from triptych.launcher.local_cluster import LocalCluster
from triptych.launcher.ports import with_free_ports
from triptych.types.events import DeltaEvent, FinishedEvent
from triptych.types.structured import StructuredOutputs

pytestmark = pytest.mark.model

READY_S = 180.0
DEADLINE_S = 180.0
PATIENT_S = 60.0
"""For ranks that a busy machine stops for a while."""
PROMPT = "The history of the sea begins with"
SAMPLING = {"max_tokens": 400, "temperature": 0.7, "seed": 11, "ignore_eos": True}
SIMULATED = {"simulation.enabled": "true", "simulation.base_ms": "3", "parallel.tensor_parallel_size": "3"}
"""The embedded model has three key heads."""


@contextmanager
def group_of_ranks(**flags: str) -> Iterator[tuple[LocalCluster, list[str]]]:
    """A stack whose worker has several ranks, and the lines of its log."""
    lines: list[str] = []
    config = load_config(env={}, flags={"parallel.silence_timeout_s": str(PATIENT_S), **flags})
    with LocalCluster(with_free_ports(config), on_log_line=lines.append) as stack:
        try:
            stack.wait_ready(READY_S)
            yield stack, lines
        finally:
            print("\n".join(lines[-60:]))


def ranks_of(stack: LocalCluster) -> dict[str, int]:
    return {name: pid for name, pid in stack.pids.items() if name.startswith("worker/")}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def tokens_of(
    client: GenerationClient,
    tokens: list[int],
    prompt: str = PROMPT,
    sampling: Mapping[str, object] = SAMPLING,
) -> list[int]:
    async for event in client.generate(prompt, sampling):
        if isinstance(event, DeltaEvent):
            tokens += event.token_ids
    return tokens


async def wait_until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.thorough
async def test_the_end_or_silence_of_any_rank_is_that_of_all_and_costs_no_token() -> None:
    with group_of_ranks(**SIMULATED, **{"parallel.silence_timeout_s": "3"}) as (stack, lines):
        async with GenerationClient(stack.address) as client:
            expected = await tokens_of(client, [])
            assert len(expected) == SAMPLING["max_tokens"]
            faults = [
                ("worker/0", signal.SIGKILL),
                ("worker/1", signal.SIGKILL),
                ("worker/2", signal.SIGSTOP),
            ]
            for name, number in faults:
                tokens: list[int] = []
                stream = asyncio.create_task(tokens_of(client, tokens))
                await wait_until(lambda tokens=tokens: len(tokens) > 20)
                ranks = ranks_of(stack)
                os.kill(ranks[name], number)
                await wait_until(lambda ranks=ranks: not any(map(is_running, ranks.values())))
                async with asyncio.timeout(DEADLINE_S):
                    assert await stream == expected, f"{name} got {number!r}"
                await wait_until(lambda ranks=ranks: ranks_of(stack).keys() == ranks.keys())
            assert any("rank 2" in line and "has been silent for 3 s" in line for line in lines)


@pytest.mark.thorough
async def test_sleep_and_drain_are_those_of_all_ranks() -> None:
    with group_of_ranks(**SIMULATED) as (stack, lines):
        async with (
            GenerationClient(stack.address) as client,
            grpc.aio.insecure_channel(stack.admin_address) as channel,
            asyncio.timeout(DEADLINE_S),
        ):
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            expected = await tokens_of(client, [])
            await admin.Sleep(admin_pb2.SleepRequest(level=1, mode=admin_pb2.PAUSE_MODE_KEEP))
            stream = asyncio.create_task(tokens_of(client, []))
            await admin.Wake(admin_pb2.WakeRequest())
            assert await stream == expected
            # one rank that is asked to stop takes the others with it, in order
            ranks = ranks_of(stack)
            os.kill(ranks["worker/1"], signal.SIGTERM)
            await wait_until(lambda: not any(map(is_running, ranks.values())))
            assert await tokens_of(client, []) == expected
        assert not any("rank" in line and "ends, and all" in line for line in lines), "they left in order"
    assert not any(map(is_running, stack.pids.values()))


SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49157,  # which no number of ranks divides
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": True,
    "torch_dtype": "float32",
}
PROMPTS = [list(range(100 + 37 * number, 100 + 37 * number + 5 + 7 * number)) for number in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of odd sizes, whose logits differ."""
    directory = save_checkpoint(tmp_path_factory.mktemp("model"), SIZES)
    shutil.copy(resolve_model("embedded") / "tokenizer.json", directory)
    return directory


async def answers_of(client: GenerationClient) -> list[list[int]]:
    """Tokens of all prompts at once, greedy and drawn."""

    async def answer(number: int) -> list[int]:
        sampling = {"max_tokens": 16, "temperature": float(number % 2), "seed": number, "ignore_eos": True}
        tokens: list[int] = []
        async for event in client.generate(PROMPTS[number], sampling):
            if isinstance(event, DeltaEvent):
                tokens += event.token_ids
        return tokens

    return await asyncio.gather(*map(answer, range(len(PROMPTS))))


@pytest.fixture(scope="module")
def answers_of_one_rank(checkpoint: Path) -> list[list[int]]:
    with group_of_ranks(**real(checkpoint)) as (stack, _):
        return asyncio.run(first_answers(stack))


async def first_answers(stack: LocalCluster) -> list[list[int]]:
    async with GenerationClient(stack.address) as client:
        return await answers_of(client)


def real(checkpoint: Path, **more: str) -> dict[str, str]:
    flags = {"model.model": str(checkpoint), "model.dtype": "float32", "cache.num_blocks": "200"}
    return {**flags, "worker.device": "cpu", **more}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tensor_parallel", "stages"),
    [
        (2, 1),
        pytest.param(4, 1, marks=pytest.mark.thorough),
        pytest.param(2, 2, marks=pytest.mark.thorough),
    ],
)
async def test_ranks_say_what_one_says_through_the_whole_stack(
    tensor_parallel: int, stages: int, checkpoint: Path, answers_of_one_rank: list[list[int]]
) -> None:
    sizes = {
        "parallel.tensor_parallel_size": str(tensor_parallel),
        "parallel.pipeline_parallel_size": str(stages),
    }
    with group_of_ranks(**real(checkpoint, **sizes)) as (stack, _):
        assert len(ranks_of(stack)) == tensor_parallel * stages
        async with (
            GenerationClient(stack.address) as client,
            grpc.aio.insecure_channel(stack.admin_address) as channel,
            asyncio.timeout(READY_S),
        ):
            assert await answers_of(client) == answers_of_one_rank
            assert len({tuple(tokens) for tokens in answers_of_one_rank}) == len(PROMPTS), "they differ"
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            for level in (1, 2):
                await admin.Sleep(admin_pb2.SleepRequest(level=level))
                await admin.Wake(admin_pb2.WakeRequest())
                assert await answers_of(client) == answers_of_one_rank


LONG = {"max_tokens": 200, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
WAYS: tuple[dict[str, object], ...] = (
    LONG | {"temperature": 0.0},
    LONG | {"temperature": 0.8, "seed": 4, "logprobs": 1, "frequency_penalty": 0.1},
    {"max_tokens": 40, "temperature": 1.0, "seed": 5, "structured_outputs": StructuredOutputs(json=SCHEMA)},
)


async def answers_with(
    stack: LocalCluster, *, speculation: bool, on_delta: Callable[[], None] = lambda: None
) -> tuple[list[list[int]], int]:
    """Return the tokens of requests of several kinds at once, and how many of their guesses were right."""
    num_right = 0

    async def answer(client: GenerationClient, sampling: dict[str, object]) -> list[int]:
        nonlocal num_right
        tokens: list[int] = []
        async for event in client.generate([300, 301, 302] * 5, sampling | {"speculation": speculation}):
            if isinstance(event, DeltaEvent):
                tokens += event.token_ids
                on_delta()
            elif isinstance(event, FinishedEvent):
                num_right += event.timings.num_accepted_guesses
        return tokens

    async with GenerationClient(stack.address) as client, asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*(answer(client, sampling) for sampling in WAYS)), num_right


@pytest.mark.thorough
async def test_ranks_guess_and_lose_no_token_when_one_is_killed(checkpoint: Path) -> None:
    flags = {"parallel.tensor_parallel_size": "2", "speculative.enabled": "true"}
    with group_of_ranks(**real(checkpoint, **flags)) as (stack, _):
        expected, num_right = await answers_with(stack, speculation=False)
        assert num_right == 0
        async with asyncio.timeout(DEADLINE_S):
            while not num_right:  # how soon guesses are worth their time depends on the machine
                answers, num_right = await answers_with(stack, speculation=True)
                assert answers == expected
        ranks = ranks_of(stack)
        kill = once(partial(os.kill, ranks["worker/1"], signal.SIGKILL))
        answers, _ = await answers_with(stack, speculation=True, on_delta=kill)
        assert answers == expected
        await wait_until(lambda: not any(map(is_running, ranks.values())))
        answers, _ = await answers_with(stack, speculation=True)
        assert answers == expected


@pytest.mark.thorough
def test_heads_that_ranks_do_not_divide_are_refused_by_name() -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"worker/\d: cannot serve: parallel.tensor_parallel_size: 2 does not divide num_kv_heads = 3",
        ),
        group_of_ranks(**SIMULATED | {"parallel.tensor_parallel_size": "2"}),
    ):
        pass
