"""Metrics of the engines as a frontend sees them, and the names that vLLM has for a frontend's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.observe.metrics.frontend import PREFIX
from triptych.types.facts import STATUS_ROWS, EngineStatus

ENGINE_STATES = ("ready", "not_ready", "asleep", "draining", "lost")
_NOT_VLLM = (
    "requests",
    "moves",
    "active_requests",
    "engine_ready",
    "engines",
    "engine_sessions",
    "attached_streams",
    "rate_limited_requests",
    "http_responses",
    "choices_waiting_for_engine",
    "oldest_choice_waiting_for_engine_seconds",
)


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
        numbers = {
            name: (CounterMetricFamily if row.is_counter else GaugeMetricFamily)(
                f"{PREFIX}{row.shared}", row.help, labels=labels
            )
            for name, row in STATUS_ROWS.items()
            if row.shared
        }
        usage = GaugeMetricFamily(
            f"{PREFIX}kv_cache_usage_perc",
            "Share of KV blocks that requests hold; 1 is all of them.",
            labels=labels,
        )
        sizes = GaugeMetricFamily(
            f"{PREFIX}cache_config_info",
            "1; sizes of the engine's KV cache.",
            labels=[*labels, "block_size", "num_gpu_blocks"],
        )
        for model, status in self._latest():
            who = [model, status.engine_id]
            for name, family in numbers.items():
                family.add_metric(who, STATUS_ROWS[name].read(status))
            usage.add_metric(who, status.num_used_blocks / max(status.num_blocks, 1))
            sizes.add_metric([*who, str(status.block_size), str(status.num_blocks)], 1)
        yield from (*numbers.values(), usage, sizes)
        yield from self._collect_states(labels)

    def _collect_states(self, labels: Sequence[str]) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            f"{PREFIX}engine_ready",
            "1 while the engine takes requests; 0 also while it is lost, under its last name or its address.",
            labels=labels,
        )
        engines = GaugeMetricFamily(
            f"{PREFIX}engines", "Engines that are configured or were found, by state.", labels=["state"]
        )
        counts = dict.fromkeys(ENGINE_STATES, 0)
        for each in self._states():
            counts[each.state] += 1
            ready.add_metric([each.model, each.engine], each.state == "ready")
        for state, count in counts.items():
            engines.add_metric([state], count)
        yield from (ready, engines)


class VllmNames(Collector):
    """The frontend's metrics once more, under vLLM's names: dashboards, autoscalers and gateways look for these."""

    def __init__(self, sources: Iterable[Collector]) -> None:
        self._sources = tuple(sources)

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for metric in source.collect():
                name = metric.name.removeprefix(PREFIX)
                if name in _NOT_VLLM:
                    continue
                renamed = Metric(f"vllm:{name}", metric.documentation, metric.type)
                renamed.samples = [
                    sample._replace(name=f"vllm:{sample.name.removeprefix(PREFIX)}")
                    for sample in metric.samples
                ]
                yield renamed
