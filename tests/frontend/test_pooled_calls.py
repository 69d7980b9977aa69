"""Calls for vectors, from raw requests to arrays, in front of fake engines."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.clock import pass_time
from tests.helpers.fake_engine import MODEL, NUM_CACHED, TIMINGS, FakeEngine, SubmittedChoice, eventually
from tests.helpers.frontend import FrontendCore, answer, frontend_core, raw_request
from triptych.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    FeatureDisabled,
    InvalidRequest,
    QueueFull,
    WrongState,
)
from triptych.types.outputs import FinishedRequest, FinishReason, OutputBatch
from triptych.types.pooling import PoolingParams, Task
from triptych_services.frontend import pooled_calls
from triptych_services.frontend.access.caller import ANYONE
from triptych_services.frontend.pooled_calls import PooledText, Window, check_num_inputs
from triptych_services.frontend.requests.raw import RawPair
from triptych_services.frontend.streams.migrator import MigrationTerms

TOKENIZER = byte_tokenizer()
EMBEDDER = replace(MODEL, tasks=("embed", "token_embed"), embedding_size=4)
BOTH = replace(MODEL, tasks=("generate", "embed"), embedding_size=4)


def spread(request: SubmittedChoice) -> np.ndarray:
    """Vectors that depend on the tokens of the text alone."""
    ids = request.token_ids.astype(np.float32)
    if request.request.pooling.task is Task.TOKEN_EMBED:
        return np.stack([ids, ids + 1], axis=1)
    return np.array([[ids.sum(), ids[0], ids[-1], len(ids)]], np.float32)


def raw(prompt: object = "Hello", task: Task = Task.EMBED, **given: Any) -> Any:
    params = {name: given.pop(name) for name in ("kind", "normalize", "dimensions") if name in given}
    return raw_request(prompt, pooling=PoolingParams(task, **params), **given)


async def compute(core: FrontendCore, *raws: Any, window: Window | None = None) -> list[PooledText]:
    async with asyncio.timeout(60):
        pooled = core.generator.pooled
        with closing(pooled.open_answer()) as counted:
            return await pooled.compute(raws, counted, window)


async def test_each_text_is_one_request_and_order_is_kept() -> None:
    async with FakeEngine(model=EMBEDDER, pool=spread) as engine, frontend_core(engine) as core:
        texts = [f"text {number}" for number in range(300)]
        answers = await compute(core, *map(raw, texts))
        for text, got in zip(texts, answers, strict=True):
            ids = TOKENIZER.encode(text)
            assert got.vectors.tolist() == [[sum(ids), ids[0], ids[-1], len(ids)]]
            assert got.vectors.dtype == np.float32
            assert got.num_tokens == len(ids)
        assert len(engine.submitted) == 300
        assert core.count("stop") == 300
        (first, *_) = engine.submitted
        assert first.request.pooling == PoolingParams(Task.EMBED)
        assert first.request.num_choices == 1


async def test_every_token_may_have_a_vector() -> None:
    async with FakeEngine(model=EMBEDDER, pool=spread) as engine, frontend_core(engine) as core:
        (got,) = await compute(core, raw("abc", Task.TOKEN_EMBED))
        assert got.vectors[:, 0].tolist() == TOKENIZER.encode("abc")


async def test_a_text_may_fill_the_context_and_not_more() -> None:
    async with FakeEngine(model=EMBEDDER, pool=spread) as engine, frontend_core(engine) as core:
        (got,) = await compute(core, raw([7] * 64))
        assert got.num_tokens == 64
        for prompt in ([7] * 65, "x" * 100):
            with pytest.raises(ContextLengthExceeded) as caught:
                await compute(core, raw(prompt, paths={"prompt": "input[3]"}))
            assert caught.value.violations[0].field == "input[3]"
            assert caught.value.metadata["limit"] == "64"
        for cut in (-1, 10):
            (got,) = await compute(
                core, raw("abcdefgh" * 20, truncate_prompt_tokens=cut, keeps_beginning=True)
            )
            assert got.num_tokens == (64 if cut == -1 else 10)
            assert got.vectors[0, 1] == TOKENIZER.encode("a")[0]


async def test_the_context_that_is_told_is_the_one_that_texts_are_held_to(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    async with FakeEngine(model=EMBEDDER, pool=spread) as engine:
        async with frontend_core(engine, directory=tmp_path) as core:
            assert core.generator.find_model("tiny").max_model_len == 32
            with pytest.raises(ContextLengthExceeded, match="32 tokens"):
                await compute(core, raw([7] * 33))
    both = replace(EMBEDDER, tasks=("generate", "embed"))
    async with (
        FakeEngine(model=both, pool=spread) as engine,
        frontend_core(engine, directory=tmp_path) as core,
    ):
        assert core.generator.find_model("tiny").max_model_len == both.max_model_len > 32


@pytest.mark.parametrize(
    ("prompt", "given", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([1, 300], {}, "prompt[1]"),
        (None, {}, "prompt"),
        ("x\ud800", {}, "prompt"),
        ("x", {"dimensions": 5}, "dimensions"),
        ("x", {"prompt_name": "poem"}, "prompt_name"),
        ("x", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (RawPair("a", "", "documents[0]"), {}, "documents[0]"),
    ],
)
async def test_a_bad_text_is_named_and_others_go_on(prompt: Any, given: dict[str, Any], field: str) -> None:
    async with FakeEngine(model=EMBEDDER, pool=spread) as engine, frontend_core(engine) as core:
        bystander = asyncio.create_task(compute(core, *[raw("bystander")] * 50))
        with pytest.raises(InvalidRequest) as caught:
            await compute(core, raw("good"), raw(prompt, **given))
        assert caught.value.violations[0].field == field
        assert len(await bystander) == 50


async def test_tasks_that_a_model_lacks_are_refused_with_those_that_it_has() -> None:
    async with (
        FakeEngine(model=EMBEDDER, pool=spread) as embeds,
        FakeEngine(model=MODEL, pool=spread) as generates,
    ):
        async with frontend_core(embeds) as core:
            with pytest.raises(FeatureDisabled, match="generate: the model 'tiny' serves embed, token_embed"):
                await answer(core.generator, raw_request("x"))
            with pytest.raises(FeatureDisabled, match=r"classify: .* serves embed"):
                await compute(core, raw("x", Task.CLASSIFY))
        async with frontend_core(generates) as core:
            with pytest.raises(FeatureDisabled, match="embed: the model 'tiny' serves generate"):
                await compute(core, raw("x"))
        assert not embeds.submitted
        assert not generates.submitted


async def test_a_text_goes_to_an_engine_that_has_the_task() -> None:
    async with (
        FakeEngine(lambda request: [1] * 9, model=MODEL, engine_id="a") as generates,
        FakeEngine(lambda request: [1] * 9, model=BOTH, pool=spread, engine_id="b") as both,
        frontend_core(generates, both) as core,
    ):
        await compute(core, *[raw("x")] * 20)
        assert len(both.submitted) == 20
        assert not generates.submitted


async def test_a_text_moves_when_its_engine_dies() -> None:
    async with (
        FakeEngine(model=EMBEDDER, engine_id="a") as dies,
        FakeEngine(model=EMBEDDER, engine_id="b") as other,
        frontend_core(dies, other, moves=MigrationTerms()) as core,
    ):
        task = asyncio.create_task(compute(core, raw("Hello")))
        await eventually(lambda: dies.submitted or other.submitted)
        await eventually(lambda: dies.num_alive + other.num_alive)
        first, second = (dies, other) if dies.submitted else (other, dies)
        second.pool = spread
        await first.die()
        (got,) = await task
        assert got.vectors[0, 0] == sum(TOKENIZER.encode("Hello"))
        (request,) = second.submitted
        assert request.request.is_moved
        assert request.request.pooling == PoolingParams(Task.EMBED)
        assert not request.request.emitted


async def test_more_texts_than_the_engine_holds_wait_for_each_other() -> None:
    async with (
        FakeEngine(model=EMBEDDER, max_choices=3, pool=None) as engine,
        frontend_core(engine) as core,
    ):
        task = asyncio.create_task(compute(core, *[raw(f"t{n}") for n in range(8)]))
        await eventually(lambda: len(engine.submitted) == 3)
        await asyncio.sleep(0.02)
        assert len(engine.submitted) == 3
        engine.fail(engine.submitted[1], "QUEUE_FULL", "full", retry_after_ms=10)
        engine.pool = spread
        for request in engine.submitted[:1]:
            engine.send(request, _finish(request))
        await eventually(lambda: len(engine.submitted) >= 4)
        engine.send(engine.submitted[2], _finish(engine.submitted[2]))
        assert [got.vectors[0, 2] for got in await task] == [TOKENIZER.encode(str(n))[0] for n in range(8)]


def _finish(request: SubmittedChoice) -> OutputBatch:
    finish = FinishedRequest(request.number, FinishReason.STOP, None, NUM_CACHED, TIMINGS)
    return OutputBatch(0, finished=(finish,), vectors={request.number: spread(request)})


async def test_an_item_that_waits_goes_on_when_another_one_fails() -> None:
    async with FakeEngine(model=EMBEDDER) as engine, frontend_core(engine) as core:
        window = core.generator.pooled.open_window("tiny")
        fails = asyncio.create_task(compute(core, raw("fails"), window=window))
        first = await engine.next_submit()
        waits = asyncio.create_task(compute(core, raw("waits", deadline_s=60.0), window=window))
        engine.fail(await engine.next_submit(1), "QUEUE_FULL", "full")
        await asyncio.sleep(0.02)
        engine.fail(first, "ENGINE_FAILURE", "broken")
        with pytest.raises(EngineFailure):
            await fails
        again = await engine.next_submit(2)
        assert again.request.deadline_remaining_ms <= 59_980, "the time of its wait counts"
        engine.send(again, _finish(again))
        assert [got.vectors.tolist() for got in await waits] == [spread(again).tolist()]


async def test_the_time_of_an_item_ends_while_it_waits_for_a_place() -> None:
    async with FakeEngine(model=EMBEDDER) as engine, frontend_core(engine) as core:
        window = Window(1, asyncio.Lock())
        holds = asyncio.create_task(compute(core, raw("holds"), window=window))
        first = await engine.next_submit()
        with pytest.raises(DeadlineExceeded):
            await compute(core, raw("waits", deadline_s=0.02), window=window)
        engine.send(first, _finish(first))
        await holds
        assert len(engine.submitted) == 1
        engine.pool = spread
        assert len(await compute(core, raw("next"), window=window)) == 1, "there is a place again"


async def test_items_that_wait_end_with_the_last_one() -> None:
    async with FakeEngine(model=EMBEDDER) as engine, frontend_core(engine) as core:
        window = core.generator.pooled.open_window("tiny")
        items = [asyncio.create_task(compute(core, raw(), window=window)) for _ in range(2)]
        await engine.next_submit(1)
        for index in range(3):  # the first waits for the second, and is alone when it tries again
            engine.fail(await engine.next_submit(index), "QUEUE_FULL", "full")
        for item in items:
            with pytest.raises(QueueFull):
                await item


async def test_a_lone_text_finds_the_queue_full() -> None:
    async with FakeEngine(model=EMBEDDER) as engine, frontend_core(engine) as core:
        task = asyncio.create_task(compute(core, raw()))
        engine.fail(await engine.next_submit(), "QUEUE_FULL", "full", retry_after_ms=10)
        with pytest.raises(QueueFull):
            await task


async def test_a_call_that_is_left_aborts_its_texts() -> None:
    async with FakeEngine(model=EMBEDDER) as engine, frontend_core(engine) as core:
        task = asyncio.create_task(compute(core, *[raw()] * 5))
        await eventually(lambda: engine.num_alive == 5)
        task.cancel()
        await eventually(lambda: engine.num_alive == 0)
        assert len(engine.aborted) == 5
        assert core.generator.num_active == 0


async def test_the_deadline_is_that_of_the_call() -> None:
    async with FakeEngine(model=EMBEDDER, max_choices=1) as engine, frontend_core(engine) as core:
        task = asyncio.create_task(compute(core, *[raw(deadline_s=50)] * 3))
        submitted = await engine.next_submit()
        assert 0 < submitted.request.deadline_remaining_ms <= 50_000
        await pass_time(50)
        with pytest.raises(DeadlineExceeded):
            await task


async def test_an_aborted_text_has_no_vector() -> None:
    async with FakeEngine(model=EMBEDDER) as engine, frontend_core(engine) as core:
        task = asyncio.create_task(compute(core, raw(request_id="mine")))
        await engine.next_submit()
        await eventually(lambda: core.generator.alive.abort_of(ANYONE, ["mine"], True))
        with pytest.raises(WrongState):
            await task


def test_a_call_of_too_many_texts_names_field_value_and_limit() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_num_inputs(100_000, "input")
    assert caught.value.metadata == {"field": "input", "value": "100000", "limit": "2048"}
    with pytest.raises(InvalidRequest, match="input: none is given"):
        check_num_inputs(0, "input")


async def test_a_call_with_too_large_vectors_ends_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_calls, "MAX_CALL_BYTES", 10 * 16)
    async with FakeEngine(model=EMBEDDER, pool=spread) as engine, frontend_core(engine) as core:
        fits, refused = await asyncio.gather(
            compute(core, *[raw()] * 10), compute(core, *[raw()] * 300), return_exceptions=True
        )
        assert isinstance(fits, list)
        assert len(fits) == 10
        assert isinstance(refused, InvalidRequest)
        assert "more than 160 bytes" in str(refused)


async def test_texts_of_calls_leave_the_loop_to_others() -> None:
    """One text begins in a turn of the loop, so that a stream waits for one to be tokenized and not for hundreds."""
    async with FakeEngine(model=BOTH, pool=spread) as engine, frontend_core(engine) as core:
        begun_before_turn = [0]
        calls = [asyncio.create_task(compute(core, *map(raw, ["text"] * 100))) for _ in range(3)]
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            begun_before_turn.append(core.generator.num_active)
        begun = np.diff(begun_before_turn)
        assert begun.max() <= 3, "the first of each call does not wait"
        assert max(begun_before_turn) > 100, "many are in flight together"


async def test_texts_in_flight_hold_no_stream_back() -> None:
    async with FakeEngine(model=BOTH) as engine, frontend_core(engine) as core:  # which answers nothing
        call = asyncio.create_task(compute(core, *map(raw, ["text"] * 20)))
        await eventually(lambda: len(engine.submitted) == 20)
        assert (core.generator.num_active, core.generator.alive.num_generating) == (20, 0)
        call.cancel()
        await eventually(lambda: core.generator.num_active == 0)
