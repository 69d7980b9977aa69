"""Metrics of an engine core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from triptych.observe.metrics.frontend import TOKENS
from triptych.types.facts import STATUS_ROWS

JOURNAL_STATES = ("off", "recording", "full", "failed", "closed")
MAX_PRIORITY_LABEL = 10
"""Greatest priority with a series of its own; its negative is the least. A client may choose any 32-bit number."""
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Metrics of groups of layers, by what these keep: `GroupStatus.name` is the label."""

    used_blocks: Gauge
    blocks: Gauge
    hit_blocks: Counter
    released_blocks: Counter
    snapshots: Gauge

    @classmethod
    def create(cls, gauge: Callable[..., Gauge], counter: Callable[..., Counter]) -> GroupMetrics:
        """Return the metrics, made by functions of a name, a text and labels."""
        return cls(
            used_blocks=gauge(
                "group_used_blocks",
                "Blocks that requests hold in groups of layers, by what these keep, as full, window-1024, state.",
                "group",
            ),
            blocks=gauge(
                "group_blocks", "Blocks of the pool that these groups draw from, with others.", "group"
            ),
            hit_blocks=counter(
                "group_hit_blocks",
                "Blocks found in the prefix cache that requests began with, by group as above.",
                "group",
            ),
            released_blocks=counter(
                "group_released_blocks",
                "Blocks that running requests gave back because no later token sees them, by group as above.",
                "group",
            ),
            snapshots=gauge(
                "state_snapshots", "Recurrent states in the prefix cache, from which a prompt can go on."
            ),
        )


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Prometheus metrics of the engine core."""

    gauges: Mapping[str, Gauge]
    """Name in STATUS_ROWS -> the metric of a number that is no counter."""
    counters: Mapping[str, Counter]
    """Name in STATUS_ROWS -> the metric of a counter."""
    waiting_by_priority: Gauge
    finished: Counter
    kv_transfers: Counter
    kv_transfer_bytes: Counter
    groups: GroupMetrics
    journal_state: Gauge
    worker_losses: Counter
    step_seconds: Histogram
    iteration_tokens: Histogram

    @classmethod
    def create(cls, registry: CollectorRegistry = REGISTRY) -> EngineMetrics:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"triptych_engine_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"triptych_engine_{name}", text, labels, registry=registry)

        shown = {name: row for name, row in STATUS_ROWS.items() if row.metric}
        return cls(
            gauges={name: gauge(row.metric, row.help) for name, row in shown.items() if not row.is_counter},
            counters={name: counter(row.metric, row.help) for name, row in shown.items() if row.is_counter},
            waiting_by_priority=gauge(
                "waiting_requests_by_priority",
                f"Choices that wait for a row by priority; {-MAX_PRIORITY_LABEL} and {MAX_PRIORITY_LABEL} include all "
                "beyond them.",
                "priority",
            ),
            finished=counter("finished_requests", "Requests ended, by reason.", "reason"),
            kv_transfers=counter(
                "kv_transfers",
                "Prompts with KV blocks that went to another worker (out) or came from one (in), and outcome: "
                "complete, or failed: computed here after all, or not pulled in time.",
                "direction",
                "outcome",
            ),
            kv_transfer_bytes=counter(
                "kv_transfer_bytes", "Bytes of these blocks and pages of states, on one rank.", "direction"
            ),
            groups=GroupMetrics.create(gauge, counter),
            journal_state=gauge("journal_state", "1 for the state of the step journal.", "state"),
            worker_losses=counter("worker_losses", "Times that the worker's stream was lost."),
            step_seconds=Histogram(
                "triptych_engine_step_seconds",
                "Plan sent to result received.",
                buckets=_STEP_SECONDS,
                registry=registry,
            ),
            iteration_tokens=Histogram(
                "triptych_engine_iteration_tokens_total",
                "Tokens of a step, as vLLM's histogram of this name.",
                buckets=TOKENS,
                registry=registry,
            ),
        )
