"""Printing shared by the commands that stream an answer to the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from triptych.client.collect import OutputCollector
from triptych.types.events import DeltaEvent, Event
from triptych.types.outputs import CompletionOutput, Usage

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
# A terminal obeys control characters, and a model may write any: they are shown as pictures there.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Return the text with its control characters made visible, which is safe to show on a terminal."""
    return text.translate(_PICTURES)


def write_now(text: str) -> None:
    """Write to stdout at once: text as it is into files and pipes, control characters made visible on a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@dataclass(slots=True)
class StreamStats:
    """Times of one stream; feed it every event as it arrives. Starts its clock when created."""

    started_s: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    _first_s: float = 0.0
    _last_s: float = 0.0
    _num_first_tokens: int = 0

    def add(self, event: Event) -> None:
        if not isinstance(event, DeltaEvent) or not event.token_ids:
            return
        now = time.perf_counter()
        if self.num_tokens == 0:
            self._first_s, self._num_first_tokens = now, len(event.token_ids)
        self._last_s = now
        self.num_tokens += len(event.token_ids)

    @property
    def ttft_s(self) -> float:
        """Request sent to first token; 0 where none came."""
        return self._first_s - self.started_s if self.num_tokens else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first delta over the time that they took; 0 where there were none."""
        elapsed_s = self._last_s - self._first_s
        return (self.num_tokens - self._num_first_tokens) / elapsed_s if elapsed_s > 0 else 0.0

    def __str__(self) -> str:
        return f"TTFT {self.ttft_s * 1e3:.0f} ms, {self.decode_tokens_per_s:.1f} tokens/s, {self.num_tokens} tokens"


class AnswerPrinter:
    """Writes one answer of one choice to stdout as it comes, and keeps it.

    On a terminal the model's reasoning is shown dimmed. Files and pipes get the answer alone.
    """

    def __init__(self) -> None:
        self.stats = StreamStats()
        self._collector = OutputCollector(None)
        self._is_dim = False
        self._shows_reasoning = sys.stdout.isatty()

    async def print(self, events: AsyncIterator[Event]) -> None:
        """Write until the end of the answer, or until cancelled. The caller ends the line."""
        try:
            async for event in events:
                self.stats.add(event)
                self._collector.add(event)
                if isinstance(event, DeltaEvent):
                    self._write(event)
            for call in self.answer.tool_calls:
                write_now(
                    f"\n{call.name}({call.arguments})"
                    if self.answer.text
                    else f"{call.name}({call.arguments})"
                )
        finally:
            self._set_dim(False)

    @property
    def answer(self) -> CompletionOutput:
        """The answer so far."""
        outputs = self._collector.output.outputs
        return outputs[0] if outputs else CompletionOutput()

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and the output; zeros until the answer has ended."""
        return self._collector.output.usage

    def _write(self, delta: DeltaEvent) -> None:
        if delta.reasoning and self._shows_reasoning:
            self._set_dim(True)
            write_now(delta.reasoning)
        if delta.text:
            if self._is_dim:
                self._set_dim(False)
                write_now("\n\n")
            write_now(delta.text)

    def _set_dim(self, is_dim: bool) -> None:
        if self._is_dim != is_dim:
            self._is_dim = is_dim
            sys.stdout.write(_DIM if is_dim else _PLAIN)
            sys.stdout.flush()
