"""A linear layer's weight in a form that is no plain tensor: what every such form can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

Half = Literal["gate", "up"]


class LinearWeight(ABC):
    """[out_features, in_features] of one or several projections and their bias, filled row by row as they are loaded.

    Gated ones hold an MLP's gate and up projections, which are multiplied: the two halves of `out_features`.
    """

    impl: ClassVar[str]
    """Whose kernels understand it, one of `dispatch.IMPLS`."""

    out_features: int
    """Of all projections together."""
    in_features: int
    dtype: torch.dtype
    """Of what is looked up in it unless told otherwise."""
    gated: bool
    device: torch.device
    bias: Tensor | None
    """float32, in the order of the kernels; None: created without."""

    @property
    @abstractmethod
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        """What it can be multiplied with."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def num_elements(self) -> int:
        return self.out_features * (self.in_features + (self.bias is not None))

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of memory."""

    @abstractmethod
    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        """Copy rows [n, in_features], rounded to this form, to output `first_row` and those after it, counted
        within the half."""

    @abstractmethod
    def fill_bias(self, first_row: int, values: Tensor, half: Half | None = None) -> None:
        """Copy the bias [n] of those outputs."""

    @abstractmethod
    def multiply(self, x: Tensor, out_dtype: torch.dtype, activation: str | None = None) -> Tensor:
        """`ops.linear`, or with an activation `ops.gated_linear`."""

    @abstractmethod
    def rows(self, token_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
        """`ops.embedding`."""


class BlockWeight(LinearWeight):
    """One that can keep the blocks of a GGUF file."""

    @abstractmethod
    def fill_blocks(self, first_row: int, type: str, data: Tensor, half: Half | None = None) -> None:
        """Keep the blocks of a GGUF file as they are.

        Args:
            type: one of `quantized_format.BLOCK_FORMATS`.
            data: [n, bytes of a row] uint8.
        Raises:
            ValueError: this weight's format cannot hold such blocks without loss.
        """
