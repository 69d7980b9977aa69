"""The path of a request, from raw to events, in front of a fake engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.clock import pass_time
from tests.helpers.fake_engine import MODEL, NUM_CACHED, TIMINGS, FakeEngine, Reply, eventually
from tests.helpers.frontend import answer, collect, frontend_core, raw_request
from triptych.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
)
from triptych.rpc.interceptors import new_request_id
from triptych.text.chat_template import Message
from triptych.types.events import AdmittedEvent, FinishedEvent
from triptych.types.outputs import FinishReason, Usage
from triptych.types.sampling import OutputKind
from triptych.types.submit import SubmitRequest
from triptych_services.frontend.access.caller import ANYONE
from triptych_services.frontend.requests.chat_renderer import ChatRenderer
from triptych_services.frontend.requests.identity import splitmix64
from triptych_services.frontend.requests.raw import RawChat
from triptych_services.frontend.streams import placement

TOKENIZER = byte_tokenizer()
TEXT = "Hello world, the end. Größe: 5 μm; こんにちは 🎉 stop the world"


def say(text: str) -> Reply:
    """The same text, over and over."""
    return lambda request: itertools.cycle(TOKENIZER.encode(text))


def seeded(request: SubmitRequest) -> Iterator[int]:
    """Tokens that depend on the seed alone, as keyed sampling's do."""
    state = request.seed
    while True:
        state = splitmix64(state)
        yield state % 250


async def test_a_request_is_admitted_streamed_and_finished() -> None:
    async with (
        FakeEngine(say(TEXT), model=replace(MODEL, max_model_len=500)) as engine,
        frontend_core(engine) as core,
    ):
        got = await answer(core.generator, raw_request("Hello", sampling={"max_tokens": 5}))
        token_ids = TOKENIZER.encode(TEXT)[:5]
        assert got.token_ids() == token_ids
        assert got.text() == TOKENIZER.decode(token_ids)
        assert [delta.finish_reason for delta in got.deltas if delta.finish_reason] == [FinishReason.LENGTH]
        assert got.finished.usage == Usage(len(TOKENIZER.encode("Hello")), 5, NUM_CACHED)
        assert got.finished.timings == TIMINGS
        assert got.finished.tokenize_ns > 0
        assert got.admitted.model == "tiny"
        assert list(got.admitted.prompt_token_ids) == TOKENIZER.encode("Hello")
        (submit,) = engine.submitted
        assert submit.request_id == got.admitted.request_id
        assert submit.seed == got.admitted.seed
        assert submit.token_ids.tolist() == TOKENIZER.encode("Hello")
        assert core.count("length") == 1


async def test_streamed_equals_unstreamed() -> None:
    model = replace(MODEL, max_model_len=500)
    async with FakeEngine(say(TEXT), model=model) as engine, frontend_core(engine) as core:
        for sampling in (
            {"max_tokens": 60},
            {"max_tokens": 60, "stop": ["Hallo", "m; こん"]},
            {"max_tokens": 17},
        ):
            texts = {}
            for kind in (OutputKind.DELTA, OutputKind.FINAL_ONLY):
                got = await answer(core.generator, raw_request(sampling=sampling, output_kind=kind))
                last = got.deltas[-1]
                streamed = kind is OutputKind.DELTA
                texts[kind] = (
                    got.text() if streamed else last.text,
                    got.token_ids() if streamed else list(last.token_ids),
                    last.finish_reason,
                    last.stop_reason,
                    got.finished.usage,
                )
            assert texts[OutputKind.DELTA] == texts[OutputKind.FINAL_ONLY]


async def test_three_choices_differ_and_the_same_seed_repeats_them() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:

        async def texts(seed: int) -> list[list[int]]:
            got = await answer(core.generator, raw_request(sampling={"n": 3, "seed": seed, "max_tokens": 6}))
            assert {delta.index for delta in got.deltas} == {0, 1, 2}
            assert sum(delta.finish_reason is not None for delta in got.deltas) == 3
            assert got.finished.usage.num_output_tokens == 18
            return [got.token_ids(index) for index in range(3)]

        first, again, other = await texts(42), await texts(42), await texts(43)
        assert first == again
        assert len({tuple(token_ids) for token_ids in first}) == 3
        assert other != first
        seeds = [request.seed for request in engine.submitted[:3]]
        assert seeds == [42, splitmix64(43), splitmix64(44)]
        lone = await answer(core.generator, raw_request(sampling={"seed": 42, "max_tokens": 6}))
        assert lone.token_ids() == first[0]
        assert len({request.request_id for request in engine.submitted[:3]}) == 3


