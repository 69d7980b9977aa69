"""What a shared prefix saves: 64 requests of 512 shared and 32 own tokens, against the same with nothing shared.

    python benchmarks/shared_prefix.py [--rounds 3]

Through three processes and gRPC, 16 new tokens each, whole answers; the two take turns. The shared prefix is a new
one in every round, so its first request computes it.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from triptych import LLM, SamplingParams

NUM_REQUESTS, PREFIX_LEN, OWN_LEN, OUTPUT_LEN = 64, 512, 32, 16
VOCAB_SIZE = 49152


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    with LLM(model="embedded") as llm:
        run(llm, rng, shared=True)  # not counted
        seconds = {shared: list[float]() for shared in (True, False)}
        for _ in range(arguments.rounds):
            for shared, samples in seconds.items():
                samples.append(run(llm, rng, shared=shared))
    shared_s, own_s = (statistics.median(seconds[shared]) for shared in (True, False))
    print(f"shared {shared_s:.2f} s, nothing shared {own_s:.2f} s: {shared_s / own_s:.2f}")


def run(llm: LLM, rng: np.random.Generator, *, shared: bool) -> float:
    """Seconds until all answers are there."""
    common = random_tokens(rng, PREFIX_LEN)
    prompts = [
        (common if shared else random_tokens(rng, PREFIX_LEN)) + random_tokens(rng, OWN_LEN)
        for _ in range(NUM_REQUESTS)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started


def random_tokens(rng: np.random.Generator, length: int) -> list[int]:
    tokens: list[int] = rng.integers(0, VOCAB_SIZE, length).tolist()
    return tokens


if __name__ == "__main__":
    main()
