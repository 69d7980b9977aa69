"""The places of a model that adapters add to, under the names that checkpoints and PEFT have for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from triptych.checkpoint.adapter import AdapterFiles, AdapterModule
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.tensor_names import FusedTensor
from triptych.errors import FeatureDisabled, ModelError
from triptych_kernels.weights.adapter_tables import create_adapter_table, create_panel_table, in_one_memory
from triptych_kernels.weights.adapters import (
    AdaptedRows,
    AdapterTable,
    Factors,
    PackedAdapter,
    PanelTable,
)
from triptych_kernels.weights.base import BlockWeight
from triptych_services.worker.layers.adapted import AdaptedLayer, AdaptedPiece
from triptych_services.worker.layers.checkpoint_tensors import rows_of_parts
from triptych_services.worker.models.base import AdaptedModel

_IN_MIXTURE = re.compile(r"\.(experts\.|(gate|router|shared_expert_gate)$)")
_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(\w+)$")
_STACKED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""Parameter of all experts in transformers -> our projections of each, one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One projection of our layers that a module of the checkpoint is, or a part of."""

    site: int
    """Number of the layer among `ModelSites.tables`."""
    number: int
    """Number of the projection in the layer."""
    piece: AdaptedPiece
    rows: Tensor | slice | None = None
    """Its outputs among those of a fused module; None: it is the module."""
    expert: int = 0
    """Number of the expert, if the module holds the projections of all."""


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A module of the checkpoint that an adapter may change."""

    targets: tuple[Target, ...]
    """Those of which this rank has a share."""
    shape: tuple[int, int]
    """[out_features, in_features]; of an embedding its inputs are the vocabulary; of all experts that of each."""
    is_embedding: bool = False
    num_experts: int = 0
    """Number of experts of which it holds the projections; 0: it is no module of all experts."""


class ModelSites:
    """The tables of a model's layers, and which module of the checkpoint goes where."""

    def __init__(
        self,
        pieces: Sequence[tuple[AdaptedPiece, ...]],
        tables: Sequence[AdapterTable],
        architecture: ModelArchitecture,
        *,
        dtype: torch.dtype,
        is_elsewhere: Callable[[str], bool],
    ) -> None:
        """
        Args:
            pieces, tables: Projections and adapters of each layer.
            dtype: Precision of factors.
            is_elsewhere: Returns whether another stage computes a module of the checkpoint.
        """
        self.tables = tuple(tables)
        self.dtype = dtype
        self._pieces = tuple(pieces)
        self._is_elsewhere = is_elsewhere
        targets: dict[str, list[Target]] = {}
        lookups: set[str] = set()
        for site, (own, table) in enumerate(zip(pieces, tables, strict=True)):
            for number, piece in enumerate(own):
                targets.setdefault(piece.name, []).append(Target(site, number, piece))
            if table.is_lookup:
                lookups.add(own[0].name)
        self._adapts_experts = any(piece.rows.expert is not None for own in pieces for piece in own)
        self.modules = _modules(targets, lookups, architecture)

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        architecture: ModelArchitecture,
        *,
        num_slots: int,
        max_rank: int,
        old: ModelSites | None = None,
    ) -> ModelSites:
        """Give every layer of a model a table of adapters.

        Args:
            old: Those of a model with the same layers, or of the same model: its memory on the device is taken.

        Raises:
            FeatureDisabled: The model's layers do not compute adapters.
        """
        if not isinstance(model, AdaptedModel):
            raise FeatureDisabled(
                "worker.max_adapters", f"{type(model).__name__} applies no adapters; set it to 0"
            )
        adapted = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
        layer_pieces = [(layer, own) for layer in adapted if (own := layer.adapted_pieces())]
        layers, pieces, tables = [each for each, _ in layer_pieces], [own for _, own in layer_pieces], []
        old_tables = [None] * len(layers) if old is None else old.tables
        for (layer, own), old_table in zip(layer_pieces, old_tables, strict=True):
            table = create_adapter_table(
                layer.weight,
                [piece.rows for piece in own],
                num_slots=num_slots,
                max_rank=max_rank,
                is_lookup=layer.is_lookup,
                old=old_table,
            )
            tables.append(table)
        for layer, table in zip(layers, tables, strict=True):
            layer.adapters = table
        dtype, is_elsewhere = _factor_dtype(layers), model.adapts_elsewhere
        return cls(pieces, tables, architecture, dtype=dtype, is_elsewhere=is_elsewhere)

    @classmethod
    def of_record(
        cls,
        record: Mapping[str, Any],
        addresses: Sequence[NDArray[np.int64]],
        architecture: ModelArchitecture,
    ) -> ModelSites:
        """Return the layers of a stored program, which computes all stages.

        Args:
            record: What `record` has returned in the process that stored it.
            addresses: [num_slots] of each layer, which the program reads.
        """
        pieces = [
            tuple(
                AdaptedPiece(
                    **{**piece, "shape": tuple(piece["shape"]), "rows": AdaptedRows(**piece["rows"])}
                )
                for piece in site["pieces"]
            )
            for site in record["sites"]
        ]
        tables = [
            create_panel_table(
                [piece.rows for piece in own],
                site["in_features"],
                num_slots=len(array),
                is_lookup=site["is_lookup"],
                addresses=torch.from_numpy(array),
            )
            for own, site, array in zip(pieces, record["sites"], addresses, strict=True)
        ]
        dtype = getattr(torch, record["dtype"])
        return cls(pieces, tables, architecture, dtype=dtype, is_elsewhere=lambda module: False)

    def record(self) -> dict[str, Any]:
        """Return what `of_record` needs, as JSON takes it."""
        sites = [
            {
                "pieces": [asdict(piece) for piece in own],
                "in_features": table.in_features,
                "is_lookup": table.is_lookup,
            }
            for own, table in zip(self._pieces, self.tables, strict=True)
        ]
        return {"sites": sites, "dtype": str(self.dtype).removeprefix("torch.")}

    @property
    def addresses(self) -> list[Tensor]:
        """[num_slots] int64 of each layer, which a recorded program reads."""
        return [table.addresses for table in self.tables if isinstance(table, PanelTable)]

    def own_modules(self, files: AdapterFiles) -> list[AdapterModule]:
        """Return the modules of an adapter that this rank's stage computes, which `check` has found."""
        return [module for name, module in files.modules.items() if name in self.modules]

    def least_bytes(self, modules: Iterable[AdapterModule]) -> int:
        """Return the bytes of this rank's share of some modules, without the padding that a table may need.

        The inputs of a module with several projections are counted once.
        """
        num_factors = 0
        for module in modules:
            targets = self.modules[module.name].targets
            inputs = {(each.site, each.expert): each.piece.in_features for each in targets}
            outputs = sum(each.piece.out_features for each in targets)
            num_factors += module.rank * (sum(inputs.values()) + outputs)
        return self.dtype.itemsize * num_factors

    def pack(
        self, modules: Iterable[AdapterModule], tensors: Mapping[str, Tensor]
    ) -> dict[int, PackedAdapter]:
        """Bring modules of an adapter into the form of the layers, this rank's share of them.

        Args:
            tensors: By their names in the file.

        Returns:
            Number of the layer -> what it adds.
        """
        factors: dict[int, dict[int, Factors]] = {}
        for module in modules:
            a, b = tensors[module.a.name].float(), tensors[module.b.name].float() * module.scaling
            of_experts = _split_experts(a, b, module.num_experts)
            for target in self.modules[module.name].targets:
                factors.setdefault(target.site, {})[target.number] = _share(
                    target, *of_experts[target.expert]
                )
        return in_one_memory({site: self.tables[site].pack(own, self.dtype) for site, own in factors.items()})

    def check(self, files: AdapterFiles) -> None:
        """Check that the model has every module of an adapter, in its shape. Each stage checks those of its layers.

        Raises:
            ModelError: It has not; names the module.
        """
        for name, module in files.modules.items():
            found = self.modules.get(name)
            if found is not None or not self._is_elsewhere(name):
                _check_module(files, module, found, adapts_experts=self._adapts_experts)
        _check_targets(files, {name: self.modules[name] for name in files.modules if name in self.modules})

    def put(self, slot: int, packed: Mapping[int, PackedAdapter]) -> None:
        """Fill a slot of all layers, on the thread that computes steps."""
        for site, table in enumerate(self.tables):
            table.put(slot, packed.get(site))


