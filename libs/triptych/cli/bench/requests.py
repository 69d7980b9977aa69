"""Options that describe the requests of `bench serve`, and the requests that they mean."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triptych.client.load.datasets import (
    Lengths,
    LoadRequest,
    draw_random,
    draw_shared_prefixes,
    read_prompts,
    read_sharegpt,
    take,
)
from triptych.errors import ConfigError

CountTokens = Callable[[str], Awaitable[int]]
_NUM_PROMPTS = 100
_OUTPUT_LEN = 128
_DRAWN_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class Dataset:
    """A kind of requests."""

    read: Callable[[Path], list[LoadRequest]] | None = None
    """Reads its file; None: it is drawn."""

    @property
    def reads_file(self) -> bool:
        return self.read is not None


DATASETS = {
    "random": Dataset(),
    "prefix_repetition": Dataset(),
    "sharegpt": Dataset(read_sharegpt),
    "custom": Dataset(read_prompts),
}


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="(default: random)")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of sharegpt and custom")
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help=f"(default: {_NUM_PROMPTS}; of a file: all of it)"
    )
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens (default: 128)")
    group.add_argument(
        "--output-len", type=int, metavar="N", help=f"new tokens (default: the file's, else {_OUTPUT_LEN})"
    )
    group.add_argument(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="drawn lengths are even from (1 - X) to (1 + X) times the length (default: 0)",
    )
    group.add_argument("--num-prefixes", type=int, default=10, metavar="N", help="(default: 10)")
    group.add_argument("--prefix-len", type=int, default=256, metavar="N", help="tokens (default: 256)")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="drawn token ids are below it (default: the model's; over HTTP 32000)",
    )


async def make_requests(
    arguments: argparse.Namespace,
    generator: np.random.Generator,
    vocab_size: int,
    count_tokens: CountTokens | None,
) -> list[LoadRequest]:
    """Return the requests of the warm-up and then those to measure.

    Args:
        count_tokens: Return the tokens of a text. None: the server does not report them.

    Raises:
        ConfigError: The file cannot be used, or is too short.
    """
    dataset, file = DATASETS[arguments.dataset_name], arguments.dataset_path
    if dataset.read is None:
        arguments.num_prompts = arguments.num_prompts or _NUM_PROMPTS
        num = arguments.num_prompts + arguments.num_warmups
        return DrawnRequests(arguments, generator, vocab_size).draw(num)
    requests = dataset.read(file)
    arguments.num_prompts = arguments.num_prompts or max(1, len(requests) - arguments.num_warmups)
    requests = take(requests, arguments.num_prompts + arguments.num_warmups, file, generator)
    if arguments.output_len is not None:
        return [dataclasses.replace(request, max_tokens=arguments.output_len) for request in requests]
    return await _measure_references(requests, count_tokens)


class DrawnRequests:
    """Requests of the datasets `random` and `prefix_repetition`, drawn as they are needed. None is drawn twice."""

    def __init__(
        self, arguments: argparse.Namespace, generator: np.random.Generator, vocab_size: int
    ) -> None:
        self._inputs = Lengths(arguments.input_len, arguments.range_ratio)
        self._outputs = Lengths(arguments.output_len or _OUTPUT_LEN, arguments.range_ratio)
        self._generator = generator
        self._vocab_size = vocab_size
        self._prefixes: list[list[int]] = []
        """Beginnings, one of which each request has; empty: requests begin as they like."""
        if arguments.dataset_name == "prefix_repetition":
            size = arguments.num_prefixes, arguments.prefix_len
            self._prefixes = generator.integers(0, vocab_size, size).tolist()

    def draw(self, num: int) -> list[LoadRequest]:
        """Return the next `num` requests."""
        lengths = self._inputs, self._outputs
        if not self._prefixes:
            return draw_random(num, *lengths, self._vocab_size, self._generator)
        return draw_shared_prefixes(num, self._prefixes, *lengths, self._vocab_size, self._generator)

    def __iter__(self) -> Iterator[LoadRequest]:
        """Yield requests without end."""
        while True:
            yield from self.draw(_DRAWN_TOGETHER)


async def _measure_references(
    requests: list[LoadRequest], count_tokens: CountTokens | None
) -> list[LoadRequest]:
    """Let answers be as long as those of the dataset, where it has any."""
    if not any(request.reference for request in requests):
        return requests
    if count_tokens is None:
        raise ConfigError(
            "--output-len: is needed over HTTP, which does not tell how many tokens the file's answers have"
        )
    places = asyncio.Semaphore(32)

    async def measure(request: LoadRequest) -> LoadRequest:
        async with places:
            return dataclasses.replace(request, max_tokens=max(1, await count_tokens(request.reference)))

    return await asyncio.gather(*map(measure, requests))
