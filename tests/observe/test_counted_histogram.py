"""Several equal observations at once are what Prometheus' own histogram says of them one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from triptych.observe.counted_histogram import CountedHistogram

BOUNDS = (0.5, 1.0, 2.5, 10.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from([0.0, 0.5, 0.75, 1.0, 3.0, 10.0, 11.0]), st.integers(1, 5)
        )
    )
)
def test_it_equals_single_observations(samples: list[tuple[str, float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = CountedHistogram("gap_seconds", "Gaps.", "model", buckets=BOUNDS, registry=ours)
    plain = Histogram("gap_seconds", "Gaps.", ["model"], buckets=BOUNDS, registry=theirs)
    for label, amount, count in samples:
        counted.labels(label).observe(amount, count)
        for _ in range(count):
            plain.labels(label).observe(amount)
    assert lines(ours) == lines(theirs)


def lines(registry: CollectorRegistry) -> list[str]:
    """Return the exposition without the times at which series were created."""
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)
