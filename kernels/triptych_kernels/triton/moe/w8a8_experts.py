"""Products of a mixture of experts with weights of 8 bits and a scale per output; inputs are rounded to 8 bits too.

Tokens are rounded once, before they are routed; the inputs of the second product are rounded pair by pair. Tiles are
those of `w8a8_linear`, each over all inputs at once as in `quantized_experts`, with the same part measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.linear.quantize_rows import quantize_rows
from triptych_kernels.triton.linear.w8a8_linear import BLOCK_K, dot_bytes
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.triton.moe.expert_stack import ExpertStack
from triptych_kernels.triton.moe.routing import Routing
from triptych_kernels.triton.moe.tiles import TILES_IN_GROUP, part_of_program, store_gated, store_weighted
from triptych_kernels.triton.tuning.tunable import Tunable, row_bucket


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one program. Stages fit the 99 KiB of shared memory of a program on Ada, the first with 8-bit floats."""

    BLOCK_N: int
    """Columns."""
    BLOCK_M: int
    """Rows."""
    num_warps: int
    num_stages: int


class ChannelQuantizedExperts(ExpertStack):
    """A stack with a `ChannelQuantizedWeight` for each expert."""

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        element_dtype: torch.dtype,
        *,
        device: torch.device,
        gated: bool = False,
    ) -> None:
        """Create weights of zeros; arguments are those of `ChannelQuantizedWeight`."""
        self.elements = torch.zeros(
            (num_experts, out_features, in_features), dtype=element_dtype, device=device
        )
        self.scales = torch.zeros((num_experts, out_features), device=device)
        super().__init__(
            [
                ChannelQuantizedWeight(
                    out_features,
                    in_features,
                    dtype,
                    element_dtype,
                    device=device,
                    gated=gated,
                    storage=storage,
                )
                for storage in zip(self.elements, self.scales, strict=True)
            ]
        )

    def block_m(self, rows_per_expert: float) -> int:
        return _choose_tiles(rows_per_expert, gated=True).BLOCK_M

    def gate_up(self, x: Tensor, routing: Routing) -> Tensor:
        intermediate_size = self[0].out_features // 2
        activated = torch.empty(routing.num_pairs, intermediate_size, dtype=x.dtype, device=x.device)
        grid, operands, options = self._launch(x, routing, intermediate_size)
        _gate_up_bytes[grid](
            activated, *operands, len(x), intermediate_size, TOP_K=routing.num_pairs // len(x), **options
        )
        return activated

    def down(self, activated: Tensor, routing: Routing, weighted: Tensor) -> None:
        hidden_size = self[0].out_features
        grid, operands, options = self._launch(activated, routing, hidden_size)
        _down_bytes[grid](routing.probabilities, weighted, *operands, hidden_size, **options)

    def _launch(
        self, inputs: Tensor, routing: Routing, num_columns: int
    ) -> tuple[tuple[int], tuple[Tensor | int, ...], dict[str, int]]:
        """Launch either kernel with its grid, the operands and the options that both have."""
        weight = self[0]
        tiles = TILES.chosen(
            inputs.device,
            len(self),
            *weight.shape,
            weight.gated,
            self.elements.dtype,
            row_bucket(routing.num_pairs / len(self)),
        )
        operands = (
            *quantize_rows(inputs, self.elements.dtype), self.elements, self.scales, self.elements.shape[2],
            routing.pairs, routing.tile_experts, routing.tile_rows, routing.max_tiles, routing.num_pairs,
        )  # fmt: skip
        options = {"GROUP": TILES_IN_GROUP, "BLOCK_K": BLOCK_K, **asdict(tiles)}
        return (routing.max_tiles * triton.cdiv(num_columns, tiles.BLOCK_N),), operands, options


def _choose_tiles(rows_per_expert: float, *, gated: bool) -> _Tiles:
    """Return the tiles for a number of rows.

    Few rows: as many programs as in `quantized_experts`, each with some 48 KiB of weights in flight. Many rows: sums
    that fill the registers, of which a gated product has two.
    """
    if rows_per_expert <= 16:
        return _Tiles(64, 16, num_warps=4, num_stages=6)
    if rows_per_expert <= 64:
        return _Tiles(128, 64, num_warps=8, num_stages=4)
    return _Tiles(64 if gated else 128, 128, num_warps=8, num_stages=3)


