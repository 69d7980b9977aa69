"""Predicts when a request that came now would have its first token, from what the engine has measured."""

from __future__ import annotations

from triptych.config import SchedulerConfig
from triptych.types.outputs import LoadReport
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.pace import StepPace
from triptych_services.enginecore.scheduler.planner import LONG_SHARE, max_short_tokens
from triptych_services.enginecore.scheduler.request_states import RequestStates

_MIN_STEPS = 16  # measured before anything is predicted
_ADMISSION_WEIGHT = 0.05  # of the latest admission in the share of tokens that the cache does not hold
_RUN_WEIGHT = 0.1  # of the latest run in the moving average: it forgets half within 7 endings
_INTERVAL_WEIGHT = 0.05  # of the latest step in the moving average between two results
_LEAST_SHARE = 1 / 8  # of a full step: smaller ones say little of what a token of a prompt costs
_UNMEASURED_S = 1.0  # between two endings, before any request has ended
_MIN_RETRY_S, _MAX_RETRY_S = 0.05, 30.0  # that a client refused for a full queue is asked to wait


class EndingPace:
    """How often a row becomes free. n rows of requests that run for t seconds free n / t rows a second (Little's law).

    So an hour without requests changes nothing, and the first burst after it is judged by what ran before.
    """

    def __init__(self) -> None:
        self._run_s: float | None = None
        self._num_refused = 0

    def note_ending(self, ran_s: float | None) -> None:
        """Take in that a request has ended.

        Args:
            ran_s: Seconds since its first admission; None if it never ran.
        """
        self._num_refused = 0
        if ran_s is not None:
            average = ran_s if self._run_s is None else self._run_s
            self._run_s = average + _RUN_WEIGHT * (ran_s - average)

    def interval_s(self, num_rows: int) -> float | None:
        """Return the seconds from one ending to the next while `num_rows` run; None before any request has ended."""
        return None if self._run_s is None else self._run_s / num_rows

    def refuse(self, num_rows: int) -> float:
        """Return the seconds after which one more refused client may find a place.

        The k-th client refused since the last ending is asked to come back after k intervals, so that they do not all
        return at once.
        """
        self._num_refused += 1
        interval = self.interval_s(num_rows)
        retry_after_s = self._num_refused * (_UNMEASURED_S if interval is None else interval)
        return min(max(retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S)


class StepInterval:
    """The moving average of the time between two results while steps follow each other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """0: nothing was measured."""
        self._last_result_at: float | None = None

    def note_result(self, now: float, *, is_last: bool) -> None:
        """Take in that a result has come. `is_last`: no further one is due."""
        if self._last_result_at is not None:
            interval = now - self._last_result_at
            self.seconds += _INTERVAL_WEIGHT * (interval - self.seconds) if self.seconds else interval
        self._last_result_at = None if is_last else now

    def note_idle(self) -> None:
        """Take in that no result is due."""
        self._last_result_at = None


class FirstTokenForecast:
    """Predicts the wait for a first token. The admission owns it; it moves no request.

    It is optimistic: requests still to come and preemptions cost nothing, and the waits for a row and for the token
    budget overlap. How long requests will run is taken from those that ended lately.
    """

    def __init__(self, config: SchedulerConfig, *, num_stages: int = 1) -> None:
        """
        Args:
            num_stages: Steps among which the rows that decode are divided.
        """
        self._num_stages = num_stages
        self.steps = StepPace()
        self.endings = EndingPace()
        self._budget = config.max_num_batched_tokens
        self._max_per_request = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._max_short = max_short_tokens(config)
        self._computed_share = 1.0

    def note_admitted(self, num_tokens: int, num_computed_tokens: int) -> None:
        """Take in that a request was admitted for the first time.

        Args:
            num_tokens: Tokens of the request.
            num_computed_tokens: Tokens among them that the cache held.
        """
        share = 1.0 - num_computed_tokens / num_tokens
        self._computed_share += _ADMISSION_WEIGHT * (share - self._computed_share)

    def wait_s(self, request: Request, states: RequestStates) -> float | None:
        """Return the seconds to the first token of a request that has not been added yet.

        None where nothing can be said: too few steps are measured, or the engine is idle. Then the request is tried in
        any case, so a wrong measurement corrects itself.
        """
        if self.steps.num_steps < _MIN_STEPS or not len(states.index):
            return None
        num_ahead, num_tokens_ahead = self._ahead_of(request, states)
        num_running = len(states.rows.slot_to_request)
        num_beside = -(-num_running // self._num_stages)  # rows of each step
        num_short, num_long = self._prefilling(request, states)
        num_hits = len(states.cached_blocks(request)) * states.blocks.block_size
        num_own = max(len(request.token_ids) - num_hits, 1)
        for_budget = self._prefill_s(num_short + num_long + num_tokens_ahead + num_own, num_beside)
        if num_long and num_own <= self._max_short:
            for_budget = min(
                for_budget, self._beside_long_s(num_tokens_ahead + num_own, num_beside + num_short)
            )
        num_endings = max(num_running + num_ahead + 1 - states.num_usable_rows, 0)
        for_row = num_endings * (self.endings.interval_s(states.num_usable_rows) or 0.0)
        return max(for_budget, for_row + self._chunks_s(num_own, num_beside))

    def measure_load(self, states: RequestStates) -> LoadReport:
        """Return what any new request would wait for, in figures that a frontend can add its own to."""
        rows, steps = states.rows, self.steps
        num_running, num_waiting = len(rows.slot_to_request), len(states.waiting)
        wanted = rows.wanted(rows.running_order())
        num_here = states.shares.num_waiting_tokens - states.transfers.pulls.num_tokens
        num_tokens = round(num_here * self._computed_share)
        num_tokens += states.waiting.num_returning_tokens + int(wanted[wanted > 1].sum())
        is_measured = steps.num_steps > 0
        knows_prompts = steps.largest >= self._budget * _LEAST_SHARE
        return LoadReport(
            num_prefill_tokens=num_tokens,
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=states.blocks.pool.num_free,
            num_free_rows=states.num_usable_rows - num_running - num_waiting,
            prefill_token_s=steps.seconds(self._budget) / self._budget if knows_prompts else 0.0,
            decode_step_s=steps.seconds(max(num_running, 1)) if is_measured else 0.0,
            row_interval_s=self.endings.interval_s(states.num_usable_rows) or 0.0,
        )

    def prefill_s(self, num_tokens: int) -> float | None:
        """Return the seconds to compute `num_tokens` of one prompt; None: too few steps are measured."""
        if self.steps.num_steps < _MIN_STEPS:
            return None
        return self._chunks_s(max(num_tokens, 1), 0)

    def _ahead_of(self, request: Request, states: RequestStates) -> tuple[int, int]:
        """Return the requests that are admitted before this one, and how many of their tokens must be computed."""
        states.shares.settle(states.rows)
        num_requests, num_tokens = states.shares.ahead_of(request.head.priority, request.head.tenant)
        num_returning, num_returning_tokens = states.waiting.returning_ahead(request.head.priority)
        num_requests += num_returning
        num_tokens = round(num_tokens * self._computed_share) + num_returning_tokens
        for preempted in states.draining.values():
            if preempted.head.priority <= request.head.priority:
                num_requests += 1
                num_tokens += len(preempted.token_ids)
        return num_requests, num_tokens

    def _prefilling(self, request: Request, states: RequestStates) -> tuple[int, int]:
        """Return the prompt tokens that running requests still want.

        Returns:
            Tokens of short prompts, and tokens of the long prompts that are as urgent as this request at least.
        """
        slots = states.rows.running_order()
        wanted = states.rows.wanted(slots)
        is_long = wanted > self._max_short
        num_long = 0
        for slot, count in zip(slots[is_long].tolist(), wanted[is_long].tolist(), strict=True):
            if states.rows.slot_to_request[slot].head.priority <= request.head.priority:
                num_long += count
        return int(wanted[(wanted > 1) & ~is_long].sum()), num_long

    def _beside_long_s(self, num_tokens: int, num_others: int) -> float:
        """Return the seconds to compute `num_tokens` in the part of each step that long prompts leave."""
        room = max((self._budget - num_others) // LONG_SHARE, 1)
        return -(-num_tokens // room) * self.steps.seconds(self._budget)

    def _prefill_s(self, num_tokens: int, num_decoding: int) -> float:
        """Return the seconds to compute `num_tokens` of prompts beside rows that decode."""
        room = max(self._budget - num_decoding, 1)
        num_full, rest = divmod(num_tokens, room)
        last_s = self.steps.seconds(num_decoding + rest) if rest else 0.0
        return num_full * self.steps.seconds(self._budget) + last_s

    def _chunks_s(self, num_tokens: int, num_decoding: int) -> float:
        """Return the seconds to compute `num_tokens` of one request, which may take only a part of each step."""
        chunk = min(max(self._budget - num_decoding, 1), self._max_per_request)
        num_full, rest = divmod(num_tokens, chunk)
        last_s = self.steps.seconds(num_decoding + rest) if rest else 0.0
        return num_full * self.steps.seconds(num_decoding + chunk) + last_s
