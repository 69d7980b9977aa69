"""The step journal's records, and what its plans say of the worker's rows."""

from __future__ import annotations

import typing
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import proto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.journals import RecordedRun
from tests.helpers.scheduling import make_prompt
from tests.wire_codecs.strategies import (
    build,
    plans,
    progress,
    results,
    submits,
    u32,
    u64,
    words,
    worker_facts,
)
from tests.wire_codecs.test_round_trips import assert_same
from tools.replay.journal_rows import RowNames, SessionRows, read_measured_steps
from triptych.config.step_times import StepWork
from triptych.errors import ProtocolViolation
from triptych.internal.v1 import journal_pb2
from triptych.types.facts import PauseMode
from triptych.types.journal import (
    Aborted,
    AdapterGone,
    AdaptersAwaited,
    CacheReset,
    Closed,
    Expired,
    JournalEvent,
    KvProgressed,
    Paused,
    Planned,
    ResultTaken,
    Resumed,
    SessionClosed,
    SessionOpened,
    Submitted,
    What,
    WorkerGone,
    WorkerReady,
    WorkerRefused,
)
from triptych.types.step import StepTimings
from triptych.wire.journal import JOURNAL_SUFFIX, event_from_bytes, event_to_bytes, framed, read_journal

WHATS: dict[type[What], st.SearchStrategy] = {
    Planned: build(Planned, plan=st.none() | plans()),
    ResultTaken: build(ResultTaken, result=results()),
    Expired: build(Expired),
    Submitted: build(Submitted, session=u64, request=submits()),
    Aborted: build(Aborted, session=u64, number=u32),
    SessionOpened: build(SessionOpened, session=u64),
    SessionClosed: build(SessionClosed, session=u64),
    WorkerReady: build(WorkerReady, facts=worker_facts(), after_crash=st.booleans()),
    WorkerGone: build(WorkerGone),
    WorkerRefused: build(WorkerRefused, why=words),
    CacheReset: build(CacheReset),
    Paused: build(Paused, mode=st.sampled_from(list(PauseMode))),
    Resumed: build(Resumed),
    KvProgressed: build(KvProgressed, progress=progress()),
    AdaptersAwaited: build(AdaptersAwaited, digests=st.lists(words).map(tuple)),
    AdapterGone: build(AdapterGone, digest=words, why=words),
    Closed: build(Closed, reason=words),
}


@pytest.mark.parametrize("kind", WHATS, ids=lambda kind: kind.__name__)
def test_an_event_comes_out_of_its_bytes_again(kind: type[What]) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(build(JournalEvent, at_s=st.floats(0, 1e9), what=WHATS[kind]))
    def check(event: JournalEvent) -> None:
        assert_same(event_from_bytes(event_to_bytes(event)), event)

    check()


def test_every_kind_of_event_is_tested_and_has_a_field() -> None:
    assert set(WHATS) == set(typing.get_args(What))
    [oneof] = journal_pb2.JournalEvent.DESCRIPTOR.oneofs
    # A plan is one of two: a step, or none.
    assert len(oneof.fields) == len(WHATS) + 1


def test_an_event_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know"):
        event_from_bytes(b"")


@pytest.mark.parametrize("length", [0, 1, 127, 128, 300, 1 << 14, 1 << 21])
def test_a_frame_is_protobufs_own(length: int) -> None:
    message = journal_pb2.JournalEvent(closed="x" * length)
    written = BytesIO()
    proto.serialize_length_prefixed(message, written)
    assert framed(message.SerializeToString()) == written.getvalue()


@pytest.mark.parametrize("limit", [1, 3])
def test_rows_are_followed_as_a_worker_follows_them(tmp_path: Path, limit: int) -> None:
    """Against the naive worker's own rows, through chunks, prefix hits, preemptions and late results."""
    run = RecordedRun(tmp_path, long_prefill_token_threshold=11, max_samples_per_row=limit).start()
    for number in range(5):
        run.submit(make_prompt(24 + number, number % 2), sampling={"max_tokens": 30, "ignore_eos": True})
    rows, worker = SessionRows(), run.runner.worker
    num_prefill_tokens, num_steps = 0, 0
    while run.engine.num_requests:
        while len(run.plans) < 2 and run.plan():
            pass
        plan = run.plans[0]
        before = {
            slot: (row.new.slot_version, row.num_computed, len(row.tokens))
            for slot, row in worker.rows.items()
        }
        result = run.finish_step()
        followed = rows.take(plan, result)
        computed, sampled = {}, []
        for slot, row in sorted(worker.rows.items()):
            slot_version, start, num_tokens = before.get(slot, (-1, 0, 0))
            if slot_version != row.new.slot_version:
                start, num_tokens = row.new.num_computed_tokens, len(row.new.token_ids)
            if row.num_computed > start:
                num_guessed = max(len(row.tokens) - num_tokens - 1, 0)
                computed[slot] = (row.num_computed - num_guessed - start, row.num_computed - num_guessed)
                num_prefill_tokens += max(min(row.num_computed, len(row.new.token_ids)) - start, 0)
                sampled += [slot] * (len(row.tokens) - num_tokens)
        columns = (followed.slots, followed.query_lens, followed.seq_lens)
        assert {s: (n, end) for s, n, end in zip(*(c.tolist() for c in columns), strict=True)} == computed
        assert np.repeat(followed.slots, followed.token_counts).tolist() == sampled
        num_steps += 1
    assert run.engine.scheduler.counters.num_preemptions > 0
    run.engine.close()
    steps = list(read_measured_steps(tmp_path))
    assert len(steps) == num_steps
    assert sum(step.work.num_prefill_tokens for step in steps) == num_prefill_tokens
    total = sum(step.work.num_prefill_tokens + step.work.num_decode_rows for step in steps)
    num_scheduled = run.engine.scheduler.counters.num_scheduled_tokens
    assert total == num_scheduled if limit == 1 else total < num_scheduled, "guesses are not among them"


def test_a_measured_step_has_its_time_and_unanswered_ones_are_left_out(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path).start()
    run.submit(make_prompt(20), sampling={"max_tokens": 3, "ignore_eos": True})
    run.plan()
    run.plan()
    run.lose_worker()
    run.connect()
    execute = run.runner.execute

    def timed(plan: Any) -> Any:
        result = execute(plan)
        object.__setattr__(result, "timings", StepTimings(1000, 20_000, 300, 7))
        return result

    run.runner.execute = timed
    run.run().engine.close()
    measured = list(read_measured_steps(tmp_path))
    assert [step.compute_ns for step in measured] == [21_300] * 3
    assert [step.work for step in measured] == [StepWork(20, 0, 20), StepWork(0, 1, 21), StepWork(0, 1, 22)]


def test_rows_are_named_by_what_they_hold(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path).start()
    run.submit([1, 2, 3])
    run.submit([1, 2, 3])  # another seed
    run.run(2).engine.close()
    names = RowNames()
    for event in read_journal(tmp_path / f"engine-0-1763700000000{JOURNAL_SUFFIX}"):
        match event.what:
            case Submitted(_, request):
                names.note_submit(request)
            case Planned(plan) if plan is not None:
                names.note_rows(plan.new_rows)
    assert [names.in_slot(slot) for slot in range(3)] == ["1-1", "1-2", "no request"]


def test_a_damaged_table_is_refused() -> None:
    event = journal_pb2.JournalEvent(at_s=1.0)
    event.step.chunk_slots = bytes(4)
    with pytest.raises(ProtocolViolation, match="chunk_slots 1, chunk_lengths 0"):
        event_from_bytes(event.SerializeToString())
