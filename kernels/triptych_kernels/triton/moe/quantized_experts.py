"""Products of a mixture of experts with weights of 4 or 8 bits in groups of 32 inputs.

Each tile is computed as by `quantized_linear`, but over all inputs at once: even few rows make a program for every few
columns of every chosen expert, which fills the device without splits of the inputs. A row's groups are added in one
order in any batch, unless products of many rows may round weights. The number of rows of a tile determines the routing
of both products and is not measured; the rest of a tile may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.linear.group_sums import sum_input_groups
from triptych_kernels.triton.linear.quantized_linear import WIDE_ROWS, sum_groups
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight, GroupStorage
from triptych_kernels.triton.moe.expert_stack import ExpertStack
from triptych_kernels.triton.moe.routing import Routing
from triptych_kernels.triton.moe.tiles import TILES_IN_GROUP, part_of_program, store_gated, store_weighted
from triptych_kernels.triton.tuning.tunable import Tunable, row_bucket
from triptych_kernels.weights.formats import QuantizedFormat


@dataclass(frozen=True, slots=True)
class _Tiles:
    BLOCK_N: int
    """Columns."""
    BLOCK_M: int
    """Rows."""
    STEP: int
    """Groups of one step; even, as 4-bit groups are stored in pairs."""
    BY_WEIGHTS: bool
    """Whether to multiply by weights instead of integers, see `quantized_linear`."""
    num_warps: int
    num_stages: int


class GroupQuantizedExperts(ExpertStack):
    """A stack with a `GroupQuantizedWeight` for each expert."""

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        format: QuantizedFormat,
        *,
        device: torch.device,
        gated: bool = False,
        batch_invariant: bool = True,
    ) -> None:
        """Create weights of zeros; arguments and errors are those of `GroupQuantizedWeight`."""
        self.dtype = dtype
        self.batch_invariant = batch_invariant
        self.storage = GroupStorage.zeros(
            num_experts, out_features, in_features, format=format, device=device
        )
        super().__init__(
            [
                GroupQuantizedWeight(
                    out_features, in_features, dtype, format, device=device, gated=gated,
                    batch_invariant=batch_invariant, storage=self.storage[expert],
                )
                for expert in range(num_experts)
            ]
        )  # fmt: skip

    def block_m(self, rows_per_expert: float) -> int:
        return _choose_tiles(rows_per_expert, self.dtype, batch_invariant=self.batch_invariant).BLOCK_M

    def gate_up(self, x: Tensor, routing: Routing) -> Tensor:
        intermediate_size = self[0].out_features // 2
        activated = torch.empty(routing.num_pairs, intermediate_size, dtype=x.dtype, device=x.device)
        grid, operands, options = self._launch(x, routing, intermediate_size)
        _gate_up_groups[grid](
            x, x.stride(0), activated, *operands, len(x), intermediate_size,
            TOP_K=routing.num_pairs // len(x), **options,
        )  # fmt: skip
        return activated

    def down(self, activated: Tensor, routing: Routing, weighted: Tensor) -> None:
        hidden_size = self[0].out_features
        grid, operands, options = self._launch(activated, routing, hidden_size)
        _down_groups[grid](
            activated, activated.stride(0), routing.probabilities, weighted, *operands, hidden_size, **options
        )

    def _launch(
        self, x: Tensor, routing: Routing, num_columns: int
    ) -> tuple[tuple[int], tuple[Tensor | int | None, ...], dict[str, int | bool]]:
        """Launch either kernel with its grid, the operands and the options that both have."""
        held = self.storage
        bits = 4 if held.integers.dtype == torch.int32 else 8
        tiles = self._tiles(routing.num_pairs / len(self), bits)
        num_groups = held.scales.shape[1]
        x_sums = None if held.minimums is None or tiles.BY_WEIGHTS else sum_input_groups(x, tiles.BLOCK_M)
        operands = (
            x_sums, 0 if x_sums is None else x_sums.stride(0),
            held.integers, held.integers.stride(0), held.scales, held.minimums, held.scales.stride(0), num_groups,
            routing.pairs, routing.tile_experts, routing.tile_rows, routing.max_tiles, routing.num_pairs,
        )  # fmt: skip
        options = {"BITS": bits, "GROUP": TILES_IN_GROUP, **asdict(tiles)}
        return (routing.max_tiles * triton.cdiv(num_columns, tiles.BLOCK_N),), operands, options

    def _tiles(self, rows_per_expert: float, bits: int) -> _Tiles:
        if self.dtype == torch.float32:
            return _choose_tiles(rows_per_expert, self.dtype, batch_invariant=self.batch_invariant)
        by_weights = rows_per_expert >= WIDE_ROWS and not self.batch_invariant
        shape = len(self), *self[0].shape, self[0].gated
        return (BY_WEIGHTS if by_weights else BY_INTEGERS).chosen(
            self.storage.integers.device,
            *shape,
            bits,
            self.storage.minimums is not None,
            row_bucket(rows_per_expert),
        )


def _choose_tiles(rows_per_expert: float, dtype: torch.dtype, *, batch_invariant: bool) -> _Tiles:
    """Return the tiles for a number of rows.

    Few rows: the 4,096 columns of two experts make about as many programs as an H200 has multiprocessors, each with
    some 40 KiB of weights in flight. Many rows: as `quantized_linear`.
    """
    if dtype == torch.float32:  # no tensor cores, so a tile is what registers hold of multiplications
        return _Tiles(32, 16, STEP=2, BY_WEIGHTS=False, num_warps=4, num_stages=2)
    if rows_per_expert >= WIDE_ROWS and not batch_invariant:
        return _Tiles(128, 128, STEP=2, BY_WEIGHTS=True, num_warps=8, num_stages=4)
    if rows_per_expert <= 16:
        return _Tiles(64, 16, STEP=8, BY_WEIGHTS=False, num_warps=4, num_stages=4)
    if rows_per_expert <= 32:
        return _Tiles(64, 32, STEP=8, BY_WEIGHTS=False, num_warps=4, num_stages=3)
    return _Tiles(128, 64, STEP=2, BY_WEIGHTS=False, num_warps=8, num_stages=4)


def _default_tiles(
    num_experts: int,
    out_features: int,
    in_features: int,
    is_gated: bool,
    bits: int,
    is_affine: bool,
    rows_per_expert: int,
    *,
    by_weights: bool,
) -> _Tiles:
    return _choose_tiles(rows_per_expert, torch.bfloat16, batch_invariant=not by_weights)


def _candidates(*key: Any, by_weights: bool) -> Iterator[_Tiles]:
    default = _default_tiles(*key, by_weights=by_weights)
    steps = (2,) if default.BLOCK_M > 32 else (2, 4)
    for block_n, step, num_warps, num_stages in product((64, 128), steps, (4, 8), (3, 4, 5)):
        if 8 <= block_n * default.BLOCK_M // (32 * num_warps) <= 64:  # sums of a thread
            yield replace(default, BLOCK_N=block_n, STEP=step, num_warps=num_warps, num_stages=num_stages)


_KEY = ("num_experts", "out_features", "in_features", "is_gated", "bits", "is_affine", "rows_per_expert")
BY_INTEGERS = Tunable(
    "quantized_experts",
    _KEY,
    default=partial(_default_tiles, by_weights=False),
    candidates=partial(_candidates, by_weights=False),
    same_bits=True,
)
BY_WEIGHTS = Tunable(
    "quantized_experts_by_weights",
    _KEY,
    default=partial(_default_tiles, by_weights=True),
    candidates=partial(_candidates, by_weights=True),
)


@triton.jit(do_not_specialize=["num_tiles", "num_pairs", "num_tokens"])  # they change from step to step
def _gate_up_groups(
    x, x_stride, activated, x_sums, x_sums_stride, integers, integers_stride, scales, minimums, scales_stride,
    num_groups, pairs, tile_experts, tile_rows, num_tiles, num_pairs, num_tokens, intermediate_size,
    TOP_K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STEP: tl.constexpr, BY_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of silu(gate) * up of the pairs of one tile."""
    num_rows, expert, pair, columns = part_of_program(
        pairs, tile_experts, tile_rows, num_tiles, num_pairs, intermediate_size, GROUP, BLOCK_M, BLOCK_N
    )
    if num_rows > 0:
        integers += expert * integers_stride
        scales += expert * scales_stride
        if minimums is not None:
            minimums += expert * scales_stride
        # one after the other: side by side they would need twice the registers and shared memory, written out twice
        # the code
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for half in range(2):
            gate = up
            up = sum_groups(
                x, x_stride, x_sums, x_sums_stride, integers, scales, minimums,
                half * intermediate_size + columns, pair // TOP_K, 0, num_groups, num_tokens,
                2 * intermediate_size, BITS, BY_WEIGHTS, STEP, BLOCK_N, BLOCK_M,
            )  # fmt: skip
        store_gated(activated, gate, up, columns, pair, num_pairs, intermediate_size)


@triton.jit(do_not_specialize=["num_tiles", "num_pairs"])  # they change from step to step
def _down_groups(
    activated, activated_stride, probabilities, weighted, x_sums, x_sums_stride, integers, integers_stride, scales,
    minimums, scales_stride, num_groups, pairs, tile_experts, tile_rows, num_tiles, num_pairs, hidden_size,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STEP: tl.constexpr, BY_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of the weighted results of the pairs of one tile."""
    num_rows, expert, pair, columns = part_of_program(
        pairs, tile_experts, tile_rows, num_tiles, num_pairs, hidden_size, GROUP, BLOCK_M, BLOCK_N
    )
    if num_rows > 0:
        integers += expert * integers_stride
        scales += expert * scales_stride
        if minimums is not None:
            minimums += expert * scales_stride
        result = sum_groups(
            activated, activated_stride, x_sums, x_sums_stride, integers, scales, minimums, columns, pair,
            0, num_groups, num_pairs, hidden_size, BITS, BY_WEIGHTS, STEP, BLOCK_N, BLOCK_M,
        )  # fmt: skip
        store_weighted(weighted, result, probabilities, columns, pair, num_pairs, hidden_size)
