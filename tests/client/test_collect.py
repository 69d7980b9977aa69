"""From events to what a Python program sees: log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from triptych.client.collect import OutputCollector, stream_outputs
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent, PromptLogprobsEvent
from triptych.types.logprobs import Logprob, TokenLogprobs
from triptych.types.outputs import FinishReason, RequestOutput, StageTimings, Usage
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


def test_a_row_of_logprobs_maps_token_ids_to_entries() -> None:
    output = collected(events(*PARTS)).output
    assert output.prompt_logprobs is not None
    first, row, *_ = output.prompt_logprobs
    assert first is None
    assert row is not None
    assert list(row) == [66, 65]  # the chosen one first, and once
    assert (len(row), 65 in row, 64 in row, row.get(64)) == (2, True, False, None)
    assert [(entry.logprob, entry.rank, entry.decoded_token) for entry in row.values()] == [
        (-16.5, 9, "B"),
        (-16.25, 1, "A"),
    ]
    with pytest.raises(KeyError):
        row[64]


class CountedIds(list[int]):
    """Token ids that count how often all of them are read."""

    num_reads = 0

    def __iter__(self) -> Iterator[int]:
        self.num_reads += 1
        return super().__iter__()


@pytest.mark.parametrize("is_cumulative", [False, True])
async def test_outputs_share_the_prompts_ids(is_cumulative: bool) -> None:
    prompt = CountedIds(range(1000))
    deltas = [DeltaEvent(0, "x", [i]) for i in range(49)]
    deltas.append(DeltaEvent(0, "x", [49], finish_reason=FinishReason.LENGTH))
    stream = replayed([AdmittedEvent("r", "m", 0, prompt), *deltas, FinishedEvent(Usage(), StageTimings())])
    outputs = [output async for output in stream_outputs(stream, None, is_cumulative=is_cumulative)]
    assert len(outputs) == 50
    assert prompt.num_reads == 1
    assert len({id(output.prompt_token_ids) for output in outputs}) == 1
    assert outputs[0].prompt_token_ids == list(range(1000))


async def test_cumulative_outputs_do_not_change_once_they_are_out() -> None:
    rows = tuple(TokenLogprobs.of(Logprob(i, -1.0)) for i in range(3))
    deltas = [DeltaEvent(0, "x", [i], (rows[i],)) for i in range(3)]
    stream = replayed([AdmittedEvent("r", "m", 0, [1]), *deltas, FinishedEvent(Usage(), StageTimings())])
    outputs = [output async for output in stream_outputs(stream, None, is_cumulative=True)]
    choices = [output.outputs[0] for output in outputs[:3]]
    assert [(choice.text, choice.token_ids, choice.logprobs) for choice in choices] == [
        ("x" * n, list(range(n)), list(rows[:n])) for n in (1, 2, 3)
    ]
    assert choices[-1].cumulative_logprob == -3.0


def test_a_collector_extends_logprobs_in_place() -> None:
    collector = OutputCollector(None)
    collector.add(DeltaEvent(0, "x", [1], (TokenLogprobs.of(Logprob(1, -1.0)),)))
    before = collector.output.outputs[0].logprobs
    collector.add(DeltaEvent(0, "x", [2], (TokenLogprobs.of(Logprob(2, -1.0)),)))
    assert collector.output.outputs[0].logprobs is before
    assert len(before or ()) == 2


def test_times_are_told_in_seconds() -> None:
    metrics = RequestOutput(
        "r", None, [], [], True, Usage(4, 2), StageTimings(10**9, 2 * 10**9, 3 * 10**9)
    ).metrics
    assert (metrics.queued_time, metrics.prefill_time, metrics.decode_time) == (1.0, 2.0, 3.0)
    assert (metrics.first_token_latency, metrics.num_generation_tokens) == (3.0, 2)
