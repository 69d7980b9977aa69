"""Requests whose frontend is gone: another session goes on with them, or they end after their time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.helpers.stack import NaiveRunner, make_config
from triptych.types.outputs import FinishReason, OutputBatch
from triptych.types.sampling import SamplingParams
from triptych.types.step import RequestGuesses
from triptych.types.submit import AttachRequest, RequestHead, SubmitRequest
from triptych_services.enginecore.engine import EngineCore

OLD, NEW, NEWEST = 1, 2, 3
SECRET = b"0123456789abcdef"
KEEP_S = 10.0


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An engine with a naive worker, and what each session has heard."""

    def __init__(self, max_kept_bytes: int = 1 << 20, max_samples_per_row: int = 1) -> None:
        config = make_config()
        config = replace(config, engine=replace(config.engine, max_kept_bytes=max_kept_bytes))
        self.time = Time()
        self.engine = EngineCore(config, self.time)
        self.runner = NaiveRunner(config, 200, 512, max_samples_per_row)
        self.heard: dict[int, list[OutputBatch]] = {}
        for session in (OLD, NEW, NEWEST):
            self.engine.frontends.open_session(session)
        self.engine.worker_ready(self.runner.facts, after_crash=False)

    def submit(
        self, numbers: Sequence[int] = (1,), *, session: int = OLD, secret: bytes = SECRET, **fields: Any
    ) -> None:
        sampling = fields.pop("sampling", SamplingParams(max_tokens=20, ignore_eos=True, n=len(numbers)))
        self.engine.frontends.submit(
            session,
            SubmitRequest(
                head=RequestHead(f"r{numbers[0]}-{session}", tenant=fields.pop("tenant", "")),
                numbers=np.array(numbers, np.uint32),
                seeds=np.arange(1, len(numbers) + 1, dtype=np.uint64),
                prompt_token_ids=np.array([1, 2, 3], np.uint32),
                sampling=sampling,
                keep_ms=fields.pop("keep_ms", int(KEEP_S * 1000)),
                resume_secret=secret,
                frontend_state=b"state",
                **fields,
            ),
        )

    def attach(
        self,
        numbers: Sequence[int] = (11,),
        seen: Sequence[int] = (0,),
        *,
        session: int = NEW,
        secret: bytes = SECRET,
        tenant: str | None = None,
    ) -> None:
        wish = AttachRequest(secret, numbers[0], len(numbers), dict(enumerate(seen)), tenant)
        self.engine.frontends.attach(session, wish)

    def run(self, num_steps: int = 1 << 30) -> None:
        for _ in range(num_steps):
            self.engine.expire()
            if (plan := self.engine.plan()) is None:
                break
            self.engine.apply(self.runner.execute(plan))
        self.take()

    def take(self) -> None:
        for session, batch in self.engine.take_outputs().items():
            self.heard.setdefault(session, []).append(batch)

    def tokens(self, session: int, number: int) -> list[int]:
        found = []
        for batch in self.heard.get(session, ()):
            found += batch.token_ids[batch.owners == number].tolist()
        return found

    def ends(self, session: int) -> dict[int, FinishReason]:
        return {end.number: end.reason for batch in self.heard.get(session, ()) for end in batch.finished}

    def failures(self, session: int) -> dict[int, str]:
        return {end.number: end.code for batch in self.heard.get(session, ()) for end in batch.failures}

    def attached(self, session: int) -> SubmitRequest:
        (found,) = [each for batch in self.heard[session] for each in batch.attached]
        return found

    def check_all_back(self) -> None:
        assert self.engine.num_requests == 0
        assert self.engine.scheduler is not None
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.snapshot().num_used_blocks == 0


def unbroken(numbers: Sequence[int] = (1,), **fields: Any) -> list[list[int]]:
    bench = Bench()
    bench.submit(numbers, **fields)
    bench.run()
    return [bench.tokens(OLD, number) for number in numbers]


