"""A linear layer's weight in the order in which the native product reads it, as panel.h draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import Operand, launch
from triptych_kernels.cpu.library import isa, load
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.weights.base import Half, LinearWeight

ACTIVATIONS = {
    name: number
    for number, name in enumerate(
        (None, "silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "swiglu_oai")
    )
}
"""Name in `ops.linear` -> `Activation` in activation.h."""
WIDENED_DTYPES = {torch.bfloat16: 0, torch.float16: 1}
"""Dtypes that products of float32 inputs widen weights from -> `Form` in widened_linear.cpp."""
AdapterOperands = tuple[Tensor, Tensor]
"""Slot of each row's adapter, [num_rows] int32, and the address of each slot's, [num_slots] int64."""
_NO_FORM = dict.fromkeys(("kind", "form", "bits", "affine", "input_bits", "wide_rows", "wide_bits"), 0)
"""The fields of `WeightForm` in product.h, of a `PackedWeight`."""
HALVES: dict[Half | None, int] = {None: -1, "gate": 0, "up": 1}


class PackedWeight(LinearWeight):
    """A weight in the dtype of its inputs."""

    impl = "cpu"

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        bias: bool = False,
    ) -> None:
        """Allocate a weight of zeros, packed for the instruction set in use.

        Args:
            out_features: Number of outputs of all projections together.
            in_features: Number of inputs, even for bfloat16.
            dtype: Dtype of weight and inputs.
            gated: Whether the two halves of `out_features` are an MLP's gate and up, which are multiplied.
            bias: Whether there is one.
        Raises:
            ValueError: There is no kernel for this dtype or number of inputs.
        """
        self._check(in_features, dtype)
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        self.gated = gated
        self.device = torch.device("cpu")
        lanes = panel_size() // 2 if gated else panel_size()
        num_panels = -(-(out_features // 2 if gated else out_features) // lanes)
        self.data = self._allocate(num_panels * panel_size())
        self.bias = torch.zeros(num_panels * panel_size()) if bias else None
        """[panels * outputs per panel] float32, in the order of the panels."""

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        rows = rows.to(self.dtype).contiguous()
        launch(
            "pack_rows", rows, dtype=DTYPES[self.dtype], rows=rows, panels=self.data,
            in_features=self.in_features, first_row=first_row, half=HALVES[half],
        )  # fmt: skip

    def fill_bias(self, first_row: int, values: Tensor, half: Half | None = None) -> None:
        assert self.bias is not None, "created without a bias"
        rows = torch.arange(first_row, first_row + len(values))
        if half is not None:
            lanes = panel_size() // 2
            rows = rows // lanes * panel_size() + HALVES[half] * lanes + rows % lanes
        self.bias[rows] = values.float()

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype,
        activation: str | None = None,
        adapters: AdapterOperands | None = None,
    ) -> Tensor:
        out = self._new_output(x, out_dtype, activation)
        launch("linear", x, **self.linear_operands(x, out, activation, adapters))
        return out

    def rows(self, token_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(token_ids), self.in_features, dtype=out_dtype, device=token_ids.device)
        launch(
            "embedding", token_ids, dtype=DTYPES[self.dtype], out_dtype=DTYPES[out_dtype], is_packed=True,
            weight=self.data, token_ids=token_ids, out=out, size=self.in_features,
        )  # fmt: skip
        return out

    @property
    def form(self) -> dict[str, int]:
        """Return the fields of `WeightForm` in product.h."""
        return _NO_FORM

    def _check(self, in_features: int, dtype: torch.dtype) -> None:
        if not can_pack(in_features, dtype):
            raise ValueError(f"a weight of {in_features} inputs in {dtype} cannot be packed")

    def _allocate(self, num_outputs: int) -> Tensor:
        """Return zeros for so many outputs, including those that fill up the last panel."""
        return zeros_in_huge_pages((num_outputs * self.in_features,), self.dtype)

    def _new_output(self, x: Tensor, dtype: torch.dtype, activation: str | None) -> Tensor:
        assert activation is not None or not self.gated, "gates and ups are multiplied by an activation"
        num_outputs = self.out_features // 2 if self.gated else self.out_features
        return torch.empty(len(x), num_outputs, dtype=dtype, device=x.device)

    def linear_operands(
        self, x: Tensor, out: Tensor, activation: str | None, adapters: AdapterOperands | None = None
    ) -> dict[str, Operand]:
        """Return the fields of `Linear` in panel.h."""
        slots, addresses = (None, None) if adapters is None else adapters
        return {
            "dtype": DTYPES[x.dtype],
            "out_dtype": DTYPES[out.dtype],
            "x": x,
            "x_stride": x.stride(0),
            "weight": self.data,
            "bias": self.bias,
            "out": out,
            "out_stride": out.shape[1],
            "in_features": self.in_features,
            "out_features": self.out_features,
            "activation": ACTIVATIONS[activation],
            "gated": self.gated,
            "stages": None,
            "slots": slots,
            "adapters": addresses,
            "num_adapters": 0 if addresses is None else len(addresses),
            "adapted": None,
            "adapter_dtype": 0,
        }


class HeadWeight(PackedWeight):
    """A weight [out_features, in_features] of each head, one after the other, for `ops.head_linear`."""

    def __init__(self, num_heads: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        """Allocate weights of zeros. Each head's begins with a panel of its own.

        Raises:
            ValueError: There is no kernel for this dtype or number of inputs.
        """
        self.head_shape = num_heads, out_features, in_features
        self._rows_per_head = -(-out_features // panel_size()) * panel_size()
        super().__init__(num_heads * self._rows_per_head, in_features, dtype)

    @property
    def num_elements(self) -> int:
        return math.prod(self.head_shape)

    def fill_head(self, head: int, weight: Tensor) -> None:
        """Copy the weight [out_features, in_features] of one head."""
        self.fill_rows(head * self._rows_per_head, weight)


class WidenedWeight(PackedWeight):
    """A weight in 16 bits for inputs in float32, as float_tile.h draws it.

    Products widen it to float32, so a checkpoint stored in these 16 bits gives the results of float32 weights, bit by
    bit, at half the bytes.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        stored_dtype: torch.dtype,
        *,
        gated: bool = False,
        bias: bool = False,
    ) -> None:
        """Allocate a weight of zeros, packed for the instruction set in use.

        Args:
            out_features: Number of outputs of all projections together.
            in_features: Number of inputs.
            stored_dtype: bfloat16 or float16.
            gated: Whether the two halves of `out_features` are an MLP's gate and up, which are multiplied.
            bias: Whether there is one.
        Raises:
            ValueError: There is no kernel for this dtype, or there are none on this machine.
        """
        if stored_dtype not in WIDENED_DTYPES:
            raise ValueError(f"a weight in {stored_dtype} cannot be widened to float32")
        self.stored_dtype = stored_dtype
        super().__init__(out_features, in_features, torch.float32, gated=gated, bias=bias)

    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        rows = rows.to(self.stored_dtype).contiguous()
        launch(
            "pack_widened", rows, form=WIDENED_DTYPES[self.stored_dtype], rows=rows, panels=self.data,
            in_features=self.in_features, first_row=first_row, half=HALVES[half],
        )  # fmt: skip

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype,
        activation: str | None = None,
        adapters: AdapterOperands | None = None,
    ) -> Tensor:
        out = self._new_output(x, out_dtype, activation)
        operands = self.linear_operands(x, out, activation, adapters)
        linear = {f"linear_{field}": operand for field, operand in operands.items()}
        launch("widened_linear", x, **linear, form=WIDENED_DTYPES[self.stored_dtype])
        return out

    def rows(self, token_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(token_ids), self.in_features, dtype=torch.float32, device=token_ids.device)
        launch(
            "widened_embedding", token_ids, form=WIDENED_DTYPES[self.stored_dtype], panels=self.data,
            token_ids=token_ids, out=out, in_features=self.in_features,
        )  # fmt: skip
        return out

    @property
    def form(self) -> dict[str, int]:
        return {**_NO_FORM, "kind": 1, "form": WIDENED_DTYPES[self.stored_dtype]}

    def _allocate(self, num_outputs: int) -> Tensor:
        return zeros_in_huge_pages((num_outputs * self.in_features,), self.stored_dtype)


