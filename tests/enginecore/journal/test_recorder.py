"""The step journal: what is recorded, how it is replayed, and that recording never hurts serving."""

from __future__ import annotations

import errno
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.journals import SESSION, STARTED_AT_MS, RecordedRun, doctor, replayed
from tests.helpers.scheduling import Clock, make_prompt
from tests.helpers.stack import make_config
from tools.replay import __main__ as replay_command
from triptych.errors import ConfigError, TriptychError, WrongState
from triptych.types.facts import EngineStatus, PauseMode
from triptych.types.journal import Aborted, Closed, Expired, JournalEvent, Planned, ResultTaken, Submitted
from triptych.types.kv_transfer import KvProgress
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import AttachRequest, single_choice
from triptych.wire.journal import (
    JOURNAL_SUFFIX,
    JOURNAL_VERSION,
    JournalReader,
    header_to_bytes,
    read_journal,
)
from triptych_services.enginecore.engine import EngineCore, RequestedAdapters
from triptych_services.enginecore.frontends.requests import FrontendRequests
from triptych_services.enginecore.journal import recorder as journal_file
from triptych_services.enginecore.journal.recorder import create_engine
from triptych_services.enginecore.scheduler.scheduler import Scheduler

FILE = f"engine-0-{STARTED_AT_MS}{JOURNAL_SUFFIX}"
CALLED_BY_THE_ENGINE = {"note_failed", "note_finished", "serve_with"}
READ_ONLY = {
    "attach",
    "close",
    "in_use",
    "priorities",
    "refuse",
    "release",
    "running",
    "status",
    "take_outputs",
    "tenants",
}
"""Public methods of an engine core that change nothing but outputs."""

prompts = st.builds(make_prompt, st.integers(15, 60), st.integers(0, 3))
sessions = st.integers(1, 2)
submits = st.tuples(
    st.just("submit"),
    sessions,
    prompts,
    st.fixed_dictionaries(
        {
            "sampling": st.fixed_dictionaries(
                {"max_tokens": st.integers(1, 40)}, optional={"stop_token_ids": st.just((3, 4, 5))}
            )
        },
        optional={
            "priority": st.integers(-1, 1),
            "tenant": st.sampled_from(["", "a", "b", "c"]),
            "cache_salt": st.sampled_from(["", "salt"]),
            "deadline_remaining_ms": st.integers(0, 60),
        },
    ),
)
turns = st.tuples(st.just("turns"), st.integers(0, 12))
incidents = st.one_of(
    st.tuples(st.just("plan")),
    st.tuples(st.just("finish_step")),
    st.tuples(st.just("abort"), sessions, st.integers(1, 6)),
    st.tuples(st.just("wait"), st.floats(0, 0.1)),
    st.tuples(st.just("lose_worker"), st.booleans()),
    st.tuples(st.just("pause"), st.sampled_from(list(PauseMode))),
    st.tuples(st.just("reset")),
    st.tuples(st.just("close_session"), sessions),
)
scenes = st.tuples(submits, submits, turns, submits, incidents, turns)


