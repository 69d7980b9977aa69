"""Records each request: one log line, and the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType

from triptych.errors import TriptychError
from triptych.observe.logging import with_fields
from triptych.observe.metrics import FrontendMetrics, ModelMetrics
from triptych.types.outputs import StageTimings, Usage
from triptych.types.sampling import SamplingParams
from triptych_services.frontend.access.caller import current_caller
from triptych_services.frontend.streams.outputs import HandedOver, RequestOutputs

log = logging.getLogger(__name__)

_CANCELLED = "cancelled"  # the client left before the end
_HANDED_OVER = "handed_over"  # it goes on at another frontend
_INTERNAL = "INTERNAL"


class RequestRecord:
    """One request from arrival to end. A context manager: leaving it writes the line, whatever happened."""

    def __init__(self, metrics: FrontendMetrics, api: str, request_id: str) -> None:
        self._metrics = metrics
        self._of_model: ModelMetrics | None = None
        self._api = api
        self._request_id = request_id
        self._key_name = current_caller().name
        self.arrived = time.monotonic()
        """On the monotonic clock."""
        self._submitted = self.arrived
        self._time_to_first_token_s: float | None = None
        self._last_output: dict[int, float] = {}
        """Index of a streamed choice -> time of its last output."""
        self._num_counted = 0  # output tokens
        self._most_tokens = 0  # of one choice
        self.model = ""
        self.usage = Usage()
        """Kept up to date by the generator."""
        self.finish = ""
        """How it ended well; empty until it has."""
        self.num_moves = 0
        """Times that it moved to another engine."""
        self.engine_names: Sequence[str] = ()
        """Engines that it was submitted to, in turn."""
        self.tenant = ""
        self.queued_ns = 0
        """Time in the engine before its first step, of the slowest choice."""
        self.is_resumed = False
        """It began at another frontend, or on another connection."""

    def note_outputs(self, outputs: RequestOutputs) -> None:
        """Take in where the request was computed."""
        self.num_moves, self.engine_names = outputs.num_moves, outputs.engine_names
        self.queued_ns = outputs.timings.queued_ns

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.arrived

    def note_model(self, name: str) -> None:
        """The model that the request is for was found."""
        self.model = name
        self._of_model = self._metrics.of_model(name)

    def note_submitted(self) -> None:
        """The request is about to go to its engine."""
        self._submitted = time.monotonic()

    def note_admitted(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """An engine has taken the request."""
        if (metrics := self._of_model) is None:
            return
        metrics.prompt_tokens.inc(num_prompt_tokens)
        metrics.request_prompt_tokens.observe(num_prompt_tokens)
        metrics.params_n.observe(sampling.n)
        if sampling.max_tokens is not None:
            metrics.params_max_tokens.observe(sampling.max_tokens)

    def note_output(self, index: int, num_tokens: int) -> None:
        """New output of a streamed choice is about to go to the client."""
        now = time.monotonic()
        if self._time_to_first_token_s is None:
            self._note_first_token(now - self.arrived)
        last, self._last_output[index] = self._last_output.get(index), now
        if num_tokens and (metrics := self._of_model) is not None:
            self._num_counted += num_tokens
            metrics.generation_tokens.inc(num_tokens)
            if last is not None:
                metrics.inter_token_latency.observe((now - last) / num_tokens, num_tokens)

    def note_first_token(self, ns_in_engine: int) -> None:
        """The engine had the first token of an answer that is not streamed so long after it took the request."""
        self._note_first_token(self._submitted - self.arrived + ns_in_engine / 1e9)

    def note_choice(self, reason: str, num_tokens: int, timings: StageTimings) -> None:
        """A choice of a request that ended well has ended for this reason."""
        self._most_tokens = max(self._most_tokens, num_tokens)
        if (metrics := self._of_model) is None:
            return
        self._metrics.request_success.labels(self.model, reason).inc()
        if not timings.queued_ns + timings.prefill_ns:
            return  # the engine has not reported them
        metrics.queue_time.observe(timings.queued_ns / 1e9)
        metrics.prefill_time.observe(timings.prefill_ns / 1e9)
        metrics.decode_time.observe(timings.decode_ns / 1e9)
        metrics.inference_time.observe((timings.prefill_ns + timings.decode_ns) / 1e9)
        if num_tokens > 1:
            metrics.time_per_output_token.observe(timings.decode_ns / 1e9 / (num_tokens - 1))

    def _note_first_token(self, after_s: float) -> None:
        self._time_to_first_token_s = after_s
        if self._of_model is not None:
            self._of_model.time_to_first_token.observe(after_s)

    def __enter__(self) -> RequestRecord:
        self._metrics.active.inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outcome = self.finish or _outcome(error)
        total_s = self.elapsed_s
        usage = self.usage
        self._metrics.active.dec()
        self._metrics.requests.labels(self.model, self._api, outcome).inc()
        if self.is_resumed:
            self._metrics.attached.labels(self.model, outcome).inc()
        if (metrics := self._of_model) is not None:
            metrics.generation_tokens.inc(max(usage.num_output_tokens - self._num_counted, 0))
            if self.finish:
                metrics.e2e_latency.observe(total_s)
                metrics.request_generation_tokens.observe(usage.num_output_tokens)
                metrics.request_max_num_generation_tokens.observe(self._most_tokens)
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
        if self.engine_names:
            fields["engine"] = ",".join(self.engine_names)
            fields["queued_ms"] = self.queued_ns / 1e6
        if self.num_moves:
            fields["moves"] = self.num_moves
        if self.is_resumed:
            fields["resumed"] = True
        if self.tenant:
            fields["tenant"] = self.tenant
        if self._key_name:
            fields["key"] = self._key_name
        if self._time_to_first_token_s is not None:
            fields["ttft_ms"] = self._time_to_first_token_s * 1000
        if not self.finish and isinstance(error, TriptychError):
            fields["error"] = error.message
        log.info("request", extra=with_fields(**fields))


def _outcome(error: BaseException | None) -> str:
    match error:
        case HandedOver():
            return _HANDED_OVER
        case TriptychError():
            return error.code
        case None | GeneratorExit() | asyncio.CancelledError():
            return _CANCELLED
    return _INTERNAL
