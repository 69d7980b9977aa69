"""Guessed tokens through all processes: the same answers in fewer steps, also when a worker is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from tests.e2e.test_simulated_stack import once
from tests.e2e.test_worker_groups import DEADLINE_S, group_of_ranks
from triptych.client.grpc_client import GenerationClient
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.events import DeltaEvent
from triptych.types.sampling import SamplingParams
from triptych.types.structured import StructuredOutputs

pytestmark = pytest.mark.model

FLAGS = {
    "model.quantization": "q4",
    "model.max_model_len": "1024",
    "scheduler.max_num_seqs": "8",
    "speculative.enabled": "true",  # `auto` judges by time whether they pay
    "worker.device": "cpu",
    "worker.num_threads": "1",
}
LIST = "red, green, blue, yellow, "
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
NAMES = tuple(f"color_of_the_{name}" for name in ("house", "garden", "river", "car", "tree", "street"))
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": LIST[:-2].split(", ")} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}
FORM = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=StructuredOutputs(json=SCHEMA))
KINDS = (
    GREEDY,
    replace(GREEDY, logprobs=2),
    replace(GREEDY, temperature=0.8, seed=3),
    replace(GREEDY, temperature=0.5, seed=4, frequency_penalty=0.2),
    replace(FORM, temperature=0.9, top_p=0.8, seed=5),
)


@dataclass
class Answer:
    """The tokens of a stream so far, and the log-probabilities of the chosen ones."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    async def read(
        self, client: GenerationClient, sampling: SamplingParams, on_delta: Callable[[], None]
    ) -> None:
        async for event in client.generate(LIST * 8, sampling):
            if isinstance(event, DeltaEvent):
                self.token_ids += event.token_ids
                self.logprobs += [entry.chosen.logprob for entry in event.logprobs]
                on_delta()


async def stream_all(
    stack: LocalCluster,
    kinds: Sequence[SamplingParams] = KINDS,
    *,
    speculation: bool,
    disturb: Callable[[], None] = lambda: None,
) -> list[Answer]:
    answers = [Answer() for _ in kinds]
    disturb_once = once(disturb)

    def on_delta() -> None:
        if all(answer.token_ids for answer in answers):
            disturb_once()

    async with GenerationClient(stack.address) as client, asyncio.timeout(DEADLINE_S):
        streams = [
            answer.read(client, replace(sampling, speculation=speculation), on_delta)
            for answer, sampling in zip(answers, kinds, strict=True)
        ]
        await asyncio.gather(*streams)
    return answers


def num_steps(stack: LocalCluster) -> float:
    """Return how many steps the worker has computed."""
    url = f"http://127.0.0.1:{stack.config.worker.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        found = re.search(rb"^triptych_worker_steps_total (\S+)$", answer.read(), re.MULTILINE)
    assert found is not None
    return float(found[1])


async def check_fewer_steps(stack: LocalCluster, sampling: SamplingParams) -> None:
    """Check that an answer with guesses is the same one, in fewer steps.

    How soon guesses are worth their time depends on what else the machine does, so the answer is asked for again.
    """
    before = num_steps(stack)
    plain = await stream_all(stack, [sampling], speculation=False)
    num_plain = num_steps(stack) - before
    num_guessed: list[float] = []
    until_s = time.monotonic() + DEADLINE_S
    while not num_guessed or num_guessed[-1] >= 0.8 * num_plain:
        assert time.monotonic() < until_s, f"{num_guessed} steps with guesses, {num_plain} without"
        before = num_steps(stack)
        assert await stream_all(stack, [sampling], speculation=True) == plain
        num_guessed.append(num_steps(stack) - before)


@pytest.mark.thorough
async def test_guesses_take_fewer_steps_and_change_no_token_when_a_worker_is_killed() -> None:
    with group_of_ranks(**FLAGS) as (stack, _):
        await check_fewer_steps(stack, GREEDY)
        await check_fewer_steps(stack, FORM)
        expected = await stream_all(stack, speculation=False)
        assert await stream_all(stack, speculation=True) == expected
        pid = stack.pids["worker"]
        kill = partial(os.kill, pid, signal.SIGKILL)
        assert await stream_all(stack, speculation=True, disturb=kill) == expected
        assert stack.pids["worker"] != pid
