"""Log-probabilities of prompts on their way to the client: all of them, in order, before any output."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.frontend.streams.test_outputs import TOKENIZER, end, feed
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.frontend import collect, frontend_core, raw_request
from triptych.errors import EngineUnavailable
from triptych.types.events import DeltaEvent, FinishedEvent, PromptLogprobsEvent
from triptych.types.outputs import FinishedRequest, FinishReason, OutputBatch, RequestPromptLogprobs
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.types.step import PromptLogprobs
from triptych.v1 import generation_pb2
from triptych.wire.generation import EventEncoder
from triptych_services.frontend.engines.session import ADMITTED, ChoiceOutput, EngineLoss
from triptych_services.frontend.streams.choice import Choice
from triptych_services.frontend.streams.logprobs import MAX_CANDIDATES, PromptReport
from triptych_services.frontend.streams.outputs import RequestOutputs

PROMPT = list(range(40, 48))


def part(first: int, end: int, num_top: int = 1) -> PromptLogprobs:
    """Each position is its own log-probability; the alternatives are tokens 0, 1, …"""
    positions = np.arange(first, end)
    shape = len(positions), 1 + num_top
    token_ids = np.tile(np.arange(-1, num_top), (len(positions), 1))
    token_ids[:, 0] = [PROMPT[position % len(PROMPT)] for position in positions]
    logprobs = np.broadcast_to(-positions[:, None], shape)
    return PromptLogprobs(
        first, token_ids.astype(np.uint32), logprobs.astype(np.float32), np.ones(len(positions), np.uint32)
    )


def make_report(num_tokens: int = len(PROMPT), num_top: int = 1) -> PromptReport:
    prompt = np.resize(np.array(PROMPT, np.uint32), num_tokens)
    return PromptReport(prompt, num_top, TOKENIZER.token_bytes)


def choices(num_choices: int = 1, **sampling: Any) -> tuple[RequestOutputs, list[Choice]]:
    outputs = RequestOutputs("r")
    outputs.expect_prompt(make_report())
    params = SamplingParams(**{"output_kind": OutputKind.DELTA, "prompt_logprobs": 1} | sampling)
    return outputs, [outputs.add_choice(params, TOKENIZER, PROMPT, "") for _ in range(num_choices)]


async def rest(outputs: RequestOutputs) -> list[PromptLogprobsEvent | DeltaEvent]:
    events = []
    async with asyncio.timeout(30):
        while (event := await outputs.next_event()) is not None:
            events.append(event)
    return events


def test_large_parts_are_cut_to_messages_far_below_a_mebibyte() -> None:
    report = make_report(5_000, num_top=20)
    options = generation_pb2.ResponseOptions(prompt_logprobs={"with_bytes": True})
    report.add(part(1, 2_000, num_top=20))
    assert not report.is_complete
    report.add(part(2_000, 5_000, num_top=20))
    assert report.is_complete
    position = 1
    while (event := report.take()) is not None:
        assert event.logprobs.first_position == position
        assert (event.first_token_bytes == b"") == (position > 1)
        assert len(event.token_bytes) == event.logprobs.token_ids.size <= MAX_CANDIDATES
        (message,) = EventEncoder(options).encode(event)
        assert message.ByteSize() < 100_000
        assert -event.logprobs.logprobs[0, 0] == position
        position = event.logprobs.end
    assert position == 5_000


def test_a_prompt_of_one_token_is_one_part_without_entries() -> None:
    event = make_report(1).take()
    assert event is not None
    assert event.logprobs.token_ids.shape == (0, 2)
    assert event.first_token_bytes == TOKENIZER.token_bytes(PROMPT[0])


@pytest.mark.parametrize("wrong", [part(1, 3), part(4, 5), part(3, len(PROMPT) + 1)])
def test_a_part_that_is_not_due_is_refused(wrong: PromptLogprobs) -> None:
    report = make_report()
    report.add(part(1, 3))
    with pytest.raises(LookupError, match="3 was due"):
        report.add(wrong)


async def test_output_waits_for_the_whole_prompt() -> None:
    outputs, (first, second) = choices(2)
    first.on_output(ChoiceOutput(prompt_logprobs=part(1, 3)))
    feed(second, PROMPT[:2], end(FinishReason.LENGTH))  # it found its prompt in the cache
    reader = asyncio.create_task(rest(outputs))
    await asyncio.sleep(0)
    first.on_output(ChoiceOutput(prompt_logprobs=part(3, len(PROMPT))))
    feed(first, PROMPT[:1], end(FinishReason.LENGTH))
    events = await reader
    kinds = [type(event) for event in events]
    assert kinds == [PromptLogprobsEvent] * 2 + [DeltaEvent] * 2
    assert [event.index for event in events] == [0, 0, 1, 0]


async def test_a_prompt_that_an_operator_ended_holds_nothing_up() -> None:
    outputs, (choice,) = choices()
    choice.on_output(ChoiceOutput(prompt_logprobs=part(1, 3)))
    feed(choice, [], end(FinishReason.ABORT))
    report, delta = await rest(outputs)
    assert isinstance(report, PromptLogprobsEvent)
    assert isinstance(delta, DeltaEvent)
    assert delta.finish_reason is FinishReason.ABORT


async def test_tokens_before_the_whole_prompt_are_the_engine_s_mistake() -> None:
    _, (choice,) = choices()
    choice.on_output(ChoiceOutput(prompt_logprobs=part(1, 3)))
    with pytest.raises(LookupError, match="no log-probabilities for the last"):
        feed(choice, PROMPT[:1])


async def test_a_loss_in_the_middle_of_the_prompt_ends_the_request() -> None:
    outputs, (choice,) = choices()
    choice.on_output(ADMITTED)
    choice.on_output(ChoiceOutput(prompt_logprobs=part(1, 3)))
    choice.on_end(EngineLoss("gone"))
    assert isinstance(await outputs.next_event(), PromptLogprobsEvent)
    with pytest.raises(EngineUnavailable):
        await outputs.next_event()


@pytest.mark.parametrize("last", [end(FinishReason.LENGTH), end(FinishReason.STOP, stop_token_id=40)])
async def test_without_output_the_one_token_is_not_shown(last: FinishedRequest) -> None:
    outputs, (choice,) = choices(max_tokens=0, logprobs=1)
    choice.on_output(ChoiceOutput(prompt_logprobs=part(1, len(PROMPT))))
    feed(choice, PROMPT[:1], last)
    *_, delta = await rest(outputs)
    assert isinstance(delta, DeltaEvent)
    assert (delta.text, list(delta.token_ids), delta.logprobs) == ("", [], ())
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.LENGTH, None)
    assert outputs.num_tokens == 0


async def test_one_choice_asks_for_the_prompt_and_events_come_in_order() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        sampling = {"n": 2, "temperature": 1.0, "max_tokens": 0, "prompt_logprobs": 1}
        reading = asyncio.create_task(collect(core.generator, raw_request(PROMPT, sampling=sampling)))
        submits = [await engine.next_submit(index) for index in range(2)]
        assert [submit.sampling.prompt_logprobs for submit in submits] == [
            1,
            1,
        ]  # the engine asks for it once
        assert [submit.sampling.max_tokens for submit in submits] == [1, 1]
        for first, last in ((1, 4), (4, len(PROMPT))):
            entry = RequestPromptLogprobs(submits[0].number, part(first, last))
            engine.send(submits[0], OutputBatch(0, prompt_logprobs=(entry,)))
        for submit in submits:
            engine.emit(submit, PROMPT[:1], finish=FinishReason.LENGTH)
        _, *reports, first, second, finished = await reading
        assert [report.logprobs.first_position for report in reports] == [1, 4]
        assert {first.index, second.index} == {0, 1}
        assert isinstance(finished, FinishedEvent)
        assert finished.usage.num_output_tokens == 0
        (message,) = EventEncoder(generation_pb2.ResponseOptions()).encode(reports[0])
        assert message.prompt_logprobs.logprobs.token_ids == [*part(1, 4).token_ids.ravel()]


async def test_a_wrong_part_ends_its_request_alone() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        asked = raw_request(PROMPT, sampling={"prompt_logprobs": 1})
        tasks = [asyncio.create_task(collect(core.generator, request)) for request in (asked, raw_request())]
        submits = [await engine.next_submit(index) for index in range(2)]
        wrong = RequestPromptLogprobs(submits[0].number, part(2, 4))
        engine.send(submits[0], OutputBatch(0, prompt_logprobs=(wrong,)))
        engine.emit(submits[1], PROMPT[:1], finish=FinishReason.LENGTH)
        await tasks[1]
        with pytest.raises(LookupError, match="1 was due"):
            await tasks[0]
