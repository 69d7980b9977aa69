"""One real stack for the whole folder: three processes, the embedded model, few rows and a short queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.cores import share_of_cores
from triptych.config.loader import load_config
from triptych.launcher.local_cluster import LocalCluster

MAX_NUM_SEQS = 16
MAX_NUM_WAITING = 64
READY_S = 180.0


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    flags = {
        "scheduler.max_num_seqs": str(MAX_NUM_SEQS),
        "scheduler.max_num_waiting": str(MAX_NUM_WAITING),
        "model.dtype": "float32",
        "model.max_model_len": "2048",
        "worker.num_threads": str(share_of_cores()),
        **{f"{leaf}.port": "0" for leaf in ("frontend", "engine", "worker")},
        **{f"{leaf}.metrics_port": "0" for leaf in ("frontend", "engine", "worker")},
        "frontend.admin_port": "0",
        "frontend.http_port": "0",
    }
    lines: list[str] = []
    with LocalCluster(load_config(env={}, flags=flags), on_log_line=lines.append) as stack:
        try:
            stack.wait_ready(READY_S)
            yield stack
        finally:
            print("\n".join(lines[-40:]))
