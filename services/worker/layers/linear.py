"""Projections: weights [out_features, in_features], packed where the checkpoint has them in pieces.

With more than one tensor-parallel rank, the packed projections hold a share of their outputs (whole heads,
whole MLP columns). `RowLinear`, which follows them, holds the matching share of its inputs. Its product is one term of
a sum over the ranks, and it computes that sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triptych_kernels.ops import gated_linear, linear
from triptych_kernels.weights.adapters import AdaptedRows
from triptych_kernels.weights.base import Half
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.adapted import AdaptedLayer, AdaptedPiece
from triptych_services.worker.layers.weights import (
    WeightTarget,
    bias_target,
    create_linear_weight,
    linear_target,
    unused_target,
)
from triptych_services.worker.parallel.shares import share, share_kv_heads


@dataclass(frozen=True, slots=True)
class Piece:
    """One of the checkpoint's projections inside a packed one."""

    name: str
    """The last part of its module's name in the checkpoint: `q_proj`."""
    out_features: int
    """Number of outputs in the checkpoint."""
    start: int
    """Index of the first output that this rank holds."""
    length: int
    """Number of outputs that this rank holds."""


class PackedLinear(AdaptedLayer):
    """Several projections of the same input as one product, with their outputs one after the other.

    weight  [ q_proj | k_proj | v_proj ]   along the outputs, each this rank's share
    """

    def __init__(
        self, in_features: int, pieces: tuple[Piece, ...], *, bias: bool, context: ModelContext, prefix: str
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.pieces = pieces
        out_features = sum(piece.length for piece in pieces)
        self.weight, self.bias = create_linear_weight(
            out_features,
            in_features,
            sources=[f"{prefix}.{piece.name}.weight" for piece in pieces],
            context=context,
            bias=bias,
        )
        self.has_bias = bias

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, sum of this rank's pieces].

        Args:
            adapter_slots: As of `StepContext`, in every layer.
        """
        return linear(x, self.weight, self.bias, adapters=self.adapters_of(adapter_slots))

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        pieces, first_row = [], 0
        for piece in self.pieces:
            pieces.append(
                AdaptedPiece(
                    f"{self.prefix}.{piece.name}",
                    (piece.out_features, self.weight.shape[1]),
                    AdaptedRows(first_row, piece.length),
                    start=piece.start,
                    length=piece.length,
                )
            )
            first_row += piece.length
        return tuple(pieces)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        first_row = 0
        for piece in self.pieces:
            name = f"{self.prefix}.{piece.name}"
            shape = (piece.out_features, self.weight.shape[1])
            targets[f"{name}.weight"] = linear_target(
                self.weight, shape, first_row=first_row, length=piece.length, start=piece.start
            )
            if self.has_bias:
                targets[f"{name}.bias"] = bias_target(
                    self.weight,
                    self.bias,
                    piece.out_features,
                    first_row=first_row,
                    length=piece.length,
                    start=piece.start,
                )
            first_row += piece.length
        return targets


class QKVLinear(PackedLinear):
    """The query, key and value projections; `prefix` is that of the attention module.

    Ranks share the heads, a key head with the query heads that read it. If there are more ranks than key heads,
    neighbouring ranks hold the same key head.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        gate: str = "none",
        lacking: tuple[str, ...] = (),
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            gate: As of `BlockSpec.output_gate`; another projection, `gate_proj`, behind the others.
            lacking: `v_proj`: values are what the projection of keys gives. `k_proj`, `v_proj`: there are only queries.
        """
        heads = share(num_heads, what="num_heads", rank=context.rank)
        kv_heads = share_kv_heads(num_kv_heads, rank=context.rank)
        self.lacks_values = "v_proj" in lacking
        gates = (
            (("gate_proj", num_heads, heads, head_dim if gate == "elements" else 1),)
            if gate != "none"
            else ()
        )
        pieces = tuple(
            Piece(name, total * width, first * width, length * width)
            for name, total, (first, length), width in (
                ("q_proj", num_heads, heads, head_dim),
                ("k_proj", num_kv_heads, kv_heads, head_dim),
                ("v_proj", num_kv_heads, kv_heads, head_dim),
                *gates,
            )
            if name not in lacking
        )
        super().__init__(hidden_size, pieces, bias=bias, context=context, prefix=prefix)
        self.head_dim = head_dim
        self.num_heads = heads[1]
        """Number of query heads of this rank."""
        self.num_kv_heads = 0 if "k_proj" in lacking else kv_heads[1]
        """Number of key heads of this rank."""
        self.num_columns = sum(piece.length for piece in pieces if piece.name != "gate_proj")
        """Number of outputs before those of the gate."""

    def split_heads(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the output of `forward`: query [num_tokens, num_heads, head_dim], key and value likewise."""
        heads = packed[:, : self.num_columns].unflatten(1, (-1, self.head_dim))
        first_key, end = self.num_heads, self.num_heads + self.num_kv_heads
        first_value = first_key if self.lacks_values else end
        last = first_value + self.num_kv_heads
        return heads[:, :first_key], heads[:, first_key:end], heads[:, first_value:last]


class GatedLinear(AdaptedLayer):
    """The gate and up projections of an MLP and its activation; `prefix` is that of the MLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        context: ModelContext,
        prefix: str,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.activation = activation
        self.intermediate_size = intermediate_size
        """Number of columns, of all ranks together."""
        self.start, self.length = share(intermediate_size, what="intermediate_size", rank=context.rank)
        self.weight, self.bias = create_linear_weight(
            2 * self.length,
            hidden_size,
            sources=[f"{prefix}.{half}_proj.weight" for half in ("gate", "up")],
            context=context,
            gated=True,
            bias=bias,
        )
        self.has_bias = bias

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_tokens, hidden_size] to activation(gate) * up, [num_tokens, this rank's columns]."""
        adapters = self.adapters_of(adapter_slots)
        return gated_linear(x, self.weight, self.bias, activation=self.activation, adapters=adapters)

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        halves: tuple[Half, ...] = ("gate", "up")
        return tuple(
            AdaptedPiece(
                f"{self.prefix}.{half}_proj",
                (self.intermediate_size, self.weight.shape[1]),
                AdaptedRows(0, self.length, half),
                start=self.start,
                length=self.length,
            )
            for half in halves
        )

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        shape = (self.intermediate_size, self.weight.shape[1])
        for half in ("gate", "up"):
            name = f"{self.prefix}.{half}_proj"
            targets[f"{name}.weight"] = linear_target(
                self.weight, shape, length=self.length, start=self.start, half=half
            )
            if self.has_bias:
                targets[f"{name}.bias"] = bias_target(
                    self.weight,
                    self.bias,
                    self.intermediate_size,
                    length=self.length,
                    start=self.start,
                    half=half,
                )
        return targets


class ColumnLinear(AdaptedLayer):
    """A projection with outputs that ranks share, and an activation: the first half of an MLP without a gate."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: str | None,
        bias: bool,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            out_features: Number of outputs, of all ranks together.
            activation: One of `ops.ACTIVATIONS`; None: none.
        """
        super().__init__()
        self.prefix = prefix
        self.activation = activation
        self.out_features = out_features
        self.start, self.length = share(out_features, what=f"outputs of {prefix}", rank=context.rank)
        self.weight, self.bias = create_linear_weight(
            self.length, in_features, sources=[f"{prefix}.weight"], context=context, bias=bias
        )
        self.has_bias = bias

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, this rank's outputs]."""
        adapters = self.adapters_of(adapter_slots)
        return linear(x, self.weight, self.bias, activation=self.activation, adapters=adapters)

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        shape, rows = (self.out_features, self.weight.shape[1]), AdaptedRows(0, self.length)
        return (AdaptedPiece(self.prefix, shape, rows, start=self.start, length=self.length),)

    def weight_targets(self) -> dict[str, WeightTarget]:
        shape = (self.out_features, self.weight.shape[1])
        targets = {f"{self.prefix}.weight": linear_target(self.weight, shape, start=self.start)}
        if self.has_bias:
            targets[f"{self.prefix}.bias"] = bias_target(
                self.weight, self.bias, self.out_features, start=self.start
            )
        return targets


class RowLinear(AdaptedLayer):
    """A projection of inputs that ranks share, and the sum over ranks; rank 0 adds the bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        context: ModelContext,
        prefix: str,
        is_summed: bool = True,
    ) -> None:
        """
        Args:
            is_summed: Whether the ranks' results are added here; otherwise the caller does that.
        """
        super().__init__()
        self.prefix = prefix
        self.group = context.group
        self.is_summed = is_summed
        self.in_features = in_features
        """Number of inputs, of all ranks together."""
        self.start, self.length = share(in_features, what=f"inputs of {prefix}", rank=context.rank)
        self.adds_bias = bias and context.rank.tensor_parallel_rank == 0
        self.weight, self.bias = create_linear_weight(
            out_features, self.length, sources=[f"{prefix}.weight"], context=context, bias=self.adds_bias
        )
        self.has_bias = bias
        """Whether the checkpoint has a bias."""

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_tokens, this rank's inputs] to [num_tokens, out_features], on every rank."""
        # each rank has A's part for its inputs and all of B, so the ranks' sum is that of the adapter, too
        own = linear(x, self.weight, self.bias, adapters=self.adapters_of(adapter_slots))
        if not self.is_summed:
            return own
        out: Tensor = self.group.all_reduce(own)
        return out

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        out_features = self.weight.shape[0]
        shape, rows = (out_features, self.in_features), AdaptedRows(0, out_features)
        return (AdaptedPiece(self.prefix, shape, rows, dim=1, start=self.start, length=self.length),)

    def weight_targets(self) -> dict[str, WeightTarget]:
        out_features = self.weight.shape[0]
        targets = {
            f"{self.prefix}.weight": linear_target(
                self.weight, (out_features, self.in_features), dim=1, start=self.start
            )
        }
        if self.has_bias:
            targets[f"{self.prefix}.bias"] = (
                bias_target(self.weight, self.bias, out_features)
                if self.adds_bias
                else unused_target((out_features,))
            )
        return targets
