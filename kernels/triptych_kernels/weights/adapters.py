"""Low-rank adapters of one product, in the form that its kernels read, by the slot of the device that holds them.

A product may hold several projections of the same input, each with factors of its own:

    A   [ q: rank 16 | v: rank 8 ]              [24, in_features]
    B   q's outputs  x  products 0 … 15         zero elsewhere, and not stored there
        v's outputs  x  products 16 … 23
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.weights.base import Half
from triptych_kernels.weights.packed import panel_size


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Outputs of a weight that one projection has."""

    first: int
    """Row of the first; in a gated weight, within its half."""
    length: int
    half: Half | None = None
    """Half of a gated weight."""
    expert: int | None = None
    """Place of the expert among those that a mixture's weights are here of, -1 if it is not here; None: the weight is
    no mixture's."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The factors for one projection: `b @ a` is added to its weight."""

    a: Tensor
    """[rank, in_features]"""
    b: Tensor
    """[length, rank] of the projection's outputs, the scaling included."""


class PackedAdapter(ABC):
    """One adapter of one product, made on any thread."""

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...


class AdapterTable(ABC):
    """The adapters of one product, by slot. Filled between steps, on the thread that computes them."""

    def __init__(
        self, pieces: Sequence[AdaptedRows], in_features: int, *, num_slots: int, is_lookup: bool = False
    ) -> None:
        """
        Args:
            is_lookup: Whether the inputs are ids of rows of an embedding, `in_features` of them.
        """
        self.pieces = tuple(pieces)
        self.in_features = in_features
        self.num_slots = num_slots
        self.is_lookup = is_lookup

    @abstractmethod
    def pack(self, factors: Mapping[int, Factors], dtype: torch.dtype) -> PackedAdapter:
        """Bring an adapter into the form of the kernels. Called on any thread.

        Args:
            factors: Number of a piece -> its factors, at least one.
            dtype: float32 or bfloat16, to which they are rounded.
        """

    @abstractmethod
    def put(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Let rows of this slot have an adapter; None: nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRef:
    """The adapters of a step's rows for one product."""

    table: AdapterTable
    slots: Tensor
    """[num_rows] int32, -1 for none."""


@dataclass(frozen=True, slots=True, eq=False)
class StackedAdapter(PackedAdapter):
    """An adapter as two plain tensors."""

    a: Tensor
    """[rank, in_features] of all pieces together."""
    b: Tensor
    """[rank, out_features], zero where a piece does not read the product."""

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True)
class StackedLayout:
    """The shape, the type and the place of the tensors of a `StackedTable`."""

    pieces: tuple[AdaptedRows, ...]
    in_features: int
    num_slots: int
    max_rank: int
    """Largest rank of a piece."""
    dtype: torch.dtype
    device: torch.device
    is_lookup: bool = False


class StackedTable(AdapterTable):
    """Adapters for products in torch and Triton: all slots in two tensors on the device, of the largest rank."""

    def __init__(self, layout: StackedLayout) -> None:
        pieces, num_slots, max_rank = layout.pieces, layout.num_slots, layout.max_rank
        super().__init__(pieces, layout.in_features, num_slots=num_slots, is_lookup=layout.is_lookup)
        self.layout = layout
        self._half = max(piece.first + piece.length for piece in pieces)
        self._out_features = self._half * (2 if any(piece.half for piece in pieces) else 1)
        rank = max_rank * len(pieces)
        dtype, device = layout.dtype, layout.device
        self.a = torch.zeros(num_slots, rank, layout.in_features, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, rank, self._out_features, dtype=dtype, device=device)
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """[num_slots], all pieces' together; 0: the slot is empty."""

    def put(self, slot: int, adapter: PackedAdapter | None) -> None:
        self.a[slot] = 0
        self.b[slot] = 0
        self.ranks[slot] = 0
        if adapter is not None:
            assert isinstance(adapter, StackedAdapter)
            self.ranks[slot] = len(adapter.a)
            self.a[slot, : len(adapter.a)] = adapter.a.to(self.a.device, non_blocking=True)
            self.b[slot, : len(adapter.b)] = adapter.b.to(self.b.device, non_blocking=True)

    def pack(self, factors: Mapping[int, Factors], dtype: torch.dtype) -> StackedAdapter:
        del dtype  # that of the model
        rank = sum(factor.a.shape[0] for factor in factors.values())
        b, start = torch.zeros(rank, self._out_features), 0
        for number, factor in sorted(factors.items()):
            piece, end = self.pieces[number], start + factor.a.shape[0]
            first = piece.first + (self._half if piece.half == "up" else 0)
            b[start:end, first : first + piece.length] = factor.b.float().t()
            start = end
        a = torch.cat([factor.a.float() for _, factor in sorted(factors.items())])
        return StackedAdapter(a.to(self.a.dtype), b.to(self.b.dtype))

    def delta(self, x: Tensor, slots: Tensor) -> Tensor:
        """Return what is added to the outputs of each row, [num_rows, out_features] float32.

        All slots are multiplied, so that no shape depends on the rows; the products of other slots are cleared.

        Args:
            x: [num_rows, in_features], or with `is_lookup` [num_rows] int64.
        """
        num_slots, rank, _ = self.a.shape
        own = slots[:, None] == torch.arange(num_slots, dtype=slots.dtype, device=slots.device)
        if self.is_lookup:
            products = self.a[:, :, x].permute(2, 0, 1)
        else:
            products = (x.to(self.a.dtype) @ self.a.flatten(0, 1).t()).view(len(x), num_slots, rank)
        products = products.masked_fill(~own[:, :, None], 0)
        return (products.flatten(1) @ self.b.flatten(0, 1)).float()


