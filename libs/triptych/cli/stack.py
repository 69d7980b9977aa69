"""Options and start-up shared by the commands that may start a stack of their own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.cli.access import DEFAULT_ADDRESS, Frontend, api_key_of, frontend_of
from triptych.cli.tls import tls_of
from triptych.config import EngineConfig, TlsConfig
from triptych.errors import ConfigError
from triptych.launcher.launch import QUIET, config_from_overrides, launch
from triptych.launcher.local_cluster import dial_address
from triptych.rpc.channel import credentials_of, open_blocking_channel
from triptych.rpc.tls import create_client_tls

_PROBE_TIMEOUT_S = 1.0


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


@contextmanager
def stack_to_measure(arguments: argparse.Namespace) -> Iterator[Frontend]:
    """The server at `--address` or `--base-url`, else one that answers at the default address, else a stack of its own.

    Where none is named it says on stderr which one it is: a stack of its own beside a server shares its cores, and
    the figures of both are worth nothing.
    """
    if getattr(arguments, "base_url", None) is None and arguments.address is None:
        if given_options(arguments) or arguments.config:
            told = "measures a stack of its own, with the options given"
        elif _answers(DEFAULT_ADDRESS, tls_of(arguments)):
            print(f"triptych bench: measures the server at {DEFAULT_ADDRESS}", file=sys.stderr)
            yield _default_frontend(arguments)
            return
        else:
            told = f"no server answers at {DEFAULT_ADDRESS}, so it measures a stack of its own"
        print(f"triptych bench: {told}", file=sys.stderr)
    with stack_to_use(arguments) as frontend:
        yield frontend


def _default_frontend(arguments: argparse.Namespace) -> Frontend:
    tls, defaults = tls_of(arguments), EngineConfig().frontend
    scheme = "https" if tls.ca else "http"
    url = f"{scheme}://{dial_address(defaults.host, defaults.http_port)}"
    return Frontend(DEFAULT_ADDRESS, api_key_of(arguments), tls, url)


def _answers(address: str, tls: TlsConfig) -> bool:
    """Return whether a server is there, ready or not."""
    with open_blocking_channel(address, credentials_of(create_client_tls(tls))) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S
            )
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return True
