"""The text of a choice: which tokens have any, and its parts: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.frontend.requests.tools import AnswerSplit
from triptych.types.events import DeltaEvent
from triptych.types.outputs import FinishedRequest, FinishReason, ToolCallDelta
from triptych.types.sampling import SamplingParams


def visible_tokens(
    token_ids: list[int], finish: FinishedRequest | None, sampling: SamplingParams
) -> list[int]:
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

    def __init__(self, split: AnswerSplit) -> None:
        self._parser = split.create_parser()
        self._sends_reasoning = split.sends_reasoning
        self._reports_calls = not split.names_tool

    def skip(self, text: str) -> None:
        """Take in text that the client has seen."""
        self._parser.push(text)
        self._parser.take()

    def split(self, delta: DeltaEvent) -> DeltaEvent:
        """Return a delta with its text split. A choice that stopped after calls has called tools."""
        self._parser.push(delta.text)
        reason = delta.finish_reason
        if reason is not None:
            self._parser.finish()
            if reason is FinishReason.STOP and self._parser.num_calls and self._reports_calls:
                reason = FinishReason.TOOL_CALLS
        parts = self._parser.take()
        return replace(
            delta,
            text=parts.content,
            finish_reason=reason,
            reasoning=parts.reasoning if self._sends_reasoning else "",
            tool_calls=join_deltas(parts.tool_calls),
        )


def join_deltas(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return one delta per call."""
    joined: list[ToolCallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + delta.arguments)
        else:
            joined.append(delta)
    return tuple(joined)