@pytest.mark.parametrize("num_steps", [0, 1, 7, 19, 30])
@pytest.mark.parametrize("is_lost", [True, False])
def test_another_session_goes_on_at_every_place(num_steps: int, is_lost: bool) -> None:
    bench = Bench()
    bench.submit([1, 2, 3])
    bench.run(num_steps)
    seen = [len(bench.tokens(OLD, number)) // 2 for number in (1, 2, 3)]
    if is_lost:
        bench.engine.frontends.detach_session(OLD)
        bench.run(3)
    bench.attach([11, 12, 13], seen)
    bench.run()
    attached = bench.attached(NEW)
    assert (attached.numbers.tolist(), attached.frontend_state) == ([11, 12, 13], b"state")
    assert attached.prompt_token_ids.tolist() == [1, 2, 3]
    for number, emitted, whole in zip((11, 12, 13), attached.emitted, unbroken([1, 2, 3]), strict=True):
        assert emitted.tolist() + bench.tokens(NEW, number) == whole
    assert bench.ends(NEW) == dict.fromkeys((11, 12, 13), FinishReason.LENGTH)
    bench.check_all_back()


def test_counts_of_guesses_come_with_a_request() -> None:
    bench = Bench(max_samples_per_row=4)
    bench.submit((1, 2), guesses=RequestGuesses.of({2: (7, 9)}))
    bench.run(4)
    counts = {
        number: told for b in bench.heard[OLD] if b.guesses for number, told in b.guesses.by_number.items()
    }
    assert counts.keys() == {1, 2}
    bench.attach((11, 12), (1, 1))
    bench.run()
    guesses = bench.attached(NEW).guesses
    assert guesses is not None
    assert guesses.by_number == {11: counts[1], 12: counts[2]}
    ends = {end.number: end.timings for batch in bench.heard[NEW] for end in batch.finished}
    assert ends[12].num_accepted_guesses > counts[2][0] >= 7
    assert ends[12].num_rejected_guesses >= counts[2][1] >= 9
    bench.check_all_back()


def test_a_session_that_is_cut_off_hears_so_once_and_cannot_abort() -> None:
    bench = Bench()
    bench.submit([1, 2])
    bench.run(5)
    bench.attach([11, 12], [0, 0])
    bench.take()
    assert bench.failures(OLD) == dict.fromkeys((1, 2), "ATTACHED_ELSEWHERE")
    bench.engine.frontends.abort(OLD, 1)
    bench.engine.frontends.stop(OLD, 2)
    bench.attach([21, 22], [4, 4], session=NEWEST)  # the last one wins
    bench.run(3)
    bench.engine.frontends.close_session(OLD)
    bench.engine.frontends.close_session(NEW)
    bench.run()
    assert bench.failures(NEW) == dict.fromkeys((11, 12), "ATTACHED_ELSEWHERE")
    assert bench.ends(NEWEST) == dict.fromkeys((21, 22), FinishReason.LENGTH)
    whole = unbroken([1, 2])
    assert [tokens[4:] for tokens in whole] == [bench.tokens(NEWEST, number) for number in (21, 22)]
    bench.check_all_back()


def test_an_adopter_may_abort_stop_leave_and_die() -> None:
    for act in ("abort", "stop", "leave", "die"):
        bench = Bench()
        bench.submit([1])
        bench.run(3)
        bench.engine.frontends.detach_session(OLD)
        bench.attach()
        bench.run(3)
        match act:
            case "abort":
                bench.engine.frontends.abort(NEW, 11)
            case "stop":
                bench.engine.frontends.stop(NEW, 11)
            case "leave":
                bench.engine.frontends.close_session(NEW)
            case "die":
                bench.engine.frontends.detach_session(NEW)
        bench.run(2)
        bench.attach([21], session=NEWEST)
        bench.run()
        if act in ("abort", "leave"):
            assert bench.failures(NEWEST) == {21: "NOT_KEPT"}, act
        else:
            expected = FinishReason.ABORT if act == "stop" else FinishReason.LENGTH
            assert bench.ends(NEWEST) == {21: expected}, act
            assert bench.tokens(NEWEST, 21) == unbroken()[0][: 6 if act == "stop" else None], act
        bench.check_all_back()


@pytest.mark.parametrize(
    "change", [{"secret": b"x" * 16}, {"tenant": "other"}, {"numbers": [11, 12], "seen": [0, 0]}]
)
def test_a_wrong_secret_tenant_or_number_of_choices_finds_nothing(change: dict[str, Any]) -> None:
    bench = Bench()
    bench.submit(tenant="mine")
    bench.run(2)
    bench.attach(**change)
    bench.take()
    assert set(bench.failures(NEW).values()) == {"NOT_KEPT"}
    bench.attach([31], tenant="mine")
    bench.run()
    assert bench.tokens(NEW, 31) == unbroken()[0]


def test_more_tokens_than_there_are_is_an_error_and_changes_nothing() -> None:
    bench = Bench()
    bench.submit()
    bench.run(2)
    bench.attach(seen=[9])
    bench.run()
    assert bench.failures(NEW) == {11: "INVALID_REQUEST"}
    assert bench.ends(OLD) == {1: FinishReason.LENGTH}


def test_nobody_comes_back_and_the_blocks_do() -> None:
    bench = Bench()
    bench.submit([1, 2], sampling=SamplingParams(max_tokens=400, ignore_eos=True))
    bench.run(3)
    bench.engine.frontends.detach_session(OLD, lost_for_s=4.0)
    bench.time.now += KEEP_S - 4.1
    bench.run(1)
    assert bench.engine.num_requests == 2
    bench.time.now += 0.2
    bench.run(1)
    bench.check_all_back()
    bench.attach([11, 12], [0, 0])
    bench.take()
    assert bench.failures(NEW) == {11: "NOT_KEPT"}


def test_a_choice_that_is_detached_waits_with_its_request_for_another_reader() -> None:
    bench = Bench()
    bench.submit([1, 2])
    bench.submit([3], secret=b"y" * 16, keep_ms=0)
    bench.run(3)
    for number in (1, 2, 3):
        bench.engine.frontends.detach(OLD, number)
    bench.run(2)
    assert bench.ends(OLD) == {3: FinishReason.ABORT}, "it is not kept"
    bench.engine.frontends.close_session(OLD)
    bench.attach([11, 12], [3, 3])
    bench.run()
    assert [bench.tokens(NEW, number) for number in (11, 12)] == [tokens[3:] for tokens in unbroken([1, 2])]
    bench.check_all_back()


def test_a_late_detach_does_not_take_a_request_from_its_new_reader() -> None:
    bench = Bench()
    bench.submit([1])
    bench.run(3)
    bench.attach([11], [0])
    bench.engine.frontends.detach(OLD, 1)
    bench.engine.frontends.detach(NEW, 1)
    bench.run()
    assert bench.tokens(NEW, 11) == unbroken()[0]
    bench.check_all_back()


def test_a_detached_request_that_nobody_comes_for_ends() -> None:
    bench = Bench()
    bench.submit([1], sampling=SamplingParams(max_tokens=400, ignore_eos=True))
    bench.run(3)
    bench.engine.frontends.detach(OLD, 1)
    bench.time.now += KEEP_S + 0.1
    bench.run(1)
    bench.check_all_back()


def test_a_made_up_count_of_choices_is_refused_once() -> None:
    bench = Bench()
    bench.submit([1])
    bench.engine.frontends.attach(NEW, AttachRequest(b"made up", 100, 16_384))
    bench.engine.frontends.attach(NEW, AttachRequest(SECRET, 20_000, 1 << 31))
    bench.take()
    assert bench.failures(NEW) == {100: "NOT_KEPT", 20_000: "NOT_KEPT"}


def test_requests_that_are_not_to_be_kept_end_with_their_frontend() -> None:
    bench = Bench()
    bench.submit([1], keep_ms=0)
    bench.submit([2])
    bench.run(3)
    bench.engine.frontends.detach_session(OLD)
    assert bench.engine.num_requests == 1
    bench.engine.frontends.close_session(NEW)
    assert bench.engine.num_requests == 1


def test_an_end_that_nobody_has_fetched_is_kept_for_its_time() -> None:
    bench = Bench()
    bench.submit()
    bench.run()
    assert bench.ends(OLD) == {1: FinishReason.LENGTH}
    bench.time.now += KEEP_S / 2
    bench.engine.frontends.detach_session(OLD)
    bench.attach(seen=[18])
    bench.take()
    assert bench.tokens(NEW, 11) == unbroken()[0][18:]
    assert bench.ends(NEW) == {11: FinishReason.LENGTH}
    bench.time.now += KEEP_S + 1
    bench.attach([21], session=NEWEST)
    bench.take()
    assert bench.failures(NEWEST) == {21: "NOT_KEPT"}


def test_an_end_is_let_go_when_its_time_is_over_though_nothing_else_happens() -> None:
    bench = Bench()
    ended_at = bench.time.now
    bench.submit()
    bench.run()
    bench.time.now += 1.0
    bench.take()
    assert bench.engine.next_due_at == ended_at + KEEP_S
    bench.time.now = bench.engine.next_due_at
    bench.engine.expire()
    assert bench.engine.next_due_at == math.inf


def test_what_is_too_much_to_be_kept_goes_in_the_order_of_its_time() -> None:
    bench = Bench(max_kept_bytes=4000)
    secrets = [bytes([i]) * 16 for i in range(20)]
    for number, secret in enumerate(secrets):
        bench.submit([number], secret=secret)
        bench.run()
        bench.time.now += 0.1
    bench.engine.expire()
    codes = []
    for number, secret in enumerate(secrets):
        bench.attach([100 + number], secret=secret)
        bench.take()
        codes.append(bench.failures(NEW).get(100 + number, "kept"))
    num_kept = codes.count("kept")
    assert 0 < num_kept < 20
    assert codes == ["NOT_KEPT"] * (20 - num_kept) + ["kept"] * num_kept


def test_an_engine_without_memory_for_it_keeps_nothing() -> None:
    bench = Bench(max_kept_bytes=0)
    bench.submit()
    bench.run(2)
    bench.engine.frontends.detach_session(OLD)
    bench.check_all_back()


def test_a_lost_worker_and_a_lost_frontend_at_once() -> None:
    bench = Bench()
    bench.submit([1, 2])
    bench.run(6)
    bench.engine.worker_lost()
    bench.engine.frontends.detach_session(OLD)
    bench.runner.reset()
    bench.attach([11, 12], [2, 3])
    bench.engine.worker_ready(bench.runner.facts, after_crash=True)
    bench.run()
    assert [bench.tokens(NEW, 11), bench.tokens(NEW, 12)] == [
        tokens[skip:] for tokens, skip in zip(unbroken([1, 2]), (2, 3), strict=True)
    ]
    bench.check_all_back()


def test_others_of_both_sessions_are_not_disturbed() -> None:
    bench = Bench()
    bench.submit([1])
    bench.submit([2], secret=b"2" * 16)
    bench.submit([1], session=NEW, secret=b"3" * 16)  # the same number elsewhere
    bench.run(5)
    bench.attach([11])
    bench.run()
    assert bench.ends(OLD) == {2: FinishReason.LENGTH}
    assert bench.ends(NEW) == dict.fromkeys((1, 11), FinishReason.LENGTH)
    whole = unbroken()[0]
    assert bench.tokens(OLD, 2) == bench.tokens(NEW, 1) == bench.tokens(NEW, 11) == whole
    bench.check_all_back()


def num_lines(call: Callable[..., None], *arguments: Any) -> int:
    """Return how many lines of Python a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)
    return count


def cost_of_a_loss(num_streams: int) -> tuple[int, int]:
    """Return the work of losing a frontend, and of going on with all its streams elsewhere."""
    bench = Bench()
    for number in range(1, num_streams + 1):
        bench.submit([number], secret=number.to_bytes(16, "little"))
    lost = num_lines(bench.engine.frontends.detach_session, OLD)
    attached = 0
    for number in range(1, num_streams + 1):
        wish = AttachRequest(number.to_bytes(16, "little"), number, 1)
        attached += num_lines(bench.engine.frontends.attach, NEW, wish)
    assert bench.engine.num_requests == num_streams
    bench.take()
    assert len(bench.heard[NEW][0].attached) == num_streams
    return lost, attached


def test_the_loss_of_a_frontend_takes_work_in_proportion_to_its_streams() -> None:
    few, many = cost_of_a_loss(50), cost_of_a_loss(400)
    assert many[0] < 10 * few[0]
    assert many[1] < 10 * few[1]
