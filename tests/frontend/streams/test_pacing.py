"""Tokens that come faster than messages should leave, leave together, and none of them waits for long."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.chaos.grounds.fake_time import in_fake_time
from tests.helpers.byte_tokenizer import byte_tokenizer
from triptych.errors import GenerationLost
from triptych.types.events import DeltaEvent
from triptych.types.outputs import FinishedRequest, FinishReason, StageTimings
from triptych.types.sampling import OutputKind, SamplingParams
from triptych_services.frontend.engines.session import ChoiceOutput
from triptych_services.frontend.streams.choice import Choice
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.pacing import Pace

TOKENIZER = byte_tokenizer()
END = FinishedRequest(1, FinishReason.LENGTH, None, 0, StageTimings(1, 2, 3))


def paced_choice(pace: Pace) -> tuple[RequestOutputs, Choice]:
    outputs = RequestOutputs("r", pace)
    return outputs, outputs.add_choice(SamplingParams(output_kind=OutputKind.DELTA), TOKENIZER, (), "")


def feed(choice: Choice, text: str, finish: FinishedRequest | None = None) -> None:
    choice.on_output(ChoiceOutput(TOKENIZER.encode(text), finish=finish))


async def take(outputs: RequestOutputs) -> str | None:
    async with asyncio.timeout(60):
        event = await outputs.next_event()
    assert event is None or isinstance(event, DeltaEvent)
    return None if event is None else event.text


@in_fake_time
async def test_tokens_within_the_interval_leave_together_after_it() -> None:
    outputs, choice = paced_choice(Pace(10, lambda: 2))  # 200 ms between two messages of a stream
    feed(choice, "a")
    assert await take(outputs) == "a", "the first output leaves at once"
    sent_at = time.monotonic()
    for character in "bcd":
        feed(choice, character)
        assert not choice.has_pending
    assert await take(outputs) == "bcd"
    assert 0.2 * 0.75 <= time.monotonic() - sent_at <= 0.2 + 1e-6
    feed(choice, "e")
    assert not choice.has_pending, "and so on"
    assert await take(outputs) == "e"


@in_fake_time
async def test_the_end_does_not_wait() -> None:
    outputs, choice = paced_choice(Pace(0.001, lambda: 1))
    feed(choice, "a")
    assert await take(outputs) == "a"
    feed(choice, "b")
    feed(choice, "c", END)
    assert await take(outputs) == "bc"
    assert await take(outputs) is None


@in_fake_time
async def test_output_later_than_the_interval_does_not_wait() -> None:
    outputs, choice = paced_choice(Pace(1000, lambda: 10))
    feed(choice, "a")
    assert await take(outputs) == "a"
    await asyncio.sleep(0.02)
    feed(choice, "b")
    assert choice.has_pending


@in_fake_time
async def test_few_streams_and_no_limit_hold_nothing_back() -> None:
    for pace in (Pace(0, lambda: 10_000), Pace(10_000, lambda: 9)):
        outputs, choice = paced_choice(pace)
        for character in "abc":
            feed(choice, character)
            assert await take(outputs) == character


@in_fake_time
async def test_streams_in_different_phases_each_leave_at_their_time() -> None:
    pace = Pace(10, lambda: 2)
    streams = [paced_choice(pace) for _ in range(3)]
    for number, (outputs, choice) in enumerate(streams):
        feed(choice, "a")
        assert await take(outputs) == "a"
        feed(choice, str(number))
        await asyncio.sleep(0.06)
    assert [await take(outputs) for outputs, _ in streams] == ["0", "1", "2"]
    assert not any(choice.is_held for _, choice in streams)


@in_fake_time
async def test_an_abort_gives_what_was_held_back() -> None:
    outputs, choice = paced_choice(Pace(0.001, lambda: 1))
    feed(choice, "a")
    assert await take(outputs) == "a"
    feed(choice, "b")
    outputs.abort()
    assert await take(outputs) == "b"


@in_fake_time
async def test_an_error_comes_after_what_was_held_back() -> None:
    """An error says how many tokens came before it, and the client goes on from there."""
    outputs, choice = paced_choice(Pace(0.001, lambda: 1))
    feed(choice, "a")
    assert await take(outputs) == "a"
    feed(choice, "b")
    outputs.fail(GenerationLost("gone"))
    assert await take(outputs) == "b"
    with pytest.raises(GenerationLost):
        await take(outputs)


@in_fake_time
async def test_a_choice_that_ends_while_held_ends_once() -> None:
    outputs, choice = paced_choice(Pace(20, lambda: 2))
    other = outputs.add_choice(SamplingParams(output_kind=OutputKind.DELTA), TOKENIZER, (), "")
    feed(choice, "a")
    assert await take(outputs) == "a"
    feed(choice, "b")
    assert choice.is_held
    feed(choice, "c", END)
    assert await take(outputs) == "bc"
    await asyncio.sleep(0.15)  # beyond the interval, when what was held would leave
    assert not choice.has_pending
    feed(other, "x", END)
    assert await take(outputs) == "x"
    assert await take(outputs) is None
