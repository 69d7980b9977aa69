"""The calls that generate, besides the plain stream: whole answers, batches, aborts, going on after a break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import pytest

from tests.helpers.clock import pass_time
from tests.helpers.fake_engine import FakeEngine, SubmittedChoice, eventually
from tests.helpers.grpc_api import TOKENIZER, alphabet, ask, error_of, open_api
from triptych import errors
from triptych.rpc.status import from_rich_status
from triptych.types.outputs import FinishReason
from triptych.types.step import LogprobColumns
from triptych.v1 import generation_pb2, model_pb2, output_pb2
from triptych_services.frontend.grpc.batch import BatchRun, items_in_flight

A = TOKENIZER.encode("a")[0]


def whole(**generation: Any) -> generation_pb2.GenerateRequest:
    request = ask(**generation)
    return generation_pb2.GenerateRequest(request_id=request.request_id, generation=request.generation)


async def read_all(messages: AsyncIterator[Any]) -> list[Any]:
    return [message async for message in messages]


async def read_rest(call: Any) -> list[Any]:
    """Read the remaining messages of a call."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


# Whole answers


async def test_generate_answers_with_all_choices_at_once() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        sampling = {"n": 2, "temperature": 1.0, "seed": 7}
        answer = await api.generation.Generate(whole(text="Hi", sampling=sampling, length={"max_tokens": 4}))
        assert (answer.admitted.model, answer.admitted.seed, answer.admitted.num_prompt_tokens) == (
            "tiny",
            7,
            2,
        )
        assert [(choice.index, choice.text, len(choice.token_ids)) for choice in answer.choices] == [
            (0, "abcd", 4),
            (1, "abcd", 4),
        ]
        assert {choice.finish_reason for choice in answer.choices} == {output_pb2.FINISH_REASON_LENGTH}
        assert answer.finished.usage.num_output_tokens == 8
        assert all(submitted.whole_output for submitted in engine.submitted)


async def test_generate_fails_as_a_stream_does() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        error = await error_of(api.generation.Generate(whole(text="", request_id="mine")))
        assert isinstance(error, errors.InvalidRequest)
        error = await error_of(api.generation.Generate(whole(text="x"), timeout=0.0))
        assert isinstance(error, errors.DeadlineExceeded)


async def test_leaving_a_whole_answer_aborts_it() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        call = api.generation.Generate(whole(text="x", request_id="mine"))
        await engine.next_submit()
        call.cancel()
        await eventually(lambda: engine.aborted == ["mine"])


async def test_a_whole_answer_above_the_message_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_services.frontend.grpc.generation_servicer._MAX_ANSWER_BYTES", 100)
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        error = await error_of(api.generation.Generate(whole(text="x", length={"max_tokens": 60})))
        assert isinstance(error, errors.InvalidRequest)
        assert "use StreamGenerate" in error.message


async def test_the_rest_of_the_context_is_asked_for_by_name() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        answer = await api.generation.Generate(whole(text="Hello", length={"rest_of_context": {}}))
        assert len(answer.choices[0].token_ids) == 64 - answer.admitted.num_prompt_tokens
        assert answer.choices[0].length_limit == output_pb2.LENGTH_LIMIT_CONTEXT
        answer = await api.generation.Generate(whole(text="Hello"))
        assert len(answer.choices[0].token_ids) == 16
        assert answer.choices[0].length_limit == output_pb2.LENGTH_LIMIT_MAX_TOKENS


async def test_logprobs_are_columns_and_have_bytes_where_asked_for() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        options = {"logprobs": {"top": 1, "with_bytes": True}}
        call = api.generation.StreamGenerate(ask(text="x", response=options))
        request = await engine.next_submit()
        columns = LogprobColumns(
            np.array([0, 1], np.uint32),
            np.array([0, 2, 4], np.uint32),
            np.array([A, A + 1, A + 2, A + 3], np.uint32),
            np.array([-1, -2, -3, -4], np.float32),
            np.array([1, 9], np.uint32),
        )
        engine.emit(request, [A, A + 2], logprobs=columns, finish=FinishReason.LENGTH)
        (output,) = [m.output for m in await read_all(call) if m.HasField("output")]
        assert output.logprobs == output_pb2.Logprobs(
            num_candidates=2,
            token_ids=[A, A + 1, A + 2, A + 3],
            logprobs=[-1, -2, -3, -4],
            ranks=[1, 9],
            token_bytes=[b"a", b"b", b"c", b"d"],
        )