def carry_out(run: RecordedRun, action: tuple[Any, ...]) -> None:
    engine = run.engine
    match action:
        case ("submit", session, prompt, fields):
            run.submit(prompt, session, **fields)
        case ("turns", count):
            run.run(count)
        case ("plan",):
            run.plan()
        case ("finish_step",):
            run.finish_step()
        case ("abort", session, number):
            engine.frontends.abort(session, number)
        case ("wait", seconds):
            run.clock.now += seconds
        case ("lose_worker", is_crash):
            run.lose_worker()
            run.submit([1, 2, 3])
            engine.expire()
            run.connect(after_crash=is_crash)
        case ("pause", mode):
            engine.pause(mode)
            run.run(3)
            engine.resume()
        case ("reset",):
            with suppress(WrongState):  # blocks are in use
                engine.reset_prefix_cache()
        case ("close_session", session):
            engine.frontends.close_session(session)
            run.submit([1, 2, 3], session)
            engine.frontends.open_session(session)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=st.lists(scenes, min_size=2, max_size=12),
    policy=st.sampled_from(["fcfs", "priority"]),
    limit=st.sampled_from([1, 4]),
    num_stages=st.sampled_from([1, 1, 3]),
)
def test_whatever_happened_happens_again(
    tmp_path_factory: Any, script: list[Any], policy: str, limit: int, num_stages: int
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    run = RecordedRun(directory, policy=policy, max_samples_per_row=limit, num_stages=num_stages).start()
    run.engine.frontends.open_session(2)
    for scene in script:
        for action in scene:
            carry_out(run, action)
    run.run().engine.close()
    result = replayed(directory)
    assert result.divergence is None, result
    assert result.ending == "the recording ended: the engine stopped"


def crowded(directory: Path, **options: Any) -> RecordedRun:
    """Run requests with preemptions, aborts, deadlines and a loss of the worker."""
    run = RecordedRun(directory, **options).start()
    for number in range(6):
        run.submit(make_prompt(20 + number, number), sampling={"max_tokens": 40, "ignore_eos": True})
    run.submit(make_prompt(9), deadline_remaining_ms=20)
    run.run(15)
    run.engine.frontends.abort(SESSION, 2)
    run.run(15)
    run.lose_worker()
    run.connect(after_crash=True)
    return run.run()


def test_a_run_with_everything_in_it_replays_exactly(
    tmp_path: Path,
) -> None:
    run = crowded(tmp_path)
    counters = run.engine.scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.num_finished == {"stop": 0, "length": 5, "repetition": 0, "abort": 1, "error": 1}
    run.engine.close()
    result = replayed(tmp_path)
    assert str(result) == (
        f"{counters.num_steps} steps, 7 requests: no divergence (the recording ended: the engine stopped)"
    )


class Events(list[JournalEvent]):
    """An engine's listener that keeps what it hears."""

    state = "recording"
    num_bytes = oldest_at_ms = 0

    def on_event(self, event: JournalEvent) -> None:
        self.append(event)

    def close(self, at_s: float) -> None:
        pass


CALLS: dict[str, Callable[[RecordedRun, EngineCore], object]] = {
    "abort": lambda run, engine: engine.frontends.abort(SESSION, 1),
    "apply": lambda run, engine: engine.apply(StepResult(1, np.zeros(0, np.uint32))),
    "close_session": lambda run, engine: engine.frontends.close_session(SESSION),
    "detach": lambda run, engine: engine.frontends.detach(SESSION, 1),
    "detach_session": lambda run, engine: engine.frontends.detach_session(SESSION),
    "expire": lambda run, engine: engine.expire(),
    "fail": lambda run, engine: engine.adapters.fail("a", "gone"),
    "keep_waiting": lambda run, engine: engine.adapters.keep_waiting(("a",)),
    "note_kv_progress": lambda run, engine: engine.note_kv_progress(KvProgress()),
    "open_session": lambda run, engine: engine.frontends.open_session(SESSION),
    "pause": lambda run, engine: engine.pause(PauseMode.KEEP),
    "plan": lambda run, engine: engine.plan(),
    "reset_prefix_cache": lambda run, engine: engine.reset_prefix_cache(),
    "resume": lambda run, engine: engine.resume(),
    "stop": lambda run, engine: engine.frontends.stop(SESSION, 1),
    "submit": lambda run, engine: engine.frontends.submit(SESSION, SUBMIT),
    "worker_lost": lambda run, engine: engine.worker_lost(),
    "worker_refused": lambda run, engine: engine.worker_refused("another model"),
    "worker_ready": lambda run, engine: engine.worker_ready(run.runner.facts, after_crash=False),
}
"""Every public method of an engine core that can change it."""
SUBMIT = single_choice(1, "1", [1, 2, 3], SamplingParams(max_tokens=2), seed=1)


def test_every_public_method_of_an_engine_is_known() -> None:
    methods = {
        name
        for owner in (EngineCore, FrontendRequests, RequestedAdapters)
        for name, _ in inspect.getmembers(owner, inspect.isfunction)
        if name[0] != "_"
    }
    known = CALLS.keys() | READ_ONLY | CALLED_BY_THE_ENGINE
    assert methods == known, "a new method emits an event, or is read-only"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_can_change_an_engine_is_an_event(name: str, tmp_path: Path) -> None:
    run, events = RecordedRun(tmp_path), Events()
    engine = EngineCore(make_config(), run.clock, events)
    engine.worker_ready(run.runner.facts, after_crash=False)
    engine.frontends.open_session(SESSION)
    engine.frontends.submit(SESSION, SUBMIT)
    events.clear()
    with suppress(TriptychError):
        CALLS[name](run, engine)
    [event] = events
    assert event.at_s == run.clock.now


def test_without_a_path_nothing_is_recorded() -> None:
    engine = create_engine(make_config(), STARTED_AT_MS)
    assert engine.status(ready=False, why_not_ready="", steps_in_flight=1).journal == "off"


def test_no_other_user_may_read_a_journal(tmp_path: Path) -> None:
    RecordedRun(tmp_path).start().engine.close()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_an_engine_that_waits_for_its_worker_writes_nothing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path).start()
    run.engine.plan()  # flushes
    size = (tmp_path / FILE).stat().st_size
    for _ in range(10):
        run.engine.expire()
        run.engine.plan()
    assert (tmp_path / FILE).stat().st_size == size