class PackedStack(Sequence[PackedWeight]):
    """The weights of one product of all experts, one after the other in memory, so that one call reads them."""

    def __init__(self, experts: Sequence[PackedWeight]) -> None:
        """Move weights of one class, shape and form, which hold nothing yet, into memory that they share."""
        first = experts[0]
        assert all(
            type(expert) is type(first) and expert.shape == first.shape and expert.form == first.form
            for expert in experts
        ), "experts of one product are alike"
        self._experts = tuple(experts)
        self.data = zeros_in_huge_pages((len(experts), *first.data.shape), first.data.dtype)
        self.bias = None if first.bias is None else torch.zeros(len(experts), len(first.bias))
        for number, expert in enumerate(experts):
            expert.data = self.data[number]
            expert.bias = None if self.bias is None else self.bias[number]

    def __len__(self) -> int:
        return len(self._experts)

    def __getitem__(self, index: Any) -> Any:
        return self._experts[index]

    def operands(self) -> dict[str, Operand]:
        """Return the fields of `Experts` in fused_moe.cpp."""
        first = self._experts[0]
        return {
            **{f"form_{field}": value for field, value in first.form.items()},
            "weight": self.data,
            "expert_bytes": first.data.nbytes,
            "bias": self.bias,
            "in_features": first.in_features,
            "out_features": first.out_features,
        }


def can_pack(in_features: int, dtype: torch.dtype) -> bool:
    """Return whether this machine has native products for such a weight."""
    return bool(isa()) and dtype in DTYPES and (dtype == torch.float32 or in_features % 2 == 0)


def panel_size() -> int:
    """Return the number of outputs per panel with the instruction set in use."""
    return int(load(isa()).triptych_panel_size())
