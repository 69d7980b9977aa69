"""Metrics of a worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_GAP_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.005, 0.02, 0.1)
_MASK_SECONDS = (2e-5, 1e-4, 5e-4, 0.002, 0.005, 0.02, 0.1, 0.5)


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """Prometheus metrics of a worker."""

    steps: Counter
    tokens: Counter
    stage_seconds: Counter
    step_gap_seconds: Histogram
    mask_seconds: Histogram
    guesses: Counter
    accepted_guesses: Counter
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
            Counter(
                "triptych_worker_guesses",
                "Guessed tokens verified, by proposer and place behind what was known of the request, from 1.",
                ["proposer", "place"],
                registry=registry,
            ),
            Counter(
                "triptych_worker_accepted_guesses",
                "Guessed tokens that were the ones chosen, by proposer and place.",
                ["proposer", "place"],
                registry=registry,
            ),
            Gauge("triptych_worker_kv_blocks", "KV blocks built.", registry=registry),
            Gauge("triptych_worker_weight_bytes", "Bytes of weights held.", registry=registry),
            Gauge("triptych_worker_load_seconds", "Process start to weights loaded.", registry=registry),
            Gauge("triptych_worker_kernels", "1 for what computes.", ["kernels"], registry=registry),
        )


class ExpertChoices(Collector):
    """How often routers chose each expert, as it is counted elsewhere, read when it is scraped."""

    def __init__(
        self,
        read: Callable[[], tuple[Mapping[int, Sequence[int]], int]],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`read`: Returns each layer's choices by expert, none without a mixture, and those of the busiest ranks."""
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        by_layer, of_busiest_ranks = self._read()
        if not by_layer:
            return
        chosen = CounterMetricFamily(
            "triptych_worker_expert_choices",
            "Times that a token chose an expert, by its number and over all layers.",
            labels=["expert"],
        )
        for expert, counts in enumerate(itertools.zip_longest(*by_layer.values(), fillvalue=0)):
            chosen.add_metric([str(expert)], sum(counts))
        yield chosen
        yield CounterMetricFamily(
            "triptych_worker_busiest_rank_expert_choices",
            "Of these, in each layer and step those of the rank that has most; 0 unless ranks share the experts.",
            of_busiest_ranks,
        )
