"""Load of one engine: its work, cache and queue as it reports them, and what was sent there since."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from triptych.errors import QueueFull
from triptych.prefix_hash import why_unknown
from triptych.types.outputs import LoadReport, OutputBatch
from triptych.types.submit import PrefixHash
from triptych_services.frontend.routing.prefix_index import CachedBlocks, PrefixIndex, RoutedPrompt

TRUSTED_S = 10.0
"""An older measure is no reason to avoid an engine: it may have been slow beside something else, and only the next
request would show that it is not any more."""
_REMEMBERED_S = 1.0
"""A refusal is taken to hold for so long while the queue stays full: later the queue may take what it has refused."""
_MOST_REMEMBERED = 1024
_MOST_BLOCKS = 1 << 22
"""Nothing is kept of an engine that reports more: these take 128 MB already."""
_NO_LOAD = LoadReport(0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


class WorkTimes(NamedTuple):
    """The time that the work for a request takes, in seconds. 0: it is not known."""

    prefill_token_s: float
    """For each token of a prompt."""
    decode_step_s: float


class EngineLoad:
    """The load and the cache of one engine. The session with the engine owns it.

    A request counts here from the moment it is sent, until the engine reports a load that includes it. So a burst of
    requests sees itself, and none counts twice.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, index: PrefixIndex | None = None) -> None:
        """
        Args:
            clock: Monotonic time in seconds.
            index: The blocks of all engines, with the same clock. None: this engine has one of its own.
        """
        self._clock = clock
        self.cached = CachedBlocks(index or PrefixIndex(clock))
        self.block_size = 0
        """Tokens per block. 0: it is not known here what is cached there."""
        self.why_no_affinity = "it does not tell what it caches"
        """Why it is not known; empty: it is, and requests are sent there for it."""
        self._why_too_much = ""
        """Says what it has reported that is too much to keep. Empty: nothing."""
        self.reported = _NO_LOAD
        """As last reported."""
        self.is_known = False
        """The engine has reported its load. One of an earlier version never does."""
        self.told_at = 0.0
        """When it was reported."""
        self.prefill_measured_at = self.decode_measured_at = 0.0
        """When the load's measures last changed."""
        self._watchers: list[tuple[set[int], int]] = []
        """Sets that take a number whenever anything changes here."""
        self._bookings: dict[int, _Booking] = {}
        """The first number of a request that is in no load yet -> what it adds."""
        self.num_booked_tokens = 0
        self.num_booked_choices = 0
        self._admitted: set[int] = set()
        """First numbers of requests that the next load includes."""

    @property
    def num_choices(self) -> int:
        """Choices that run or wait there."""
        return self.reported.num_running + self.reported.num_waiting + self.num_booked_choices

    def now(self) -> float:
        """Return the time in seconds, as all times here are meant."""
        return self._clock()

    def watch(self, changed: set[int], number: int) -> None:
        """Add a number to a set now and whenever anything changes here, until `unwatch`."""
        changed.add(number)
        self._watchers.append((changed, number))

    def unwatch(self, changed: set[int]) -> None:
        """Add nothing more to a set."""
        self._watchers = [watcher for watcher in self._watchers if watcher[0] is not changed]

    def count_cached_tokens(self, prompt: RoutedPrompt) -> int:
        """Return how many tokens of a prompt need not be computed. At least one always is."""
        if not self.block_size:
            return 0
        return min(self.cached.count(prompt, self.block_size) * self.block_size, prompt.num_tokens - 1)

    @property
    def times(self) -> WorkTimes:
        """Return what the engine has measured lately."""
        until = self._clock() - TRUSTED_S
        return WorkTimes(
            self.reported.prefill_token_s if self.prefill_measured_at > until else 0.0,
            self.reported.decode_step_s if self.decode_measured_at > until else 0.0,
        )

    def first_token_s(self, num_tokens: float, num_choices: int, best: WorkTimes) -> float:
        """Return in how many seconds a request would have its first token.

        Args:
            num_tokens: Tokens of its prompt that must be computed.
            num_choices: Its choices, each of which needs a row.
            best: Of the engines that could serve it. Takes the place of what this one has not measured lately.
        """
        load, times = self.reported, self.times
        token_s = times.prefill_token_s or best.prefill_token_s
        num_lacking = num_choices + self.num_booked_choices - load.num_free_rows
        row_s = num_lacking * load.row_interval_s if num_lacking > 0 else 0.0
        own_s = num_tokens * token_s
        step_s = times.decode_step_s or best.decode_step_s
        return max(self.waiting_s(token_s) + own_s, row_s + own_s) + step_s

    def waiting_s(self, prefill_token_s: float) -> float:
        """Return in how many seconds the prompts that are there already will be computed."""
        told_s = self.reported.num_prefill_tokens * prefill_token_s
        computed_s = self._clock() - self.told_at
        return max(told_s - computed_s, 0.0) + self.num_booked_tokens * prefill_token_s

    def note_hash(self, told: PrefixHash | None) -> None:
        """Take in how the engine names the blocks of its cache. `told`: None: it does not report what it caches."""
        if told is None:
            self.block_size, self.why_no_affinity = 0, "it does not tell what it caches"
        else:
            self.why_no_affinity = self._why_too_much or why_unknown(told)
            self.block_size = 0 if self.why_no_affinity else told.block_size
        self._note_change()

    def book(self, numbers: Sequence[int], num_tokens: int, prompt: RoutedPrompt | None = None) -> None:
        """Take in that a request is being sent.

        Args:
            numbers: [num_choices] the names of its choices.
            num_tokens: Its tokens, computed or not.
            prompt: The prompt as it was looked up in the cache; None: it was not looked up.
        """
        if not self.is_known:
            return
        if prompt is not None:
            num_tokens -= self.count_cached_tokens(prompt)
            if self.block_size and prompt.num_tokens >= self.block_size:
                self.cached.expect(prompt, self.block_size)
        self._bookings[numbers[0]] = _Booking(num_tokens, len(numbers))
        self.num_booked_tokens += num_tokens
        self.num_booked_choices += len(numbers)
        self._note_change()

    def cancel(self, number: int) -> None:
        """Take in that a choice has ended, perhaps before it was admitted."""
        if (booking := self._bookings.pop(number, None)) is not None:
            self.num_booked_tokens -= booking.num_tokens
            self.num_booked_choices -= booking.num_choices
            self._admitted.discard(number)
            self._note_change()

    def leave(self) -> None:
        """Take in that the session is over: nothing is known to be cached there any more."""
        self.cached.leave()
        self._note_change()

    def note_batch(self, batch: OutputBatch) -> None:
        """Follow the engine."""
        if batch.cache is not None and not self._why_too_much:
            self.cached.take_in(batch.cache)
            if len(self.cached) > _MOST_BLOCKS:
                self.cached.leave()
                self._why_too_much = f"it has reported more than {_MOST_BLOCKS:,} cached blocks"
                self.block_size, self.why_no_affinity = 0, self._why_too_much
            self._note_change()
        if self._bookings:
            self._admitted.update(self._bookings.keys() & set(batch.admitted.tolist()))
            for failure in batch.failures:
                self.cancel(failure.number)
        if batch.load is not None:
            self._take_in(batch.load)
            for number in list(self._admitted):
                self.cancel(number)

    def _take_in(self, load: LoadReport) -> None:
        now = self._clock()
        if load.prefill_token_s != self.reported.prefill_token_s:
            self.prefill_measured_at = now
        if load.decode_step_s != self.reported.decode_step_s:
            self.decode_measured_at = now
        self.reported, self.is_known, self.told_at = load, True, now
        self._note_change()

    def _note_change(self) -> None:
        for changed, number in self._watchers:
            changed.add(number)


