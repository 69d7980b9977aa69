"""A session with one engine, over all its streams: the sinks of its requests, and the batches that have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from triptych import failpoints
from triptych.errors import EngineUnavailable, FieldViolation, TriptychError
from triptych.rpc.session.replay_buffer import is_repeated
from triptych.rpc.status import error_from_code
from triptych.types.outputs import FinishedRequest, OutputBatch, RequestFailure
from triptych.types.step import F32, PromptLogprobs
from triptych.types.submit import AttachRequest, SubmitRequest
from triptych_services.frontend.engines.outbox import Outbox
from triptych_services.frontend.routing.load import EngineLoad, QueueView
from triptych_services.frontend.routing.prefix_index import PrefixIndex, RoutedPrompt
from triptych_services.frontend.streams.logprobs import BatchLogprobs

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


class ChoiceOutput(NamedTuple):
    """Output that an engine has sent of one choice: any of these, in the order in which it was computed."""

    token_ids: Sequence[int] = ()
    """New output tokens."""
    logprobs: BatchLogprobs | None = None
    """Log-probabilities of the batch's tokens. None: none were asked for."""
    first_row: int = 0
    """The first token's row in `logprobs`."""
    finish: FinishedRequest | None = None
    """The end of the choice, which the engine has accounted for. Nothing follows."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the next part of the prompt. They come before the first token, or with it."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine had in a cache. Comes before the engine's first token."""
    is_released: bool = False
    """The engine cannot end the choice in time and would give it to another one. Until then it computes it."""
    vectors: F32 | None = None
    """[num_vectors, num_columns] of a pooled request. They come with its end."""
    guesses: tuple[int, int] | None = None
    """Its accepted and its rejected guesses so far, at all engines. They come before the tokens of their step."""


ADMITTED = ChoiceOutput()
"""The engine has admitted the choice. Any other output says so, too."""
_RELEASED = ChoiceOutput(is_released=True)


class OutputSink(Protocol):
    """Receiver of one choice's outputs. Called on the event loop; it must neither block nor await."""

    def on_output(self, output: ChoiceOutput) -> None:
        """Take what the engine has sent."""

    def on_end(self, why: Exception | EngineLoss) -> None:
        """Take the end of a choice that the engine does not finish: its error, or the loss of the session."""


class EngineSession:
    """The requests of one session. Owned by the engine client. Each output batch takes effect once."""

    def __init__(
        self,
        name: str,
        *,
        keeps_requests: bool = False,
        hands_over: bool = False,
        index: PrefixIndex | None = None,
    ) -> None:
        """
        Args:
            name: As the engine's welcome says.
            keeps_requests: Whether the engine keeps requests and lets them go on elsewhere.
            hands_over: Whether it has the feature HANDOVER.
            index: The blocks that engines cache. None: this session has one of its own.
        """
        self.name = name
        self.keeps_requests = keeps_requests
        self.hands_over = hands_over
        self.outbox = Outbox(self._on_unsendable)
        self.last_batch_seen = 0
        self.is_torn = False
        """A batch has taken effect in part, by a bug. The session cannot be resumed."""
        self.queue = QueueView()
        self.load = EngineLoad(index=index)
        self._sinks: dict[int, OutputSink] = {}
        self._attachments: dict[int, Attachment] = {}
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
            self.load.book(numbers, num_tokens, prompt)
        else:  # another engine computes the prompt
            self.load.book(numbers, 1)
        self._sinks.update(zip(numbers, sinks, strict=True))
        self.queue.note_submitted(numbers, request.head.priority, request.head.tenant)
        self.outbox.submit(request)

    def stop(self, number: int, sink: OutputSink) -> None:
        """End one choice early, as `EngineClient.stop` does."""
        if self._sinks.get(number) is sink:
            self.outbox.stop(number) if self.keeps_requests else self.outbox.abort(number)

    def attach(self, request: AttachRequest) -> Attachment:
        """Ask for a request of another session."""
        attachment = self._attachments[request.first_number] = Attachment(self, request)
        self.outbox.attach(request)
        return attachment

    def drop_attachment(self, first_number: int) -> None:
        """Drop the answer to a question. What the engine attaches all the same waits for another reader."""
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
        self.load.cancel(number)

    def end(self, loss: EngineLoss) -> None:
        """End every request: no output will come any more."""
        self.load.leave()
        sinks, self._sinks = self._sinks, {}
        attachments, self._attachments = self._attachments, {}
        for attachment in attachments.values():
            attachment.on_refused(EngineUnavailable(loss.why))
        for sink in sinks.values():
            sink.on_end(loss)

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
        self.load.note_batch(batch)
        sinks = self._sinks
        for request in batch.attached:
            numbers = request.numbers.tolist()
            if (attachment := self._attachments.pop(numbers[0], None)) is not None:
                sinks.update(zip(numbers, attachment.on_attached(request), strict=True))
            else:
                self.outbox.detach(numbers)
        for number in batch.admitted.tolist():
            if (sink := sinks.get(number)) is not None:
                sink.on_output(ADMITTED)
        for entry in batch.prompt_logprobs:
            if (sink := sinks.get(entry.number)) is not None:
                self._deliver(entry.number, sink, ChoiceOutput(prompt_logprobs=entry.logprobs))
        if len(batch.first_numbers):
            firsts = zip(batch.first_numbers.tolist(), batch.first_cached_tokens.tolist(), strict=True)
            for number, num_cached_tokens in firsts:
                if (sink := sinks.get(number)) is not None:
                    sink.on_output(ChoiceOutput(num_cached_tokens=num_cached_tokens))
        if batch.guesses is not None:
            for number, counts in batch.guesses.by_number.items():
                if (sink := sinks.get(number)) is not None:
                    sink.on_output(ChoiceOutput(guesses=counts))
        finishes = {finish.number: finish for finish in batch.finished}
        if len(batch.numbers):
            self._dispatch_tokens(batch, finishes)
        for number, finish in finishes.items():  # those that end without a new token
            if (sink := sinks.pop(number, None)) is not None:
                output = ChoiceOutput(finish=finish, vectors=batch.vectors.get(number))
                self._deliver(number, sink, output)
        for failure in batch.failures:
            if (attachment := self._attachments.pop(failure.number, None)) is not None:
                self._refused_numbers.append(attachment.request.numbers)
                attachment.on_refused(_to_error(failure))
            if (sink := sinks.pop(failure.number, None)) is not None:
                sink.on_end(_to_error(failure))
        for number in batch.released.tolist():
            if (sink := sinks.get(number)) is not None:
                sink.on_output(_RELEASED)

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
                output = ChoiceOutput(token_ids[start : start + count], logprobs, start, finish)
                self._deliver(number, sink, output)
            start += count

    def _deliver(self, number: int, sink: OutputSink, output: ChoiceOutput) -> None:
        """Give one choice what came of it. An error in it ends only this choice."""
        try:
            sink.on_output(output)
        except Exception as error:
            self.abort(number, sink)
            sink.on_end(error)

    def _on_unsendable(self, numbers: Sequence[int], error: Exception) -> None:
        for number in numbers:
            self.queue.note_aborted(number)
            self.load.cancel(number)
            if (sink := self._sinks.pop(number, None)) is not None:
                sink.on_end(error)