async def test_a_lone_choice_uses_the_seed_as_given_and_one_is_drawn_otherwise() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        got = await answer(core.generator, raw_request(sampling={"seed": 42}))
        assert (engine.submitted[0].seed, got.admitted.seed) == (42, 42)
        drawn = [await answer(core.generator, raw_request()) for _ in range(2)]
        assert drawn[0].admitted.seed != drawn[1].admitted.seed
        assert engine.submitted[1].seed == drawn[0].admitted.seed


def test_splitmix64_is_the_published_generator() -> None:
    # First outputs of the reference implementation (prng.di.unimi.it/splitmix64.c) from state 1234567.
    gamma, state = 0x9E3779B97F4A7C15, 1234567
    outputs = [splitmix64((state + i * gamma) % (1 << 64)) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_drawn_ids_are_uuids_of_version_7_and_sort_by_time() -> None:
    first = new_request_id()
    time.sleep(0.002)
    second = new_request_id()
    assert first < second
    assert (first[14], first[19] in "89ab", len(first)) == ("7", True, 36)


async def test_leaving_the_iterator_aborts_at_once() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        events = core.generator.generate(raw_request(sampling={"n": 2}, request_id="mine"))
        opening = asyncio.ensure_future(anext(events))
        engine.emit(await engine.next_submit(0), [65])
        assert isinstance(await opening, AdmittedEvent)
        await events.aclose()
        await eventually(lambda: sorted(engine.aborted) == ["mine#0", "mine#1"])
        assert (core.generator.num_active, core.count("cancelled")) == (0, 1)
        assert core.router.engines[0].num_in_flight == 0


async def test_cancelling_before_admission_aborts() -> None:
    async with FakeEngine(is_mute=True) as engine, frontend_core(engine) as core:
        task = asyncio.create_task(collect(core.generator, raw_request()))
        request = await engine.next_submit()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: engine.aborted == [request.request_id])


async def test_a_request_that_ended_is_not_aborted() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        for _ in range(3):
            await answer(core.generator, raw_request())
        assert engine.aborted == []


async def test_an_id_is_free_when_the_last_event_arrives() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        async with aclosing(core.generator.generate(raw_request(request_id="mine"))) as events:
            async for event in events:
                assert core.generator.num_active == (not isinstance(event, FinishedEvent))
        assert isinstance(event, FinishedEvent)


async def test_a_stop_string_aborts_upstream_at_once() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        task = asyncio.create_task(answer(core.generator, raw_request(sampling={"stop": ["wor"]})))
        request = await engine.next_submit()
        engine.emit(request, TOKENIZER.encode("Hello world"))
        got = await task
        assert (got.text(), got.deltas[-1].stop_reason) == ("Hello ", "wor")
        assert engine.aborted == [request.request_id]
        assert got.finished.usage.num_cached_tokens == NUM_CACHED  # the engine's account has been waited for
        assert core.count("stop") == 1


async def test_the_deadline_reaches_the_engine_and_is_kept_here() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        task = asyncio.create_task(answer(core.generator, raw_request(deadline_s=50)))
        request = await engine.next_submit()
        assert request.deadline_remaining_ms is not None
        assert 0 < request.deadline_remaining_ms <= 50_000
        await pass_time(50)
        with pytest.raises(DeadlineExceeded, match="the deadline of 50 s has passed"):
            await task
        await eventually(lambda: engine.aborted == [request.request_id])
        assert core.count("DEADLINE_EXCEEDED") == 1


async def test_an_id_that_is_alive_is_refused_and_free_afterwards() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        task = asyncio.create_task(answer(core.generator, raw_request(request_id="mine")))
        request = await engine.next_submit()
        with pytest.raises(DuplicateRequest, match="mine"):
            await collect(core.generator, raw_request(request_id="mine"))
        engine.emit(request, [65], finish=FinishReason.LENGTH)
        assert (await task).token_ids() == [65]
        again = asyncio.create_task(answer(core.generator, raw_request(request_id="mine")))
        engine.emit(await engine.next_submit(1), [66], finish=FinishReason.LENGTH)
        assert (await again).token_ids() == [66]


