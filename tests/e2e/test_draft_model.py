"""A loaded model guesses for the served one through all processes: the same answers, also when a worker is killed.

Where a small model guesses, the served one is the same with layers on top that add nothing. So guesses are right, and
worth their time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.test_simulated_stack import once
from tests.e2e.test_worker_groups import DEADLINE_S, group_of_ranks
from tests.helpers.byte_tokenizer import write_model_directory
from tests.worker.runner.drafting.eagle_checkpoints import save_cycle
from triptych.checkpoint.config_json import read_architecture
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.events import DeltaEvent
from triptych_kernels.cpu.library import isa
from triptych_services.worker.loader.random import RandomCheckpoint

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor"),
]

NUM_LAYERS, MAX_LEN = 24, 2048
DRAFT_LEN = 512
"""Tokens of a text for which the small model guesses, at most."""
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 288,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FLAGS = {
    "cache.num_blocks": "300",
    "scheduler.max_num_seqs": "4",
    "speculative.enabled": "true",
    "speculative.cache_gib": "0.01",
    "worker.device": "cpu",
    "worker.num_threads": "1",
}
PROMPT = [100, 7, 31, 60, 61, 62]
LONG_PROMPT = PROMPT * (1 + DRAFT_LEN // len(PROMPT))
NUMBERS = count()
GREEDY = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}


def save_model(directory: Path, num_layers: int, max_len: int) -> Path:
    """Write a model of which only the first layer adds anything. Of any number of layers, it says the same."""
    write_model_directory(directory)
    sizes = SIZES | {"num_hidden_layers": num_layers, "max_position_embeddings": max_len}
    (directory / "config.json").write_text(json.dumps(sizes))
    shapes = RandomCheckpoint(read_architecture(directory), 0).tensors
    tensors = {}
    for name, like in shapes.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        first = name if layer is None else name.replace(layer[0], "layers.0.")
        generator = torch.Generator().manual_seed(sum(first.encode()))
        tensors[name] = (torch.randn(like.shape, generator=generator) * 0.3).to(torch.bfloat16)
        if layer is not None and int(layer[1]) and ("o_proj" in name or "down_proj" in name):
            tensors[name].zero_()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    flags = {
        "model.model": str(save_model(tmp_path_factory.mktemp("model"), NUM_LAYERS, MAX_LEN)),
        "model.quantization": "q4",
        "speculative.model": str(save_model(tmp_path_factory.mktemp("draft"), 1, DRAFT_LEN)),
        "speculative.proposers": "suffix,draft",
    }
    with group_of_ranks(**flags, **FLAGS) as (stack, _):
        yield stack


async def answer_of(
    stack: LocalCluster,
    prompt: list[int],
    tenant: str | None = None,
    on_delta: Callable[[], None] = lambda: None,
    **changes: object,
) -> list[int]:
    """Return the tokens of an answer; a tenant of its own gets it, unless one is named."""
    options = RequestOptions(tenant=f"{next(NUMBERS)}" if tenant is None else tenant)
    token_ids: list[int] = []
    async with GenerationClient(stack.address) as client, asyncio.timeout(DEADLINE_S):
        async for event in client.generate(prompt, GREEDY | changes, options):
            if isinstance(event, DeltaEvent):
                token_ids += event.token_ids
                on_delta()
    return token_ids


def metrics_of(stack: LocalCluster) -> str:
    url = f"http://127.0.0.1:{stack.config.worker.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


async def counted(stack: LocalCluster, line: str) -> float:
    """Return the sum of the worker's counters that begin so, as soon as it can be asked."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                text = metrics_of(stack)
                return sum(float(found[1]) for found in re.finditer(rf"^{line}.* (\S+)$", text, re.MULTILINE))
            except OSError:  # it is being started again
                await asyncio.sleep(0.02)


def right_guesses(proposer: str) -> str:
    return rf'triptych_worker_accepted_guesses_total{{.*proposer="{proposer}"'


async def ask_until_counted(
    stack: LocalCluster, proposer: str, prompt: list[int], expected: list[int], tenant: str | None = None
) -> None:
    """Ask until more guesses were right. How soon they are worth their time depends on what else the machine does."""
    before = await counted(stack, right_guesses(proposer))
    async with asyncio.timeout(DEADLINE_S):
        while await counted(stack, right_guesses(proposer)) <= before:
            assert await answer_of(stack, prompt, tenant) == expected


async def ask_beside_a_death(
    stack: LocalCluster, process: str, prompt: list[int], expected: list[int]
) -> None:
    """Kill a process within an answer, which is whole all the same."""
    num_resumed = 0.0
    while not num_resumed:  # an answer that was complete by then is asked for again
        pid = stack.pids[process]
        kill = once(partial(os.kill, pid, signal.SIGKILL))
        assert await answer_of(stack, prompt, on_delta=kill, max_tokens=len(expected)) == expected
        async with asyncio.timeout(DEADLINE_S):
            while stack.pids.get(process, pid) == pid:
                await asyncio.sleep(0.02)
        num_resumed = await counted(stack, "triptych_worker_steps_total")


async def test_a_draft_model_changes_no_token_when_the_worker_is_killed(stack: LocalCluster) -> None:
    expected = await answer_of(stack, PROMPT, speculation=False, max_tokens=1500)
    await ask_until_counted(stack, "draft", PROMPT, expected[: GREEDY["max_tokens"]])
    await ask_beside_a_death(stack, "worker", PROMPT, expected)
    await ask_until_counted(stack, "draft", PROMPT, expected[: GREEDY["max_tokens"]])


async def test_a_head_changes_no_token_when_the_rank_that_guesses_is_killed(tmp_path: Path) -> None:
    """The model says the tokens 3, 4, … 96, 3, … in turn. It has layers enough for guesses to be worth their time."""
    sizes = {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": MAX_LEN}
    write_model_directory(tmp_path)
    save_cycle(tmp_path, tmp_path / "head", is_right=True, **sizes)
    flags = FLAGS | {
        "model.model": str(tmp_path),
        "parallel.tensor_parallel_size": "2",
        "speculative.model": str(tmp_path / "head"),
        "speculative.proposers": "draft",
    }
    prompt, expected = [5, 6, 7], [3 + (token - 3) % 94 for token in range(8, 8 + 1500)]
    with group_of_ranks(**flags) as (stack, lines):
        await ask_until_counted(stack, "eagle3", prompt, expected[: GREEDY["max_tokens"]])
        await ask_beside_a_death(stack, "worker/0", prompt, expected)
        assert await answer_of(stack, prompt) == expected[: GREEDY["max_tokens"]]
        assert any("rank 0 guesses for all 2 ranks" in line for line in lines)


async def test_what_one_tenant_was_answered_is_guessed_for_no_other_one(stack: LocalCluster) -> None:
    """The prompt is beyond the small model's context, so guesses are of outputs alone."""
    expected = await answer_of(stack, LONG_PROMPT, speculation=False)
    await ask_until_counted(stack, "suffix", LONG_PROMPT, expected, tenant="one")
    guesses = right_guesses("suffix").replace("accepted_", "")
    await answer_of(stack, LONG_PROMPT, speculation=False)  # what was computed before it is counted by now
    before = await counted(stack, guesses)
    for tenant in ("another", "a third"):
        assert await answer_of(stack, LONG_PROMPT, tenant) == expected
    await answer_of(stack, LONG_PROMPT, speculation=False)
    assert await counted(stack, guesses) == before > 0
    await ask_until_counted(stack, "suffix", LONG_PROMPT, expected, tenant="another")
