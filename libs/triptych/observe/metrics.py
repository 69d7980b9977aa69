"""Prometheus metrics: every name in one place, one set per tier, one small HTTP server per process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.observe.counted_histogram import CountedHistogram, CountedSamples
from triptych.types.facts import EngineStatus

disable_created_metrics()  # a series with the time of creation beside each counter: twice as many

_FRONTEND = "triptych_frontend_"
ENGINE_STATES = ("ready", "not_ready", "asleep", "draining", "lost")
_NOT_VLLM = (
    "requests",
    "moves",
    "active_requests",
    "engine_ready",
    "engines",
    "engine_sessions",
    "attached_streams",
    "choices_waiting_for_engine",
    "oldest_choice_waiting_for_engine_seconds",
)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_GAP_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.005, 0.02, 0.1)
_MASK_SECONDS = (2e-5, 1e-4, 5e-4, 0.002, 0.005, 0.02, 0.1, 0.5)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LAG_INTERVAL_S = 0.5
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class FrontendMetrics:
    """Prometheus metrics of the frontend.

    What comes behind `triptych_frontend_` is vLLM's own name wherever vLLM has the same quantity; see `VllmNames`.
    """

    requests: Counter
    active: Gauge
    prompt_tokens: Counter
    generation_tokens: Counter
    request_success: Counter
    moves: Counter
    sessions: Counter
    attached: Counter
    waiting_for_engine: Gauge
    oldest_waiting_for_engine_seconds: Gauge
    time_to_first_token: Histogram
    inter_token_latency: CountedHistogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    inference_time: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    params_n: Histogram
    params_max_tokens: Histogram
    _of_models: dict[str, ModelMetrics] = field(init=False, default_factory=dict)

    @classmethod
    def create(cls, registry: CollectorRegistry = REGISTRY) -> FrontendMetrics:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_FRONTEND}{name}", text, ["model_name", *labels], registry=registry)

        return cls(
            requests=counter(
                "requests",
                "Requests ended, by API and outcome; no model if none was found.",
                "api",
                "outcome",
            ),
            active=Gauge(f"{_FRONTEND}active_requests", "Requests that run now.", registry=registry),
            prompt_tokens=counter("prompt_tokens", "Prompt tokens that an engine has taken."),
            generation_tokens=counter("generation_tokens", "Output tokens, counted as they come."),
            request_success=counter("request_success", "Choices that ended, by reason.", "finished_reason"),
            moves=counter(
                "moves",
                "Choices whose engine was lost or gave them up: moved to one that computes the same bits, or others, "
                "failed for want of an engine, or suspected of what the engines died of.",
                "outcome",
            ),
            sessions=Counter(
                f"{_FRONTEND}engine_sessions",
                "Sessions with engines: begun, resumed after a broken stream, or lost with what was in flight.",
                ["outcome"],
                registry=registry,
            ),
            attached=counter(
                "attached_streams", "Streams that began elsewhere and were asked to go on here.", "outcome"
            ),
            waiting_for_engine=Gauge(
                f"{_FRONTEND}choices_waiting_for_engine",
                "Choices that have lost their engine and wait for another.",
                registry=registry,
            ),
            oldest_waiting_for_engine_seconds=Gauge(
                f"{_FRONTEND}oldest_choice_waiting_for_engine_seconds",
                "Time that the first of them has waited.",
                registry=registry,
            ),
            inter_token_latency=CountedHistogram(
                f"{_FRONTEND}inter_token_latency_seconds",
                "Between two tokens of a streamed choice; tokens that leave together share their time.",
                "model_name",
                buckets=_TOKEN_SECONDS,
                registry=registry,
            ),
            **_request_histograms(registry),
        )

    def of_model(self, name: str) -> ModelMetrics:
        """Return the metrics of requests for one model."""
        if name not in self._of_models:  # looking up each costs 10 us
            metrics = (getattr(self, each.name).labels(name) for each in fields(ModelMetrics))
            self._of_models[name] = ModelMetrics(*metrics)
        return self._of_models[name]

    @property
    def collectors(self) -> list[Collector]:
        """All of them."""
        return [getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")]


def _request_histograms(registry: CollectorRegistry) -> dict[str, Histogram]:
    """Return name -> each field of `FrontendMetrics` that counts requests by their times and sizes."""

    def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{_FRONTEND}{name}", text, ["model_name"], buckets=buckets, registry=registry)

    return {
        "time_to_first_token": histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS),
        "time_per_output_token": histogram(
            "request_time_per_output_token_seconds",
            "First token to end, divided by the tokens after the first.",
            _TOKEN_SECONDS,
        ),
        "e2e_latency": histogram("e2e_request_latency_seconds", "Arrival to end.", _SECONDS),
        "queue_time": histogram(
            "request_queue_time_seconds", "In the engine, before the first step.", _SECONDS
        ),
        "prefill_time": histogram("request_prefill_time_seconds", "First step to first token.", _SECONDS),
        "decode_time": histogram("request_decode_time_seconds", "First token to last.", _SECONDS),
        "inference_time": histogram("request_inference_time_seconds", "First step to last token.", _SECONDS),
        "request_prompt_tokens": histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
        "request_generation_tokens": histogram(
            "request_generation_tokens", "Output tokens of a request, all choices together.", _TOKENS
        ),
        "params_n": histogram("request_params_n", "Choices that a request asks for.", _CHOICES),
        "params_max_tokens": histogram(
            "request_params_max_tokens", "Output tokens that a choice of a request may have.", _TOKENS
        ),
    }


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Those of `FrontendMetrics` that have no label beside the model's name."""

    prompt_tokens: Counter
    generation_tokens: Counter
    time_to_first_token: Histogram
    inter_token_latency: CountedSamples
    time_per_output_token: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    inference_time: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    params_n: Histogram
    params_max_tokens: Histogram


