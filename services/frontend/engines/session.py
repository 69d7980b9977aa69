"""A session with one engine, over all its streams: the sinks of its requests, and the batches that have arrived."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triptych import failpoints
from triptych.errors import EngineUnavailable, FieldViolation, QueueFull, TriptychError
from triptych.rpc.session.replay_buffer import is_repeated
from triptych.rpc.status import error_from_code
from triptych.types.outputs import FinishedRequest, OutputBatch, RequestFailure
from triptych.types.step import PromptLogprobs
from triptych.types.submit import AttachRequest, SubmitRequest
from triptych_services.frontend.engines.outbox import Outbox
from triptych_services.frontend.engines.outlook import EngineOutlook
from triptych_services.frontend.engines.prefix_index import RoutedPrompt
from triptych_services.frontend.logprobs import BatchLogprobs

if TYPE_CHECKING:
    from triptych_services.frontend.engines.attachment import Attachment

MAX_NUMBER = (1 << 32) - 1
# The engine keeps what is not acknowledged, a few kB per batch; each acknowledgement costs both sides a message.
ACKNOWLEDGE_EVERY = 64
ACKNOWLEDGE_ABOVE = (
    1 << 15
)  # bytes: log-probabilities of prompts, and what a large cache holds, may be megabytes


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """The end of a session in which requests were in flight."""

    why: str
    is_death: bool = False
    """The engine's process has ended without a word, so that a request may have been the reason."""


