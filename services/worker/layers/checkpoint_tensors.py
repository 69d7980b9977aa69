"""The checkpoint's tensors in terms of our layers' own: other names, several projections in one, transposed ones.

Layers list their targets under the names that Llama has; `TensorNames` says how a family's checkpoints differ. A tensor
that holds several projections is cut into pieces, each of which goes to the target of its projection.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames
from triptych.errors import ModelError
from triptych_services.worker.layers.quantization import CodedStack, CodedTensor, StoredBlocks, UnreadTensor
from triptych_services.worker.layers.weights import (
    LoadedTensor,
    WeightTarget,
    check_shape,
    find_weight_targets,
)

_NUM_NAMES_SHOWN = 5  # of a list of tensor names in an error


class TensorTarget(Protocol):
    """The place of one tensor of the checkpoint."""

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, as it is stored."""

    @property
    def constant(self) -> float | None:
        """As of `WeightTarget`."""

    def load(self, name: str, tensor: LoadedTensor) -> None:
        """Store this rank's share.

        Raises:
            ModelError: The tensor has another shape; names both.
        """


@dataclass(frozen=True, slots=True, eq=False)
class CutTensor:
    """A tensor that is cut along its outputs, or that lies the other way round; a `TensorTarget`."""

    pieces: tuple[tuple[WeightTarget, Tensor | slice], ...]
    """The target of each projection, and its rows among those of the tensor: [num_rows] int64, or a range."""
    shape: tuple[int, ...]
    """Shape as our layers have it, outputs first."""
    is_transposed: bool

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_transposed else self.shape

    @property
    def constant(self) -> float | None:
        return self.pieces[0][0].constant

    def load(self, name: str, tensor: LoadedTensor) -> None:
        if isinstance(tensor, CodedTensor | StoredBlocks):  # which has outputs first
            check_shape(name, tensor, self.shape)
        else:
            check_shape(name, tensor, self.checkpoint_shape)
            if self.is_transposed:
                tensor = _transposed(tensor)
        for target, rows in self.pieces:
            target.load(name, _select(tensor, rows, target.checkpoint_shape))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsTensor:
    """A tensor that holds the projections of all experts along its first axis; a `TensorTarget`."""

    experts: tuple[CutTensor, ...]
    """The target of each expert's part, by its number."""

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].checkpoint_shape

    @property
    def constant(self) -> float | None:
        return self.experts[0].constant

    def load(self, name: str, tensor: LoadedTensor) -> None:
        if isinstance(tensor, CodedStack):
            check_shape(name, tensor, (len(self.experts), *self.experts[0].shape))
        else:
            check_shape(name, tensor, self.checkpoint_shape)
        for expert, cut in enumerate(self.experts):
            if not any(target.length for target, _ in cut.pieces):
                continue  # another rank's, which is not read
            own = tensor.expert(expert) if isinstance(tensor, CodedStack) else tensor.narrow(0, expert, 1)[0]
            cut.load(name, own)


def _transposed(tensor: LoadedTensor) -> UnreadTensor:
    rows, columns = tensor.shape
    return UnreadTensor((columns, rows), lambda dim, start, length: tensor.narrow(1 - dim, start, length).t())


def _select(tensor: LoadedTensor, rows: Tensor | slice, shape: tuple[int, ...]) -> LoadedTensor:
    """Return some rows of a tensor, of which no more is read than its form allows."""
    if isinstance(tensor, CodedTensor | StoredBlocks):
        return tensor.select(rows, shape[0])

    def read(dim: int, start: int, length: int) -> Tensor:
        if isinstance(rows, slice):
            if dim == 0:
                return tensor.narrow(0, rows.start + start, length)
            return tensor.narrow(dim, start, length)[rows]
        if dim == 0:
            return tensor.narrow(0, 0, tensor.shape[0])[rows[start : start + length]]
        return tensor.narrow(dim, start, length)[rows]

    return UnreadTensor(shape, read)


