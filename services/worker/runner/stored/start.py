"""A start from a stored program, where an earlier start has left one that fits. Needs no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from triptych import host
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig
from triptych.errors import TriptychError
from triptych.types.facts import Phase, WorkerFacts
from triptych_kernels.cpu.library import isa, isa_and_build
from triptych_kernels.cpu.library import use_threads as use_native_threads
from triptych_services.worker.context.machine import cpu_traits, examine_machine, machine_directory
from triptych_services.worker.context.resolve import resolve_for_device
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.runner.base import PhaseChange, Runner
from triptych_services.worker.runner.drafting.create import CreateProposers, proposers_of
from triptych_services.worker.runner.startup.facts import served_tasks, worker_facts
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.runner.startup.warm_up import warm_up_plainly
from triptych_services.worker.runner.stored.image import Image, image_path, read_image
from triptych_services.worker.runner.stored.key import program_key
from triptych_services.worker.runner.stored.runner import Resume, StoredRunner

if TYPE_CHECKING:
    from triptych_services.worker.adapters.store import AdapterStore

log = logging.getLogger(__name__)

IMPORT_AFTER_S = 10.0  # the first tokens of a worker that has just started are more urgent
_LIBRARIES_OF_TORCH = {  # as torch/__init__.py maps them
    "libtorch_global_deps.so": os.RTLD_GLOBAL | os.RTLD_NOW,
    "libtorch_python.so": os.RTLD_LAZY,
}
_DEVICES_OF_GPUS = ("nvidiactl", "kfd", "dxg")  # under /dev: NVIDIA's, AMD's, and those of Windows' Linux


def programs_directory() -> Path:
    """Return the directory of stored programs, beside what is found out about this machine: it can be written."""
    return machine_directory() / "programs"


def may_store(config: EngineConfig) -> bool:
    """Return whether a start with this config may leave a program behind, or start from one."""
    worker = config.worker
    is_on_cpu = worker.device == "cpu" or (
        worker.device == "auto" and not any(Path("/dev", name).exists() for name in _DEVICES_OF_GPUS)
    )
    return (
        is_on_cpu
        and worker.stored_programs_gib > 0
        and config.parallel.num_ranks == 1
        and config.model.backend != "transformers"
        and config.load.format != "random"
        and worker.attention_backend == "auto"
        and not worker.enforce_eager
        and not worker.kv_transfer
        and not config.speculative.model  # a stored program is that of one model
        and not config.speculative.wants_mtp
    )


def num_threads_of(config: EngineConfig) -> int:
    """Return the number of threads that one worker on this machine computes with."""
    return config.worker.num_threads or max(1, host.usable_cores())


def start_stored(
    config: EngineConfig, directory: Path, *, boot_id: str, on_phase: PhaseChange
) -> Runner | None:
    """Start from a stored program; None if there is none that fits, and for what is refused, which only an ordinary
    start reports."""
    started = time.perf_counter()
    if not may_store(config):
        return None
    examine_machine(config.worker.instruction_set)
    if not isa():
        return None
    try:
        resolved = resolve_for_device(config, read_architecture(directory), cpu_traits())
        key = program_key(resolved, directory, num_threads_of(config))
        proposers = proposers_of(resolved.engine.speculative)
    except (OSError, TriptychError) as error:
        log.debug("no stored program: %s", error)
        return None
    image = read_image(image_path(programs_directory(), key), key)
    if image is None:
        return None
    use_native_threads(num_threads_of(config))
    on_phase(Phase.ALLOCATING, 0.0)
    kv = plan_kv_cache(resolved, host.free_memory())
    facts = worker_facts(
        resolved,
        kv,
        boot_id=boot_id,
        fingerprint=image.model.fingerprint,
        weights=image.model.weights,
        device_name=host.cpu_name(),
        processor=isa_and_build(),
        num_threads=0 if resolved.batch_invariant else num_threads_of(config),
        weight_bytes=image.model.weight_bytes,
        load_s=time.perf_counter() - started,
        kernels=image.model.kernels,
        quantization=image.model.quantization,
        served=served_tasks(resolved.architecture, directory),
    )
    return _start(resolved, directory, facts, image, on_phase, proposers)


def _start(
    config: ResolvedConfig,
    directory: Path,
    facts: WorkerFacts,
    image: Image,
    on_phase: PhaseChange,
    proposers: CreateProposers,
) -> Runner | None:
    def load() -> Resume:
        _import_torch()
        from triptych_services.worker.runner.startup.create import load_to_resume

        return load_to_resume(config, directory, facts, on_phase)

    def create_adapters(addresses: Sequence[NDArray[np.int64]]) -> AdapterStore:
        from triptych_services.worker.runner.startup.create import create_stored_adapters  # imports torch

        assert image.model.adapted is not None, "stored by a worker that serves adapters"
        return create_stored_adapters(config, image.model.adapted, addresses)

    try:
        runner = StoredRunner(
            image,
            facts,
            load=load,
            proposers=proposers,
            create_adapters=create_adapters,
        )
    except (AttributeError, KeyError, ValueError, IndexError) as error:
        log.warning("the stored program does not fit, and is recorded anew: %s", error)
        return None
    on_phase(Phase.WARMING, 0.0)
    warm_up_plainly(runner)
    log.info("weights: samples of their bytes have sha256 %s", facts.model.identity.weights)
    log.info("started from a stored program; torch is imported when something needs it")
    timer = threading.Timer(IMPORT_AFTER_S, _import_torch)
    timer.daemon = True
    timer.start()
    return runner


def _import_torch() -> None:
    """Import what another runner needs, so that the first request that needs more waits for less.

    The interpreter's lock is held while it maps a library, for 0.2 to 0.6 s for those of torch. So the C library maps
    them before, called without the lock, and the import finds them.
    """
    found = importlib.util.find_spec("torch")
    if "torch" not in sys.modules and found is not None and found.submodule_search_locations:
        libraries = Path(found.submodule_search_locations[0], "lib")
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.restype, dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
        for name, mode in _LIBRARIES_OF_TORCH.items():
            dlopen(str(libraries / name).encode(), mode)  # one that is not there is the import's affair
    import triptych_services.worker.runner.startup.create  # noqa: F401
