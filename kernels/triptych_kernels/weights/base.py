"""The interface of a linear layer's weight that is not a plain tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from triptych_kernels.weights.coded import CodedRows, as_blocks
from triptych_kernels.weights.formats import BLOCK_FORMATS, QuantizedFormat

Half = Literal["gate", "up"]


class LinearWeight(ABC):
    """A weight [out_features, in_features] of one or several projections, and their bias, in the form of some kernels.

    It is filled row by row while a checkpoint is loaded. A gated weight holds an MLP's gate and up projections, the two
    halves of `out_features`.
    """

    impl: ClassVar[str]
    """Package of the kernels that compute with it, one of `registry.IMPLS`."""

    out_features: int
    """Number of outputs of all projections together."""
    in_features: int
    dtype: torch.dtype
    """Default dtype of looked-up rows."""
    gated: bool
    device: torch.device
    bias: Tensor | None
    """float32, in the order of the kernels; None if created without one."""

    @property
    @abstractmethod
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of inputs that it can be multiplied with."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def num_elements(self) -> int:
        return self.out_features * (self.in_features + (self.bias is not None))

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of memory of weight and bias."""

    @abstractmethod
    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        """Copy rows [n, in_features], rounded to this form, to output `first_row` and those after it.

        Args:
            half: Half of a gated weight within which `first_row` counts; None for other weights.
        """

    @abstractmethod
    def fill_bias(self, first_row: int, values: Tensor, half: Half | None = None) -> None:
        """Copy the bias [n] of output `first_row` and those after it, counted within the half."""

    @abstractmethod
    def multiply(self, x: Tensor, out_dtype: torch.dtype, activation: str | None = None) -> Tensor:
        """Compute `ops.linear`, or of a gated weight `ops.gated_linear`, which has an activation.

        Triton's kernels give a gated weight's gates and then its ups where there is none.
        """

    @abstractmethod
    def rows(self, token_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Compute `ops.embedding`."""


class BlockWeight(LinearWeight):
    """A weight that keeps quantized weights of a file as they are."""

    format: QuantizedFormat

    def keeps_blocks(self, type: str) -> bool:
        """Return whether `fill_blocks` takes blocks of this type, GGML's name."""
        return type in BLOCK_FORMATS and self.format.holds(BLOCK_FORMATS[type])

    @abstractmethod
    def fill_blocks(self, first_row: int, type: str, data: Tensor, half: Half | None = None) -> None:
        """Keep the blocks of a GGUF file as they are.

        Args:
            type: One that this weight keeps.
            data: [n, bytes of a row] uint8, of which the bytes of a row are contiguous.
        Raises:
            ValueError: This weight's format cannot hold such blocks without loss, or a scale is no number.
        """

    def fill_codes(self, first_row: int, rows: CodedRows, half: Half | None = None) -> None:
        """Keep the quantized weights of a file as they are, from output `first_row` on, counted within the half.

        Raises:
            ValueError: This weight's format cannot hold them without loss.
        """
        self.fill_blocks(first_row, *as_blocks(rows), half=half)
