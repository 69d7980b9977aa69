"""The server that `bench serve` measures: its options, and the client that calls it."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from triptych.cli.access import Frontend, add_address_argument
from triptych.cli.sampling_flags import add_sampling_arguments, sampling_of
from triptych.client.http_client import HttpClient
from triptych.client.load.backends import CHAT, COMPLETIONS, Backend, GrpcBackend, OpenAiBackend
from triptych.client.load.datasets import LoadRequest
from triptych.client.load.run import run_load
from triptych.errors import ConfigError, TriptychError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "ignore_eos")
"""Sampling fields that have a flag."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("server")
    where.add_argument(
        "--backend", choices=("grpc", "openai"), default="grpc", help="how it is called (default: grpc)"
    )
    where.add_argument(
        "--base-url", metavar="URL", help="of an OpenAI server, for --backend openai (default: as --address)"
    )
    where.add_argument(
        "--endpoint",
        choices=(COMPLETIONS, CHAT),
        default=COMPLETIONS,
        help=f"for --backend openai (default: {COMPLETIONS})",
    )
    where.add_argument("--model", default="", help="which of the models served there")
    add_address_argument(parser, default=None)
    add_sampling_arguments(parser, _SAMPLING)


@asynccontextmanager
async def open_backend(
    frontend: Frontend, arguments: argparse.Namespace
) -> AsyncIterator[tuple[Backend, int, Any]]:
    """Give the backend, the size of its vocabulary, and what counts the tokens of a text, if anything can."""
    fixed_length = arguments.dataset_name != "custom"
    sampling = {
        "temperature": 0.0,
        **({"ignore_eos": True} if fixed_length else {}),
        **sampling_of(arguments),
    }
    if arguments.backend == "openai":
        url = arguments.base_url or frontend.base_url
        async with HttpClient(url, api_key=frontend.api_key, tls=frontend.tls) as http:
            model = arguments.model or await _only_model(http)
            yield (
                OpenAiBackend(http, arguments.endpoint, sampling, model),
                arguments.vocab_size or 32_000,
                None,
            )
        return
    async with frontend.open_client() as client:
        models = await client.list_models()
        sizes = [model.vocab_size for model in models if arguments.model in ("", model.name)]
        if not sizes:
            known = ", ".join(model.name for model in models)
            raise ConfigError(f"--model: {arguments.model!r} is not served there; there are {known}")

        async def count_tokens(text: str) -> int:
            return len((await client.tokenize(text, model=arguments.model)).token_ids)

        backend = GrpcBackend(client, sampling, arguments.model)
        yield backend, arguments.vocab_size or sizes[0], count_tokens


async def _only_model(http: HttpClient) -> str:
    """Return the name of the first model that the server lists."""
    answer = await http.get("/v1/models")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, TypeError, KeyError, IndexError):
        raise ConfigError(f"--model: {http.base_url} does not say which models it serves; name one") from None


async def warm_up(backend: Backend, requests: list[LoadRequest]) -> None:
    """Send them all at once; the first error ends the measurement before it begins."""
    result = await run_load(backend, requests, [0.0] * len(requests), None)
    for record in result.records:
        if record.error:
            raise TriptychError(f"warm-up: {record.error}")
