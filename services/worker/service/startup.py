"""From the operator's config to a runner that is ready. Runs on the runner thread, where torch is imported."""

from __future__ import annotations

import gc
import os
import uuid

from services.worker.context.resolve import check_supported
from services.worker.runner.base import PhaseChange, Runner
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig
from triptych.hub import resolve_model
from triptych.types.facts import Phase


def load_runner(config: EngineConfig, on_phase: PhaseChange) -> Runner:
    """Find the model's files, then load it, or simulate it where `simulation.enabled` asks for that.

    Raises:
        ModelNotFound, ModelError: the model cannot be had, or its files are not whole.
        ConfigError, FeatureDisabled: what the operator asks for cannot be done here.
    """
    check_supported(config)
    on_phase(Phase.LOADING, 0.0)
    directory = resolve_model(config.model.model)
    boot_id = str(uuid.uuid4())
    # Each kind imports its own: a simulation is ready before torch would be.
    if config.simulation.enabled:
        from services.worker.simulation.runner import create_simulated_runner

        return create_simulated_runner(config, directory, boot_id=boot_id, on_phase=on_phase)
    from triptych_kernels.cpu.build import DIGEST

    if DIGEST.is_file():
        # Read when torch is imported: its threads must not spin on the cores that native kernels' threads work on.
        # Where there are no native kernels spinning pays: a quarter of the throughput on a quiet machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gc.disable()  # a tenth of this import's time would be looking for garbage among what it makes
    try:
        from services.worker.context.device import resolve_config
        from services.worker.runner.startup.create import create_runner
    finally:
        gc.freeze()  # and it lives as long as the process: no collection need look at it again
        gc.enable()
    resolved = resolve_config(config, read_architecture(directory))
    return create_runner(resolved, directory, boot_id=boot_id, on_phase=on_phase)
