"""A stack on this machine to measure: with a model, or with steps that take a fixed time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triptych.config import EngineConfig
from triptych.launcher.launch import config_from_overrides, launch
from triptych.launcher.local_cluster import LocalCluster


def simulated_config(step_ms: float, **overrides: Any) -> EngineConfig:
    """Return the config of a stack with a worker that computes nothing and takes `step_ms` for each step.

    Args:
        overrides: Bare names of options, as `max_num_seqs`.
    """
    terms = ("prefill_token_us", "decode_row_us", "context_token_ns")
    return config_from_overrides(
        {
            "simulation.enabled": True,
            "simulation.base_ms": step_ms,
            **{f"simulation.{term}": 0 for term in terms},
            **overrides,
        }
    )


@contextmanager
def running(config: EngineConfig) -> Iterator[LocalCluster]:
    """Start the services, wait until they serve, and stop them at the block's end."""
    cluster = launch(config)
    try:
        yield cluster
    finally:
        cluster.stop()