def _default_tiles(
    num_experts: int,
    out_features: int,
    in_features: int,
    is_gated: bool,
    element_dtype: torch.dtype,
    rows_per_expert: int,
) -> _Tiles:
    return _choose_tiles(rows_per_expert, gated=is_gated)


def _candidates(
    num_experts: int,
    out_features: int,
    in_features: int,
    is_gated: bool,
    element_dtype: torch.dtype,
    rows_per_expert: int,
) -> Iterator[_Tiles]:
    default = _choose_tiles(rows_per_expert, gated=is_gated)
    for block_n, num_warps, num_stages in product((64, 128, 256), (4, 8), (3, 4, 6)):
        sums = block_n * default.BLOCK_M * (1 + is_gated) // (32 * num_warps)  # of a thread
        if 8 <= sums <= 128 and num_stages * (block_n + default.BLOCK_M) * BLOCK_K <= 227 << 10:
            yield replace(default, BLOCK_N=block_n, num_warps=num_warps, num_stages=num_stages)


TILES = Tunable(
    "w8a8_experts",
    ("num_experts", "out_features", "in_features", "is_gated", "element_dtype", "rows_per_expert"),
    default=_default_tiles,
    candidates=_candidates,
    same_bits=True,
)


@triton.jit(do_not_specialize=["num_tiles", "num_pairs", "num_tokens"])  # they change from step to step
def _gate_up_bytes(
    activated, x, x_scales, elements, scales, hidden_size, pairs, tile_experts, tile_rows, num_tiles, num_pairs,
    num_tokens, intermediate_size,
    TOP_K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of silu(gate) * up of the pairs of one tile."""
    num_rows, expert, pair, columns = part_of_program(
        pairs, tile_experts, tile_rows, num_tiles, num_pairs, intermediate_size, GROUP, BLOCK_M, BLOCK_N
    )
    if num_rows > 0:
        elements += expert * 2 * intermediate_size * hidden_size
        scales += expert * 2 * intermediate_size
        # one after the other: side by side they would need twice the registers and shared memory, written out twice
        # the code
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for half in range(2):
            gate = up
            up = _multiply_bytes(
                x, x_scales, elements, scales, half * intermediate_size + columns, pair // TOP_K, num_tokens,
                2 * intermediate_size, hidden_size, BLOCK_N, BLOCK_M, BLOCK_K,
            )  # fmt: skip
        store_gated(activated, gate, up, columns, pair, num_pairs, intermediate_size)


@triton.jit(do_not_specialize=["num_tiles", "num_pairs"])  # they change from step to step
def _down_bytes(
    probabilities, weighted, activated, activated_scales, elements, scales, intermediate_size,
    pairs, tile_experts, tile_rows, num_tiles, num_pairs, hidden_size,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of the weighted results of the pairs of one tile."""
    num_rows, expert, pair, columns = part_of_program(
        pairs, tile_experts, tile_rows, num_tiles, num_pairs, hidden_size, GROUP, BLOCK_M, BLOCK_N
    )
    if num_rows > 0:
        elements += expert * hidden_size * intermediate_size
        scales += expert * hidden_size
        result = _multiply_bytes(
            activated, activated_scales, elements, scales, columns, pair, num_pairs, hidden_size, intermediate_size,
            BLOCK_N, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        store_weighted(weighted, result, probabilities, columns, pair, num_pairs, hidden_size)


@triton.jit
def _multiply_bytes(
    x, x_scales, elements, scales, outputs, rows, num_rows, out_features, in_features,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the scaled product, [outputs, rows] float32."""
    product = dot_bytes(
        x,
        elements,
        outputs,
        rows,
        0,
        in_features,
        num_rows,
        out_features,
        in_features,
        BLOCK_N,
        BLOCK_M,
        BLOCK_K,
    )
    output_scale = tl.load(scales + outputs, mask=outputs < out_features, other=0.0)[:, None]
    return product * output_scale * tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)[None, :]
