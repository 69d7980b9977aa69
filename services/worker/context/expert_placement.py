"""Which rank holds which experts under `parallel.expert_parallel`, by how often each was chosen. Needs no torch.

A file of counts says how often, as a worker that serves answers at `/expert_counts` of its metrics port:

    {"model": "qwen3-30b", "weights": "<sha256>", "layers": {"0": [31, 0, 7, …], "1": […]}}

Every rank makes the same orders of it, each from the layer's own counts:

    expert    0   1   2   3           order   0   3 | 1   2
    count    30  10   9   1           rank      0   |   1       31 and 19 choices; neighbours have 40 and 10
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import ConfigError

log = logging.getLogger(__name__)

_OPTION = "parallel.expert_counts"
_MOST_BYTES = 16 << 20  # 256 layers of 1,024 counts of 16 digits are 5 MB
_LARGEST_COUNT = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The order of each layer's experts over the ranks that share them."""

    file: str
    digest: str
    """sha256 of the file of counts, in hex."""
    model: str
    """Name of the model that was counted; empty: the file has none."""
    weights: str
    """sha256 of samples of its weights, as of `ModelIdentity`; empty: the file has none."""
    orders: Mapping[int, tuple[int, ...]]
    """Layer -> its experts, those of the first rank first; each rank has equally many."""

    def order_of(self, layer: int) -> Sequence[int] | None:
        """Return the experts of a layer in their order; None if that is the order of their numbers."""
        order = self.orders.get(layer)
        return None if order == tuple(range(len(order or ()))) else order

    def check_weights(self, weights: str) -> None:
        """Check that the counts are of a checkpoint.

        Raises:
            ConfigError: They are of another one.
        """
        if self.weights and self.weights != weights:
            raise ConfigError(
                f"{_OPTION}: {self.file}: weights: found {self.weights}, of {self.model or 'another model'}, expected "
                f"{weights}, of this checkpoint; count its own choices, or take `weights` out of the file if those of "
                "the other one are to decide"
            )


def read_placement(path: str, architecture: ModelArchitecture, *, num_ranks: int) -> ExpertPlacement:
    """Read a file of counts and place a model's experts by it.

    Args:
        num_ranks: Ranks that share each layer.

    Raises:
        ConfigError: The file cannot be read, or does not fit the model; names what was found and what is expected.
    """
    content = _read(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_OPTION}: {path}: found no JSON ({error}), expected {_EXPECTED}") from None
    if not isinstance(found, dict) or not isinstance(found.get("layers"), dict):
        raise ConfigError(f"{_OPTION}: {path}: layers: found none, expected {_EXPECTED}")
    for name in ("model", "weights"):
        if not isinstance(found.get(name, ""), str):
            raise ConfigError(f"{_OPTION}: {path}: {name}: found {found[name]!r:.80}, expected a string")
    counts = _check_layers(path, found["layers"], architecture)
    orders = {layer: place_experts(own, num_ranks) for layer, own in counts.items()}
    _report(path, counts, orders, num_ranks)
    return ExpertPlacement(
        file=path,
        digest=hashlib.sha256(content).hexdigest(),
        model=found.get("model", ""),
        weights=found.get("weights", ""),
        orders=orders,
    )


def experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """Return how many experts each of the ranks that share a layer holds whole, under `parallel.expert_parallel`.

    Raises:
        ConfigError: The number of ranks does not divide `num_experts`.
    """
    if num_experts % num_ranks:
        raise ConfigError(
            f"parallel.expert_parallel: {num_ranks} ranks (parallel.tensor_parallel_size) cannot share num_experts = "
            f"{num_experts} evenly; set it to false, or the number of ranks to one that divides it"
        )
    return num_experts // num_ranks


