"""Measures what a shared prefix saves: 64 requests of 512 shared and 32 own tokens, beside 64 that share nothing.

Through three processes and gRPC, 16 new tokens each, whole answers; the two take turns. The shared prefix is a new
one in every round, so its first request computes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import wall_s
from triptych import LLM, SamplingParams

NUM_REQUESTS, PREFIX_LEN, OWN_LEN, OUTPUT_LEN = 64, 512, 32, 16
VOCAB_SIZE = 49152


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    rng = np.random.default_rng(0)
    with LLM(model="embedded") as llm:
        batch_s(llm, rng, is_shared=True)  # not counted
        for _ in range(arguments.rounds):
            shared_s, own_s = batch_s(llm, rng, is_shared=True), batch_s(llm, rng, is_shared=False)
            yield Figure("prefix shared", "s", (shared_s,))
            yield Figure("nothing shared", "s", (own_s,))
            yield Figure("prefix shared / nothing shared", "", (shared_s / own_s,))


def batch_s(llm: LLM, rng: np.random.Generator, *, is_shared: bool) -> float:
    """Return the seconds until all answers have arrived."""
    prompts = rng.integers(0, VOCAB_SIZE, (NUM_REQUESTS, PREFIX_LEN + OWN_LEN))
    if is_shared:
        prompts[:, :PREFIX_LEN] = prompts[0, :PREFIX_LEN]
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    return wall_s(lambda: llm.generate(prompts.tolist(), sampling, use_tqdm=False))


if __name__ == "__main__":
    sys.exit(run(create_parser(__doc__, rounds=3), measure))
