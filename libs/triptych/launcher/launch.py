"""Starts a local stack as a user describes it: config, model, free ports, progress."""

from __future__ import annotations

import difflib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.config import EngineConfig, TlsConfig
from triptych.config.api_keys import read_api_keys
from triptych.config.loader import iter_options, load_config
from triptych.config.option import Option
from triptych.errors import ConfigError
from triptych.hub import resolve_model
from triptych.hub.progress import ProgressLine
from triptych.launcher.local_cluster import LocalCluster
from triptych.launcher.ports import check_ports, with_free_ports
from triptych.launcher.readiness import Progress
from triptych.launcher.vllm_arguments import ALIASES, to_overrides
from triptych.rpc.channel import ADDRESS_ENV
from triptych.rpc.tls import create_client_tls, create_server_tls
from triptych.types.facts import Phase

READY_TIMEOUT_S = 600.0
"""Time for a stack of our own to start: a large model may come from a slow disk."""
CONNECT_TIMEOUT_S = 30.0
"""Time for a stack elsewhere to answer; it is already running or starting."""

_write_lock = threading.Lock()


# A program's stderr is its own; what goes wrong still shows.
QUIET: Mapping[str, Any] = {"log.level": "warning"}
# It calls over gRPC, and waits for the first token.
OWN: Mapping[str, Any] = {**QUIET, "frontend.serve_http": False}


def config_from_overrides(
    overrides: Mapping[str, Any], *, file: Path | None = None, preferred: Mapping[str, Any] = QUIET
) -> EngineConfig:
    """The config of a stack that a program starts for itself.

    Args:
        overrides: keys (`scheduler.max_num_seqs`), bare names (`max_num_seqs`) or vLLM's arguments
            (`gpu_memory_utilization`, `swap_space`) to values. Where several sections have a name, the one of `model`
            is meant: `dtype` is `model.dtype`. None is the default.
        file: yaml, as in `load_config`; environment variables count too, below the overrides.
        preferred: key to value, for options that have their default.

    Raises:
        ConfigError: an unknown or ambiguous name, or a bad value; names it.
    """
    given = {_find_option(name).key: value for name, value in to_overrides(overrides).items()}
    flags = {key: value for key, value in given.items() if value is not None}
    config = load_config(file=file, flags=flags)
    for key, value in preferred.items():
        option = _find_option(key)
        leaf = getattr(config, option.leaf)
        is_said = key in flags or option.env in os.environ or getattr(leaf, option.name) != option.default
        if not is_said:
            config = replace(config, **{option.leaf: replace(leaf, **{option.name: value})})
    return with_free_ports(config)


def stack_config(model: str | None, address: str | None, overrides: dict[str, Any]) -> EngineConfig | None:
    """The config of a stack to start, or None where there is one to connect to."""
    if address is None:
        if model is not None:
            overrides = {"model.model": model, **overrides}
        return config_from_overrides(overrides, preferred=OWN)
    said = to_overrides({"model.model": model, **overrides})
    if names := [name for name, value in said.items() if value is not None and name != "model.model"]:
        raise ConfigError(
            f"{', '.join(names)}: options of a stack that is started here; "
            f"the one at address={address!r} (or ${ADDRESS_ENV}) has its own"
        )
    return None


def request_model(model: str | None, address: str | None) -> str:
    """Return the model name that requests carry: empty where the stack serves only one."""
    return model or "" if address is not None else ""


def launch(
    config: EngineConfig,
    *,
    on_log_line: Callable[[str], None] | None = None,
    ready_timeout_s: float = READY_TIMEOUT_S,
    show_progress: bool = True,
    check: Callable[[], None] = lambda: None,
) -> LocalCluster:
    """Fetch the model if need be, start the three services and wait until they serve.

    Interrupted or failed, it leaves nothing behind.

    Args:
        on_log_line: called with what the services print; None: it goes to stderr.
        show_progress: show progress on stderr.
        check: called repeatedly while waiting; an exception from it ends the start.

    Raises:
        ConfigError, ModelError, ModelNotFound, EngineUnavailable: it is not available; says why.
    """
    check_ports(config)
    _check_tls(config.tls)
    if config.frontend.api_keys_file:
        read_api_keys(Path(config.frontend.api_keys_file))
    # Here and not in the services: its progress needs the terminal, and its errors need no quoting.
    resolve_model(config.model.model, revision=config.model.revision, progress=show_progress)
    cluster = LocalCluster(config, on_log_line=on_log_line or write_log_line)
    latest = Progress(Phase.STARTING)

    def note(progress: Progress) -> None:
        nonlocal latest
        latest = progress
        check()

    try:
        with ProgressLine(f"getting {config.model.model} ready", lambda: str(latest), enabled=show_progress):
            cluster.start()
            cluster.wait_ready(ready_timeout_s, note)
    except BaseException:
        cluster.stop(grace_s=2.0)
        raise
    return cluster


def _check_tls(tls: TlsConfig) -> None:
    """Check the files before the services start, so that an error is reported once and early."""
    create_server_tls(tls)
    create_client_tls(tls)
    if tls.certificate and not tls.ca:
        raise ConfigError("tls.ca: needed with tls.certificate, since the three services dial each other")


def write_log_line(line: str) -> None:
    """Write a service's line to stderr in one piece, after clearing a progress line."""
    erase = "\r\033[K" if sys.stderr.isatty() else ""
    with _write_lock:
        sys.stderr.write(f"{erase}{line}\n")
        sys.stderr.flush()


def _find_option(name: str) -> Option:
    options = {option.key: option for option in iter_options()}
    name = ALIASES.get(name, name)
    if name in options:
        return options[name]
    found = [option for option in options.values() if option.name == name]
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        of_model = [option for option in found if option.leaf == "model"]
        if of_model:
            return of_model[0]
        keys = " or ".join(repr(option.key) for option in found)
        raise ConfigError(f"{name}: ambiguous, several sections have it; say {keys}")
    names = [*options, *(option.name for option in options.values()), *ALIASES]
    close = difflib.get_close_matches(name, names, n=1)
    raise ConfigError(f"{name}: no such option" + (f"; did you mean {close[0]}?" if close else ""))
