"""Measures what a frontend computes for the log-probabilities of a token, from a batch's columns to an answer's bytes.

    python -m benchmarks.stack.logprobs [--top 20]

CPU time of one thread, with the pieces of JSON that are kept from token to token already made. A delta is what one
message brings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import cpu_s
from triptych.hub import resolve_model
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import DeltaEvent
from triptych.types.logprobs import LogprobRows
from triptych.types.step import LogprobColumns
from triptych.v1 import generation_pb2
from triptych.wire.generation import EventEncoder
from triptych_services.frontend.http.openai.logprobs import TextPlaces, chat_json, completion_json
from triptych_services.frontend.streams.logprobs import BatchLogprobs

_BATCH, _NUM_BATCHES = 60, 100


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    columns = _columns(arguments.top)
    token_bytes = Tokenizer.from_directory(resolve_model("embedded")).token_bytes
    options = generation_pb2.ResponseOptions()
    options.logprobs.top = arguments.top
    encoder = EventEncoder(options)

    def grpc(rows: LogprobRows) -> None:
        for message in encoder.encode(DeltaEvent(0, "x", rows.token_ids[: len(rows)], rows)):
            message.SerializeToString()

    ways: dict[str, Callable[[LogprobRows], object]] = {
        "columns of a choice": len,
        "chat completions": lambda rows: chat_json(rows, names_by_id=False),
        "completions": lambda rows: completion_json(rows, TextPlaces(), None, "", names_by_id=False),
        "gRPC": grpc,
    }
    for _ in range(arguments.rounds):
        for delta in (1, 2, 6):
            for name, write in ways.items():

                def batches(write: Callable[[LogprobRows], object] = write, delta: int = delta) -> None:
                    for _ in range(_NUM_BATCHES):
                        batch = BatchLogprobs(columns)
                        for start in range(0, _BATCH, delta):
                            write(batch.rows(start, delta, token_bytes))

                batches()
                us = 1e6 * cpu_s(batches) / (_BATCH * _NUM_BATCHES)
                yield Figure(f"{name}, deltas of {delta}, top {arguments.top}, per token", "us", (us,))


def _columns(num_top: int) -> LogprobColumns:
    """Return those of a batch of random tokens, each of which is its best candidate."""
    random, width = np.random.default_rng(0), 1 + num_top
    token_ids = random.integers(300, 40_000, (_BATCH, width)).astype(np.uint32)
    logprobs = -np.sort(random.exponential(3, (_BATCH, width)).astype(np.float32), axis=1)
    if num_top:
        token_ids[:, 0], logprobs[:, 0] = token_ids[:, 1], logprobs[:, 1]
    return LogprobColumns(
        rows=np.arange(_BATCH, dtype=np.uint32),
        offsets=np.arange(0, (_BATCH + 1) * width, width, dtype=np.uint32),
        token_ids=token_ids.ravel(),
        logprobs=logprobs.ravel(),
        ranks=np.ones(_BATCH, np.uint32),
    )


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=5)
    parser.add_argument("--top", type=int, default=20, metavar="N", help="candidates beside each token")
    sys.exit(run(parser, measure))
