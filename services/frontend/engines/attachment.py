"""A request that began at another frontend, from the question to its engine until there are choices for its outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from triptych.errors import EngineUnavailable
from triptych.types.outputs import FinishedRequest
from triptych.types.step import PromptLogprobs
from triptych.types.submit import SubmitRequest
from triptych_services.frontend.engines.session import EngineLoss, EngineSession, OutputSink
from triptych_services.frontend.logprobs import BatchLogprobs


class Attachment:
    """Owned by the call that wants to go on. `relays` are the sinks of the choices until there are others."""

    def __init__(self) -> None:
        self.relays: Sequence[Relay] = ()
        """[num_choices] once the engine has answered: until then their number is the client's claim."""
        self.session: EngineSession | None = None
        """Session that the engine was asked in. Set by it."""
        self._attached: asyncio.Future[SubmitRequest] = asyncio.get_running_loop().create_future()

    def on_attached(self, request: SubmitRequest) -> Sequence[Relay]:
        """Take the engine's answer, and return what takes the outputs of each choice, which follow."""
        self.relays = [Relay() for _ in range(request.num_choices)]
        if not self._attached.done():
            self._attached.set_result(request)
        return self.relays

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

    def abandon(self, first_number: int) -> None:
        """Want it no more. What the engine has attached, or will, waits there for another frontend."""
        if self.session is not None:
            self.session.drop_attachment(first_number)
            numbers = range(first_number, first_number + len(self.relays))
            self.session.detach(numbers, dict(zip(numbers, self.relays, strict=True)))

    def connect(self, sinks: Mapping[int, OutputSink]) -> None:
        """Give each choice its sink, by number, which first gets what has come."""
        assert self.session is not None, "the engine was asked"
        for (number, sink), relay in zip(sinks.items(), self.relays, strict=True):
            self.session.replace_sink(number, relay, sink)
            relay.flush_to(sink)


class Relay:
    """Holds back the outputs of one choice until there is a sink for them."""

    def __init__(self) -> None:
        self._calls: list[Callable[[OutputSink], None]] = []

    def flush_to(self, sink: OutputSink) -> None:
        """Hand on what has come."""
        calls, self._calls = self._calls, []
        for call in calls:
            call(sink)

    def on_admitted(self) -> None:
        self._calls.append(lambda sink: sink.on_admitted())

    def on_first_token(self, num_cached_tokens: int) -> None:
        self._calls.append(lambda sink: sink.on_first_token(num_cached_tokens))

    def on_tokens(
        self,
        token_ids: list[int],
        logprobs: BatchLogprobs | None,
        first_row: int,
        finish: FinishedRequest | None,
    ) -> None:
        self._calls.append(lambda sink: sink.on_tokens(token_ids, logprobs, first_row, finish))

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None:
        self._calls.append(lambda sink: sink.on_prompt_logprobs(part))

    def on_error(self, error: Exception) -> None:
        self._calls.append(lambda sink: sink.on_error(error))

    def on_released(self) -> None:
        self._calls.append(lambda sink: sink.on_released())

    def on_engine_lost(self, loss: EngineLoss) -> None:
        self._calls.append(lambda sink: sink.on_engine_lost(loss))