def _check_module(
    files: AdapterFiles, module: AdapterModule, found: Module | None, *, adapts_experts: bool
) -> None:
    name = f"{files.weights}: {module.name}"
    if found is None and not adapts_experts and _IN_MIXTURE.search(module.name):
        raise ModelError(
            f"{name}: experts and routers are adapted by the native kernels of CPUs only, not in plain tensors"
        )
    if found is None:
        raise ModelError(f"{name}: is no projection of this model that adapters are applied to")
    if found.is_embedding != module.is_embedding:
        kind = "an embedding" if found.is_embedding else "no embedding"
        raise ModelError(f"{name}: has factors of another kind; the module is {kind}")
    if found.num_experts != module.num_experts:
        raise ModelError(
            f"{name}: has factors of {module.num_experts} experts, the module has {found.num_experts}"
        )
    shape = module.b.shape[0], module.a.shape[1]
    if shape != found.shape:
        raise ModelError(f"{name}: is for {list(shape)}, the model has {list(found.shape)}")


def _check_targets(files: AdapterFiles, modules: Mapping[str, Module]) -> None:
    """Check that no projection is adapted twice, by a module of its own and by one of all experts."""
    adapting: dict[tuple[int, int], str] = {}
    for name, module in modules.items():
        for target in module.targets:
            other = adapting.setdefault((target.site, target.number), name)
            if other != name:
                raise ModelError(f"{files.weights}: {name}: adapts {target.piece.name}, as {other} does")


