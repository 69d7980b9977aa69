"""Measures sampling on this CPU, native beside plain torch, as a multiple of the time of one read of the logits."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.command import run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import samples_s
from benchmarks.kernels.limits import create_kernel_parser, prepare
from triptych_kernels.logit_index import PenaltyColumns
from triptych_kernels.ops import process_logits, sample, token_logprobs

SHAPES = ((1, 49_152), (64, 49_152), (1, 128_256), (8, 128_256))
SPREADS = {"peaked": 4.0, "flat": 1.0}
"""Standard deviations of the logits: a nucleus of 0.9 leaves a hundred tokens, or most of the vocabulary."""
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}
NUM_PENALIZED, NUM_TOP = 512, 5


def sampling_calls(logits: Tensor) -> dict[str, Callable[..., object]]:
    """Return what is measured, by name; each call takes `impl`.

    Args:
        logits: [num_rows, vocab_size] float32.
    """
    rows, chosen = torch.arange(len(logits), device=logits.device), logits.argmax(dim=-1)
    penalties = _penalties(logits)

    def choose_penalized(impl: str | None = None) -> object:
        processed = process_logits(logits, rows, penalties=penalties, impl=impl)
        return sample(processed, **_columns(logits, {"top_k": 50, "top_p": 0.9}), impl=impl)

    return {
        **{name: partial(sample, logits, **_columns(logits, asked)) for name, asked in FILTERS.items()},
        "penalties": partial(process_logits, logits, rows, penalties=penalties),
        "top-k 50, top-p 0.9, penalties": choose_penalized,
        f"{NUM_TOP} logprobs": partial(token_logprobs, logits, rows, chosen, NUM_TOP),
    }


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    prepare(arguments.threads)
    for num_rows, vocab_size in SHAPES:
        for spread, deviation in SPREADS.items():
            logits = torch.randn(num_rows, vocab_size) * deviation
            read_s = statistics.median(samples_s(logits.sum, arguments.rounds))
            for name, call in sampling_calls(logits).items():
                for impl in ("cpu", "torch"):
                    seconds = samples_s(partial(call, impl=impl), arguments.rounds)
                    title = f"{num_rows} x {vocab_size:,}, {spread}, {name}, {impl}"
                    note = f"{1e6 * statistics.median(seconds):.0f} us"
                    yield Figure(title, "reads", tuple(one_s / read_s for one_s in seconds), note=note)


def _columns(logits: Tensor, asked: dict[str, float]) -> dict[str, Any]:
    num_rows, device = len(logits), logits.device
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | asked
    top_k = int(values.pop("top_k", 0))
    return {
        **{name: torch.full((num_rows,), value, device=device) for name, value in values.items()},
        "top_k": torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
        "seeds": torch.arange(num_rows, device=device),
        "positions": torch.arange(num_rows, device=device) * 7,
    }


def _penalties(logits: Tensor) -> PenaltyColumns:
    """Return penalties of distinct tokens of every row, half of which are in its output."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    count = min(NUM_PENALIZED, vocab_size)
    return PenaltyColumns(
        rows=torch.arange(num_rows, device=device).repeat_interleave(count),
        token_ids=torch.rand(num_rows, vocab_size, device=device).topk(count).indices.flatten(),
        output_counts=torch.arange(num_rows * count, device=device) % 2,
        presence=torch.full((num_rows,), 0.5, device=device),
        frequency=torch.full((num_rows,), 0.1, device=device),
        repetition=torch.full((num_rows,), 1.1, device=device),
    )


if __name__ == "__main__":
    sys.exit(run(create_kernel_parser(__doc__, rounds=30), measure))
