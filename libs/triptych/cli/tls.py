"""Options of the commands that dial a server: how it is checked, and what it is shown."""

from __future__ import annotations

import argparse

from triptych.config import TlsConfig
from triptych.config.loader import section_from_env

_NAME_TO_HELP = {
    "ca": "PEM file with the CAs of a server with TLS; `public`: the public ones",
    "certificate": "PEM file with a certificate to show to it",
    "key": "PEM file with the certificate's key",
    "server_name": "name that its certificate must have, if it is not the host that is dialed",
}
"""Fields of `TlsConfig` that a client has."""


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--tls-ca` and the like. What is not given is taken from the environment, as a service takes it."""
    for name, text in _NAME_TO_HELP.items():
        parser.add_argument(
            f"--tls-{name.replace('_', '-')}",
            metavar="NAME" if name == "server_name" else "FILE",
            help=f"{text} (default: $TRIPTYCH_TLS_{name.upper()})",
        )


def tls_of(arguments: argparse.Namespace) -> TlsConfig:
    """Return what the arguments and the environment say."""
    given = {name: getattr(arguments, f"tls_{name}") for name in _NAME_TO_HELP}
    return TlsConfig(
        **{**section_from_env("tls"), **{name: text for name, text in given.items() if text is not None}}
    )
