"""Stages as processes behind the whole stack: the tokens of one process, and what happens when a stage dies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import grpc.aio
import pytest

from tests.e2e.test_worker_groups import (
    DEADLINE_S,
    group_of_ranks,
    is_running,
    ranks_of,
    tokens_of,
    wait_until,
)
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.client.grpc_client import GenerationClient
from triptych.hub import resolve_model

pytestmark = pytest.mark.model

PROMPTS = ["The sea", "One, two, three, four, five, six, seven", "Once upon a time there was a king who"]
SAMPLING = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's tokenizer, and a network of odd sizes, whose weights are drawn."""
    directory = tmp_path_factory.mktemp("tiny")
    for file in resolve_model("embedded").iterdir():
        if "token" in file.name and file.is_file():
            shutil.copy(file, directory)
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(sizes))
    return directory


def flags_of(model: Path, num_sharing: int, num_stages: int) -> dict[str, str]:
    return {
        "model.model": str(model),
        "model.dtype": "float32",
        "load.format": "random",
        "cache.num_blocks": "400",
        "parallel.tensor_parallel_size": str(num_sharing),
        "parallel.pipeline_parallel_size": str(num_stages),
        "worker.num_threads": "1",
    }


async def generate(client: GenerationClient) -> list[list[int]]:
    """All prompts at once, so that stages compute different ones."""
    async with asyncio.timeout(DEADLINE_S):
        return list(await asyncio.gather(*(tokens_of(client, [], prompt, SAMPLING) for prompt in PROMPTS)))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Tokens of one process."""

    async def ask(address: str) -> list[list[int]]:
        async with GenerationClient(address) as client:
            return await generate(client)

    with group_of_ranks(**flags_of(model, 1, 1)) as (stack, _):
        tokens = asyncio.run(ask(stack.address))
    assert [len(ids) for ids in tokens] == [SAMPLING["max_tokens"]] * len(PROMPTS)
    return tokens


@pytest.mark.thorough
async def test_the_end_of_any_stage_is_that_of_all_and_costs_no_token(
    model: Path, expected: list[list[int]]
) -> None:
    with group_of_ranks(**flags_of(model, 1, 2)) as (stack, _):
        async with GenerationClient(stack.address) as client:
            assert await generate(client) == expected
            for name in ("worker/1", "worker/0"):
                tokens: list[int] = []
                stream = asyncio.create_task(tokens_of(client, tokens, PROMPTS[0], SAMPLING))
                await wait_until(lambda tokens=tokens: len(tokens) > 5)
                ranks = ranks_of(stack)
                os.kill(ranks[name], signal.SIGKILL)
                await wait_until(lambda ranks=ranks: not any(map(is_running, ranks.values())))
                async with asyncio.timeout(DEADLINE_S):
                    assert await stream == expected[0], f"{name} was killed"


@pytest.mark.thorough
async def test_two_stages_of_two_ranks_say_what_one_says(model: Path, expected: list[list[int]]) -> None:
    with group_of_ranks(**flags_of(model, 2, 2)) as (stack, _):
        assert len(ranks_of(stack)) == 4
        async with (
            GenerationClient(stack.address) as client,
            grpc.aio.insecure_channel(stack.admin_address) as channel,
        ):
            assert await generate(client) == expected
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            async with asyncio.timeout(DEADLINE_S):
                await admin.Sleep(admin_pb2.SleepRequest(level=2, mode=admin_pb2.PAUSE_MODE_KEEP))
                await admin.Wake(admin_pb2.WakeRequest())
            assert await generate(client) == expected, "all stages have read their weights again"
