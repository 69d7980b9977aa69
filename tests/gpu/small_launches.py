"""Every op that has Triton kernels, launched at small odd sizes: a program for tools/sanitize_gpu.sh.

python3 -m tests.gpu.small_launches [cpu]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from triptych_kernels import ops
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns
from triptych_kernels.registry import OPS
from triptych_kernels.triton.linear.few_rows import GATED_LINEAR, LINEAR, ByTorch, Tiles, multiply_few_rows
from triptych_kernels.triton.moe.expert_stack import ExpertStack
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.triton.tuning.tunable import Tunable
from triptych_kernels.weights.formats import QuantizedFormat

_BLOCK_SIZE, _NUM_BLOCKS, _VOCAB_SIZE = 16, 12, 1031
_HEADS = 6, 2, 64  # query heads, key heads, head size


class Launches:
    """One method per op; operands are drawn for each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def embedding(self) -> None:
        token_ids = torch.randint(_VOCAB_SIZE, (7,), device=self.device)
        ops.embedding(token_ids, self._normal(_VOCAB_SIZE, 72), out_dtype=torch.float32, impl="triton")

    def fused_moe(self) -> None:
        w13, w2 = self._normal(4, 2 * 48, 40), self._normal(4, 40, 48)
        ops.fused_moe(self._normal(7, 40), self._normal(7, 4), w13, w2, top_k=2, impl="triton")
        for bits in (4, 8):
            self._mix_quantized(GroupQuantizedExperts, QuantizedFormat(bits, is_affine=bits == 4))
        for element in LARGEST_ELEMENT:
            self._mix_quantized(ChannelQuantizedExperts, element)

    def gated_linear(self) -> None:
        x, weight = self._normal(5, 40), self._normal(2 * 33, 40)
        ops.gated_linear(x, weight, impl="triton")
        for tiles in _tried(GATED_LINEAR, weight):
            multiply_few_rows(x, weight, self._normal(2 * 33), self.dtype, "silu", tiles)

    def linear(self) -> None:
        ops.linear(self._normal(5, 40), self._normal(33, 40), impl="triton")
        for in_features in (40, 1100):  # too few to be split, and enough
            x, weight = self._normal(5, in_features), self._normal(33, in_features)
            for tiles in _tried(LINEAR, weight):
                multiply_few_rows(x, weight, self._normal(33), torch.float32, None, tiles)

    def paged_attention(self) -> None:
        num_heads, num_kv_heads, head_dim = _HEADS
        for dtype in (self.dtype, *LARGEST_ELEMENT):
            cache, scales = self._cache(dtype)
            for query_lens, seq_lens in (((1, 1, 1), (1, 17, 50)), ((20,), (20,)), ((1, 19, 1), (33, 40, 3))):
                starts = torch.tensor([0, *query_lens], device=self.device).cumsum(0).int()
                tables = torch.randint(1, _NUM_BLOCKS, (len(seq_lens), 4), device=self.device).int()
                ops.paged_attention(
                    self._normal(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads],
                    cache, tables, starts, torch.tensor(seq_lens, device=self.device).int(), head_dim**-0.5,
                    kv_scales=scales, query_lens_list=query_lens, seq_lens_list=seq_lens, impl="triton",
                )  # fmt: skip

    def process_logits(self) -> None:
        logits = torch.randn(6, _VOCAB_SIZE, device=self.device)
        rows = torch.tensor([0, 2, 5], device=self.device)
        entry_rows = torch.tensor([0, 0, 1, 2, 2, 2], device=self.device)
        token_ids = torch.tensor([0, 1030, 7, 1, 2, 3], device=self.device)
        ones = torch.ones(3, device=self.device)
        counts = torch.arange(6, device=self.device)
        ops.process_logits(
            logits,
            rows,
            allowed=TokenColumns(entry_rows[:2], token_ids[:2]),
            banned=TokenColumns(entry_rows[2:3], token_ids[2:3]),
            biases=BiasColumns(entry_rows, token_ids, torch.randn(6, device=self.device)),
            penalties=PenaltyColumns(entry_rows, token_ids, counts, ones, ones, ones),
            impl="triton",
        )

    def rms_norm(self) -> None:
        for width in (33, 576):
            x, weight = self._normal(5, width), self._normal(width)
            ops.rms_norm(x, weight, 1e-5, impl="triton")
            ops.rms_norm(x, weight, 1e-5, torch.randn(5, width, device=self.device), impl="triton")

    def rotary_and_write_kv(self) -> None:
        for dtype in (self.dtype, *LARGEST_ELEMENT):
            query, key, value = self._heads()
            cache, scales = self._cache(dtype)
            positions, table = self._rotary()
            ops.rotary_and_write_kv(
                query, key, value, positions, table, cache, self._slots(), kv_scales=scales, impl="triton"
            )

    def rotary_embedding(self) -> None:
        query, key, _ = self._heads()
        ops.rotary_embedding(query, key, *self._rotary(), impl="triton")

    def sample(self) -> None:
        column = torch.linspace(0.0, 1.0, 6, device=self.device)
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.8, 0.01)):
            ops.sample(
                torch.randn(6, _VOCAB_SIZE, device=self.device) * 3,
                temperature=column,
                top_k=torch.full((6,), top_k, dtype=torch.int32, device=self.device),
                top_p=torch.full((6,), top_p, device=self.device),
                min_p=torch.full((6,), min_p, device=self.device),
                seeds=torch.arange(6, device=self.device),
                positions=torch.arange(6, device=self.device),
                impl="triton",
            )

    def silu_and_mul(self) -> None:
        ops.silu_and_mul(self._normal(3, 2 * 1025), impl="triton")

    def token_logprobs(self) -> None:
        logits = torch.randn(5, _VOCAB_SIZE, device=self.device)
        chosen = torch.randint(_VOCAB_SIZE, (5,), device=self.device)
        ops.token_logprobs(logits, torch.arange(5, device=self.device), chosen, 3, impl="triton")

    def write_kv(self) -> None:
        for dtype in (self.dtype, *LARGEST_ELEMENT):
            _, key, value = self._heads()
            cache, scales = self._cache(dtype)
            ops.write_kv(key, value, cache, self._slots(), kv_scales=scales, impl="triton")

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def _mix_quantized(self, create: Callable[..., ExpertStack], *format: object) -> None:
        """Mix one row, a few and many per expert."""
        w13 = create(4, 2 * 160, 96, self.dtype, *format, device=self.device, gated=True)
        w2 = create(4, 96, 160, self.dtype, *format, device=self.device)
        for stack in (w13, w2):
            for weight in stack:
                weight.fill_rows(0, self._normal(*weight.shape))
        for num_tokens in (1, 7, 70):
            ops.fused_moe(self._normal(num_tokens, 96), self._normal(num_tokens, 4), w13, w2, top_k=2)

    def _heads(self) -> tuple[Tensor, ...]:
        num_heads, num_kv_heads, head_dim = _HEADS
        packed = self._normal(9, num_heads + 2 * num_kv_heads, head_dim)
        return packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)

    def _cache(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        cache = self._normal(_NUM_BLOCKS, 2, _HEADS[1], _BLOCK_SIZE, _HEADS[2]).to(dtype)
        scales = torch.rand(cache.shape[:4], device=self.device) if dtype in LARGEST_ELEMENT else None
        return cache, scales

    def _slots(self) -> Tensor:
        slots = torch.randperm(_NUM_BLOCKS * _BLOCK_SIZE, device=self.device)[:9]
        slots[4] = -1
        return slots

    def _rotary(self) -> tuple[Tensor, Tensor]:
        return torch.randint(100, (9,), device=self.device), torch.randn(100, _HEADS[2], device=self.device)


def _tried(tunable: Tunable[Tiles | ByTorch], weight: Tensor) -> list[Tiles]:
    """One candidate of each width, whole and with splits."""
    candidates = tunable.candidates(*weight.shape, weight.dtype, 16)
    return list({(t.block_n, t.num_splits): t for t in candidates if isinstance(t, Tiles)}.values())


def main() -> int:
    launches = Launches(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
    torch.manual_seed(0)
    triton_ops = sorted(op.name for op in OPS.values() if "triton" in op.impls)
    unwatched = [op for op in triton_ops if not hasattr(launches, op)]
    for op in sorted(set(triton_ops).difference(unwatched)):
        launch: Callable[[], None] = getattr(launches, op)
        launch()
        if launches.device.type == "cuda":
            torch.cuda.synchronize()
        print(f"launched {op}", flush=True)
    if unwatched:
        print(f"small_launches: give {', '.join(unwatched)} a method here", file=sys.stderr)
    return 1 if unwatched else 0


if __name__ == "__main__":
    sys.exit(main())