async def test_output_is_gathered_up_to_the_interval() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        call = api.generation.StreamGenerate(ask(text="x", response={"min_interval_tokens": 3}))
        request = await engine.next_submit()
        assert (await call.read()).HasField("admitted")
        for first, text in ((0, "abc"), (3, "def")):
            for place in range(first, first + 3):
                engine.emit(request, [A + place])
                await asyncio.sleep(0.02)  # it would leave alone
            assert (await call.read()).output.text == text
        engine.emit(request, [A + 6], finish=FinishReason.LENGTH)
        texts = [m.output.text for m in await read_rest(call) if m.HasField("output")]
        assert texts == ["g"]


async def test_prompts_are_cut_on_the_side_asked_for() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        ids = TOKENIZER.encode("abcdef")
        for prompt in ({"text": "abcdef"}, {"token_ids": ids}):
            for side, kept in (("RIGHT", ids[:2]), ("LEFT", ids[-2:]), ("UNSPECIFIED", ids[-2:])):
                cut = {"max_tokens": 2, "side": f"TRUNCATION_SIDE_{side}"}
                options = {"prompt_token_ids": True}
                answer = await api.generation.Generate(whole(**prompt, truncation=cut, response=options))
                assert list(answer.admitted.prompt_token_ids) == kept


# Batches


async def items(*requests: tuple[int, Any], then: asyncio.Event | None = None) -> AsyncIterator[Any]:
    for tag, request in requests:
        yield generation_pb2.BatchGenerateRequest(tag=tag, request=request)
    if then is not None:
        await then.wait()


async def test_a_batch_answers_each_item_under_its_tag() -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        good = ask(text="x", length={"max_tokens": 3}, response={"whole_choices": True})
        bad = ask(request_id="bad", text="x", sampling={"temperature": 9.0})
        call = api.generation.BatchGenerate(items((7, good), (8, bad), (9, ask(text="y", adapter="lora"))))
        tag_to_messages: dict[int, list[Any]] = {}
        for message in await read_all(call):
            tag_to_messages.setdefault(message.tag, []).append(message)
        events = [message.event for message in tag_to_messages[7]]
        assert [event.WhichOneof("event") for event in events] == ["admitted", "output", "finished"]
        assert [event.sequence for event in events] == [1, 2, 3]
        assert events[1].output.text == "abc"
        (refused,) = tag_to_messages[8]
        error = from_rich_status(refused.error)
        assert isinstance(error, errors.InvalidRequest)
        assert error.metadata["field"] == "sampling.temperature"
        assert any(detail.type_url.endswith("RequestInfo") for detail in refused.error.details)
        (not_found,) = tag_to_messages[9]
        assert not_found.error.code == 5


async def test_a_bug_ends_one_item_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        plain = api.core.generator.prepare

        async def prepare(raw: Any, *rest: Any) -> Any:
            if raw.head.request_id == "buggy":
                raise ZeroDivisionError
            return await plain(raw, *rest)

        monkeypatch.setattr(api.core.generator, "prepare", prepare)
        call = api.generation.BatchGenerate(items((1, ask("buggy", text="x")), (2, ask(text="x"))))
        messages = await read_all(call)
        (failed,) = [m for m in messages if m.tag == 1]
        assert failed.error.code == 13
        assert "buggy" in failed.error.message
        assert [m for m in messages if m.tag == 2][-1].event.HasField("finished")


async def test_an_item_has_its_own_deadline() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:

        async def requests() -> AsyncIterator[Any]:
            yield generation_pb2.BatchGenerateRequest(tag=1, request=ask(text="x"), timeout_ms=100_000)

        reading = asyncio.create_task(read_all(api.generation.BatchGenerate(requests())))
        submitted = await engine.next_submit()
        assert 0 < (submitted.deadline_remaining_ms or 0) <= 100_000
        await pass_time(100.0)
        *_, last = await asyncio.wait_for(reading, 60)
        assert isinstance(from_rich_status(last.error), errors.DeadlineExceeded)


async def test_leaving_a_batch_aborts_its_items() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        requests = items((1, ask(text="x")), (2, ask(text="x")), then=asyncio.Event())
        call = api.generation.BatchGenerate(requests)
        await engine.next_submit(1)
        call.cancel()
        await eventually(lambda: len(engine.aborted) == 2)
        await eventually(lambda: api.core.generator.num_active == 0)


