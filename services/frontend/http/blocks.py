"""The blocks of an answer in their order: what the model thinks, its text, the tools that it calls.

Chat completions send reasoning, content and calls side by side. OpenAI's responses (output items) and Anthropic's
messages (content blocks) send one after the other:

    reasoning | text | call | call | text        each: begin, grow …, end

However an answer is cut into deltas, its blocks are the same. A dialect spells them by a `BlockFormat`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent
from triptych.types.logprobs import TokenLogprobs
from triptych.types.outputs import FinishReason, Usage
from triptych_services.frontend.http.errors import HttpError, json_response
from triptych_services.frontend.http.sse import EventStream, with_notes
from triptych_services.frontend.http.state import generator_of
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.streams.outputs import EventReceiver

_CUT = (FinishReason.LENGTH, FinishReason.ABORT, FinishReason.REPETITION)


class BlockKind(Enum):
    """The content of a block."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """One block; grows while it streams."""

    index: int
    """Its place in the answer: 0, 1, …"""
    kind: BlockKind
    call_id: str = ""
    """The id of a call."""
    name: str = ""
    """The tool that a call calls."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the tokens of a text, and of white space before it."""
    is_cut: bool = False
    """The answer has ended inside of it."""

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments as JSON text."""
        return "".join(self.pieces)


class Stage(Enum):
    """The change that a step makes to its block."""

    BEGIN = auto()
    GROW = auto()
    END = auto()


class Step(NamedTuple):
    """A change of one block."""

    stage: Stage
    block: Block
    text: str = ""
    """The new text of GROW."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of its tokens."""


@dataclass(slots=True)
class BlockAnswer:
    """An answer of one choice; grows while it streams."""

    model: str = ""
    num_prompt_tokens: int = 0
    blocks: list[Block] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it."""
    usage: Usage = field(default_factory=Usage)
    """Known at the end."""
    _open: Block | None = None
    _num_chars: int = 0
    _pending: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of tokens that are of no block yet."""
    _num_logprobs: int = 0
    """Tokens so far that have some."""

    @property
    def has_calls(self) -> bool:
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    @property
    def is_cut(self) -> bool:
        """Whether the answer has ended before the model was done."""
        return self.finish_reason in _CUT

    def admit(self, event: AdmittedEvent) -> None:
        """Take in that the engine has the request."""
        self.model, self.num_prompt_tokens = event.model, len(event.prompt_token_ids)

    def add(self, delta: DeltaEvent) -> Iterator[Step]:
        """Take in new output; yield what it means."""
        self._pending += delta.logprobs
        self._num_logprobs += len(delta.logprobs)
        first_pending = self._num_logprobs - len(self._pending)
        del self._pending[: max(delta.num_before_answer - first_pending, 0)]
        if delta.reasoning:
            yield from self._grow(BlockKind.REASONING, delta.reasoning)
        text = delta.text
        for call in delta.tool_calls:
            if call.id:
                num_before = call.offset - self._num_chars
                yield from self._add_text(text[:num_before])
                text = text[num_before:]
                yield from self._begin(BlockKind.CALL, call.id, call.name)
            if call.arguments:
                yield from self._grow(BlockKind.CALL, call.arguments)
        yield from self._add_text(text)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            yield from self._end(is_cut=self.is_cut)

    def _add_text(self, text: str) -> Iterator[Step]:
        if text:
            self._num_chars += len(text)
            yield from self._grow(BlockKind.TEXT, text)

    def _grow(self, kind: BlockKind, text: str) -> Iterator[Step]:
        """Add to the open block, or to a new one where that is of another kind."""
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        block = self._open
        assert block is not None
        block.pieces.append(text)
        yield Step(Stage.GROW, block, text, self._take_logprobs(block))

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._end(is_cut=False)
        self._open = Block(len(self.blocks), kind, call_id, name)
        self.blocks.append(self._open)
        yield Step(Stage.BEGIN, self._open)

    def _end(self, *, is_cut: bool) -> Iterator[Step]:
        if self._open is not None:
            block, self._open = self._open, None
            block.is_cut = is_cut
            yield Step(Stage.END, block, logprobs=self._take_logprobs(block))

    def _take_logprobs(self, block: Block) -> tuple[TokenLogprobs, ...]:
        if block.kind is not BlockKind.TEXT:
            return ()
        taken, self._pending = tuple(self._pending), []
        block.logprobs += taken
        return taken


class BlockFormat(Protocol):
    """How an API spells its answers. One object per request."""

    answer_id: str

    def whole(self, answer: BlockAnswer) -> dict[str, Any]:
        """The answer to a request that does not stream."""

    def opening(self, answer: BlockAnswer) -> str:
        """Events at admission."""

    def step(self, step: Step) -> str:
        """Events of a change."""

    def closing(self, answer: BlockAnswer) -> str:
        """Events at the end."""

    def failure(self, error: HttpError) -> str:
        """The last event of a stream that has failed."""


async def answer_in_blocks(
    request: Request, raw: RawRequest, format: BlockFormat, *, is_streamed: bool
) -> Response:
    """Generate, and answer in the API's own words."""
    raw = replace(raw, client_names=(*raw.client_names, format.answer_id))
    generator, in_flight = generator_of(request), request.app.state.in_flight
    notes = dict[str, str]()

    def generate(receiver: EventReceiver | None = None) -> AsyncGenerator[Event]:
        events = generator.generate(raw, receiver)
        return with_notes(events, notes) if raw.has_schema else events

    if not is_streamed:
        whole = await in_flight.run(request.receive, _whole_blocks(generate()))
        return json_response(format.whole(whole), headers=notes)
    return EventStream(
        generate,
        BlockEncoder(format).encode,
        in_flight=in_flight,
        request_id=request.state.request_id,
        failure=format.failure,
        notes=notes,
    )


class BlockEncoder:
    """Writes the events of one stream in the words of an API."""

    def __init__(self, format: BlockFormat) -> None:
        self._answer = BlockAnswer()
        self._format = format

    def encode(self, event: Event) -> str:
        """Return what is sent of an event, at once; perhaps nothing."""
        answer = self._answer
        match event:
            case DeltaEvent():
                return "".join(map(self._format.step, answer.add(event)))
            case AdmittedEvent():
                answer.admit(event)
                return self._format.opening(answer)
            case FinishedEvent():
                answer.usage = event.usage
                return self._format.closing(answer)
        return ""


async def _whole_blocks(events: AsyncGenerator[Event]) -> BlockAnswer:
    """Return the answer to a request that does not stream."""
    answer = BlockAnswer()
    async with aclosing(events):
        async for event in events:
            match event:
                case DeltaEvent():
                    for _ in answer.add(event):
                        pass
                case AdmittedEvent():
                    answer.admit(event)
                case FinishedEvent():
                    answer.usage = event.usage
    return answer
