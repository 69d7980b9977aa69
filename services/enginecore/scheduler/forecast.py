"""When a request that came now would have its first token."""

from __future__ import annotations

from services.enginecore.request import Request
from services.enginecore.scheduler.pace import EndingPace, StepPace
from services.enginecore.scheduler.request_states import RequestStates
from services.enginecore.scheduler.step_builder import LONG_SHARE, most_short
from triptych.config import SchedulerConfig

_LEAST_STEPS = 16  # measured before anything is predicted
_WEIGHT = 0.05  # of the latest admission in the share of tokens that the cache does not hold


class FirstTokenForecast:
    """Owned by the admission; nobody moves because of it.

    It leans towards hope: requests still to come and preemptions cost nothing, and rows and budget are waited
    for side by side. How long requests will run is taken from those that ended lately.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.steps = StepPace()
        self.endings = EndingPace()
        self._budget = config.max_num_batched_tokens
        self._most_per_request = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._most_short = most_short(config)
        self._computed_share = 1.0

    def note_admitted(self, num_tokens: int, num_computed_tokens: int) -> None:
        """A request was admitted for the first time; the cache held `num_computed_tokens` of its tokens."""
        share = 1.0 - num_computed_tokens / num_tokens
        self._computed_share += _WEIGHT * (share - self._computed_share)

    def wait_s(self, request: Request, states: RequestStates) -> float | None:
        """Seconds to the first token of a request that is not in the roster yet.

        None where nothing can be said: too few steps are measured, or the engine is idle. It tries whatever
        comes first then, and so a measurement that was wrong mends itself.
        """
        if self.steps.num_steps < _LEAST_STEPS or not len(states):
            return None
        num_ahead, num_tokens_ahead = self._ahead_of(request, states)
        num_running = len(states.rows.slot_to_request)
        num_short, num_long = self._prefilling(request, states)
        num_hits = len(states.cached_blocks(request)) * states.blocks.block_size
        num_own = max(len(request.token_ids) - num_hits, 1)
        for_budget = self._prefill_s(num_short + num_long + num_tokens_ahead + num_own, num_running)
        if num_long and num_own <= self._most_short:
            for_budget = min(
                for_budget, self._beside_long_s(num_tokens_ahead + num_own, num_running + num_short)
            )
        num_endings = max(num_running + num_ahead + 1 - states.num_seats, 0)
        for_seat = num_endings * (self.endings.interval_s(states.num_seats) or 0.0)
        return max(for_budget, for_seat + self._chunks_s(num_own, num_running))

    def _ahead_of(self, request: Request, states: RequestStates) -> tuple[int, int]:
        """Requests that come before it, and how many of their tokens must be computed."""
        states.settle()
        num_requests, num_tokens = states.shares.ahead_of(request.priority, request.tenant)
        num_returning, num_returning_tokens = states.waiting.returning_ahead(request.priority)
        num_requests += num_returning
        num_tokens = round(num_tokens * self._computed_share) + num_returning_tokens
        for preempted in states.draining.values():
            if preempted.priority <= request.priority:
                num_requests += 1
                num_tokens += len(preempted.token_ids)
        return num_requests, num_tokens

    def _prefilling(self, request: Request, states: RequestStates) -> tuple[int, int]:
        """Prompt tokens that short prompts which run still want, and that long ones do which come before it."""
        slots = states.rows.running_order()
        wanted = states.rows.wanted(slots)
        is_long = wanted > self._most_short
        num_long = 0
        for slot, count in zip(slots[is_long].tolist(), wanted[is_long].tolist(), strict=True):
            if states.rows.slot_to_request[slot].priority <= request.priority:
                num_long += count
        return int(wanted[(wanted > 1) & ~is_long].sum()), num_long

    def _beside_long_s(self, num_tokens: int, num_others: int) -> float:
        """Seconds to compute so many tokens in what long prompts leave."""
        room = max((self._budget - num_others) // LONG_SHARE, 1)
        return -(-num_tokens // room) * self.steps.seconds(self._budget)

    def _prefill_s(self, num_tokens: int, num_decoding: int) -> float:
        """Seconds to compute so many prompt tokens beside rows that decode."""
        room = max(self._budget - num_decoding, 1)
        num_full, rest = divmod(num_tokens, room)
        last_s = self.steps.seconds(num_decoding + rest) if rest else 0.0
        return num_full * self.steps.seconds(self._budget) + last_s

    def _chunks_s(self, num_tokens: int, num_decoding: int) -> float:
        """The same for one request alone, which may take only so much of a step."""
        chunk = min(max(self._budget - num_decoding, 1), self._most_per_request)
        num_full, rest = divmod(num_tokens, chunk)
        last_s = self.steps.seconds(num_decoding + rest) if rest else 0.0
        return num_full * self.steps.seconds(num_decoding + chunk) + last_s
