"""From events to what a Python program sees: log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from triptych.client.collect import OutputCollector, stream_outputs
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent, PromptLogprobsEvent
from triptych.types.outputs import (
    FinishReason,
    Logprob,
    RequestOutput,
    StageTimings,
    TokenLogprobs,
    Usage,
    as_dicts,
)
from triptych.types.step import PromptLogprobs


def part(first_position: int, *rows: list[int]) -> PromptLogprobsEvent:
    """Each row: a prompt token, then the best ones; token t spells byte t and has the log-probability -t / 4."""
    token_ids = np.array(rows, np.uint32).reshape(len(rows), -1)
    logprobs = (token_ids * -0.25).astype(np.float32)
    ranks = np.full(len(rows), 9, np.uint32)
    return PromptLogprobsEvent(
        PromptLogprobs(first_position, token_ids, logprobs, ranks), [bytes([i]) for i in token_ids.ravel()]
    )


def events(*parts: PromptLogprobsEvent) -> list[Event]:
    return [
        AdmittedEvent("r", "m", 0, [7, 66, 67, 0xE2]),
        *parts,
        DeltaEvent(0, "x", [1]),
        DeltaEvent(0, "y", [2], finish_reason=FinishReason.LENGTH),
        FinishedEvent(Usage(4, 2), StageTimings()),
    ]


PARTS = part(1, [66, 65, 66]), part(2, [67, 65, 68], [0xE2, 65, 66])
ENTRIES = [
    None,
    TokenLogprobs.of(Logprob(66, -16.5, "B", 9), (Logprob(65, -16.25, "A", 1), Logprob(66, -16.5, "B", 2))),
    TokenLogprobs.of(Logprob(67, -16.75, "C", 9), (Logprob(65, -16.25, "A", 1), Logprob(68, -17.0, "D", 2))),
    TokenLogprobs.of(
        Logprob(0xE2, -56.5, "\ufffd", 9, b"\xe2"), (Logprob(65, -16.25, "A", 1), Logprob(66, -16.5, "B", 2))
    ),
]


async def replayed(stream: list[Event]) -> AsyncIterator[Event]:
    for event in stream:
        yield event


def collected(stream: list[Event]) -> OutputCollector:
    collector = OutputCollector("text")
    for event in stream:
        collector.add(event)
    return collector


def test_an_output_has_one_entry_for_each_prompt_token() -> None:
    output = collected(events(*PARTS)).output
    assert output.prompt_logprobs == ENTRIES
    assert output.outputs[0].text == "xy"
    assert collected(events()).output.prompt_logprobs is None
    nothing = PromptLogprobs(
        1, *(np.zeros((0, 2), dtype) for dtype in (np.uint32, np.float32)), np.zeros(0, np.uint32)
    )
    assert collected(events(PromptLogprobsEvent(nothing, []))).output.prompt_logprobs == [None]


@pytest.mark.parametrize("is_cumulative", [False, True])
async def test_every_output_of_a_stream_has_them(is_cumulative: bool) -> None:
    stream = stream_outputs(replayed(events(*PARTS)), "text", is_cumulative=is_cumulative)
    outputs = [output async for output in stream]
    assert len(outputs) == 2
    assert all(output.prompt_logprobs == ENTRIES for output in outputs)


def test_logprobs_have_the_form_that_users_of_vllm_know() -> None:
    output = collected(events(*PARTS)).output
    assert output.prompt_logprobs is not None
    first, second, *_ = as_dicts(output.prompt_logprobs)
    assert first is None
    assert second is not None
    assert list(second) == [66, 65]  # the chosen one first, and once
    assert (second[65].logprob, second[65].rank, second[65].decoded_token) == (-16.25, 1, "A")


def test_times_are_told_in_seconds() -> None:
    metrics = RequestOutput(
        "r", None, [], [], True, Usage(4, 2), StageTimings(10**9, 2 * 10**9, 3 * 10**9)
    ).metrics
    assert (metrics.queued_time, metrics.prefill_time, metrics.decode_time) == (1.0, 2.0, 3.0)
    assert (metrics.first_token_latency, metrics.num_generation_tokens) == (3.0, 2)
