"""Options of the commands that call a frontend: where it is, the key to show, how it is checked."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from triptych.cli.tls import add_tls_arguments, tls_of
from triptych.client.grpc_client import GenerationClient
from triptych.config import TlsConfig
from triptych.errors import ConfigError
from triptych.rpc.channel import ADDRESS_ENV, API_KEY_ENV

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Frontend:
    """A frontend to call, and how."""

    address: str
    """host:port of its gRPC server."""
    api_key: str | None
    """The key to send. None means the one in the environment, if there is one."""
    tls: TlsConfig
    base_url: str = ""
    """URL of its HTTP API, where it is known."""

    def open_client(self) -> GenerationClient:
        """Return a client. Belongs to the event loop that it is made on."""
        return GenerationClient(self.address, api_key=self.api_key, tls=self.tls)


def add_address_argument(parser: argparse.ArgumentParser, *, default: str | None = DEFAULT_ADDRESS) -> None:
    """Add `--address` and how to be let in there; see `frontend_of`."""
    otherwise = default or f"{DEFAULT_ADDRESS} if a server answers there, else a stack of its own"
    parser.add_argument(
        "--address",
        default=os.environ.get(ADDRESS_ENV) or default,
        metavar="HOST:PORT",
        help=f"gRPC address of the frontend (default: ${ADDRESS_ENV}, else {otherwise})",
    )
    add_access_arguments(parser)


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the API key, and the files of TLS."""
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"of a server that asks for one; better in ${API_KEY_ENV}, since others see command lines",
    )
    keys.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the key and no more")
    add_tls_arguments(parser)


def frontend_of(arguments: argparse.Namespace) -> Frontend:
    """Return the frontend that the arguments of `add_address_argument` mean.

    Raises:
        ConfigError: The key's file cannot be read.
    """
    return Frontend(arguments.address, api_key_of(arguments), tls_of(arguments))


def api_key_of(arguments: argparse.Namespace) -> str | None:
    """Return the key that the arguments of `add_access_arguments` mean; None is the one in the environment.

    Raises:
        ConfigError: The file cannot be read, or holds anything but one word.
    """
    file: Path | None = arguments.api_key_file
    if file is None:
        key: str | None = arguments.api_key
        return key
    words = read_text(file, "--api-key-file").split()
    if len(words) != 1:
        raise ConfigError(f"--api-key-file {file}: expected one key, found {len(words)} words")
    return words[0]


def read_text(file: Path, option: str) -> str:
    """Return what is in a file that the user named.

    Raises:
        ConfigError: It cannot be read; names the option and the file.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {file}: is no UTF-8 text ({error})") from None
