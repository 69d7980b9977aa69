"""The worker: one process per accelerator, which computes the steps that its engine plans."""

from __future__ import annotations

import os

# Before gRPC is imported: a worker tries native kernels in children that it forks (`self_check`). gRPC's handlers of
# forks end such a child by a signal while another thread is inside gRPC, and AMX would be refused by chance.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
