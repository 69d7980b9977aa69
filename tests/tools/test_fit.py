"""`python -m tools.fit` on a journal whose times are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.in_process import InProcessEngine
from tests.worker.simulated import SleepingClock, simulated_device, simulated_runner
from tools.fit import main
from triptych.config.step_times import StepTimeModel, read_step_time_profile
from triptych.types.facts import WorkerFacts
from triptych.types.journal import JournalEvent, JournalHeader, Planned, ResultTaken, WorkerReady
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.wire.journal import event_to_bytes, framed, header_to_bytes
from triptych_services.worker.runner.base import CompletedStep, do_nothing

TIMES = StepTimeModel(base_ms=3, prefill_token_us=40, decode_row_us=9, context_token_ns=700)


class RecordingRunner:
    """A simulated worker on a clock of its own, and the journal of its steps."""

    def __init__(self) -> None:
        self._runner = simulated_runner(device=simulated_device(TIMES, SleepingClock()))
        self.journal = framed(header_to_bytes(JournalHeader("e", 1, "0", {})))
        self._record(WorkerReady(self.facts, after_crash=False))

    @property
    def facts(self) -> WorkerFacts:
        return self._runner.facts

    def reset(self) -> None:
        self._runner.reset()

    def execute(self, plan: StepPlan) -> StepResult:
        self._record(Planned(plan))
        result = self._runner.execute(plan)
        self._record(ResultTaken(result))
        return result

    def prepare(self, plan: StepPlan) -> None:
        pass

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> CompletedStep:
        on_prepared()
        return CompletedStep(self.execute(plan))

    def _record(self, what: WorkerReady | Planned | ResultTaken) -> None:
        self.journal += framed(event_to_bytes(JournalEvent(0.0, what)))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    runner, rng = RecordingRunner(), np.random.default_rng(5)
    prompts = [rng.integers(0, 200, length).tolist() for length in (3, 90, 7, 41, 1, 60, 16, 33)]
    engine = InProcessEngine(runner, num_blocks=60, max_num_batched_tokens=50)
    engine.generate(prompts, SamplingParams(max_tokens=30))
    assert engine.scheduler.counters.num_preemptions
    path = tmp_path / "e-1.journal"
    path.write_bytes(runner.journal)
    return path


def test_a_recorded_run_gives_the_times_that_it_was_made_with(journal, capsys):
    profile = journal.parent / "times.json"
    assert main([str(journal), "--output", str(profile)]) == 0
    model = read_step_time_profile(profile)
    for name in ("base_ms", "prefill_token_us", "decode_row_us", "context_token_ns"):
        assert getattr(model, name) == pytest.approx(getattr(TIMES, name), rel=1e-6)
    about = json.loads(profile.read_text())["about"]
    assert about["median_error"] == 0
    assert f"{about['num_steps']} steps, predicted within 0.0%" in capsys.readouterr().out


def test_what_is_no_journal_is_told_in_one_line(tmp_path, capsys):
    path = tmp_path / "x.journal"
    path.write_text("hello")
    assert main([str(path), "--output", str(tmp_path / "y")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tools.fit: ")
    assert told.count("\n") == 1