_BATCH: Any = {
    "to_error": lambda item, status: generation_pb2.BatchGenerateResponse(tag=item.tag, error=status),
    "id_of": lambda item: item.request.request_id,
}


async def test_a_batch_reads_no_more_items_than_may_run() -> None:
    running = most = num_read = 0
    may_end = asyncio.Event()

    async def answer(item: Any) -> AsyncIterator[Any]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await may_end.wait()
        yield generation_pb2.StreamGenerateResponse(sequence=1)
        running -= 1

    async def requests() -> AsyncIterator[Any]:
        nonlocal num_read
        for tag in range(10):
            num_read += 1
            yield generation_pb2.BatchGenerateRequest(tag=tag)

    run: Any = BatchRun(answer, lambda: 3, **_BATCH)  # type: ignore[arg-type]
    reading = asyncio.create_task(read_all(run.run(requests())))
    await eventually(lambda: running == 3)
    await eventually(lambda: num_read == 4)
    await asyncio.sleep(0.01)
    assert num_read == 4  # one more waits to be started
    may_end.set()
    assert len(await asyncio.wait_for(reading, 60)) == 10
    assert most == 3


async def test_a_batch_reads_no_more_bytes_than_may_run() -> None:
    sizes = [1000, 1000, 400, 9000, 10]
    running: list[int] = []
    most = 0
    may_end = asyncio.Semaphore(0)

    async def answer(item: Any) -> AsyncIterator[Any]:
        nonlocal most
        running.append(item.ByteSize())
        most = max(most, len(running))
        assert sum(running) <= 2500 or len(running) == 1
        await may_end.acquire()
        running.remove(item.ByteSize())
        yield generation_pb2.StreamGenerateResponse(sequence=1)

    async def requests() -> AsyncIterator[Any]:
        for tag, size in enumerate(sizes):
            request = generation_pb2.StreamGenerateRequest(request_id="x" * size)
            yield generation_pb2.BatchGenerateRequest(tag=tag, request=request)

    run: Any = BatchRun(answer, lambda: 100, 2500, **_BATCH)  # type: ignore[arg-type]
    reading = asyncio.create_task(read_all(run.run(requests())))
    for num_running in (3, 2, 1, 1):  # the one of 9,000 waits for all others, and the last one for it
        await eventually(lambda expected=num_running: len(running) == expected)  # type: ignore[misc]
        may_end.release()
    may_end.release()
    assert len(await asyncio.wait_for(reading, 60)) == 5
    assert most == 3


async def test_a_batch_runs_as_many_items_as_the_engines_take() -> None:
    assert (items_in_flight(0), items_in_flight(64), items_in_flight(1024)) == (256, 256, 2048)
    async with FakeEngine(max_running=300) as engine, open_api(engine) as api:
        info = await api.models.GetServerInfo(model_pb2.GetServerInfoRequest())
        assert info.limits.max_batch_in_flight == 600
        assert info.limits.max_choices > 0
        model = (await api.models.GetModel(model_pb2.GetModelRequest())).model
        assert model.max_running_choices == 300
        call = api.generation.BatchGenerate(items(*((tag, ask(text="x")) for tag in range(1, 700))))
        await engine.next_submit(599)
        await asyncio.sleep(0.05)
        assert len(engine.submitted) == 600
        call.cancel()


# Aborts


async def test_abort_ends_a_stream_with_what_it_has() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        call = api.generation.StreamGenerate(ask("mine", text="x"))
        engine.emit(await engine.next_submit(), [A])
        assert (await call.read()).HasField("admitted")
        assert (await call.read()).output.text == "a"
        ids = ["mine", "other", "mine"]
        response = await api.generation.Abort(generation_pb2.AbortRequest(request_ids=ids))
        assert list(response.aborted_request_ids) == ["mine"]
        output, finished = await read_rest(call)
        assert output.output.finish_reason == output_pb2.FINISH_REASON_ABORT
        assert finished.finished.usage.num_output_tokens == 1
        assert engine.aborted == ["mine"]
        response = await api.generation.Abort(generation_pb2.AbortRequest(request_ids=ids))
        assert list(response.aborted_request_ids) == []
        error = await error_of(api.generation.Abort(generation_pb2.AbortRequest()))
        assert isinstance(error, errors.InvalidRequest)


