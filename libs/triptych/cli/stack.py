"""Options and start-up shared by the commands that start a stack of their own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from triptych.cli.access import Frontend, frontend_of
from triptych.errors import ConfigError
from triptych.launcher.launch import QUIET, config_from_overrides, launch


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Key to text of the config flags that were given (`add_config_flags` names them with a dot)."""
    return {key: text for key, text in vars(arguments).items() if "." in key}


@contextmanager
def stack_to_use(
    arguments: argparse.Namespace, preferred: Mapping[str, str] | None = None
) -> Iterator[Frontend]:
    """The frontend at `--address` or `--base-url`, or that of a stack that lives as long as the block.

    Args:
        preferred: values for options that the user has not set; see `config_from_overrides`.

    Raises:
        ConfigError: config flags for a stack that is not ours.
    """
    options = given_options(arguments)
    address: str | None = getattr(arguments, "base_url", None) or getattr(arguments, "address", None)
    if address is None:
        cluster = launch(
            config_from_overrides(options, file=arguments.config, preferred={**QUIET, **(preferred or {})})
        )
        try:
            scheme = "https" if cluster.config.tls.certificate else "http"
            yield Frontend(cluster.address, None, cluster.config.tls, f"{scheme}://{cluster.http_address}")
        finally:
            cluster.stop()
    elif options or arguments.config:
        names = ", ".join(options) or "config"
        raise ConfigError(f"{names}: the stack at {address} has its own options")
    else:
        yield frontend_of(arguments)