def place_experts(counts: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the experts of one layer, those of the first rank first.

    Each rank has equally many, in ascending order. The expert chosen most goes first, to the rank with the fewest
    choices so far that is not full; of equal experts or ranks the lower number. Where that is no better than
    neighbours together, experts stay in their order.

    Args:
        counts: Choices of each expert.

    Raises:
        ConfigError: The number of ranks does not divide that of experts.
    """
    each = experts_per_rank(len(counts), num_ranks)
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for expert in sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert)):
        rank = min(
            (rank for rank in range(num_ranks) if len(held[rank]) < each),
            key=lambda rank: (loads[rank], rank),
        )
        held[rank].append(expert)
        loads[rank] += counts[expert]
    neighbours = tuple(range(len(counts)))
    if max(loads) >= _busiest(counts, neighbours, num_ranks):
        return neighbours
    return tuple(expert for own in held for expert in sorted(own))


def describe_counts(model: str, weights: str, counts: Mapping[int, Sequence[int]]) -> bytes:
    """Return the file of counts that `read_placement` reads.

    Args:
        model, weights: As of `ExpertPlacement`.
        counts: Layer -> choices of each expert.
    """
    layers = {str(layer): list(own) for layer, own in counts.items()}
    return json.dumps({"model": model, "weights": weights, "layers": layers}).encode() + b"\n"


_EXPECTED = 'a file as /expert_counts of a worker\'s metrics port has it: {"layers": {"0": [counts], ...}}'


def _read(path: str) -> bytes:
    try:
        file_path = Path(path).expanduser()
        if file_path.exists() and not file_path.is_file():  # a pipe would keep the start waiting
            raise ConfigError(f"{_OPTION}: {path}: found no regular file, expected {_EXPECTED}")
        with file_path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:  # no such user, or a name that cannot be one
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{_OPTION}: {path}: cannot be read: {why}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{_OPTION}: {path}: found more than {_MOST_BYTES} bytes, expected {_EXPECTED}")
    return content


def _check_layers(
    path: str, found: Mapping[str, object], architecture: ModelArchitecture
) -> dict[int, Sequence[int]]:
    """Return layer -> choices of each expert, of all mixtures of the model."""
    expected = {
        str(index): layer.experts.num_experts
        for index, layer in enumerate(architecture.layers)
        if layer.experts is not None
    }
    if differing := sorted(expected.keys() ^ found.keys()):
        lacks = differing[0] in expected
        raise ConfigError(
            f"{_OPTION}: {path}: layers: found {len(found)} layers, expected those of the {len(expected)} mixtures of "
            f"{architecture.name}; it {'lacks' if lacks else 'has'} {differing[0]!r:.80}"
            f"{'; join the files of all stages' if lacks else ''}"
        )
    for layer, num_experts in expected.items():
        counts = found[layer]
        if not isinstance(counts, list) or len(counts) != num_experts:
            size = f"{len(counts)} counts" if isinstance(counts, list) else f"{counts!r:.80}"
            raise ConfigError(
                f"{_OPTION}: {path}: layers.{layer}: found {size}, expected those of {num_experts} experts of "
                f"{architecture.name}"
            )
        for expert, count in enumerate(counts):
            if type(count) is not int or not 0 <= count <= _LARGEST_COUNT:
                raise ConfigError(
                    f"{_OPTION}: {path}: layers.{layer}: found {count!r:.80} for expert {expert}, expected an integer "
                    f"from 0 to {_LARGEST_COUNT}"
                )
    return {int(layer): found[layer] for layer in expected}  # type: ignore[misc]


def _busiest(counts: Sequence[int], order: Sequence[int], num_ranks: int) -> int:
    """Return the choices of the rank that has most."""
    each = len(counts) // num_ranks
    return max(
        sum(counts[expert] for expert in order[first : first + each]) for first in range(0, len(order), each)
    )


def _report(
    path: str, counts: Mapping[int, Sequence[int]], orders: Mapping[int, Sequence[int]], num_ranks: int
) -> None:
    """Log how uneven the ranks' loads are by these counts."""
    mean = sum(map(sum, counts.values())) / num_ranks
    if mean == 0:
        log.warning("%s: nothing was chosen, so experts stay in their order", path)
        return
    before = sum(_busiest(own, range(len(own)), num_ranks) for own in counts.values())
    after = sum(_busiest(own, orders[layer], num_ranks) for layer, own in counts.items())
    log.info(
        "experts are placed by %s: the busiest of %d ranks has %.3f times the mean, and would have %.3f times if ranks "
        "had neighbouring experts",
        path,
        num_ranks,
        after / mean,
        before / mean,
    )
