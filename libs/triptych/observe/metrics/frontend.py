"""Metrics of a frontend's requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.observe.counted_histogram import CountedHistogram, CountedSamples

PREFIX = "triptych_frontend_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)

Create = Callable[[CollectorRegistry], Any]
"""Makes a metric for all models."""


def _count(name: str, text: str) -> dict[str, Create]:
    def create(registry: CollectorRegistry) -> Counter:
        return Counter(f"{PREFIX}{name}", text, ["model_name"], registry=registry)

    return {"create": create}


def _histogram(name: str, text: str, buckets: Sequence[float]) -> dict[str, Create]:
    def create(registry: CollectorRegistry) -> CountedHistogram:
        return CountedHistogram(f"{PREFIX}{name}", text, "model_name", buckets=buckets, registry=registry)

    return {"create": create}


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics of requests for one model that have no label beside its name."""

    prompt_tokens: Counter = field(
        metadata=_count("prompt_tokens", "Prompt tokens that an engine has taken.")
    )
    generation_tokens: Counter = field(
        metadata=_count("generation_tokens", "Output tokens, counted as they come.")
    )
    time_to_first_token: CountedSamples = field(
        metadata=_histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
    )
    inter_token_latency: CountedSamples = field(
        metadata=_histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a streamed choice; tokens that leave together share their time.",
            _TOKEN_SECONDS,
        )
    )
    time_per_output_token: CountedSamples = field(
        metadata=_histogram(
            "request_time_per_output_token_seconds",
            "First token to end, divided by the tokens after the first.",
            _TOKEN_SECONDS,
        )
    )
    e2e_latency: CountedSamples = field(
        metadata=_histogram("e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
    )
    queue_time: CountedSamples = field(
        metadata=_histogram("request_queue_time_seconds", "In the engine, before the first step.", _SECONDS)
    )
    prefill_time: CountedSamples = field(
        metadata=_histogram("request_prefill_time_seconds", "First step to first token.", _SECONDS)
    )
    decode_time: CountedSamples = field(
        metadata=_histogram("request_decode_time_seconds", "First token to last.", _SECONDS)
    )
    inference_time: CountedSamples = field(
        metadata=_histogram("request_inference_time_seconds", "First step to last token.", _SECONDS)
    )
    request_prompt_tokens: CountedSamples = field(
        metadata=_histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
    )
    request_generation_tokens: CountedSamples = field(
        metadata=_histogram(
            "request_generation_tokens", "Output tokens of a request, all choices together.", TOKENS
        )
    )
    request_max_num_generation_tokens: CountedSamples = field(
        metadata=_histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice.", TOKENS
        )
    )
    params_n: CountedSamples = field(
        metadata=_histogram("request_params_n", "Choices that a request asks for.", _CHOICES)
    )
    params_max_tokens: CountedSamples = field(
        metadata=_histogram(
            "request_params_max_tokens", "Output tokens that a choice of a request may have.", TOKENS
        )
    )


