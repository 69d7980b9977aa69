"""Options and printing shared by the commands that stream an answer to the terminal."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from triptych.cli.tls import add_tls_arguments, tls_of
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import Prompt, RequestOptions, Sampling
from triptych.client.stream_stats import StreamStats
from triptych.config import TlsConfig
from triptych.rpc.channel import API_KEY_ENV
from triptych.types.events import DeltaEvent

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_address_argument(parser: argparse.ArgumentParser, *, default: str | None = DEFAULT_ADDRESS) -> None:
    """Add `--address` and how to be let in there; see `frontend_of`."""
    parser.add_argument(
        "--address",
        default=default,
        metavar="HOST:PORT",
        help=f"gRPC address of the frontend (default: {default or 'a stack of its own'})",
    )
    add_access_arguments(parser)


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the API key, and the files of TLS."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"of a frontend that asks for one; better in ${API_KEY_ENV}, since others see command lines",
    )
    add_tls_arguments(parser)


@dataclass(frozen=True, slots=True)
class Frontend:
    """A frontend to call, and how."""

    address: str
    """host:port of its gRPC server."""
    api_key: str | None
    """The key to send. None means the one in the environment, if there is one."""
    tls: TlsConfig

    def open_client(self) -> GenerationClient:
        """Return a client. Belongs to the event loop that it is made on."""
        return GenerationClient(self.address, api_key=self.api_key, tls=self.tls)


def frontend_of(arguments: argparse.Namespace) -> Frontend:
    """Return the frontend that the arguments of `add_address_argument` mean."""
    return Frontend(arguments.address, arguments.api_key, tls_of(arguments))


async def print_answer(
    client: GenerationClient,
    prompt: Prompt,
    sampling: Sampling,
    options: RequestOptions,
) -> StreamStats:
    """Write the answer to stdout as it comes."""
    stats = StreamStats()
    async for event in client.generate(prompt, sampling, options):
        stats.add(event)
        if isinstance(event, DeltaEvent):
            write_now(event.text)
    return stats


# A terminal obeys control characters, and a model may write any: they are shown as pictures there.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def write_now(text: str) -> None:
    """Write to stdout at once: text as it is into files and pipes, control characters made visible on a terminal."""
    if sys.stdout.isatty():
        text = text.translate(_PICTURES)
    sys.stdout.write(text)
    sys.stdout.flush()
