"""A worker like the one of a journal, as a child process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from triptych.config import EngineConfig
from triptych.config.loader import CONFIG_FILE_ENV, iter_options, load_config
from triptych.errors import ConfigError, EngineUnavailable
from triptych.launcher.process import Exit, ServiceProcess
from triptych.types.facts import WorkerFacts
from triptych.types.journal import WorkerReady
from triptych.wire.journal import JournalReader

_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RecordedWorker:
    """One that has been started, and may still be loading."""

    address: str
    is_alive: Callable[[], bool]


@contextmanager
def recorded_worker(path: Path) -> Iterator[RecordedWorker]:
    """A worker of the journal's config, with as many KV blocks, for as long as the block.

    Raises:
        ConfigError: the journal has no worker, or this one cannot serve here; says why.
    """
    with JournalReader(path) as journal:
        config = load_config(env={}, flags=journal.header.config)
        ready = next((event.what for event in journal if isinstance(event.what, WorkerReady)), None)
    if ready is None:
        raise ConfigError(f"journal {path}: no worker was ever ready, and no step planned")
    options = {option.env for option in iter_options()} | {CONFIG_FILE_ENV}
    env = {name: text for name, text in os.environ.items() if name not in options}
    process = ServiceProcess("triptych_services.worker", env, lambda line: None)
    process.begin(_flags(config, ready.facts))
    try:
        yield RecordedWorker(f"127.0.0.1:{_wait_for_port(process)}", lambda: process.poll() is None)
    except EngineUnavailable as error:
        if (end := process.poll()) is None:
            raise
        raise _death(process, end) from error
    finally:
        process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(_POLL_S)


def _flags(config: EngineConfig, facts: WorkerFacts) -> list[str]:
    """Every option that a worker reads, said outright: its defaults may have changed since."""
    recorded = [
        f"{option.flag}={getattr(getattr(config, option.leaf), option.name)}"
        for option in iter_options()
        if "worker" in option.limits.read_by
    ]
    own = (
        "--worker.host=127.0.0.1",
        "--worker.port=0",
        "--worker.metrics-port=0",
        f"--cache.num-blocks={facts.kv.num_blocks}",
    )
    return [*recorded, *own]


def _wait_for_port(process: ServiceProcess) -> int:
    while (ports := process.read_ports()) is None:
        if (end := process.poll()) is not None:
            raise _death(process, end)
        time.sleep(_POLL_S)
    return ports["port"]


def _death(process: ServiceProcess, end: Exit) -> ConfigError:
    return ConfigError("\n  ".join((f"the worker {end}; its last lines:", *process.tail)))
