"""How checkpoint tensors find their way into parameters: a table from name to place, filled once each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.worker.device import TORCH_DTYPES
from triptych.config.resolved import ResolvedConfig
from triptych.errors import ConfigError, ModelError

_NUM_NAMES_SHOWN = 5  # of a list of tensor names in an error


@dataclass(frozen=True, slots=True, eq=False)
class WeightTarget:
    """The place of one checkpoint tensor, or of this rank's share of it."""

    storage: Tensor
    """The (part of a) parameter to fill; aliases it."""
    checkpoint_shape: tuple[int, ...]
    """Of the whole tensor, as every rank reads it."""
    dim: int = 0
    """The axis that ranks share out."""
    start: int = 0
    """Where this rank's share begins on that axis; it is as long as `storage`."""

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's share of `tensor`, rounded to the dtype of the parameter.

        Raises:
            ModelError: the tensor has another shape; names both.
        """
        if tuple(tensor.shape) != self.checkpoint_shape:
            raise ModelError(
                f"{name}: the checkpoint holds {list(tensor.shape)}, "
                f"the model needs {list(self.checkpoint_shape)}"
            )
        self.storage.copy_(tensor.narrow(self.dim, self.start, self.storage.shape[self.dim]))


class WeightedLayer(nn.Module, ABC):
    """A layer with parameters of its own."""

    @abstractmethod
    def weight_targets(self) -> dict[str, WeightTarget]:
        """Name in the checkpoint -> place, for every tensor that this layer's parameters are made of."""


def empty_parameter(*shape: int, config: ResolvedConfig) -> nn.Parameter:
    """Storage in `config.dtype` on this rank's device; its content is undefined until it is loaded."""
    storage = torch.empty(shape, dtype=TORCH_DTYPES[config.dtype], device=config.rank.device)
    return nn.Parameter(storage, requires_grad=False)


def share(size: int, *, what: str, config: ResolvedConfig) -> tuple[int, int]:
    """This rank's part of `size` equal things: the first one, and how many.

    Args:
        what: names the things, for the error.
    Raises:
        ConfigError: they cannot be shared out evenly.
    """
    rank, num_ranks = config.rank.tensor_parallel_rank, config.rank.tensor_parallel_size
    if size % num_ranks:
        raise ConfigError(f"parallel.tensor_parallel_size: {num_ranks} does not divide {what} = {size}")
    return rank * (size // num_ranks), size // num_ranks


def find_weight_targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Name in the checkpoint -> place, for every parameter of `model`."""
    targets: dict[str, WeightTarget] = {}
    for module in model.modules():
        if isinstance(module, WeightedLayer):
            for name, target in module.weight_targets().items():
                assert name not in targets, f"two layers ask for {name}"
                targets[name] = target
    num_targeted = sum(target.storage.numel() for target in targets.values())
    assert num_targeted == sum(parameter.numel() for parameter in model.parameters()), (
        "a parameter has no source"
    )
    return targets


def load_weights(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, ignored: Collection[str] = ()
) -> None:
    """Fill every parameter of `model` exactly once; holds one checkpoint tensor at a time.

    Args:
        tensors: (name, tensor) in any order; each is copied before the next is asked for.
        ignored: endings of names that checkpoints may hold and the model has no use for.
    Raises:
        ModelError: a tensor is missing, unexpected, given twice or of another shape; names it.
    """
    targets = find_weight_targets(model)
    missing = dict.fromkeys(targets)
    unexpected: list[str] = []
    with torch.no_grad():
        for name, tensor in tensors:
            if name in missing:
                targets[name].load(name, tensor)
                del missing[name]
            elif name in targets:
                raise ModelError(f"{name}: the checkpoint holds this tensor twice")
            elif not name.endswith(tuple(ignored)):
                unexpected.append(name)
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
