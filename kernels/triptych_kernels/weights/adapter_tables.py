"""Tables of adapters for every kind of weight, mixtures of experts among them, and the memory of one adapter.

The products of a mixture read the adapter of each row and expert:

    slot    0        1        2
            |        |        null: nothing
            v        v
    expert  0 1 2 3  0 1 2 3     addresses of an `Adapter` of adapters.h, null: nothing for this expert
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.weights.adapters import (
    AdaptedRows,
    AdapterTable,
    AddressedAdapter,
    Factors,
    PackedAdapter,
    PanelAdapter,
    PanelTable,
    StackedLayout,
    StackedTable,
)
from triptych_kernels.weights.base import LinearWeight
from triptych_kernels.weights.packed import PackedWeight

_ALIGNMENT = 64  # bytes: a cache line, and a vector


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsAdapter(AddressedAdapter):
    """An adapter of some experts, in one product of a mixture."""

    addresses: Tensor
    """[num_experts] int64 of their adapters, 0 for none."""
    by_expert: Mapping[int, PanelAdapter]
    """Place of an expert that has one -> its adapter."""

    @classmethod
    def of_experts(cls, num_experts: int, by_expert: Mapping[int, PanelAdapter]) -> ExpertsAdapter:
        """Return the adapter of some experts, by place."""
        addresses = torch.zeros(num_experts, dtype=torch.int64)
        for expert, part in by_expert.items():
            addresses[expert] = part.address
        return cls(addresses, by_expert)

    @property
    def num_bytes(self) -> int:
        return self.addresses.nbytes + sum(part.num_bytes for part in self.parts)

    @property
    def address(self) -> int:
        return self.addresses.data_ptr()

    @property
    def parts(self) -> tuple[PanelAdapter, ...]:
        return tuple(self.by_expert.values())

    def with_parts(self, parts: Sequence[PanelAdapter]) -> ExpertsAdapter:
        return self.of_experts(len(self.addresses), dict(zip(self.by_expert, parts, strict=True)))


class ExpertsTable(PanelTable):
    """Adapters for one product of all experts: a slot is the address of its experts' addresses."""

    def __init__(
        self,
        pieces: Sequence[AdaptedRows],
        in_features: int,
        *,
        num_slots: int,
        addresses: Tensor | None = None,
    ) -> None:
        """
        Args:
            pieces: Of all experts, those of each one after the other; all experts have the same.
            addresses: As of `PanelTable`.
        """
        super().__init__(pieces, in_features, num_slots=num_slots, addresses=addresses)
        own: dict[int, list[int]] = {}
        for number, piece in enumerate(pieces):
            assert piece.expert is not None, "a mixture's"
            own.setdefault(piece.expert, []).append(number)
        own.pop(-1, None)
        self.num_experts = len(own)
        self._numbers = [own[expert] for expert in range(len(own))]
        """By expert: the numbers of its pieces."""
        first = self._numbers[0] if own else []
        self._of_one = PanelTable([pieces[number] for number in first], in_features, num_slots=0)

    def pack(self, factors: Mapping[int, Factors], dtype: torch.dtype) -> ExpertsAdapter:
        by_expert = {}
        for expert, numbers in enumerate(self._numbers):
            own = {place: factors[number] for place, number in enumerate(numbers) if number in factors}
            if own:
                by_expert[expert] = self._of_one.pack_panels(own, dtype)
        return ExpertsAdapter.of_experts(self.num_experts, by_expert)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertAdapters:
    """The adapters of a step's rows for both products of a mixture."""

    w13: ExpertsTable
    w2: ExpertsTable
    slots: Tensor
    """[num_rows] int32, -1 for none."""


def in_one_memory(adapters: Mapping[int, PackedAdapter]) -> dict[int, PackedAdapter]:
    """Return the parts of one adapter, those for native products in one piece of memory in the order of the layers.

    It has huge pages, as weights have: a step reads all of it once.
    """
    moved = dict(adapters)
    native = {number: part for number, part in sorted(adapters.items()) if isinstance(part, AddressedAdapter)}
    sizes = [
        _aligned(tensor.nbytes)
        for adapter in native.values()
        for part in adapter.parts
        for tensor in (part.a, part.weights)
    ]
    memory = zeros_in_huge_pages((sum(sizes) + _ALIGNMENT,), torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT

    def move(tensor: Tensor) -> Tensor:
        nonlocal start
        place = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor.nbytes)
        return place.copy_(tensor)

    for number, adapter in native.items():
        moved[number] = adapter.with_parts(
            [part.moved(move(part.a), move(part.weights)) for part in adapter.parts]
        )
    return moved


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def create_adapter_table(
    weight: Tensor | LinearWeight,
    pieces: Sequence[AdaptedRows],
    *,
    num_slots: int,
    max_rank: int,
    is_lookup: bool = False,
    old: AdapterTable | None = None,
) -> AdapterTable:
    """Create the table of a product with this weight.

    Args:
        weight: The weight; of a mixture that of any expert.
        max_rank: Largest rank of a piece.
        is_lookup: Whether rows of the weight are looked up instead.
        old: Table of the same product of another model, which is taken if it is alike and has memory on the device.
    """
    in_features = weight.shape[0 if is_lookup else 1]
    if isinstance(weight, PackedWeight) or (is_lookup and weight.device.type == "cpu" and isa()):
        return create_panel_table(pieces, in_features, num_slots=num_slots, is_lookup=is_lookup)
    layout = StackedLayout(
        tuple(pieces), in_features, num_slots, max_rank, weight.dtype, weight.device, is_lookup
    )
    return old if isinstance(old, StackedTable) and old.layout == layout else StackedTable(layout)


def create_panel_table(
    pieces: Sequence[AdaptedRows],
    in_features: int,
    *,
    num_slots: int,
    is_lookup: bool = False,
    addresses: Tensor | None = None,
) -> PanelTable:
    """Create the table of a native product; arguments as of `PanelTable`."""
    if pieces[0].expert is not None:
        return ExpertsTable(pieces, in_features, num_slots=num_slots, addresses=addresses)
    return PanelTable(pieces, in_features, num_slots=num_slots, is_lookup=is_lookup, addresses=addresses)