def _factor_dtype(layers: list[AdaptedLayer]) -> torch.dtype:
    """Return the precision of factors: float32 beside plain weights in float32.

    Beside weights of 16 bits or fewer bfloat16 loses less than they have lost already, at half the bytes.
    """
    weights = [layer.weight for layer in layers if not layer.is_lookup]
    is_exact = all(
        weight.dtype == torch.float32 and not isinstance(weight, BlockWeight) for weight in weights
    )
    return torch.float32 if is_exact else torch.bfloat16


def _split_experts(a: Tensor, b: Tensor, num_experts: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the factors of each expert; if there is none, those that are given."""
    if not num_experts:
        return [(a, b)]
    of_experts = a.view(num_experts, -1, a.shape[1]), b.view(len(b), -1, num_experts).permute(2, 0, 1)
    return list(zip(*of_experts, strict=True))


def _share(target: Target, a: Tensor, b: Tensor) -> Factors:
    """Return this rank's part of the factors for one projection."""
    piece = target.piece
    if target.rows is not None:
        b = b[target.rows]
    if piece.dim == 0:
        return Factors(a, b.narrow(0, piece.start, piece.length))
    return Factors(a.narrow(1, piece.start, piece.length), b)


def _modules(
    targets: Mapping[str, list[Target]], lookups: set[str], architecture: ModelArchitecture
) -> dict[str, Module]:
    """Return name of a module in the checkpoint -> where it goes."""
    found: dict[str, Module] = {}
    fused: dict[str, dict[str, list[Target]]] = {}
    holders = {}
    for name, own in targets.items():
        holder = architecture.names.holder(f"{name}.weight")
        if holder.fused is None or holder.fused.of_experts:
            module = Module(_held(own), own[0].piece.shape, name in lookups)
            if holder.fused is None:
                found[holder.name.removesuffix(".weight")] = module
            if _IN_MIXTURE.search(name):  # also under transformers' name, which is ours
                found[name] = module
        else:
            fused_module = holder.name.removesuffix(holder.fused.suffixes[0])
            fused.setdefault(fused_module, {})[holder.part] = own
            holders[fused_module] = holder.fused
    for name, parts in fused.items():
        fusion = holders[name]
        split = _split(fusion, [parts[part] for part in fusion.parts], architecture)
        found[name] = split
    return found | _modules_of_experts(targets, architecture)


def _split(
    fusion: FusedTensor,
    parts: Sequence[Sequence[Target]],
    architecture: ModelArchitecture,
    num_experts: int = 0,
) -> Module:
    """Return a module that holds several projections.

    Args:
        parts: By projection: where it goes, or where that of each expert goes.
    """
    counts = [own[0].piece.shape[0] for own in parts]
    rows = rows_of_parts(fusion, counts, architecture)
    split = [replace(each, rows=own_rows) for own, own_rows in zip(parts, rows, strict=True) for each in own]
    return Module(_held(split), (sum(counts), split[0].piece.shape[1]), num_experts=num_experts)


def _held(targets: Iterable[Target]) -> tuple[Target, ...]:
    return tuple(target for target in targets if target.piece.length)


def _modules_of_experts(
    targets: Mapping[str, list[Target]], architecture: ModelArchitecture
) -> dict[str, Module]:
    """Return name of a parameter of all experts, as transformers has it -> where it goes."""
    mixtures: dict[str, dict[str, list[Target]]] = {}
    for name, own in targets.items():
        if match := _EXPERT.match(name):
            of_projection = mixtures.setdefault(match[1], {}).setdefault(match[3], [])
            of_projection.extend(replace(each, expert=int(match[2])) for each in own)
    found: dict[str, Module] = {}
    for prefix, projections in mixtures.items():
        lacking = "up_proj" if "gate_proj" in projections else "gate_up_proj"
        for parameter, parts in _STACKED.items():
            if parameter == lacking:
                continue
            holder = architecture.names.holder(f"{prefix}.0.{parts[0]}.weight")
            fusion = holder.fused or FusedTensor(parameter, parts)
            num_experts = len(projections[parts[0]])
            module = _split(fusion, [projections[part] for part in parts], architecture, num_experts)
            names = {f"{prefix}.{parameter}", f"{architecture.names.stored(f'{prefix}.')}{parameter}"}
            if holder.fused is not None:
                names.add(holder.name.removesuffix(holder.fused.suffixes[0]))
            found |= dict.fromkeys(names, module)
    return found