def test_time_stands_still_within_a_call(tmp_path: Path) -> None:
    """A request could expire between two readings, and not when it is replayed."""
    run = RecordedRun(tmp_path).start()
    readings = []

    class MovingClock(Clock):
        """Time that moves whenever it is read."""

        def __call__(self) -> float:
            self.now += 0.01
            readings.append(self.now)
            return self.now

    run.clock = MovingClock()
    run.submit([1, 2], deadline_remaining_ms=25)
    assert len(readings) == 1
    [request] = run.engine.scheduler.snapshot().requests
    assert request.queued_at == readings[0]
    assert request.deadline == readings[0] + 0.025


def test_the_first_difference_names_field_time_and_request(tmp_path: Path) -> None:
    run = crowded(tmp_path)
    run.engine.close()
    events = list(read_journal(tmp_path))
    index, event = next(
        (i, event)
        for i, event in enumerate(events)
        if isinstance(event.what, Planned) and event.what.plan is not None and len(event.what.plan.block_ids)
    )
    plan = event.what.plan
    blocks = plan.block_ids.copy()
    blocks[0] += 1
    slot = int(plan.block_slots[0])

    def change(events: list[JournalEvent]) -> list[JournalEvent]:
        events[index] = replace(event, what=Planned(replace(plan, block_ids=blocks)))
        return events

    doctor(tmp_path, change)
    result = replayed(tmp_path)
    divergence = result.divergence
    assert divergence is not None
    assert divergence.event_number == index + 1
    assert divergence.at_s == pytest.approx(event.at_s - events[0].at_s)
    assert divergence.what == f"step {plan.step_id} is not what it was"
    [detail] = divergence.details
    assert detail.startswith(f"block_ids[0]: recorded {blocks[0]}")
    assert f"now {plan.block_ids[0]}" in detail
    assert divergence.requests == (f"1-{slot + 1}",)  # the first to come got the lowest slots


def test_a_changed_input_shows_at_the_first_step_that_it_changes(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path).start()
    for seed in range(2):
        run.submit(make_prompt(9, seed), sampling={"ignore_eos": True})
    run.run(3)
    run.engine.frontends.abort(SESSION, 2)
    run.run().engine.close()

    def without_the_abort(events: list[JournalEvent]) -> list[JournalEvent]:
        return [event for event in events if not isinstance(event.what, Aborted)]

    doctor(tmp_path, without_the_abort)
    divergence = replayed(tmp_path).divergence
    assert divergence is not None
    assert divergence.details[0] == "removed_slots[0]: recorded 1, now nothing"
    assert divergence.requests == ("1-2",)
    assert str(divergence).startswith(
        f"event {divergence.event_number}, {divergence.at_s:.6f} s after the first: "
    )