@dataclass(frozen=True, slots=True)
class FrontendMetrics:
    """Prometheus metrics of the frontend.

    What comes behind `triptych_frontend_` is vLLM's own name wherever vLLM has the same quantity; see `VllmNames`.
    """

    requests: Counter
    active: Gauge
    request_success: Counter
    moves: Counter
    sessions: Counter
    attached: Counter
    rate_limited: Counter
    http_responses: Counter
    waiting_for_engine: Gauge
    oldest_waiting_for_engine_seconds: Gauge
    by_model: Mapping[str, Any]
    """Field of `ModelMetrics` -> its metric for all models, with the model as label."""
    _of_models: dict[str, ModelMetrics] = field(init=False, default_factory=dict)

    @classmethod
    def create(cls, registry: CollectorRegistry = REGISTRY) -> FrontendMetrics:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}{name}", text, ["model_name", *labels], registry=registry)

        def counter_of_all(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{PREFIX}{name}", text, registry=registry)

        return cls(
            requests=counter(
                "requests", "Requests ended, by API and outcome; no model: none was found.", "api", "outcome"
            ),
            active=gauge("active_requests", "Requests that run now."),
            request_success=counter("request_success", "Choices that ended, by reason.", "finished_reason"),
            moves=counter(
                "moves",
                "Choices that lost their engine or were given up by it: moved to one that computes the same bits, or "
                "others, failed for want of an engine, or suspected of what the engines died of.",
                "outcome",
            ),
            sessions=counter_of_all(
                "engine_sessions",
                "Sessions with engines: begun, resumed after a broken stream, or lost with what was in flight.",
                "outcome",
            ),
            attached=counter(
                "attached_streams", "Streams that began elsewhere and were asked to go on here.", "outcome"
            ),
            rate_limited=counter_of_all(
                "rate_limited_requests",
                "Requests refused because their API key has used up a limit, by the key's tenant and what is limited: "
                "requests, tokens, or streams (asked for where none is kept).",
                "tenant",
                "limit",
            ),
            http_responses=counter_of_all(
                "http_responses",
                "HTTP answers by the template of the route's path and by status; `other`: no route.",
                "route",
                "status",
            ),
            waiting_for_engine=gauge(
                "choices_waiting_for_engine", "Choices that have lost their engine and wait for another."
            ),
            oldest_waiting_for_engine_seconds=gauge(
                "oldest_choice_waiting_for_engine_seconds", "Time that the first of them has waited."
            ),
            by_model={each.name: each.metadata["create"](registry) for each in fields(ModelMetrics)},
        )

    def of_model(self, name: str) -> ModelMetrics:
        """Return the metrics of requests for one model."""
        if name not in self._of_models:  # looking up each costs 10 us
            metrics = {each: metric.labels(name) for each, metric in self.by_model.items()}
            self._of_models[name] = ModelMetrics(**metrics)
        return self._of_models[name]

    @property
    def collectors(self) -> list[Collector]:
        """All of them."""
        own = [
            getattr(self, each.name) for each in fields(self) if each.name not in ("by_model", "_of_models")
        ]
        return [*own, *self.by_model.values()]


class ChoiceGauges(Collector):
    """The choices that wait for their first token, by tenant."""

    def __init__(self, count_without_token: Callable[[], Mapping[str, int]]) -> None:
        """`count_without_token`: Returns the choices by the label of their tenant. Called on any thread."""
        self._count_without_token = count_without_token

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            f"{PREFIX}choices_without_token",
            "Choices that no token has come for: they wait, or their prompts are computed. By tenant, if an API key is "
            "of it; `other`: all others.",
            labels=["tenant"],
        )
        for tenant, count in self._count_without_token().items():
            family.add_metric([tenant], count)
        yield family


class ChildTotals(NamedTuple):
    """The work that child processes of one kind have done since the start."""

    outcomes: Mapping[str, int]
    """Outcome -> tasks that ended so."""
    cpu_s: float
    """CPU time of the tasks."""


class ChildMetrics(Collector):
    """The work on clients' forms, conversations and long texts in child processes."""

    def __init__(self, totals: Callable[[], Mapping[str, ChildTotals]]) -> None:
        """`totals`: Returns the totals by kind of work. Called on any thread."""
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        tasks = CounterMetricFamily(
            f"{PREFIX}child_tasks",
            "Tasks of child processes, by work (grammar: a form of structured outputs is compiled; template: a "
            "conversation is rendered; tokenizer: a long text is tokenized; body: a long request is read) and "
            "outcome: done, refused, late (its process used up its CPU time and was killed), crashed; and "
            "started: a process has begun.",
            labels=["work", "outcome"],
        )
        cpu = CounterMetricFamily(
            f"{PREFIX}child_cpu_seconds", "CPU time of these tasks, starts included.", labels=["work"]
        )
        for work, totals in self._totals().items():
            for outcome, count in totals.outcomes.items():
                tasks.add_metric([work, outcome], count)
            cpu.add_metric([work], totals.cpu_s)
        yield from (tasks, cpu)
