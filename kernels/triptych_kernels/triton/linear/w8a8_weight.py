"""A linear layer's weight in 8 bits on a CUDA device, with a scale per output; its inputs are rounded to 8 bits too."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.triton.linear.quantize_rows import quantize_rows
from triptych_kernels.triton.linear.w8a8_linear import multiply_bytes
from triptych_kernels.weights.base import Half, LinearWeight


class ChannelQuantizedWeight(LinearWeight):
    """A weight of one or several projections in int8 or float8_e4m3fn, to which products round their inputs too."""

    impl = "triton"

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        element_dtype: torch.dtype,
        *,
        device: torch.device,
        gated: bool = False,
        bias: bool = False,
        storage: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Create a weight of zeros.

        Args:
            dtype: Dtype of the inputs.
            element_dtype: int8, or float8_e4m3fn on devices that multiply it: compute capability 8.9 and above.
            storage: Its part of the elements and scales of several weights; None allocates them.
        """
        assert element_dtype in LARGEST_ELEMENT, element_dtype
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        self.device = device
        self.gated = gated
        self.elements, self.scales = storage or (
            torch.zeros((out_features, in_features), dtype=element_dtype, device=device),
            torch.zeros(out_features, device=device),
        )
        self.bias = torch.zeros(out_features, device=device) if bias else None

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    @property
    def num_bytes(self) -> int:
        parts = (self.elements, self.scales, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        outputs = self._outputs(first_row, len(rows), half)
        elements, scales = quantize_rows(rows.to(self.device).contiguous(), self.elements.dtype)
        self.elements[outputs], self.scales[outputs] = elements, scales

    def fill_bias(self, first_row: int, values: Tensor, half: Half | None = None) -> None:
        assert self.bias is not None, "created without a bias"
        self.bias[self._outputs(first_row, len(values), half)] = values.to(self.device, torch.float32)

    def multiply(self, x: Tensor, out_dtype: torch.dtype, activation: str | None = None) -> Tensor:
        gated = self.gated and activation is not None
        elements, x_scales = quantize_rows(x, self.elements.dtype)
        return multiply_bytes(
            elements, x_scales, self.elements, self.scales, self.bias, out_dtype, activation, gated=gated
        )

    def rows(self, token_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
        return (self.elements[token_ids].float() * self.scales[token_ids, None]).to(out_dtype)

    def _outputs(self, first_row: int, num_rows: int, half: Half | None) -> slice:
        first = first_row + (self.out_features // 2 if half == "up" else 0)
        return slice(first, first + num_rows)