class EngineState(NamedTuple):
    """The state of one engine, as a frontend sees it."""

    model: str
    """Name of its model. Empty: not known yet."""
    engine: str
    """Its last name; its address if it was never reached."""
    state: str
    """One of `ENGINE_STATES`."""


class EngineGauges(Collector):
    """The engines' counters as a frontend last heard of them, for gateways and dashboards that ask frontends."""

    def __init__(
        self,
        latest: Callable[[], Iterable[tuple[str, EngineStatus]]],
        states: Callable[[], Iterable[EngineState]],
    ) -> None:
        """
        Args:
            latest: Returns the model's name and the status of each engine that reports.
            states: Returns the state of each engine, lost ones included.
        """
        self._latest = latest
        self._states = states

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"{_FRONTEND}{name}", text, labels=labels)

        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"{_FRONTEND}{name}", text, labels=labels)

        running = gauge("num_requests_running", "Choices with a row in the engine's worker.")
        waiting = gauge("num_requests_waiting", "Choices that wait for one.")
        usage = gauge("kv_cache_usage_perc", "Share of KV blocks that requests hold; 1 is all of them.")
        asleep = gauge("engine_sleep_state", "1 while the engine's worker sleeps.")
        ready = gauge(
            "engine_ready",
            "1 while the engine takes requests; 0 also while it is lost, under its last name or its address.",
        )
        engines = GaugeMetricFamily(
            f"{_FRONTEND}engines", "Engines that are configured or were found, by state.", labels=["state"]
        )
        counts = dict.fromkeys(ENGINE_STATES, 0)
        for each in self._states():
            counts[each.state] += 1
            ready.add_metric([each.model, each.engine], each.state == "ready")
        for state, count in counts.items():
            engines.add_metric([state], count)
        queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        hits = counter("prefix_cache_hits", "Prompt tokens found there.")
        preemptions = counter("num_preemptions", "Requests that lost their blocks to another.")
        sizes = GaugeMetricFamily(
            f"{_FRONTEND}cache_config_info",
            "1; sizes of the engine's KV cache.",
            labels=[*labels, "block_size", "num_gpu_blocks"],
        )
        for model, status in self._latest():
            who = [model, status.engine_id]
            running.add_metric(who, status.num_running)
            waiting.add_metric(who, status.num_waiting)
            usage.add_metric(who, status.num_used_blocks / max(status.num_blocks, 1))
            asleep.add_metric(who, status.asleep)
            queries.add_metric(who, status.prefix_queries)
            hits.add_metric(who, status.prefix_hits)
            preemptions.add_metric(who, status.num_preemptions)
            sizes.add_metric([*who, str(status.block_size), str(status.num_blocks)], 1)
        yield from (running, waiting, usage, asleep, ready, engines, queries, hits, preemptions, sizes)


class VllmNames(Collector):
    """The frontend's metrics once more, under vLLM's names: dashboards, autoscalers and gateways look for these."""

    def __init__(self, sources: Iterable[Collector]) -> None:
        self._sources = tuple(sources)

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for metric in source.collect():
                name = metric.name.removeprefix(_FRONTEND)
                if name in _NOT_VLLM:
                    continue
                renamed = Metric(f"vllm:{name}", metric.documentation, metric.type)
                renamed.samples = [
                    sample._replace(name=f"vllm:{sample.name.removeprefix(_FRONTEND)}")
                    for sample in metric.samples
                ]
                yield renamed


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Prometheus metrics of the engine core."""

    running: Gauge
    waiting: Gauge
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
                "triptych_engine_iteration_tokens",
                "Tokens of a step.",
                buckets=_TOKENS,
                registry=registry,
            ),
        )


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """Prometheus metrics of a worker."""

    steps: Counter
    tokens: Counter
    stage_seconds: Counter
    step_gap_seconds: Histogram
    mask_seconds: Histogram
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
            Histogram(
                "triptych_worker_mask_seconds",
                "Time that a step spends on the masks of structured outputs; only of steps with some.",
                buckets=_MASK_SECONDS,
                registry=registry,
            ),
            Gauge("triptych_worker_kv_blocks", "KV blocks built.", registry=registry),
            Gauge("triptych_worker_weight_bytes", "Bytes of weights held.", registry=registry),
            Gauge("triptych_worker_load_seconds", "Process start to weights loaded.", registry=registry),
            Gauge("triptych_worker_kernels", "1 for what computes.", ["kernels"], registry=registry),
        )


class LoopLag:
    """Measures how late a timer of the event loop fires. Owned by the service, which runs `run` while it serves."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._lag = Histogram(
            "triptych_event_loop_lag_seconds",
            "Lateness of a timer, twice a second: everything on the loop waits for so long.",
            buckets=_LAG_SECONDS,
            registry=registry,
        )

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_at = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._lag.observe(max(loop.time() - due_at, 0.0))