def checkpoint_targets(model: nn.Module, architecture: ModelArchitecture) -> dict[str, TensorTarget]:
    """Return name in the checkpoint -> place, for every parameter of `model`."""
    names, ours = architecture.stored_names, find_weight_targets(model)
    found: dict[str, TensorTarget] = {}
    fused: dict[str, tuple[FusedTensor, dict[tuple[int, str], WeightTarget]]] = {}
    for name, target in ours.items():
        holder = names.holder(name)
        if holder.fused is not None:
            fused.setdefault(holder.name, (holder.fused, {}))[1][holder.expert, holder.part] = target
        elif _is_transposed(holder.name, target.checkpoint_shape, names):
            found[holder.name] = CutTensor(
                ((target, slice(0, target.checkpoint_shape[0])),), target.checkpoint_shape, is_transposed=True
            )
        else:
            found[holder.name] = target
    for name, (fusion, targets) in fused.items():
        experts = sorted({expert for expert, _ in targets})
        cuts = tuple(
            _join(fusion, [targets[expert, part] for part in fusion.parts], architecture, name)
            for expert in experts
        )
        found[name] = ExpertsTensor(cuts) if fusion.of_experts else cuts[0]
    return found


def _join(
    fusion: FusedTensor, targets: list[WeightTarget], architecture: ModelArchitecture, name: str
) -> CutTensor:
    """Return the place of the checkpoint's tensor `name`, which is made of these projections."""
    rows = [target.checkpoint_shape[0] for target in targets]
    shape = (sum(rows), *targets[0].checkpoint_shape[1:])
    is_transposed = fusion.is_transposed and len(shape) == 2
    return CutTensor(
        tuple(zip(targets, rows_of_parts(fusion, rows, architecture), strict=True)),
        shape,
        is_transposed or _is_transposed(name, shape, architecture.stored_names),
    )


def _is_transposed(name: str, shape: tuple[int, ...], names: TensorNames) -> bool:
    return len(shape) == 2 and name.rpartition(".")[0].endswith(names.transposed or ("\0",))


def rows_of_parts(
    fusion: FusedTensor, rows: list[int], architecture: ModelArchitecture
) -> Iterator[Tensor | slice]:
    """Yield the rows of each projection among those of the fused tensor."""
    if fusion.interleaved == "no":
        first = 0
        for count in rows:
            yield slice(first, first + count)
            first += count
        return
    groups = {"kv_heads": architecture.num_kv_heads, "rows": rows[0], "groups": fusion.num_groups}
    num_groups = groups[fusion.interleaved]
    group = torch.arange(num_groups)[:, None] * (sum(rows) // num_groups)
    first = 0
    for count in rows:
        within = torch.arange(first, first + count // num_groups)
        yield (group + within).flatten()
        first += count // num_groups


def load_weights(
    model: nn.Module,
    tensors: Iterable[tuple[str, LoadedTensor]],
    architecture: ModelArchitecture,
    *,
    ignored: Collection[str] = (),
) -> None:
    """Fill every parameter of `model` exactly once, holding one checkpoint tensor at a time.

    Args:
        tensors: (name, tensor) in any order; each is copied before the next is read.
        architecture: Its `names` say how the checkpoint's tensors differ from those that the layers ask for.
        ignored: Endings of names that checkpoints may contain and the model does not use, beside the family's.

    Raises:
        ModelError: A tensor is missing, unexpected, given twice or of another shape; names it.
    """
    names = architecture.stored_names
    targets = checkpoint_targets(model, architecture)
    missing = dict.fromkeys(targets)
    unexpected: list[str] = []
    endings = (*ignored, *names.ignored)
    with torch.no_grad():
        for given, tensor in tensors:
            name = names.current(given)
            if name in missing:
                targets[name].load(given, tensor)
                del missing[name]
            elif name in targets:
                raise ModelError(f"{given}: the checkpoint holds this tensor twice")
            elif not name.endswith(endings) and not name.startswith(names.ignored_prefixes or ("\0",)):
                unexpected.append(given)
    complaints = [
        f"{len(names)} tensors are {what}: {_listed(names)}"
        for what, names in (("missing", list(missing)), ("unexpected", unexpected))
        if names
    ]
    if complaints:
        raise ModelError(
            f"the checkpoint does not fit {type(model).__name__}: {'; '.join(complaints)}; "
            "compare its config.json with its weights"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMES_SHOWN])
    num_hidden = len(names) - _NUM_NAMES_SHOWN
    return f"{shown} and {num_hidden} more" if num_hidden > 0 else shown