async def test_a_stalled_reader_slows_nobody_and_gets_one_merged_delta() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        stalled = core.generator.generate(raw_request(sampling={"max_tokens": 40}))
        opening = asyncio.ensure_future(anext(stalled))
        slow = await engine.next_submit(0)
        await opening
        quick = core.generator.generate(raw_request(sampling={"max_tokens": 40}))
        opening = asyncio.ensure_future(anext(quick))
        fast = await engine.next_submit(1)
        await opening
        for step in range(20):  # each step's token reaches the quick reader before the next is made
            engine.emit(slow, [65 + step])
            engine.emit(fast, [65 + step])
            assert list((await anext(quick)).token_ids) == [65 + step]  # type: ignore[union-attr]
        assert list((await anext(stalled)).token_ids) == [65 + step for step in range(20)]  # type: ignore[union-attr]
        await stalled.aclose()
        await quick.aclose()


async def test_prompts_of_every_kind_reach_the_engine_as_ids() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        chat = RawChat([{"role": "user", "content": "Hi"}])
        for prompt in ("Hi", [5, 6], chat, replace(chat, add_generation_prompt=False)):
            await answer(core.generator, raw_request(prompt))
        assert [request.token_ids.tolist() for request in engine.submitted] == [
            TOKENIZER.encode("Hi"),
            [5, 6],
            TOKENIZER.encode("user: Hi\nassistant:"),
            TOKENIZER.encode("user: Hi\n"),
        ]
        assert engine.submitted[2].sampling.max_tokens == 64 - len(engine.submitted[2].token_ids)


async def test_a_prompt_is_truncated_from_the_left_on_demand() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        with pytest.raises(InvalidRequest, match=r"101 tokens \(100 in the prompt"):
            await collect(core.generator, raw_request("x" * 100))
        got = await answer(core.generator, raw_request("x" * 100 + "ab", truncate_prompt_tokens=2))
        assert engine.submitted[0].token_ids.tolist() == TOKENIZER.encode("x" * 100 + "ab")[-2:]
        assert got.finished.usage.num_prompt_tokens == 2


async def test_a_prompt_may_be_truncated_to_what_fits() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        asked: list[dict[str, object]] = [
            {},
            {"sampling": {"max_tokens": 4}},
            {"takes_rest_of_context": True},
        ]
        for prompt in ("x" * 100, TOKENIZER.encode("x" * 100)):
            kept = [
                await answer(core.generator, raw_request(prompt, truncate_prompt_tokens=-1, **fields))
                for fields in asked
            ]
            assert [each.finished.usage.num_prompt_tokens for each in kept] == [64 - 16, 64 - 4, 64 - 1]


async def test_echo_repeats_the_prompt_before_the_output_of_each_choice() -> None:
    async with FakeEngine(say(" world")) as engine, frontend_core(engine) as core:
        for prompt in ("Hello", TOKENIZER.encode("Hello")):
            sampling = {"n": 2, "stop": ["ell"], "max_tokens": 2}  # a stop string in the prompt is none
            got = await answer(core.generator, raw_request(prompt, echo=True, sampling=sampling))
            assert [got.text(index) for index in (0, 1)] == ["Hello world"] * 2
            assert got.token_ids() == TOKENIZER.encode(" world")


async def test_checkpoint_defaults_and_client_values_reach_the_engine() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine, defaults={"temperature": 0.5}) as core:
        raw = raw_request(
            sampling={"logit_bias": {"7": 1.5}, "seed": 3}, priority=-4, tenant="t", cache_salt="salt"
        )
        await answer(core.generator, raw)
        (submit,) = engine.submitted
        assert (submit.sampling.temperature, submit.sampling.logit_bias) == (0.5, ((7, 1.5),))
        assert (submit.head.priority, submit.head.tenant, submit.head.cache_salt) == (-4, "t", "salt")
        assert (submit.sampling.max_tokens, submit.num_prompt_tokens) == (16, len(submit.token_ids))
        assert submit.deadline_remaining_ms is None


async def test_unknown_model_names_the_served_ones() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        with pytest.raises(ModelNotFound, match=r"'gpt-5'; served: tiny"):
            await collect(core.generator, raw_request(model="gpt-5"))
        await answer(core.generator, raw_request(model="tiny"))


