"""Several prompts as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from openai.types import CompletionUsage

from triptych.errors import ContextLengthExceeded, FieldViolation, GenerationLost, InvalidRequest, QueueFull
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent
from triptych.types.outputs import FinishReason, StageTimings, Usage
from triptych_services.frontend.http.openai.objects import usage_object
from triptych_services.frontend.http.openai.streams import merge


class Prompt:
    """A generation that counts what is taken of it and notes its end."""

    def __init__(
        self, *, num_deltas: int, error: Exception | None = None, refusal: Exception | None = None
    ) -> None:
        self.refusal = refusal
        self.num_deltas = num_deltas
        self.error = error
        self.num_taken = 0
        self.has_ended = False

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            if self.refusal is not None:
                raise self.refusal
            yield AdmittedEvent("r", "m", 0, [1])
            for number in range(self.num_deltas):
                await asyncio.sleep(0)
                yield DeltaEvent(number % 2, str(number), [number])
                self.num_taken += 1
            if self.error is not None:
                raise self.error
            yield DeltaEvent(0, "", [], finish_reason=FinishReason.STOP)
            yield FinishedEvent(Usage(1, self.num_deltas, 1), StageTimings(5, 5, self.num_deltas), 7)
        finally:
            self.has_ended = True


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_all_are_admitted_first_and_it_ends_once_with_the_sums() -> None:
    prompts = [Prompt(num_deltas=n) for n in (3, 1, 2)]
    events = [event async for event in merge([prompt.events() for prompt in prompts], 2)]
    *_, finished = events
    deltas = events[3:-1]
    assert events[:3] == [AdmittedEvent("r", "m", 0, [1], index=index) for index in (0, 2, 4)]
    assert finished == FinishedEvent(Usage(3, 6, 3), StageTimings(5, 5, 3), 21)
    by_choice: dict[int, str] = {}
    for delta in deltas:
        assert isinstance(delta, DeltaEvent)
        by_choice[delta.index] = by_choice.get(delta.index, "") + delta.text
    assert by_choice == {0: "02", 1: "1", 2: "0", 4: "0", 5: "1"}


async def test_nothing_is_read_ahead_of_a_slow_reader() -> None:
    prompts = [Prompt(num_deltas=1000) for _ in range(3)]
    merged = merge([prompt.events() for prompt in prompts], 1)
    for num_read in range(5):
        await anext(merged)
        await settle()
        assert sum(prompt.num_taken for prompt in prompts) <= num_read + 1
    await merged.aclose()
    assert all(prompt.has_ended for prompt in prompts)


async def test_prompts_take_turns() -> None:
    prompts = [Prompt(num_deltas=100) for _ in range(3)]
    merged = merge([prompt.events() for prompt in prompts], 1)
    async for event in merged:
        if isinstance(event, DeltaEvent):
            taken = [prompt.num_taken for prompt in prompts]
            assert max(taken) - min(taken) <= 2


async def test_the_first_error_ends_all() -> None:
    prompts = [Prompt(num_deltas=1000), Prompt(num_deltas=2, error=GenerationLost("gone"))]
    merged = merge([prompt.events() for prompt in prompts], 1)
    with pytest.raises(GenerationLost, match="gone"):
        [event async for event in merged]
    assert all(prompt.has_ended for prompt in prompts)
    assert prompts[0].num_taken < 10


async def refusal_of(*refusals: Exception | None) -> Exception:
    prompts = [Prompt(num_deltas=1, refusal=refusal) for refusal in refusals]
    with pytest.raises(Exception) as caught:
        [event async for event in merge([prompt.events() for prompt in prompts], 1)]
    assert all(prompt.has_ended for prompt in prompts)
    return caught.value


async def test_all_prompts_that_are_wrong_are_reported_at_once() -> None:
    common = FieldViolation("top_p", "0 must be above 0")
    error = await refusal_of(
        InvalidRequest([FieldViolation("prompt[0]", "is empty"), common]),
        None,
        InvalidRequest([FieldViolation("prompt[2]", "is empty"), common]),
    )
    assert isinstance(error, InvalidRequest)
    assert [v.field for v in error.violations] == ["prompt[0]", "top_p", "prompt[2]"]


async def test_prompts_that_are_too_long_are_a_context_error_together() -> None:
    error = await refusal_of(ContextLengthExceeded("prompt[0]", "x"), ContextLengthExceeded("prompt[1]", "y"))
    assert isinstance(error, ContextLengthExceeded)
    assert error.message == "prompt[0]: x; prompt[1]: y"


async def test_a_refusal_that_a_retry_helps_is_not_waited_for() -> None:
    assert isinstance(await refusal_of(None, QueueFull("full", 1.0)), QueueFull)


async def test_an_answer_says_that_its_request_has_moved() -> None:
    ends = [
        FinishedEvent(Usage(1, 2), StageTimings(), 0, *moves) for moves in ((0, True), (2, False), (1, True))
    ]
    assert "triptych" not in usage_object(ends[0])
    assert usage_object(ends[1])["triptych"] == {"moves": 2, "exact": False}

    async def stream(end: FinishedEvent) -> AsyncGenerator[Event]:
        yield AdmittedEvent("r", "m", 0, [1])
        yield end

    *_, together = [event async for event in merge([stream(end) for end in ends], 1)]
    assert isinstance(together, FinishedEvent)
    usage = usage_object(together)
    assert usage["triptych"] == {"moves": 2, "exact": False}
    assert CompletionUsage.model_validate(usage).model_extra == {"triptych": usage["triptych"]}
