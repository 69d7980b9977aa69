"""Leaves the program of an ordinary start behind, for the next one."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from triptych.checkpoint.config_json import read_architecture
from triptych.errors import TriptychError
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program_storage import NotStorable, extract
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import open_same
from triptych_services.worker.runner.stored.image import ModelRecord, image_path, make_room, write_image
from triptych_services.worker.runner.stored.key import program_key
from triptych_services.worker.runner.stored.start import may_store, num_threads_of, programs_directory

log = logging.getLogger(__name__)

_GIB = 1 << 30


def store_later(runner: SleepableRunner, config: ResolvedConfig, directory: Path) -> threading.Thread | None:
    """Store a runner's program on a thread, which ends with the process; None if it is not to be stored.

    A failure is no failure of the worker: the next start takes as long as this one.
    """
    recorded = runner.runner.recorded()
    if recorded is None or config.rank.device != "cpu" or not may_store(config.engine) or not isa():
        return None
    thread = threading.Thread(
        target=_store_or_warn, args=(runner, config, directory), name="store program", daemon=True
    )
    thread.start()
    return thread


def _store_or_warn(runner: SleepableRunner, config: ResolvedConfig, directory: Path) -> None:
    try:
        store(runner, config, directory)
    except NotStorable as reason:
        log.info("the recorded program is not stored: %s", reason)
    except (OSError, TriptychError) as error:
        log.warning("the recorded program cannot be stored, so every start records it: %s", error)


def store(runner: SleepableRunner, config: ResolvedConfig, directory: Path) -> Path | None:
    """Write a runner's program, and return the file's path; None if it is too large, or describes another model.

    Raises:
        NotStorable: The program cannot be stored.
        OSError: The file cannot be written.
        TriptychError: The checkpoint has gone, or its files have been replaced since they were loaded.
    """
    recorded = runner.runner.recorded()
    if recorded is None or read_architecture(directory) != config.architecture:
        return None
    extracted = extract(*recorded)
    started, facts, folder = time.perf_counter(), runner.facts, programs_directory()
    limit_bytes = int(config.engine.worker.stored_programs_gib * _GIB)
    if not make_room(folder, extracted.constant_bytes, limit_bytes, time.time()):
        log.info(
            "the recorded program takes %d MiB, and is not stored: worker.stored_programs_gib = %g",
            extracted.constant_bytes >> 20,
            config.engine.worker.stored_programs_gib,
        )
        return None
    key = program_key(config, directory, num_threads_of(config.engine))
    open_same(config, directory, facts)  # after the key is made, which is then that of the weights in memory
    path = image_path(folder, key)
    identity = facts.model.identity
    write_image(
        path,
        key,
        extracted.program,
        ModelRecord(
            identity.fingerprint,
            identity.weights,
            facts.weight_bytes,
            facts.kernels,
            facts.model.quantization,
            runner.adapters.sites.record() if facts.max_adapters else None,
        ),
        [(offset, values.numpy().data) for offset, values in extracted.constants],
        extracted.constant_bytes,
    )
    log.info(
        "stored the recorded program, %d MiB in %.1f s, for the next start: %s",
        extracted.constant_bytes >> 20, time.perf_counter() - started, path,
    )  # fmt: skip
    return path