async def test_requests_spread_over_engines_by_load_and_by_model() -> None:
    small = replace(MODEL, name="small")
    async with (
        FakeEngine() as a,
        FakeEngine(engine_id="engine-1") as b,
        FakeEngine(model=small, engine_id="engine-2") as c,
        frontend_core(a, b, c) as core,
    ):
        with pytest.raises(InvalidRequest, match=r"name one of small, tiny"):
            await collect(core.generator, raw_request())
        tasks = [
            asyncio.create_task(collect(core.generator, raw_request(model=model)))
            for model in ("tiny", "tiny", "tiny", "tiny", "small")
        ]
        await eventually(lambda: a.num_alive + b.num_alive + c.num_alive == 5)
        assert (a.num_alive, b.num_alive, c.num_alive) == (2, 2, 1)
        await a.die()  # what was there is lost; what comes goes elsewhere
        await eventually(lambda: not core.router.engines[0].is_ready)
        tasks.append(asyncio.create_task(collect(core.generator, raw_request(model="tiny"))))
        await eventually(lambda: b.num_alive == 3)
        assert {model.name for model in core.generator.models()} == {"tiny", "small"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_refused_choice_ends_the_request_and_its_other_choices() -> None:
    async with FakeEngine(is_mute=True) as engine, frontend_core(engine) as core:
        task = asyncio.create_task(collect(core.generator, raw_request(sampling={"n": 3})))
        requests = [await engine.next_submit(index) for index in range(3)]
        engine.fail(requests[1], "QUEUE_FULL", "full", retry_after_ms=100)
        with pytest.raises(QueueFull):
            await task
        await eventually(lambda: sorted(engine.aborted) == [requests[0].request_id, requests[2].request_id])


async def test_many_choices_let_others_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "CHOICES_PER_TURN", 4)
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        got = await answer(core.generator, raw_request(sampling={"n": 50, "max_tokens": 2}))
        assert got.finished.usage.num_output_tokens == 100


async def test_a_long_prompt_is_tokenized_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, int] = {}
    tokenizer = byte_tokenizer()
    plain = tokenizer.encode

    def encode(text: str, **options: bool) -> list[int]:
        threads[len(text)] = threading.get_ident()
        return plain(text, **options)

    monkeypatch.setattr(tokenizer, "encode", encode)
    model = replace(MODEL, max_model_len=10_000)
    async with FakeEngine(seeded, model=model) as engine, frontend_core(engine, tokenizer=tokenizer) as core:
        await answer(core.generator, raw_request("x" * 4096))
        await answer(core.generator, raw_request("x" * 4097))
        assert threads[4096] == threading.get_ident() != threads[4097]


async def test_a_text_with_too_many_characters_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    too_long = "x" * (64 * (tokenizer.max_chars_per_token or 0) + 1)
    async with FakeEngine() as engine, frontend_core(engine, tokenizer=tokenizer) as core:
        for prompt in (too_long, RawChat([{"role": "user", "content": too_long}])):
            with pytest.raises(ContextLengthExceeded, match="maximum context length is 64 tokens"):
                await collect(core.generator, raw_request(prompt))


async def test_a_text_of_any_length_may_be_truncated() -> None:
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        raw = raw_request("the " * 1000, truncate_prompt_tokens=3, sampling={"max_tokens": 1})
        got = await answer(core.generator, raw)
        assert list(got.admitted.prompt_token_ids) == TOKENIZER.encode("the " * 1000)[-3:]


async def test_a_long_conversation_is_checked_and_rendered_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[int, int] = {}
    plain = ChatRenderer.render

    def render(self: ChatRenderer, messages: Sequence[Message], **options: bool) -> str:
        threads[len(messages)] = threading.get_ident()
        return plain(self, messages, **options)

    monkeypatch.setattr(ChatRenderer, "render", render)
    model = replace(MODEL, max_model_len=10_000)
    async with FakeEngine(seeded, model=model) as engine, frontend_core(engine) as core:
        for num_messages in (64, 65):
            chat = RawChat([{"role": "user", "content": ""}] * num_messages)
            await answer(core.generator, raw_request(chat, sampling={"max_tokens": 1}))
    assert threads[64] == threading.get_ident() != threads[65]


async def test_a_rendered_text_is_tokenized_where_its_own_length_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    tokenizer = byte_tokenizer(chat_template="{{ 'the ' * 2000 }}")
    plain = tokenizer.encode

    def encode(text: str, **options: bool) -> list[int]:
        threads.append(threading.get_ident())
        return plain(text, **options)

    monkeypatch.setattr(tokenizer, "encode", encode)
    model = replace(MODEL, max_model_len=10_000)
    async with FakeEngine(seeded, model=model) as engine, frontend_core(engine, tokenizer=tokenizer) as core:
        chat = RawChat([{"role": "user", "content": "Hi"}])
        await answer(core.generator, raw_request(chat, sampling={"max_tokens": 1}))
    assert threads != [threading.get_ident()]