def test_a_step_that_is_missing_is_reported(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path).start()
    run.submit([1, 2, 3])
    run.run().engine.close()

    def without_the_request(events: list[JournalEvent]) -> list[JournalEvent]:
        return [event for event in events if not isinstance(event.what, Submitted)]

    doctor(tmp_path, without_the_request)
    divergence = replayed(tmp_path).divergence
    assert divergence is not None
    assert divergence.details == ("step: recorded step 1 of 3 tokens, now none",)


def test_an_engine_that_died_of_a_bug_dies_of_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path).start()
    run.submit([1, 2, 3])
    schedule = Scheduler.schedule

    def break_down(self: Scheduler) -> StepPlan | None:
        if self.num_in_flight:
            raise AssertionError("a block is lost")
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", break_down)
    assert run.plan()
    with pytest.raises(AssertionError):
        run.plan()
    run.engine.close()
    divergence = replayed(tmp_path).divergence
    assert divergence is not None
    assert divergence.what == "Planned raises AssertionError: a block is lost"


@pytest.mark.parametrize("cut", [1, 2, 7, 40])
def test_a_record_cut_off_by_a_crash_is_left_out(tmp_path: Path, cut: int) -> None:
    crowded(tmp_path).engine.close()
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-cut])
    result = replayed(tmp_path)
    assert result.divergence is None
    assert result.ending == (
        "the recording has no end: the engine died, or still runs; its last record is cut off"
    )


def test_whatever_has_been_written_so_far_can_be_read(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path).start()
    run.submit([1, 2, 3])
    run.run().plan()  # nothing left: the loop would sleep now
    result = replayed(tmp_path)
    assert result.num_steps == run.engine.scheduler.counters.num_steps
    assert result.ending == "the recording has no end: the engine died, or still runs"


def test_a_file_that_is_no_journal_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RecordedRun(tmp_path).start().engine.close()
    whole = (tmp_path / FILE).read_bytes()
    header_bytes = len(header_to_bytes(JournalReader(tmp_path).header)) + 2
    files = {
        "empty": b"",
        "text": b"The quick brown fox jumps over the lazy dog." * 9,
        "zeros": bytes(64),
        "cut": whole[: header_bytes - 1],
        "version": whole.replace(
            b"triptych-journal\x10" + bytes([JOURNAL_VERSION]), b"triptych-journal\x10\x63"
        ),
        "damaged": whole[:header_bytes] + b"\x03\xff\xff\xff" + whole[header_bytes:],
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nothing").mkdir()
    errors = {}
    for name in (*files, "absent", "nothing"):
        assert replay_command.main([str(tmp_path / name)]) == 2, name
        errors[name] = capsys.readouterr().err
    assert all("is no step journal" in errors[name] for name in ("empty", "text", "zeros", "cut"))
    assert f"has version 99, this triptych reads {JOURNAL_VERSION}" in errors["version"]
    assert f"is damaged at byte {header_bytes}" in errors["damaged"]
    assert "No such file" in errors["absent"]
    assert "no *.journal in this directory" in errors["nothing"]


def test_a_config_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    RecordedRun(tmp_path).start().engine.close()
    with JournalReader(tmp_path) as journal:
        header = replace(journal.header, config={**journal.header.config, "scheduler.warp": "9"})
    (tmp_path / FILE).write_bytes(journal_file.framed(header_to_bytes(header)))
    with pytest.raises(ConfigError, match=r"scheduler\.warp"):
        replayed(tmp_path)


class FullDisk(FileIO):
    """Takes 3,000 bytes."""

    num_written = 0

    def write(self, data: Any) -> int:
        self.num_written += len(data)
        if self.num_written > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_file, "FileIO", FullDisk)
    monkeypatch.setattr(journal_file, "BUFFER_BYTES", 512)
    caplog.set_level(logging.WARNING)
    run = crowded(tmp_path)
    run.engine.close()
    assert run.engine.num_requests == 0
    assert sum(run.engine.scheduler.counters.num_finished.values()) == 7
    assert run.engine.status(ready=True, why_not_ready="", steps_in_flight=2).journal == "failed"
    [record] = caplog.records
    assert "No space left on device; this run is recorded no further" in record.getMessage()
    assert replayed(tmp_path).divergence is None