class Attachment:
    """A request that began at another frontend, until there are choices for its outputs. The session makes it."""

    def __init__(self, session: EngineSession, request: AttachRequest) -> None:
        """`request`: The question to the engine."""
        self.request = request
        self._session = session
        self._held: Sequence[_HeldOutputs] = ()
        """[num_choices] once the engine has answered: until then their number is the client's claim."""
        self._attached: asyncio.Future[SubmitRequest] = asyncio.get_running_loop().create_future()

    def on_attached(self, request: SubmitRequest) -> Sequence[OutputSink]:
        """Take the engine's answer, and return what takes the outputs of each choice, which follow."""
        self._held = [_HeldOutputs() for _ in range(request.num_choices)]
        if not self._attached.done():
            self._attached.set_result(request)
        return self._held

    def on_refused(self, error: Exception) -> None:
        """Take the engine's refusal, or its loss. Nothing follows."""
        if not self._attached.done():
            self._attached.set_exception(error)

    async def wait(self, timeout_s: float) -> SubmitRequest:
        """Return the request as the engine has it, with the output that the client has as `emitted`.

        Raises:
            NotKept, InvalidRequest: The engine refuses.
            EngineUnavailable: It is lost, or does not answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._attached
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine has not answered within {timeout_s:g} s; try again"
            ) from None

    def abandon(self) -> None:
        """Leave what the engine has attached, or will attach, there for another frontend. Safe more than once."""
        first = self.request.first_number
        self._session.drop_attachment(first)
        numbers = range(first, first + len(self._held))
        self._session.detach(numbers, dict(zip(numbers, self._held, strict=True)))

    def connect(self, sinks: Mapping[int, OutputSink]) -> None:
        """Give each choice its sink, by number, which first gets what has come."""
        for (number, sink), held in zip(sinks.items(), self._held, strict=True):
            self._session.replace_sink(number, held, sink)
            held.flush_to(sink)


class _HeldOutputs:
    """Holds back the outputs of one choice until there is a sink for them."""

    def __init__(self) -> None:
        self._outputs: list[ChoiceOutput] = []
        self._end: Exception | EngineLoss | None = None

    def flush_to(self, sink: OutputSink) -> None:
        """Hand on what has come."""
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            sink.on_output(output)
        if self._end is not None:
            sink.on_end(self._end)

    def on_output(self, output: ChoiceOutput) -> None:
        self._outputs.append(output)

    def on_end(self, why: Exception | EngineLoss) -> None:
        self._end = why


def _to_error(failure: RequestFailure) -> TriptychError:
    description = failure.message.removeprefix(f"{failure.field}: ")
    violations = [FieldViolation(failure.field, description)] if failure.field else []
    return error_from_code(failure.code, failure.message, violations, failure.retry_after_ms / 1000)