async def test_the_echo_of_a_text_is_the_text_as_sent() -> None:
    async with FakeEngine(say("!")) as engine, frontend_core(engine) as core:
        text = "<|bos|>the"
        got = await answer(core.generator, raw_request(text, echo=True, sampling={"max_tokens": 1}))
        assert got.text() == text + "!"
        ids = TOKENIZER.encode(text)
        got = await answer(core.generator, raw_request(ids, echo=True, sampling={"max_tokens": 1}))
        assert got.text() == "the!"


async def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        task = asyncio.create_task(answer(core.generator, raw_request()))
        request = await engine.next_submit()
        draining = asyncio.create_task(core.generator.drain(5.0))
        await asyncio.sleep(0)
        assert not core.generator.is_ready
        with pytest.raises(EngineUnavailable, match="stopping"):
            await collect(core.generator, raw_request())
        engine.emit(request, [65], finish=FinishReason.LENGTH)
        assert (await task).token_ids() == [65]
        assert await draining == 0


async def test_draining_ends_in_time_whatever_runs() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        task = asyncio.create_task(collect(core.generator, raw_request()))
        await engine.next_submit()
        assert await core.generator.drain(0.01) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_log_line_tells_the_story_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triptych_services.frontend.streams.accounting")
    async with FakeEngine(seeded) as engine, frontend_core(engine) as core:
        raw = raw_request(request_id="mine", sampling={"max_tokens": 3}, tenant="ours")
        await answer(core.generator, raw)
        with pytest.raises(InvalidRequest):
            await collect(core.generator, raw_request("", request_id="bad"))
    good, bad = (record.fields for record in caplog.records if record.message == "request")  # type: ignore[attr-defined]
    assert good["ttft_ms"] <= good["total_ms"]
    expected = {
        "request_id": "mine",
        "model": "tiny",
        "output_tokens": 3,
        "cached_tokens": NUM_CACHED,
        "finish": "length",
        "engine": "engine-0",
        "tenant": "ours",
        "queued_ms": 1e-6,
    }
    assert expected.items() <= good.items()
    assert "resumed" not in good
    assert (bad["request_id"], bad["finish"]) == ("bad", "INVALID_REQUEST")
    assert bad["error"].startswith("prompt: the prompt is empty")


async def test_time_to_first_token_of_a_whole_answer_is_the_engine_s() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        raw = raw_request(output_kind=OutputKind.FINAL_ONLY)
        task = asyncio.create_task(collect(core.generator, raw))
        request = await engine.next_submit()
        engine.emit(request, [65])
        await asyncio.sleep(0.3)  # the second token takes that long; TIMINGS say that the first took 3 ns
        engine.emit(request, [65], finish=FinishReason.LENGTH)
        await task
        assert core.metric("time_to_first_token_seconds_count", model_name="tiny") == 1
        assert 0 < core.metric("time_to_first_token_seconds_sum") < 0.3


async def test_a_chat_without_a_template_is_refused_in_the_client_s_words() -> None:
    tokenizer = byte_tokenizer(chat_template=None)
    async with FakeEngine() as engine, frontend_core(engine, tokenizer=tokenizer) as core:
        raw = raw_request(RawChat([{"role": "user", "content": "Hi"}]), paths={"prompt": "chat.messages"})
        with pytest.raises(InvalidRequest, match=r"^chat\.messages: this model has no chat template"):
            await collect(core.generator, raw)


@pytest.mark.parametrize("is_sent", [False, True])
async def test_a_request_that_is_aborted_before_it_is_admitted_ends(is_sent: bool) -> None:
    async with FakeEngine(is_mute=True) as engine, frontend_core(engine) as core:
        asking = asyncio.create_task(answer(core.generator, raw_request(request_id="r", sampling={"n": 2})))
        while not core.generator.alive.abort_of(ANYONE, ["r"], True) if not is_sent else not engine.submitted:
            await asyncio.sleep(0)
        await core.generator.abort(["r"])
        got = await asking
    assert {(delta.index, delta.finish_reason) for delta in got.deltas} == {
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    }
