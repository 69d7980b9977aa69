"""The steps of a session that the runner thread has launched, and the delivery of their results."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from triptych.errors import EngineFailure, TriptychError
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.runner.base import PendingStep, Runner
from triptych_services.worker.service.watchdog import StepClock

log = logging.getLogger(__name__)

Deliver = Callable[[StepResult | Exception], None]


class SessionSteps:
    """The steps of one session that have been launched; owned by the runner thread."""

    def __init__(
        self,
        runner: Runner,
        clock: StepClock,
        post: Callable[..., None],
        *,
        is_fatal: Callable[[Exception], bool],
    ) -> None:
        """
        Args:
            is_fatal: Whether nothing can be computed any more after this failure of a step.
        """
        self._runner = runner
        self._clock = clock
        self._post = post
        self._is_fatal = is_fatal
        self._deliver: Deliver | None = None
        self._launched: deque[_Launched] = deque()
        self._dropped: list[PendingStep] = []
        """Steps with results that go nowhere, and that the device may still compute."""
        self._on_open: Callable[[], None] | None = None
        """Called when they are done; None: the session knows, or there is none."""
        self._outcomes: list[tuple[Deliver, StepResult | Exception]] = []
        """Results and failures that have not been delivered, and who gets them."""

    @property
    def are_any(self) -> bool:
        return bool(self._launched) or self._on_open is not None

    @property
    def poll_s(self) -> float:
        """Seconds until the oldest step should be looked at again."""
        return self._dropped[0].poll_s if self._on_open is not None else self._launched[0].pending.poll_s

    def open(self, deliver: Deliver, on_open: Callable[[], None]) -> None:
        """A session begins; results of the steps of the one before that are in flight go nowhere."""
        self.drop()
        self._runner.reset()
        self._deliver, self._on_open = deliver, on_open
        self._note_open()

    def drop(self) -> None:
        """The session is over: results of its steps in flight go nowhere."""
        self.deliver()
        self._drop_launched()
        self._clock.abandon()
        self._deliver = self._on_open = None

    def launch(self, plan: StepPlan, idle_ns: int) -> None:
        """Begin a step and deliver what was done before; a failure is delivered behind the results before it."""
        if self._deliver is None:
            return  # rows are undefined until the next session resets them
        try:
            self._runner.prepare(plan)
            if not self._launched:
                self._clock.start(plan.step_id, plan.num_tokens)
            pending = self._runner.launch(plan, lambda: self._deliver_done(plan))
        except Exception as error:
            self.finish()
            self._fail(plan.step_id, error)
            return
        self._launched.append(_Launched(plan.step_id, plan.num_tokens, pending, idle_ns))
        self.deliver()
        self.collect_done()

    def deliver(self) -> None:
        """Hand what has been collected to the event loop."""
        for deliver, outcome in self._outcomes:
            self._post(deliver, outcome)
        self._outcomes.clear()

    def _deliver_done(self, plan: StepPlan) -> None:
        """Deliver what is done when a step is prepared: it may have waited for the tokens of an earlier one."""
        if self._launched:
            self.collect_done()
            if not self._launched:
                self._clock.start(plan.step_id, plan.num_tokens)
        self.deliver()

    def collect_done(self) -> None:
        """Collect results, oldest first, up to a step that is not done."""
        self._note_open()
        while self._launched and _is_done(self._launched[0].pending):
            self._collect_oldest()

    def finish(self) -> None:
        """Wait for all steps and deliver their results."""
        while self._launched:
            self._collect_oldest()
        self.deliver()

    def _collect_oldest(self) -> None:
        launched = self._launched.popleft()
        try:
            result = launched.pending.wait()
        except Exception as error:
            self._fail(launched.step_id, error)
            return
        self._watch_oldest()
        if self._deliver is not None:
            timings = replace(result.timings, idle_ns=launched.idle_ns)
            self._outcomes.append((self._deliver, replace(result, timings=timings)))

    def _fail(self, step_id: int, error: Exception) -> None:
        """End the session with this failure; what it has in flight is forgotten.

        Raises:
            Exception: the error itself, if it says that nothing can be computed any more.
        """
        self._drop_launched()
        self._watch_oldest()
        if self._deliver is not None:  # else a step before this one has failed
            log.error("step %d failed: %r", step_id, error, exc_info=error)
            is_known = isinstance(error, TriptychError)
            outcome = error if is_known else EngineFailure(f"step {step_id} failed: {error!r}")
            self._outcomes.append((self._deliver, outcome))
            self.deliver()
            self._deliver = None
        if self._is_fatal(error):
            raise error

    def _drop_launched(self) -> None:
        self._dropped += [launched.pending for launched in self._launched]
        self._launched.clear()

    def _note_open(self) -> None:
        """Report to a new session that it is open, once the device computes no step of an earlier one."""
        if self._on_open is None:
            return
        self._dropped = [pending for pending in self._dropped if not _is_done(pending)]
        if not self._dropped:
            self._post(self._on_open)
            self._on_open = None

    def _watch_oldest(self) -> None:
        """The step in hand is over; the one behind it has been computed on since."""
        self._clock.stop()
        if self._launched:
            self._clock.start(self._launched[0].step_id, self._launched[0].num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    step_id: int
    num_tokens: int
    pending: PendingStep
    idle_ns: int
    """Nanoseconds that the thread was idle before this step arrived."""


def _is_done(pending: PendingStep) -> bool:
    try:
        return pending.is_done()
    except RuntimeError:
        return True  # the device failed: `wait` says how
