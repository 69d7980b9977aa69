"""The text of a choice: which tokens have any, and its parts: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from triptych.text.answer_parser import ReasoningFormat
from triptych.types.events import DeltaEvent
from triptych.types.outputs import FinishedRequest, FinishReason, ToolCallDelta
from triptych.types.sampling import SamplingParams
from triptych_services.frontend.requests.tools import AnswerSplit


def visible_tokens(
    token_ids: Sequence[int], finish: FinishedRequest | None, sampling: SamplingParams
) -> Sequence[int]:
    """Return the tokens that have text.

    The engine ends a request with STOP only by its last token: an end-of-sequence token or one of
    `stop_token_ids`. That token has no text, unless the client wants what ended the output.
    """
    is_stopped = finish is not None and finish.reason is FinishReason.STOP
    if is_stopped and not sampling.include_stop_str_in_output:
        return token_ids[:-1]
    return token_ids


class AnswerSplitter:
    """Owned by one choice."""

    def __init__(self, split: AnswerSplit, token_bytes: Callable[[int], bytes]) -> None:
        """
        Args:
            token_bytes: See `Tokenizer.token_bytes`.
        """
        self._reasoning = None
        if split.reasoning is not None:
            self._reasoning = ReasoningTokens(split.reasoning, token_bytes, is_open=split.is_reasoning)
        self._parser = split.create_parser()
        self._sends_reasoning = split.sends_reasoning
        self._reports_calls = not split.names_tool

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens so far that the model thought before it answered."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def skip(self, text: str, token_ids: Iterable[int]) -> None:
        """Take in text and tokens that the client has seen."""
        self._count(token_ids)
        self._parser.push(text)
        self._parser.take()

    def split(self, delta: DeltaEvent) -> DeltaEvent:
        """Return a delta with its text split. A choice that stopped after calls has called tools."""
        self._count(delta.token_ids)
        self._parser.push(delta.text)
        reason = delta.finish_reason
        if reason is not None:
            self._parser.finish()
            has_called = self._parser.num_calls and not self._parser.is_cut  # not by a stop string
            if reason is FinishReason.STOP and has_called and self._reports_calls:
                reason = FinishReason.TOOL_CALLS
        parts = self._parser.take()
        return replace(
            delta,
            text=parts.content,
            finish_reason=reason,
            reasoning=parts.reasoning if self._sends_reasoning else "",
            num_before_answer=0 if self._reasoning is None else self._reasoning.num_with_marks,
            tool_calls=join_deltas(parts.tool_calls),
        )

    def _count(self, token_ids: Iterable[int]) -> None:
        if self._reasoning is not None:
            self._reasoning.add(token_ids)


class ReasoningTokens:
    """Counts the tokens of an output's reasoning without its marks, however these are cut into tokens.

    Hm  , so </  think  >Yes         num_tokens 2, num_with_marks 3
    """

    def __init__(
        self, reasoning: ReasoningFormat, token_bytes: Callable[[int], bytes], *, is_open: bool
    ) -> None:
        """
        Args:
            is_open: The prompt has opened it. Otherwise it begins the output, or there is none.
        """
        self.num_tokens = 0
        """The count so far, with tokens that may turn out to begin the closing mark."""
        self.num_with_marks = 0
        """Tokens of the output so far that have nothing of the answer behind the reasoning."""
        self._num_seen = 0
        """Tokens of the output so far, up to the end of the reasoning."""
        self._token_bytes = token_bytes
        self._opening, self._closing = reasoning.opening.encode(), reasoning.closing.encode()
        self._is_open = is_open
        self._is_over = False
        self._tail = b""
        """The latest bytes, in which the next mark may have begun."""
        self._token_sizes: list[int] = []
        """Bytes of each of the latest tokens of the reasoning."""

    def add(self, token_ids: Iterable[int]) -> None:
        """Take in new tokens of the output."""
        for token_id in token_ids:
            if self._is_over:
                return
            self._num_seen += 1
            if self._is_open:
                self._go_on(self._token_bytes(token_id))
            else:
                self._begin(self._token_bytes(token_id))

    def _begin(self, token: bytes) -> None:
        self._tail = (self._tail + token).lstrip()
        if self._tail.startswith(self._opening):
            self._tail, self._is_open = b"", True
            self.num_with_marks = self._num_seen
        else:
            self._is_over = not self._opening.startswith(self._tail)

    def _go_on(self, token: bytes) -> None:
        self.num_tokens += 1
        self.num_with_marks = self._num_seen
        overlap = len(self._closing) - 1
        self._tail = self._tail[len(self._tail) - min(overlap, len(self._tail)) :] + token
        self._token_sizes = [*self._token_sizes[-overlap:], len(token)]
        place = self._tail.find(self._closing)
        if place < 0:
            return
        self._is_over = True
        num_behind = len(self._tail) - place
        if self._tail[place + len(self._closing) :].strip():  # the answer begins in this token
            self.num_with_marks -= 1
        for size in reversed(self._token_sizes):
            if num_behind <= 0:
                return
            num_behind -= size
            self.num_tokens -= 1


def join_deltas(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return one delta per call."""
    joined: list[ToolCallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + delta.arguments)
        else:
            joined.append(delta)
    return tuple(joined)
