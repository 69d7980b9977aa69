"""Measures what the soft limit of the KV cache saves and costs: blocks touched, and prompt tokens found cached.

The engine's block manager, in kinds of traffic with few and with many prefixes that come again, once with the limit
and once without. A request holds the blocks of its prompt and output from its admission on; the one that was admitted
NUM_RUNNING requests earlier ends then. Nothing is computed. Sizes are of the embedded model's float32 cache on a
machine with 23 GiB free.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import TypeAlias

import numpy as np

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.manager import BlockManager

BLOCK_SIZE = 16
BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK_SIZE
FREE_BYTES = 23 << 30
NUM_BLOCKS = FREE_BYTES // 2 // BLOCK_BYTES
NUM_RUNNING = 16
VOCAB_SIZE = 49152

Prompts: TypeAlias = "Iterator[tuple[array[int], array[int]]]"
"""Prompt and output of each request."""


def tokens(random: Random, count: int) -> array[int]:
    ids = np.frombuffer(random.randbytes(4 * count), np.uint32) % VOCAB_SIZE
    return array("I", ids.astype(np.uint32).tobytes())


def unrelated(random: Random) -> Prompts:
    """Requests of 32 to 1,024 tokens; one in twenty begins with one of five prefixes of 64."""
    prefixes = [tokens(random, 64) for _ in range(5)]
    while True:
        prefix = random.choice(prefixes) if random.random() < 0.05 else array("I")
        yield prefix + tokens(random, random.randint(32, 1024)), tokens(random, random.randint(16, 256))


def system_prompts(random: Random) -> Prompts:
    """Requests that begin with one of forty prompts of 512 to 2,048 tokens, the first ones more often."""
    prefixes = [tokens(random, random.randint(512, 2048)) for _ in range(40)]
    weights = [1 / (1 + rank) for rank in range(40)]
    while True:
        (prefix,) = random.choices(prefixes, weights)
        yield prefix + tokens(random, random.randint(32, 256)), tokens(random, random.randint(16, 256))


def chats(random: Random, num_at_once: int = 100) -> Prompts:
    """Conversations of up to 12 turns; the next turn is of any that is going on."""
    going_on = [array("I") for _ in range(num_at_once)]
    while True:
        index = random.randrange(num_at_once)
        prompt = going_on[index] + tokens(random, random.randint(16, 128))
        output = tokens(random, random.randint(32, 256))
        yield prompt, output
        going_on[index] = array("I") if random.random() < 1 / 12 else prompt + output


def documents(random: Random) -> Prompts:
    """Questions about 400 documents of 1,000 to 4,000 tokens, some of them more often than others."""
    texts = [tokens(random, random.randint(1000, 4000)) for _ in range(400)]
    weights = [(1 + rank) ** -0.8 for rank in range(400)]
    while True:
        (text,) = random.choices(texts, weights)
        yield text + tokens(random, random.randint(16, 64)), tokens(random, random.randint(16, 128))


TRAFFIC: tuple[Callable[[Random], Prompts], ...] = (unrelated, system_prompts, chats, documents)


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    soft = int(FREE_BYTES * arguments.soft_memory_fraction / BLOCK_BYTES)
    for kind in TRAFFIC:
        title = kind.__name__.replace("_", " ")
        for limit_title, soft_num_blocks in (("no limit", None), ("soft limit", soft)):
            touched_gb, hit_rate = serve(kind(Random(0)), arguments.requests, soft_num_blocks)
            yield Figure(f"{title}, {limit_title}: memory of the cache", "GB", (touched_gb,))
            yield Figure(f"{title}, {limit_title}: prompt tokens found cached", "%", (100 * hit_rate,))


def serve(prompts: Prompts, num_requests: int, soft_num_blocks: int | None) -> tuple[float, float]:
    """Return the GB that the touched blocks take, and the share of prompt tokens that were cached."""
    blocks = BlockManager(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        soft_num_blocks=soft_num_blocks,
    )
    running: deque[tuple[BlockTable, array[int]]] = deque()
    num_tokens = num_hits = 0
    for _ in range(num_requests):
        prompt, output = next(prompts)
        if len(running) == NUM_RUNNING:
            table, token_ids = running.popleft()
            blocks.cache_full_blocks([(table, token_ids, len(token_ids))])
            blocks.free(table)
        table, token_ids = BlockTable(), prompt + output
        hits = blocks.get_computed_blocks(table, token_ids[: len(prompt) - 1])
        assert blocks.allocate(table, len(token_ids), hits) is not None, "all fit"
        blocks.cache_full_blocks([(table, token_ids, len(prompt))])
        num_tokens, num_hits = num_tokens + len(prompt), num_hits + len(hits) * BLOCK_SIZE
        running.append((table, token_ids))
    return blocks.num_touched * BLOCK_BYTES / 1e9, num_hits / num_tokens


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--requests", type=int, default=5_000, help="of each kind (default: %(default)s)")
    parser.add_argument("--soft-memory-fraction", type=float, default=0.1, help="(default: %(default)s)")
    sys.exit(run(parser, measure))