class OutputSink(Protocol):
    """Receiver of one choice's outputs. Called on the event loop; it must neither block nor await."""

    def on_admitted(self) -> None:
        """Note that the engine has admitted the choice."""

    def on_first_token(self, num_cached_tokens: int) -> None:
        """Note that the engine's first token follows, and how many tokens of the prompt a cache had."""

    def on_tokens(
        self,
        token_ids: list[int],
        logprobs: BatchLogprobs | None,
        first_row: int,
        finish: FinishedRequest | None,
    ) -> None:
        """Take new tokens, and the end if `finish` is given. `first_row`: the first token's row in `logprobs`."""

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Take log-probabilities of the next part of the prompt. They come before the first token, or with it."""

    def on_error(self, error: Exception) -> None:
        """Take the error that ends the choice. Nothing follows."""

    def on_released(self) -> None:
        """Note that the engine would give the choice to another one, since it cannot end it in time. It goes on."""

    def on_engine_lost(self, loss: EngineLoss) -> None:
        """Note that the session with the engine was given up. Nothing follows."""


class EngineSession:
    """The requests of one session. Owned by the engine client. Each output batch takes effect once."""

    def __init__(self, name: str, *, keeps_requests: bool = False, hands_over: bool = False) -> None:
        """
        Args:
            name: As the engine's welcome says.
            keeps_requests: Whether the engine keeps requests and lets them go on elsewhere.
            hands_over: Whether it has the feature HANDOVER.
        """
        self.name = name
        self.keeps_requests = keeps_requests
        self.hands_over = hands_over
        self.outbox = Outbox(self._on_unsendable)
        self.last_batch_seen = 0
        self.is_torn = False
        """A batch has taken effect in part, by a bug. The session cannot be resumed."""
        self.queue = QueueView()
        self.outlook = EngineOutlook()
        self._sinks: dict[int, OutputSink] = {}
        self._attachments: dict[int, tuple[AttachRequest, Attachment]] = {}
        """By the number of the first choice, until the engine has answered."""
        self._next_number = 1
        self._refused_numbers: list[range] = []
        """Numbers of requests that the engine refused to attach: it has used none of them."""

    @property
    def num_in_flight(self) -> int:
        """Number of choices that were submitted and have not ended."""
        return len(self._sinks)

    def has_numbers(self, count: int) -> bool:
        """Return whether so many numbers are left."""
        return self._next_number + count - 1 <= MAX_NUMBER

    def take_numbers(self, count: int) -> range:
        """Return numbers that no choice of this session has had."""
        first, self._next_number = self._next_number, self._next_number + count
        return range(first, first + count)

    def take_numbers_to_attach(self, count: int) -> range:
        """Return numbers for a request that a client names, who may claim any count of choices.

        Those of refused ones are given out again, so that made-up claims do not use up the session's.
        """
        for place, numbers in enumerate(self._refused_numbers):
            if len(numbers) >= count:
                del self._refused_numbers[place]
                return numbers[:count]
        return self.take_numbers(count)

    def submit(
        self, request: SubmitRequest, sinks: Sequence[OutputSink], prompt: RoutedPrompt | None = None
    ) -> None:
        """Hand over one request.

        Args:
            sinks: [num_choices] for the outputs of each.
            prompt: As the router has seen it.
        """
        numbers = request.numbers.tolist()
        num_tokens = len(request.prompt_token_ids) + sum(map(len, request.emitted))
        if request.kv_source is None:
            self.outlook.book(numbers, num_tokens, prompt)
        else:  # another engine computes the prompt
            self.outlook.book(numbers, 1)
        self._sinks.update(zip(numbers, sinks, strict=True))
        self.queue.note_submitted(numbers, request.priority, request.tenant)
        self.outbox.submit(request)

    def stop(self, number: int, sink: OutputSink) -> None:
        """End one choice early, as `EngineClient.stop` does."""
        if self._sinks.get(number) is sink:
            self.outbox.stop(number) if self.keeps_requests else self.outbox.abort(number)

    def attach(self, wish: AttachRequest, attachment: Attachment) -> None:
        """Ask for a request of another session."""
        self._attachments[wish.first_number], attachment.session = (wish, attachment), self
        self.outbox.attach(wish)

    def drop_attachment(self, first_number: int) -> None:
        """Want no answer to a question any more. What the engine attaches all the same waits for another reader."""
        self._attachments.pop(first_number, None)

    def detach(self, numbers: Sequence[int], sink_of: Mapping[int, OutputSink]) -> None:
        """Let choices of one request go on without this frontend, as `EngineClient.detach` does."""
        own = [number for number in numbers if self._sinks.get(number) is sink_of[number]]
        for number in own:
            self._forget(number)
        if self.hands_over:
            self.outbox.detach(own)
        else:  # an engine of the version before, which knows no other way to leave
            for number in own:
                self.outbox.abort(number)

    def replace_sink(self, number: int, before: OutputSink, sink: OutputSink) -> None:
        """Give a choice another sink, if it has not ended."""
        if self._sinks.get(number) is before:
            self._sinks[number] = sink

    def abort(self, number: int, sink: OutputSink) -> None:
        """End one choice and drop its later outputs, as `EngineClient.abort` does."""
        if self._sinks.get(number) is sink:  # else it has ended, or the number is of an earlier session
            self._forget(number)
            self.outbox.abort(number)

    def _forget(self, number: int) -> None:
        del self._sinks[number]
        self.queue.note_aborted(number)
        self.outlook.cancel(number)

    def end(self, loss: EngineLoss) -> None:
        """End every request: no output will come any more."""
        sinks, self._sinks = self._sinks, {}
        attachments, self._attachments = self._attachments, {}
        for _, attachment in attachments.values():
            attachment.on_refused(EngineUnavailable(loss.why))
        for sink in sinks.values():
            sink.on_engine_lost(loss)

    def take_in(self, batch: OutputBatch, messages_received: int) -> bool:
        """Hand out one batch, unless it has been here before.

        Args:
            messages_received: Number of the last message that had taken effect when the batch was sent.

        Returns:
            Whether the session goes forward: this batch is new, and the engine has taken all that was written.

        Raises:
            ProtocolViolation: It is not the next one. It has not taken effect.
        """
        self.outbox.confirm(messages_received)
        if is_repeated(batch.batch_id, self.last_batch_seen, "output batch"):
            return False
        self.last_batch_seen = batch.batch_id
        if batch.batch_id % ACKNOWLEDGE_EVERY == 0 or batch.num_bytes > ACKNOWLEDGE_ABOVE:
            self.outbox.acknowledge(batch.batch_id)
        self.is_torn = True
        if failpoints.ARMED:
            failpoints.reach("frontend.before_batch")
        self._dispatch(batch)
        self.is_torn = False
        if failpoints.ARMED:
            failpoints.reach("frontend.after_batch")
        return not len(self.outbox.sent)  # a message that is not confirmed may be what breaks the streams

    def _dispatch(self, batch: OutputBatch) -> None:
        """Give each choice its part of a batch, with one dictionary look-up per choice."""
        self.queue.note_batch(batch)
        self.outlook.note_batch(batch)
        sinks = self._sinks
        for request in batch.attached:
            numbers = request.numbers.tolist()
            if (asked := self._attachments.pop(numbers[0], None)) is not None:
                sinks.update(zip(numbers, asked[1].on_attached(request), strict=True))
            else:
                self.outbox.detach(numbers)
        for number in batch.admitted.tolist():
            if (sink := sinks.get(number)) is not None:
                sink.on_admitted()
        for entry in batch.prompt_logprobs:
            if (sink := sinks.get(entry.number)) is not None:
                try:
                    sink.on_prompt_logprobs(entry.logprobs)
                except Exception as error:
                    self.abort(entry.number, sink)
                    sink.on_error(error)
        if len(batch.first_numbers):
            firsts = zip(batch.first_numbers.tolist(), batch.first_cached_tokens.tolist(), strict=True)
            for number, num_cached_tokens in firsts:
                if (sink := sinks.get(number)) is not None:
                    sink.on_first_token(num_cached_tokens)
        finishes = {finish.number: finish for finish in batch.finished}
        if len(batch.numbers):
            self._dispatch_tokens(batch, finishes)
        for number, finish in finishes.items():  # those that end without a new token
            if (sink := sinks.pop(number, None)) is not None:
                self._deliver(number, sink, [], None, 0, finish)
        for failure in batch.failures:
            if (asked := self._attachments.pop(failure.number, None)) is not None:
                self._refused_numbers.append(asked[0].numbers)
                asked[1].on_refused(_to_error(failure))
            if (sink := sinks.pop(failure.number, None)) is not None:
                sink.on_error(_to_error(failure))
        for number in batch.released.tolist():
            if (sink := sinks.get(number)) is not None:
                sink.on_released()

    def _dispatch_tokens(self, batch: OutputBatch, finishes: dict[int, FinishedRequest]) -> None:
        """Give each choice its tokens, and take those that end with them out of `finishes`.

        A batch of several steps has a request's tokens in several places.
        """
        token_ids: list[int] = batch.token_ids.tolist()
        numbers: list[int] = batch.numbers.tolist()
        counts: list[int] = batch.token_counts.tolist() or [1] * len(numbers)
        logprobs = BatchLogprobs(batch.logprobs) if batch.logprobs is not None else None
        last_place = {number: place for place, number in enumerate(numbers)} if finishes else {}
        sinks = self._sinks
        start = 0
        for place, (number, count) in enumerate(zip(numbers, counts, strict=True)):
            finish = finishes.pop(number, None) if last_place.get(number) == place else None
            sink = sinks.get(number) if finish is None else sinks.pop(number, None)
            if sink is not None:  # else it was aborted here, and the engine did not know yet
                self._deliver(number, sink, token_ids[start : start + count], logprobs, start, finish)
            start += count

    def _deliver(
        self,
        number: int,
        sink: OutputSink,
        token_ids: list[int],
        logprobs: BatchLogprobs | None,
        first_row: int,
        finish: FinishedRequest | None,
    ) -> None:
        """Give one choice its tokens. An error in them ends only this choice."""
        try:
            sink.on_tokens(token_ids, logprobs, first_row, finish)
        except Exception as error:
            self.abort(number, sink)
            sink.on_error(error)

    def _on_unsendable(self, numbers: Sequence[int], error: Exception) -> None:
        for number in numbers:
            self.queue.note_aborted(number)
            self.outlook.cancel(number)
            if (sink := self._sinks.pop(number, None)) is not None:
                sink.on_error(error)


def _to_error(failure: RequestFailure) -> TriptychError:
    description = failure.message.removeprefix(f"{failure.field}: ")
    violations = [FieldViolation(failure.field, description)] if failure.field else []
    return error_from_code(failure.code, failure.message, violations, failure.retry_after_ms / 1000)


_REMEMBERED_S = 1.0
"""A refusal is taken to hold for so long while the queue stays full: later the queue may take what it has refused."""
_MOST_REMEMBERED = 1024


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
