"""Times one streamed answer as its client sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from triptych.types.events import DeltaEvent, Event


@dataclass(slots=True)
class StreamStats:
    """Times of one stream; feed it every event as it arrives. Starts its clock when created."""

    started_s: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between two deltas with tokens (ITL as the client sees it: a lagging client gets several in one)."""
    _first_s: float = 0.0
    _last_s: float = 0.0
    _num_first_tokens: int = 0

    def add(self, event: Event) -> None:
        if not isinstance(event, DeltaEvent) or not event.token_ids:
            return
        now = time.perf_counter()
        if self.num_tokens == 0:
            self._first_s, self._num_first_tokens = now, len(event.token_ids)
        else:
            self.gaps_s.append(now - self._last_s)
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