async def test_abort_before_the_admission_ends_the_request_as_well() -> None:
    async with FakeEngine(is_mute=True) as engine, open_api(engine) as api:
        call = api.generation.StreamGenerate(ask("mine", text="x", response={"prompt_logprobs": {"top": 1}}))
        await engine.next_submit()
        assert (
            await api.generation.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        ).aborted_request_ids
        messages = await asyncio.wait_for(read_all(call), 10)
        assert messages[0].HasField("admitted")
        assert messages[-2].output.finish_reason == output_pb2.FINISH_REASON_ABORT
        assert messages[-1].HasField("finished")


# Going on after a break


def rest_of_alphabet(request: SubmittedChoice) -> list[int]:
    """Return the answer of `alphabet` without the tokens that have been emitted already."""
    num_emitted = len(request.emitted[request.index]) if request.emitted else 0
    return alphabet(request)[num_emitted:]


async def test_an_answer_goes_on_where_it_broke_off() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        generation: dict[str, Any] = {
            "text": "x",
            "sampling": {"n": 3, "temperature": 1.0, "seed": 5},
            "length": {"max_tokens": 6, "stop": ["ef"]},
        }
        first = api.generation.StreamGenerate(ask(**generation))
        await engine.next_submit(2)
        seeds = [submitted.seed for submitted in engine.submitted]
        first.cancel()
        emitted = [{"index": 2, "token_ids": [A, A + 1, A + 2, A + 3, A + 4]}, {"index": 0, "token_ids": []}]
        call = api.generation.StreamGenerate(ask(**generation, emitted=emitted))
        second = [await engine.next_submit(3), await engine.next_submit(4)]
        assert [submitted.seed for submitted in second] == [seeds[2], seeds[0]]
        assert [list(ids) for ids in second[0].emitted] == [[A, A + 1, A + 2, A + 3, A + 4], []]
        assert second[0].sampling.max_tokens == 6
        engine.emit(second[0], [A + 5])  # "e" was held back, for it may begin "ef"
        engine.emit(second[1], [A] * 6, finish=FinishReason.LENGTH)
        outputs = [m.output for m in await read_all(call) if m.HasField("output")]
        ends = {output.index: output for output in outputs if output.finish_reason}
        assert set(ends) == {0, 2}
        assert ends[2].stop_string == "ef"
        assert "".join(output.text for output in outputs if output.index == 2) == ""
        assert "".join(output.text for output in outputs if output.index == 0) == "aaaaaa"


async def test_a_held_back_text_comes_after_the_break() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        length = {"max_tokens": 6, "stop": ["bx"]}
        emitted = [{"index": 0, "token_ids": [A, A + 1]}]
        call = api.generation.StreamGenerate(ask(text="x", length=length, emitted=emitted))
        request = await engine.next_submit()
        engine.emit(request, [A + 2, A + 3], finish=FinishReason.LENGTH)
        *_, output, finished = await read_all(call)
        assert output.output.text == "bcd"
        assert finished.finished.usage.num_output_tokens == 4


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"emitted": [{"index": 1}]}, "emitted[0].index"),
        ({"emitted": [{"index": 0}, {"index": 0}]}, "emitted[1].index"),
        ({"emitted": [{"token_ids": [999]}]}, "emitted[0].token_ids[0]"),
        ({"emitted": [{"token_ids": [A] * 16}]}, "emitted[0].token_ids"),
        ({"emitted": [{"token_ids": [A]}], "length": {"stop": ["a"]}}, "emitted[0].token_ids"),
        ({"emitted": [{}], "response": {"prompt_logprobs": {}}}, "response.prompt_logprobs.top"),
    ],
)
async def test_emitted_tokens_that_cannot_be_are_refused(fields: dict[str, Any], path: str) -> None:
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        error = await error_of(api.generation.StreamGenerate(ask(text="x", **fields)))
        assert isinstance(error, errors.InvalidRequest)
        assert [violation.field for violation in error.violations] == [path]


# Known, and not served yet


async def test_an_unserved_field_is_named_in_the_details() -> None:
    async with FakeEngine() as engine, open_api(engine) as api:
        chat = {"messages": [{"role": "user", "parts": [{"image": {"url": "x"}}]}]}
        error = await error_of(api.generation.Generate(whole(chat=chat)))
        assert isinstance(error, errors.FeatureDisabled)
        assert error.features == ("chat.messages[0].parts[0].image",)
        assert error.metadata["field"] == "chat.messages[0].parts[0].image"
