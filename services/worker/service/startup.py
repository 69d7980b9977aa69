"""From the operator's config to a runner that is ready. Runs on the runner thread, where torch is imported."""

from __future__ import annotations

import gc
import os
import uuid
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from triptych.config import EngineConfig, SpeculativeConfig
from triptych.errors import ModelError, ModelNotFound
from triptych.hub import resolve_model
from triptych.types.facts import Phase
from triptych_services.worker.context.group_place import GroupPlace
from triptych_services.worker.runner.base import PhaseChange, Runner


def load_runner(
    config: EngineConfig, on_phase: PhaseChange, place: Future[GroupPlace] | None = None
) -> Runner:
    """Find the model's files, then load it, or simulate it where `simulation.enabled` asks for that.

    Args:
        place: Of several ranks: set when they have met, within a deadline of its own.

    Raises:
        ModelNotFound, ModelError: the model is not available, or its files are not whole.
        ConfigError, FeatureDisabled: what the operator asks for cannot be done here.
        RankUnavailable, HandshakeMismatch: other ranks are missing, or differ.
    """
    on_phase(Phase.LOADING, 0.0)
    directory = resolve_model(config.model.model, revision=config.model.revision)
    # Each kind imports its own: a simulation is ready before torch would be.
    if config.simulation.enabled:
        from triptych_services.worker.simulation.runner import create_simulated_runner

        boot_id = str(uuid.uuid4()) if place is None else place.result().generation
        return create_simulated_runner(config, directory, boot_id=boot_id, on_phase=on_phase)
    from triptych_kernels.cpu.compile import DIGEST
    from triptych_services.worker.runner.stored.start import start_stored

    if DIGEST.is_file():
        # Read when torch is imported: its threads must not spin on the cores that native kernels' threads work on.
        # Where there are no native kernels spinning pays: a quarter of the throughput on a quiet machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    boot_id = str(uuid.uuid4())
    if DIGEST.is_file() and (stored := start_stored(config, directory, boot_id=boot_id, on_phase=on_phase)):
        return stored
    gc.disable()  # a tenth of this import's time would be looking for garbage among what it makes
    try:
        from triptych_services.worker.context.device import resolve_config
        from triptych_services.worker.models.choose import choose_architecture
        from triptych_services.worker.runner.startup.create import create_runner
        from triptych_services.worker.runner.stored.store import store_later
    finally:
        gc.freeze()  # and it lives as long as the process: no collection need look at it again
        gc.enable()
    met = None if place is None else place.result()
    resolved = resolve_config(config, choose_architecture(directory, config.model.backend))
    if met is not None:
        boot_id = met.generation
        resolved = replace(resolved, rank=replace(resolved.rank, ranks_on_host=met.ranks_on_host))
    runner = create_runner(
        resolved,
        directory,
        boot_id=boot_id,
        on_phase=on_phase,
        place=met,
        draft_directory=_find_draft(resolved.engine.speculative) if resolved.rank.rank == 0 else None,
    )
    if resolved.architecture.encoder is None:
        store_later(runner, resolved, directory)
    return runner


def _find_draft(config: SpeculativeConfig) -> Path | None:
    """Return the directory of the model that guesses; None: there is none, or nothing is guessed.

    Raises:
        ModelNotFound, ModelError: It is not available, or its files are not whole.
    """
    if not config.model or config.enabled != "true":
        return None
    name, revision = config.model, ""
    if not Path(name).expanduser().exists():
        name, _, revision = name.partition("@")
    try:
        return resolve_model(name, revision=revision, may_be_head=True)
    except (ModelNotFound, ModelError) as error:
        raise type(error)(f"speculative.model: {error.message}") from error
