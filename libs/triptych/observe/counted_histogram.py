"""A Prometheus histogram that takes several equal observations at once, at the cost of one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class CountedHistogram(Collector):
    """As `prometheus_client.Histogram` with one label. Written by one thread; others may collect meanwhile."""

    def __init__(
        self, name: str, text: str, label: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`buckets`: Upper bounds in ascending order, without infinity."""
        self._name, self._text, self._label = name, text, label
        self._bounds = tuple(buckets)
        self._children: dict[str, CountedSamples] = {}
        registry.register(self)

    def labels(self, value: str) -> CountedSamples:
        """Return the samples under a value of the label."""
        if value not in self._children:
            self._children[value] = CountedSamples(self._bounds)
        return self._children[value]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, samples in list(self._children.items()):
            family.add_metric([value], samples.buckets(), samples.sum)
        yield family


class CountedSamples:
    """The samples of one value of the label."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """Samples up to each bound and above the one before; the last: above all bounds."""
        self.sum = 0.0

    def observe(self, amount: float, count: int = 1) -> None:
        """Add `count` samples of the same amount."""
        self._counts[bisect_left(self._bounds, amount)] += count
        self.sum += amount * count

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound and the number of samples up to it, as the exposition wants them."""
        total, found = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts[:], strict=True):
            total += count
            found.append((floatToGoString(bound), float(total)))
        return found
