"""Records each request: one log line, and the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType

from services.frontend.access.caller import current_caller
from triptych.errors import TriptychError
from triptych.observe.logging import with_fields
from triptych.observe.metrics import FrontendMetrics
from triptych.types.outputs import Usage

log = logging.getLogger(__name__)

_CANCELLED = "cancelled"  # the client left before the end
_INTERNAL = "INTERNAL"


class RequestRecord:
    """One request from arrival to end. A context manager: leaving it writes the line, whatever happened."""

    def __init__(self, metrics: FrontendMetrics, api: str, request_id: str) -> None:
        self._metrics = metrics
        self._api = api
        self._request_id = request_id
        self._key_name = current_caller().name
        self._arrived = time.monotonic()
        self._submitted = self._arrived
        self._time_to_first_token_s: float | None = None
        self.model = ""
        self.usage = Usage()
        """Kept up to date by the generator."""
        self.finish = ""
        """How it ended well; empty until it has."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._arrived

    def note_submitted(self) -> None:
        """The request is about to go to its engine."""
        self._submitted = time.monotonic()

    def note_output(self) -> None:
        """Output is about to go to the client; the first time counts."""
        if self._time_to_first_token_s is None:
            self._note_first_token(self.elapsed_s)

    def note_first_token(self, ns_in_engine: int) -> None:
        """The engine had the first token of an answer that is not streamed so long after it took the request."""
        self._note_first_token(self._submitted - self._arrived + ns_in_engine / 1e9)

    def _note_first_token(self, after_s: float) -> None:
        self._time_to_first_token_s = after_s
        self._metrics.time_to_first_token.observe(after_s)

    def __enter__(self) -> RequestRecord:
        self._metrics.active.inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outcome = self.finish or _outcome(error)
        total_s = self.elapsed_s
        metrics, usage = self._metrics, self.usage
        metrics.active.dec()
        metrics.requests.labels(self._api, outcome).inc()
        metrics.request_seconds.observe(total_s)
        metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        metrics.output_tokens.inc(usage.num_output_tokens)
        fields = {
            "request_id": self._request_id,
            "api": self._api,
            "model": self.model,
            "prompt_tokens": usage.num_prompt_tokens,
            "output_tokens": usage.num_output_tokens,
            "cached_tokens": usage.num_cached_tokens,
            "total_ms": total_s * 1000,
            "finish": outcome,
        }
        if self._key_name:
            fields["key"] = self._key_name
        if self._time_to_first_token_s is not None:
            fields["ttft_ms"] = self._time_to_first_token_s * 1000
        if not self.finish and isinstance(error, TriptychError):
            fields["error"] = error.message
        log.info("request", extra=with_fields(**fields))


def _outcome(error: BaseException | None) -> str:
    match error:
        case TriptychError():
            return error.code
        case None | GeneratorExit() | asyncio.CancelledError():
            return _CANCELLED
    return _INTERNAL
