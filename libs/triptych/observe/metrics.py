"""Prometheus metrics: every name in one place, one set per tier, one small HTTP server per process."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from triptych.errors import ConfigError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAP_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.005, 0.02, 0.1)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class FrontendMetrics:
    """Prometheus metrics of the frontend."""

    requests: Counter
    prompt_tokens: Counter
    output_tokens: Counter
    time_to_first_token: Histogram
    request_seconds: Histogram
    active: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry = REGISTRY) -> FrontendMetrics:
        return cls(
            Counter(
                "triptych_frontend_requests",
                "Requests ended, by API and outcome.",
                ["api", "outcome"],
                registry=registry,
            ),
            Counter("triptych_frontend_prompt_tokens", "Prompt tokens taken.", registry=registry),
            Counter("triptych_frontend_output_tokens", "Output tokens sent.", registry=registry),
            Histogram(
                "triptych_frontend_time_to_first_token_seconds",
                "Arrival to first token.",
                buckets=_SECONDS,
                registry=registry,
            ),
            Histogram(
                "triptych_frontend_request_seconds", "Arrival to end.", buckets=_SECONDS, registry=registry
            ),
            Gauge("triptych_frontend_active_requests", "Requests that run now.", registry=registry),
        )


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Prometheus metrics of the engine core."""

    running: Gauge
    waiting: Gauge
    used_blocks: Gauge
    blocks: Gauge
    touched_blocks: Gauge
    steps: Counter
    scheduled_tokens: Counter
    preemptions: Counter
    prefix_queries: Counter
    prefix_hits: Counter
    finished: Counter
    step_seconds: Histogram
    worker_losses: Counter
    asleep: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry = REGISTRY) -> EngineMetrics:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"triptych_engine_{name}", text, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"triptych_engine_{name}", text, labels, registry=registry)

        return cls(
            running=gauge("running_requests", "Requests with a row in the worker."),
            waiting=gauge("waiting_requests", "Requests waiting for one."),
            used_blocks=gauge("used_blocks", "KV blocks held."),
            blocks=gauge("blocks", "KV blocks that requests may hold."),
            touched_blocks=gauge(
                "touched_blocks", "KV blocks held at least once; on a CPU they take memory."
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
        )


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """Prometheus metrics of a worker."""

    steps: Counter
    tokens: Counter
    stage_seconds: Counter
    step_gap_seconds: Histogram
    kv_blocks: Gauge
    weight_bytes: Gauge
    load_seconds: Gauge
    kernels: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry = REGISTRY) -> WorkerMetrics:
        return cls(
            Counter("triptych_worker_steps", "Steps computed.", registry=registry),
            Counter("triptych_worker_tokens", "Tokens computed.", registry=registry),
            Counter(
                "triptych_worker_stage_seconds",
                "Time by stage: prepare, forward, sample, idle.",
                ["stage"],
                registry=registry,
            ),
            Histogram(
                "triptych_worker_step_gap_seconds",
                "Between the last kernel of a step and the first of the next, waits for a plan included; "
                "only of devices that measure it.",
                buckets=_GAP_SECONDS,
                registry=registry,
            ),
            Gauge("triptych_worker_kv_blocks", "KV blocks built.", registry=registry),
            Gauge("triptych_worker_weight_bytes", "Bytes of weights held.", registry=registry),
            Gauge("triptych_worker_load_seconds", "Process start to weights loaded.", registry=registry),
            Gauge("triptych_worker_kernels", "1 for what computes.", ["kernels"], registry=registry),
        )


def serve_metrics(host: str, port: int, *, option: str) -> int:
    """Serve `/metrics` on a daemon thread; returns the port.

    Raises:
        ConfigError: the port is taken; names it.
    """
    try:
        server, _ = start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigError(f"{option}: cannot bind {host}:{port} ({error.strerror})") from None
    return int(server.server_port)
