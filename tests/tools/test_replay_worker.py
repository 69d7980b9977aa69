"""A journal's steps against a real worker servicer: the same tokens, or the first that is not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.journals import SESSION, RecordedRun, doctor
from tests.helpers.scheduling import make_prompt
from tests.helpers.stack import NaiveRunner, WorkerStack, make_config
from tools.replay.worker import Replay, replay
from triptych.errors import ConfigError, EngineUnavailable, HandshakeMismatch
from triptych.types.facts import KvKind, KvLayout
from triptych.types.journal import JournalEvent, ResultTaken
from triptych.types.step import RowError, RowKey
from triptych.wire.journal import JournalReader

SCHEDULER = {"max_num_seqs": 4, "max_num_batched_tokens": 48}


def record(directory: Path) -> RecordedRun:
    """Preemptions, an abort, and a lost worker with steps in flight."""
    run = RecordedRun(directory).start()
    for number in range(5):
        run.submit(make_prompt(20 + number, number), sampling={"max_tokens": 30, "ignore_eos": True})
    run.run(12)
    run.engine.frontends.abort(SESSION, 1)
    run.run(3)
    run.lose_worker()
    run.connect(after_crash=True)
    run.run().engine.close()
    assert run.engine.scheduler.counters.num_preemptions > 0
    return run


@asynccontextmanager
async def worker(num_blocks: int = 6, **scheduler: int) -> AsyncIterator[WorkerStack]:
    config = make_config(**{**SCHEDULER, **scheduler})
    stack = WorkerStack(config, NaiveRunner(config, num_blocks, 80))
    await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


async def replayed(directory: Path, stack: WorkerStack) -> Replay:
    with JournalReader(directory) as journal:
        return await replay(journal, f"127.0.0.1:{stack.port}")


async def test_a_worker_with_other_groups_is_refused(tmp_path: Path) -> None:
    kv = KvLayout(40, 16, 1, 1, 1, "float32")
    group = replace(kv.groups[0], kind=KvKind.WINDOW, window=40)
    run = RecordedRun(tmp_path, kv=replace(kv, groups=(*kv.groups, group))).start()
    run.submit(make_prompt(20), sampling={"max_tokens": 3})
    run.run().engine.close()
    async with worker(num_blocks=40) as stack:
        with pytest.raises(
            ConfigError, match=r"kv\.groups: this worker has .*FULL.*, the recorded one had .*WINDOW"
        ):
            await replayed(tmp_path, stack)


def nth_result(
    events: list[JournalEvent], change: Callable[[ResultTaken], ResultTaken]
) -> list[JournalEvent]:
    """With the eighth result changed."""
    index = [i for i, event in enumerate(events) if isinstance(event.what, ResultTaken)][7]
    what = events[index].what
    assert isinstance(what, ResultTaken)
    events[index] = replace(events[index], what=change(what))
    return events


async def test_a_worker_computes_the_same_tokens_again_over_two_sessions(tmp_path: Path) -> None:
    run = record(tmp_path)
    async with worker() as stack:
        result = await replayed(tmp_path, stack)
        assert result.divergence == ""
        assert result.num_steps == run.engine.scheduler.counters.num_steps
        assert await replayed(tmp_path, stack) == result  # it left in order, nobody holds the worker
        assert stack.status_publisher.state.held_by == ""


async def test_the_first_other_token_is_told_with_step_slot_and_request(tmp_path: Path) -> None:
    record(tmp_path)
    changed = []

    def change(what: ResultTaken) -> ResultTaken:
        token_ids = what.result.token_ids.copy()
        changed.append((what.result.step_id, int(token_ids[1])))
        token_ids[1] += 1
        return ResultTaken(replace(what.result, token_ids=token_ids))

    doctor(tmp_path, lambda events: nth_result(events, change))
    async with worker() as stack:
        result = await replayed(tmp_path, stack)
    [(step_id, token_id)] = changed
    assert result.divergence == (
        f"step {step_id}, slot 1, request 1-2: recorded token {token_id + 1}, now token {token_id}"
    )


async def test_an_error_of_a_row_that_is_not_there_any_more_is_told(tmp_path: Path) -> None:
    record(tmp_path)

    def change(what: ResultTaken) -> ResultTaken:
        return ResultTaken(replace(what.result, row_errors={RowKey(0, 0): RowError("told to fail")}))

    doctor(tmp_path, lambda events: nth_result(events, change))
    async with worker() as stack:
        result = await replayed(tmp_path, stack)
    assert "slot 0, request 1-1: recorded an error: told to fail, now no error" in result.divergence


async def test_another_number_of_tokens_is_told(tmp_path: Path) -> None:
    record(tmp_path)

    def change(what: ResultTaken) -> ResultTaken:
        return ResultTaken(replace(what.result, token_ids=np.zeros(3, np.uint32)))

    doctor(tmp_path, lambda events: nth_result(events, change))
    async with worker() as stack:
        result = await replayed(tmp_path, stack)
    assert result.divergence.endswith("recorded 3 tokens, now 2")


async def test_a_step_that_fails_now_is_told(tmp_path: Path) -> None:
    record(tmp_path)
    async with worker() as stack:
        stack.runner.fail_at = lambda plan: plan.step_id == 5
        result = await replayed(tmp_path, stack)
    assert result.divergence.startswith("step 5: the worker ended the stream: ")


async def test_a_worker_with_fewer_blocks_is_refused(tmp_path: Path) -> None:
    record(tmp_path)
    async with worker(num_blocks=5) as stack:
        with pytest.raises(ConfigError, match="has 5 KV blocks, the recorded one had 6"):
            await replayed(tmp_path, stack)


async def test_a_worker_of_another_config_refuses(tmp_path: Path) -> None:
    record(tmp_path)
    async with worker(max_num_seqs=5) as stack:
        with pytest.raises(HandshakeMismatch, match="max_num_seqs: engine has '4', worker has '5'"):
            await replayed(tmp_path, stack)


async def test_nobody_at_the_address_is_told_at_once(tmp_path: Path) -> None:
    record(tmp_path)
    with JournalReader(tmp_path) as journal:
        with pytest.raises(EngineUnavailable):
            await replay(journal, "127.0.0.1:1")
