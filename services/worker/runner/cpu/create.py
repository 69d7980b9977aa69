"""The choice of the way in which the thread that launches a step also computes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.worker.attention.base import KvCache
from services.worker.models.base import CausalLM
from services.worker.runner.backend import ForwardBackend
from services.worker.runner.cpu.eager import EagerBackend
from services.worker.runner.cpu.recorded import RecordedBackend
from services.worker.runner.input_batch import InputBuffers
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import NotRecordable

log = logging.getLogger(__name__)


def create_cpu_backend(
    model: CausalLM, kv_caches: Sequence[KvCache], inputs: InputBuffers, *, enforce_eager: bool
) -> ForwardBackend:
    """Create the backend for a device whose steps are complete when they have been launched.

    Args:
        inputs: Buffers in which every step is gathered.
        enforce_eager: Whether the model's operations are called one by one, even if they can be recorded.
    """
    if kv_caches[0].device.type == "cpu" and isa() and not enforce_eager:
        try:
            return RecordedBackend(model, kv_caches, inputs)
        except NotRecordable as reason:
            log.warning(
                "%s: %s, so its operations are called one by one, slower", type(model).__name__, reason
            )
    return EagerBackend(model, kv_caches, inputs)
