"""Records what clients saw: one history of all requests, which the validators judge when all is over."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from triptych.errors import TriptychError
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent

REFUSED = ("ENGINE_UNAVAILABLE", "QUEUE_FULL", "DUPLICATE_REQUEST")
"""Codes of errors that are no end of a request of which nothing has come yet: its client may try again."""


@dataclass(frozen=True)
class Request:
    """One request of a load, and how its client behaves."""

    name: str
    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    leaves_after: int | None = None
    """Output tokens after which the client goes away. None: it stays."""
    pause_s: float = 0.0
    """Seconds that the client takes to read each event."""
    timeout_s: float | None = None
    http: str = ""
    """How its client goes on over HTTP with a stream that broke: at one place (once), or at two at once (twice). Empty:
    as the ground likes."""

    @property
    def must_finish(self) -> bool:
        """Whether nothing but a fault can keep it from its end."""
        return self.leaves_after is None and self.timeout_s is None


@dataclass(frozen=True)
class Seen:
    """One thing that a client saw of its request."""

    at_s: float
    request: str
    what: str
    """admitted, delta, finished, failed or left; the last three are ends."""
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    finish_reason: str = ""
    stop_reason: int | str | None = None
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the output, as they are counted."""
    num_moves: int = 0
    """How often it moved to another engine, as its last event says."""
    error: str = ""
    """Code and message of what it failed with."""


ENDS = ("finished", "failed", "left")


@dataclass
class Choice:
    """The output of one choice, put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    ends: list[tuple[str, int | str | None]] = field(default_factory=list)


@dataclass
class Answer:
    """The output of one request, put together."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None


class Recorder:
    """Takes down the events of all requests of a run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.history: list[Seen] = []
        self._clock = clock

    @property
    def ended(self) -> set[str]:
        """Return the names of the requests that have ended, in whatever way."""
        return {seen.request for seen in self.history if seen.what in ENDS}

    @property
    def num_deltas(self) -> int:
        """Return how many pieces of output have come in all."""
        return sum(seen.what == "delta" for seen in self.history)

    async def follow(
        self, request: Request, events: AsyncGenerator[Event, None], pause: Callable[[float], Any]
    ) -> bool:
        """Take down one attempt at a request. Return whether it was refused, and may be tried again.

        Args:
            pause: Waits for so many seconds.
        """
        num_tokens, has_output = 0, False
        try:
            async with aclosing(events) as stream:
                async for event in stream:
                    self._take(request.name, event)
                    if isinstance(event, DeltaEvent):
                        has_output, num_tokens = True, num_tokens + len(event.token_ids)
                    if request.pause_s:
                        await pause(request.pause_s)
                    if request.leaves_after is not None and num_tokens >= request.leaves_after:
                        self._note(request.name, "left")
                        return False
        except TriptychError as error:
            if error.code in REFUSED and not has_output and request.timeout_s is None:
                return True
            self._note(request.name, "failed", error=f"{error.code}: {error.message}")
        return False

    def fail(self, request: str, error: str) -> None:
        """Note that a request has ended with an error of its client's own."""
        self._note(request, "failed", error=error)

    def _take(self, name: str, event: Event) -> None:
        match event:
            case AdmittedEvent():
                self._note(name, "admitted", index=event.index)
            case DeltaEvent():
                self._note(
                    name,
                    "delta",
                    index=event.index,
                    token_ids=tuple(event.token_ids),
                    text=event.text,
                    logprobs=tuple(round(float(entry.logprobs[0]), 4) for entry in event.logprobs),
                    finish_reason=event.finish_reason.name if event.finish_reason is not None else "",
                    stop_reason=event.stop_reason,
                )
            case FinishedEvent():
                usage = (event.usage.num_prompt_tokens, event.usage.num_output_tokens)
                self._note(name, "finished", usage=usage, num_moves=event.num_moves)

    def _note(self, request: str, what: str, **fields: Any) -> None:
        self.history.append(Seen(self._clock(), request, what, **fields))


def answers_of(history: Iterable[Seen]) -> dict[str, Answer]:
    """Return what came of each request, by its name."""
    answers: dict[str, Answer] = {}
    for seen in history:
        answer = answers.setdefault(seen.request, Answer())
        if seen.usage is not None:
            answer.usage = seen.usage
        if seen.what != "delta":
            continue
        choice = answer.choices.setdefault(seen.index, Choice())
        choice.token_ids += seen.token_ids
        choice.text += seen.text
        choice.logprobs += seen.logprobs
        if seen.finish_reason:
            choice.ends.append((seen.finish_reason, seen.stop_reason))
    return answers
