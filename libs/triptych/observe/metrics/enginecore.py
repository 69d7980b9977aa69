"""Metrics of an engine core."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from triptych.observe.metrics.frontend import TOKENS

JOURNAL_STATES = ("off", "recording", "full", "failed", "closed")
MAX_PRIORITY_LABEL = 10
"""Greatest priority with a series of its own, and less its sign the least: a client may choose any 32-bit number."""
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Prometheus metrics of the engine core."""

    running: Gauge
    waiting: Gauge
    waiting_by_priority: Gauge
    used_blocks: Gauge
    blocks: Gauge
    touched_blocks: Gauge
    steps_in_flight: Gauge
    steps: Counter
    scheduled_tokens: Counter
    preemptions: Counter
    prefix_queries: Counter
    prefix_hits: Counter
    finished: Counter
    step_seconds: Histogram
    worker_losses: Counter
    asleep: Gauge
    oldest_waiting_seconds: Gauge
    kept: Gauge
    iteration_tokens: Histogram
    kv_transfers: Counter
    kv_transfer_bytes: Counter
    journal_state: Gauge
    journal_bytes: Gauge
    journal_oldest: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry = REGISTRY) -> EngineMetrics:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"triptych_engine_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"triptych_engine_{name}", text, labels, registry=registry)

        return cls(
            running=gauge("running_requests", "Requests with a row in the worker."),
            waiting=gauge("waiting_requests", "Requests waiting for one."),
            waiting_by_priority=gauge(
                "waiting_requests_by_priority",
                f"The same by priority; {-MAX_PRIORITY_LABEL} and {MAX_PRIORITY_LABEL} stand for all beyond them, too.",
                ("priority",),
            ),
            used_blocks=gauge("used_blocks", "KV blocks held."),
            blocks=gauge("blocks", "KV blocks that requests may hold."),
            touched_blocks=gauge(
                "touched_blocks", "KV blocks held at least once; on a CPU they take memory."
            ),
            steps_in_flight=gauge(
                "steps_in_flight", "Steps to keep in flight towards the worker, as measured or configured."
            ),
            steps=counter("steps", "Steps completed."),
            scheduled_tokens=counter("scheduled_tokens", "Tokens planned, recomputed ones included."),
            preemptions=counter("preemptions", "Requests that lost their blocks to another."),
            prefix_queries=counter("prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
            prefix_hits=counter("prefix_hit_tokens", "Prompt tokens found there."),
            finished=counter("finished_requests", "Requests ended, by reason.", ("reason",)),
            step_seconds=Histogram(
                "triptych_engine_step_seconds",
                "Plan sent to result received.",
                buckets=_STEP_SECONDS,
                registry=registry,
            ),
            worker_losses=counter("worker_losses", "Times that the worker's stream was lost."),
            asleep=gauge("asleep", "1 while the worker sleeps."),
            oldest_waiting_seconds=gauge(
                "oldest_waiting_seconds", "Time that the request which waits longest has been queued."
            ),
            kept=gauge("kept_requests", "Requests that run on without a frontend that reads them."),
            iteration_tokens=Histogram(
                "triptych_engine_iteration_tokens_total",
                "Tokens of a step, as vLLM's histogram of this name.",
                buckets=TOKENS,
                registry=registry,
            ),
            kv_transfers=counter(
                "kv_transfers",
                "Prompts whose KV blocks went to another worker (out) or came from one (in), and outcome: complete, or "
                "failed: computed here after all, or not pulled in time.",
                ("direction", "outcome"),
            ),
            kv_transfer_bytes=counter(
                "kv_transfer_bytes", "Bytes of these blocks, on one rank.", ("direction",)
            ),
            journal_state=gauge("journal_state", "1 for the state of the step journal.", ("state",)),
            journal_bytes=gauge("journal_bytes", "Bytes of this engine's journals, earlier runs included."),
            journal_oldest=gauge(
                "journal_oldest_timestamp_seconds",
                "Unix time of the start of the earliest run that they hold; 0: they hold none.",
            ),
        )