class AddressedAdapter(PackedAdapter):
    """An adapter that native products read at an address."""

    @property
    @abstractmethod
    def address(self) -> int: ...

    @property
    @abstractmethod
    def parts(self) -> tuple[PanelAdapter, ...]:
        """The adapters of weights that it is made of."""

    @abstractmethod
    def with_parts(self, parts: Sequence[PanelAdapter]) -> AddressedAdapter:
        """Return the same adapter with its parts elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class PanelAdapter(AddressedAdapter):
    """An adapter as adapters.h describes it."""

    header: Tensor
    """[6] int64, an `Adapter`."""
    panels: Tensor
    """[panels, 4] int64, an `AdapterPanel` each."""
    a: Tensor
    """[rank, in_features], or of an embedding [in_features, rank]."""
    weights: Tensor
    """The memory that the panels point to."""

    @property
    def num_bytes(self) -> int:
        return self.header.nbytes + self.panels.nbytes + self.a.nbytes + self.weights.nbytes

    @property
    def address(self) -> int:
        return self.header.data_ptr()

    @property
    def parts(self) -> tuple[PanelAdapter, ...]:
        return (self,)

    def with_parts(self, parts: Sequence[PanelAdapter]) -> PanelAdapter:
        (part,) = parts
        return part

    def moved(self, a: Tensor, weights: Tensor) -> PanelAdapter:
        """Return the same adapter with its factors elsewhere."""
        header, panels = self.header.clone(), self.panels.clone()
        panels[:, 3] += weights.data_ptr() - self.weights.data_ptr()
        header[2:5] = torch.tensor([a.data_ptr(), panels.data_ptr(), weights.data_ptr()])
        return PanelAdapter(header, panels, a, weights)


class PanelTable(AdapterTable):
    """Adapters for native products: a slot is an address, so one is loaded or exchanged by writing it."""

    def __init__(
        self,
        pieces: Sequence[AdaptedRows],
        in_features: int,
        *,
        num_slots: int,
        is_lookup: bool = False,
        addresses: Tensor | None = None,
    ) -> None:
        """
        Args:
            addresses: [num_slots] int64 on the host, which a stored program reads; None: memory of its own.
        """
        super().__init__(pieces, in_features, num_slots=num_slots, is_lookup=is_lookup)
        self.addresses = torch.zeros(num_slots, dtype=torch.int64) if addresses is None else addresses
        """[num_slots], 0 for none."""
        self._kept: list[AddressedAdapter | None] = [None] * num_slots
        self._gated = any(piece.half is not None for piece in pieces)

    def put(self, slot: int, adapter: PackedAdapter | None) -> None:
        assert adapter is None or isinstance(adapter, AddressedAdapter)
        self.addresses[slot] = 0 if adapter is None else adapter.address
        self._kept[slot] = adapter

    def pack(self, factors: Mapping[int, Factors], dtype: torch.dtype) -> AddressedAdapter:
        return self.pack_panels(factors, dtype)

    def pack_panels(self, factors: Mapping[int, Factors], dtype: torch.dtype) -> PanelAdapter:
        """Do what `pack` does for one weight. Pieces that have the same tensor `a` are multiplied by it once."""
        if self._gated:
            factors = _of_equal_ranks(factors)
        in_pairs = dtype == torch.bfloat16
        if in_pairs:
            factors = {
                number: _of_rank(factor, factor.a.shape[0] + factor.a.shape[0] % 2)
                for number, factor in factors.items()
            }
        starts, rank, of_pieces = dict[int, int](), 0, list[Tensor]()
        for number, factor in sorted(factors.items()):
            if of_pieces and self._gated and factor.a is of_pieces[-1]:
                starts[number] = starts[number - 1]
                continue
            starts[number] = rank
            rank += factor.a.shape[0]
            of_pieces.append(factor.a)
        a = torch.cat([each.float() for each in of_pieces])
        blocks = list(
            self._gated_blocks(factors, starts) if self._gated else self._plain_blocks(factors, starts)
        )
        weights = torch.cat([block.stored(in_pairs=in_pairs) for block in blocks]).to(dtype)
        panels = torch.empty(sum(len(block.weights) for block in blocks), 4, dtype=torch.int64)
        panel, address = 0, weights.data_ptr()
        for block in blocks:
            num_panels, count = block.weights.shape[:2]
            size = count * panel_size() * weights.itemsize
            own = panels[panel : panel + num_panels]
            own[:, :3] = torch.tensor([block.first, block.second, count])
            own[:, 3] = address + size * torch.arange(num_panels)
            panel, address = panel + num_panels, address + size * num_panels
        a = (a.t() if self.is_lookup else a).to(dtype).contiguous()
        header = torch.tensor(
            [DTYPES[dtype], rank, a.data_ptr(), panels.data_ptr(), weights.data_ptr(), weights.nbytes]
        )
        return PanelAdapter(header, panels, a, weights)

    def _plain_blocks(self, factors: Mapping[int, Factors], starts: Mapping[int, int]) -> Iterator[_Block]:
        """Yield the panels in their order, those that read the same products together."""
        size = panel_size()
        num_outputs = max(piece.first + piece.length for piece in self.pieces)

        def touching(panel: int) -> tuple[int, ...]:
            begin, end = panel * size, (panel + 1) * size
            return tuple(
                number
                for number in sorted(factors)
                if self.pieces[number].first < end
                and begin < self.pieces[number].first + self.pieces[number].length
            )

        for numbers, run in groupby(range(-(-num_outputs // size)), touching):
            panels = list(run)
            begin, end = panels[0] * size, (panels[-1] + 1) * size
            first = min((starts[number] for number in numbers), default=0)
            last = max((starts[number] + factors[number].a.shape[0] for number in numbers), default=0)
            outputs = torch.zeros(end - begin, last - first)
            for number in numbers:
                piece, factor = self.pieces[number], factors[number]
                low, high = max(piece.first, begin), min(piece.first + piece.length, end)
                start = starts[number] - first
                outputs[low - begin : high - begin, start : start + factor.b.shape[1]] = factor.b[
                    low - piece.first : high - piece.first
                ]
            yield _Block(first, first, outputs.view(len(panels), size, -1).transpose(1, 2))

    def _gated_blocks(self, factors: Mapping[int, Factors], starts: Mapping[int, int]) -> Iterator[_Block]:
        """Yield all panels, of which the first half has outputs of the gate."""
        lanes = panel_size() // 2
        halves = {piece.half: number for number, piece in enumerate(self.pieces)}
        length = self.pieces[0].length
        rank = next(factor.a.shape[0] for factor in factors.values())
        places, weights = [], []
        for half in ("gate", "up"):
            number = halves[half]
            outputs = torch.zeros(-(-length // lanes) * lanes, rank)
            place = 0
            if number in factors:
                place, b = starts[number], factors[number].b
                outputs[:length] = b
            places.append(place)
            weights.append(outputs.view(-1, lanes, rank).transpose(1, 2))
        yield _Block(places[0], places[1], torch.stack(weights, dim=2).flatten(2))


def _of_equal_ranks(factors: Mapping[int, Factors]) -> dict[int, Factors]:
    """Return factors of which the smaller ones are filled up with zeros."""
    rank = max(factor.a.shape[0] for factor in factors.values())
    return {number: _of_rank(factor, rank) for number, factor in factors.items()}


def _of_rank(factor: Factors, rank: int) -> Factors:
    """Return factors with zeros up to a rank."""
    if not (missing := rank - factor.a.shape[0]):
        return factor
    return Factors(functional.pad(factor.a, (0, 0, 0, missing)), functional.pad(factor.b, (0, missing)))


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Neighbouring panels that read the same products."""

    first: int
    second: int
    weights: Tensor
    """[panels, products, outputs of a panel]"""

    def stored(self, *, in_pairs: bool) -> Tensor:
        """Return the weights in their order in memory, by `AdapterPanel` in adapters.h."""
        if not in_pairs:
            return self.weights.flatten()
        panels, count, size = self.weights.shape
        return self.weights.reshape(panels, count // 2, 2, size).transpose(2, 3).flatten()