class _Booking(NamedTuple):
    """A request that is in no load yet."""

    num_tokens: int
    num_choices: int


class QueueView:
    """Owned by the session with the engine.

    The engine reports its free places in each output batch, and as soon as there are some after it reported none. A
    full queue may still take a request of another tenant or priority (`Admission.displace_for`), so only what the
    engine has refused just now is refused here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic time in seconds."""
        self._clock = clock
        self._num_free_places: int | None = None
        """As last reported; None: not yet."""
        self._unanswered: dict[int, tuple[int, str]] = {}
        """Number of a choice that the engine has neither admitted nor refused -> its priority and tenant."""
        self._refusals: dict[tuple[int, str], tuple[float, float]] = {}
        """Priority and tenant -> until when the engine's last refusal holds, and its retry time in seconds."""

    def note_submitted(self, numbers: Iterable[int], priority: int, tenant: str) -> None:
        self._unanswered.update(dict.fromkeys(numbers, (priority, tenant)))

    def note_aborted(self, number: int) -> None:
        self._unanswered.pop(number, None)

    def note_batch(self, batch: OutputBatch) -> None:
        """Take in what the engine has admitted and refused, and how much room it has left."""
        unanswered = self._unanswered
        if unanswered:
            for number in batch.admitted.tolist():
                unanswered.pop(number, None)
            for failure in batch.failures:
                refused = unanswered.pop(failure.number, None)
                if refused is not None and failure.code == QueueFull.code:
                    self._remember(refused, failure.retry_after_ms / 1000)
        if batch.num_free_places is not None:
            self._num_free_places = batch.num_free_places

    def refuses(self, priority: int, tenant: str) -> float | None:
        """Return in how many seconds a request that the engine would refuse now may come back; None if it may take it.

        The times of requests that are refused together differ, so that they do not come back together.
        """
        if self._num_free_places is None or self._num_free_places > len(self._unanswered):
            return None
        until, retry_after_s = self._refusals.get((priority, tenant), (0.0, 0.0))
        return retry_after_s * random.uniform(1.0, 2.0) if self._clock() < until else None

    def _remember(self, who: tuple[int, str], retry_after_s: float) -> None:
        now = self._clock()
        if len(self._refusals) >= _MOST_REMEMBERED:
            self._refusals = {key: refusal for key, refusal in self._refusals.items() if refusal[0] > now}
        if len(self._refusals) < _MOST_REMEMBERED:
            self._refusals[who] = now + _REMEMBERED_S, retry_after_s