def test_a_directory_that_cannot_be_made_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    run = crowded(tmp_path / "file" / "journal")
    run.engine.close()
    assert sum(run.engine.scheduler.counters.num_finished.values()) == 7
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_journal_ends_and_says_so_and_replays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    max_bytes = 8000
    run = crowded(tmp_path, max_bytes=max_bytes)
    assert run.engine.status(ready=True, why_not_ready="", steps_in_flight=2).journal == "full"
    run.engine.close()
    assert max_bytes - 1000 < (tmp_path / FILE).stat().st_size <= max_bytes
    assert sum("is reached" in record.getMessage() for record in caplog.records) == 1
    *_, last = read_journal(tmp_path)
    assert last.what == Closed("journal.max_bytes is reached")
    result = replayed(tmp_path)
    assert result.divergence is None
    assert 0 < result.num_steps < run.engine.scheduler.counters.num_steps


def test_journals_of_earlier_runs_make_room_oldest_first(tmp_path: Path) -> None:
    for start in (5, 30, 400):
        crowded(tmp_path, started_at_ms=start).engine.close()
    for other in ("engine-0-1", "engine"):
        RecordedRun(tmp_path, started_at_ms=1, engine_id=other).start().engine.close()
    size = (tmp_path / "engine-0-5.journal").stat().st_size
    run = crowded(tmp_path, started_at_ms=5000, max_bytes=3 * size + size // 2)
    run.engine.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "engine-0-30.journal",
        "engine-0-400.journal",
        "engine-0-5000.journal",
        "engine-0-1-1.journal",
        "engine-1.journal",
    }
    with JournalReader(tmp_path) as newest:
        assert newest.path.name == "engine-0-5000.journal"


def test_status_says_what_the_journals_take(tmp_path: Path) -> None:
    def status_of(run: RecordedRun) -> EngineStatus:
        return run.engine.status(ready=True, why_not_ready="", steps_in_flight=1)

    first = RecordedRun(tmp_path, started_at_ms=5)
    assert (status_of(first).journal_bytes, status_of(first).journal_oldest_at_ms) == (0, 0)
    first.start().engine.close()
    run = RecordedRun(tmp_path, started_at_ms=30).start()
    run.engine.close()
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    status = status_of(run)
    assert status.journal == "closed"
    assert status.journal_bytes == size
    assert status.journal_oldest_at_ms == 5


def test_the_journal_holds_each_call_once_and_in_order(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path).start()
    run.submit([1, 2, 3], sampling={"max_tokens": 2, "ignore_eos": True})
    run.run().engine.close()
    kinds = Counter(type(event.what) for event in read_journal(tmp_path))
    assert kinds[Submitted] == 1
    assert kinds[ResultTaken] == 2
    assert (
        sum(1 for event in read_journal(tmp_path) if isinstance(event.what, Planned) and event.what.plan) == 2
    )
    times = [event.at_s for event in read_journal(tmp_path)]
    assert times == sorted(times)
    assert kinds[Expired] > 0


def test_requests_that_change_frontends_replay_the_same(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path).start()
    run.engine.frontends.open_session(2)
    for number in range(4):
        secret = bytes([number]) * 16
        run.submit(make_prompt(20), sampling={"max_tokens": 30}, keep_ms=1000, resume_secret=secret)
    for _ in range(10):
        run.plan()
        run.finish_step()
    run.engine.frontends.detach_session(SESSION)
    for number in range(3):
        run.engine.frontends.attach(2, AttachRequest(bytes([number]) * 16, 11 + number, 1))
    run.plan()
    run.engine.frontends.abort(2, 11)
    run.engine.frontends.stop(2, 12)
    run.clock.now += 2.0  # nobody comes for the fourth
    run.run()
    run.engine.frontends.close_session(2)
    counters = run.engine.scheduler.counters
    assert counters.num_finished == {"stop": 0, "length": 1, "repetition": 0, "abort": 3, "error": 0}
    run.engine.close()
    assert "4 requests: no divergence" in str(replayed(tmp_path))
