"""Measures a gated delta net on one core, in Qwen3-Next's sizes, beside transformers' torch paths: tokens a CPU second.

A call is what lies between a layer's two projections and its norm: the convolution, then the scan. Weights and inputs
are random, states are carried on. Decodes of transformers take its path for one token, prompts that of chunks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import cpu_s
from benchmarks.kernels.limits import prepare
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.ops import causal_conv, gated_delta_scan
from triptych_kernels.state_batch import StateBatch

TAPS, NUM_KEY_HEADS, NUM_HEADS, DIM = 4, 16, 32, 128
KEYS, VALUES = NUM_KEY_HEADS * DIM, NUM_HEADS * DIM
CHANNELS = 2 * KEYS + VALUES
STEPS = {"decode of 1 row": (1, 1), "decode of 8 rows": (8, 1), "prompt of 512": (1, 512)}
"""Number of rows, and tokens of each."""
NUM_LAYERS = 4
"""States of so many layers are used in turn, since a model's do not stay in the caches."""


class Step:
    """The operands of one step; all rows are alike."""

    def __init__(self, num_rows: int, query_len: int, dtype: torch.dtype) -> None:
        num_tokens = num_rows * query_len
        self.num_rows, self.query_len = num_rows, query_len
        self.mixed = torch.randn(num_tokens, CHANNELS).to(dtype)
        self.decay, self.beta = torch.randn(2, num_tokens, NUM_HEADS).to(dtype)
        self.weight = torch.randn(TAPS, CHANNELS)
        self.rates, self.bias = torch.rand(NUM_HEADS) * 8, torch.randn(NUM_HEADS)
        pages = torch.arange(1, num_rows + 1, dtype=torch.int32)
        starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32)
        self.batch = StateBatch(pages, pages, starts, (query_len,) * num_rows)
        self.past = [
            zeros_in_huge_pages((num_rows + 1, TAPS - 1, CHANNELS), torch.float32) for _ in range(NUM_LAYERS)
        ]
        self.states = [
            zeros_in_huge_pages((num_rows + 1, NUM_HEADS, DIM, DIM), torch.float32) for _ in range(NUM_LAYERS)
        ]

    def compute(self, impl: str) -> None:
        """Compute all layers by our ops."""
        for past, state in zip(self.past, self.states, strict=True):
            mixed = causal_conv(self.mixed, self.weight, None, past, self.batch, activation="silu", impl=impl)
            query, key, value = (x.unflatten(1, (-1, DIM)) for x in mixed.split((KEYS, KEYS, VALUES), dim=1))
            gated_delta_scan(
                query, key, value, self.decay, self.beta, self.rates, self.bias, state, self.batch, impl=impl
            )

    @torch.inference_mode()
    def compute_theirs(self) -> None:
        """Compute all layers by transformers' functions, as its `Qwen3NextGatedDeltaNet` calls them."""
        weight = self.weight.t().contiguous().to(self.mixed.dtype)
        for past, state in zip(self.past, self.states, strict=True):
            mixed = self._by_row(self.mixed).transpose(1, 2)
            own = past[1:].transpose(1, 2).to(self.mixed.dtype)
            if self.query_len == 1:
                mixed = theirs.causal_conv1d_update(mixed, own, weight, None, "silu")
            else:
                mixed = theirs.causal_conv1d_fn(torch.cat((own, mixed), 2), weight, activation="silu")
                mixed = mixed[:, :, -self.query_len :]
            query, key, value = (
                x.unflatten(2, (-1, DIM)) for x in mixed.transpose(1, 2).split((KEYS, KEYS, VALUES), dim=2)
            )
            decay = -self.rates * torch.nn.functional.softplus(self._by_row(self.decay).float() + self.bias)
            scan: Callable[..., tuple[Tensor, Tensor]] = (
                theirs.torch_recurrent_gated_delta_rule
                if self.query_len == 1
                else theirs.torch_chunk_gated_delta_rule
            )
            _, after = scan(
                query, key, value, g=decay, beta=self._by_row(self.beta).sigmoid(), initial_state=state[1:],
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            state[1:] = after

    def _by_row(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.num_rows, self.query_len))


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    prepare(1)  # so that CPU time is that of this thread
    for dtype in (torch.bfloat16, torch.float32):
        for name, (num_rows, query_len) in STEPS.items():
            step = Step(num_rows, query_len, dtype)
            ways: dict[str, Callable[[], None]] = {
                "native": partial(step.compute, "cpu"),
                "transformers": step.compute_theirs,
            }
            for way, work in ways.items():
                work()
                seconds = [cpu_s(work) for _ in range(arguments.rounds)]
                tokens = num_rows * query_len * NUM_LAYERS
                title = f"{str(dtype).removeprefix('torch.')}, {name}, {way}"
                yield Figure(title, "tokens/s", tuple(tokens / one_s for one_s in seconds))


if __name__ == "__main__":
    sys.exit(run(create_parser(__doc__, rounds=7), measure))
