"""Low-rank adapters in PEFT's format: what a directory holds, without reading its numbers. Needs no torch.

    adapter_config.json          rank, alpha, and what is not served
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight   [rank, in_features]
                                 base_model.model.<module>.lora_B.weight   [out_features, rank]

An adapter adds `scaling * B (A x)` to the outputs of a module. The scaling is alpha / rank, or with rank-stabilised
adapters alpha / sqrt(rank).

PEFT adapts a mixture's experts, of which transformers keeps each projection in one parameter, by `target_parameters`:

    <mixture>.experts.base_layer.lora_A.weight   [num_experts * rank, hidden_size]          of gate_up_proj
    <mixture>.experts.base_layer.lora_B.weight   [2 * intermediate_size, rank * num_experts]
    <mixture>.experts.lora_A.weight              [num_experts * rank, intermediate_size]    of down_proj
    <mixture>.experts.lora_B.weight              [hidden_size, rank * num_experts]

    rows of A:     expert 0, rank 0 | expert 0, rank 1 | … | expert 1, rank 0 | …
    columns of B:  rank 0, expert 0 | rank 0, expert 1 | … | rank 1, expert 0 | …

Where only one of both is adapted, `base_layer` is absent, and `target_parameters` says which. Other adapters
have modules for each expert, `<mixture>.experts.3.gate_proj`, as checkpoints have.

An installed package may read other layouts: a file that an entry point of `triptych.adapters` is named after.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.checkpoint.safetensors_header import read_header
from triptych.errors import ModelError

ENTRY_POINT_GROUP = "triptych.adapters"
"""Entry points of installed packages that read adapters: name = a file's name, value = `module:function`."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 16 << 20  # a header has about 150 bytes per tensor, so this is one of 100,000
_TYPE_SIZES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes per element
_PREFIX = "base_model.model."
_PART = re.compile(r"^(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.weight)?$")
_BASE_COPIES = (".base_layer.weight",)
"""Endings of copies of the base's embedding and head, which PEFT stores beside adapters of these."""
_EXPERTS = re.compile(r"^(.+\.experts)(\.base_layer)?$")
_STACKED = ("gate_up_proj", "down_proj")
"""Parameters of all experts, in the order in which PEFT wraps one in the other."""
_DECIDING_KEYS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    """F32, F16 or BF16."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * _TYPE_SIZES[self.type]


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The two factors for one module of the base model."""

    name: str
    """Name of the module in the base's checkpoint: `model.layers.0.self_attn.q_proj`."""
    rank: int
    scaling: float
    a: AdapterTensor
    """[rank, in_features]; of an embedding [rank, vocab_size]."""
    b: AdapterTensor
    """[out_features, rank]; of an embedding [hidden_size, rank]."""
    is_embedding: bool
    num_experts: int = 0
    """Experts of which it holds the factors, as the file's description says; 0: it is the module of none, or of one.
    Its name is then that of the parameter: `model.layers.0.mlp.experts.gate_up_proj`."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter with a config and a header that are understood."""

    weights: Path
    """File of the tensors."""
    modules: Mapping[str, AdapterModule]
    """By the name of the module."""
    digest: str
    """sha256, hexadecimal, of what decides: the config's keys and the whole file of tensors, or all that a package has
    read."""
    arrays: Mapping[str, NDArray[np.float32]] | None = None
    """Tensors by name, where a package has read them. None: they are in the file."""

    @property
    def tensors(self) -> tuple[AdapterTensor, ...]:
        return tuple(part for module in self.modules.values() for part in (module.a, module.b))

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(module.rank for module in self.modules.values())


def read_adapter(
    directory: Path, *, max_rank: int, max_bytes: int, num_layers: int, num_experts: int = 0
) -> AdapterFiles:
    """Read the config and the header of an adapter, and its digest.

    Args:
        max_rank: Largest rank that is served.
        max_bytes: Size of the largest file of tensors that is read.
        num_layers: Number of layers of the base.
        num_experts: Number of experts of its mixtures; 0: it has none.

    Raises:
        ModelError: A file is missing, too large, cut short or not understood, or asks for what is not served; names it.
    """
    if not (directory / CONFIG_FILE).exists():
        for point in entry_points(group=ENTRY_POINT_GROUP):
            if (path := directory / point.name).is_file():
                return _read_by_package(point, path, max_rank=max_rank, max_bytes=max_bytes)
    config = _read_config(directory / CONFIG_FILE)
    _check_config(directory, config, max_rank=max_rank, num_layers=num_layers)
    weights = directory / WEIGHTS_FILE
    tensors = _read_tensors(weights, max_bytes)
    modules = _find_modules(weights, tensors, config, max_rank, num_experts)
    return AdapterFiles(weights, modules, _digest(config, weights))


def _read_by_package(point: EntryPoint, path: Path, *, max_rank: int, max_bytes: int) -> AdapterFiles:
    """Let an installed package read a file: name of a module -> its two factors and the scaling.

    Raises:
        ModelError: It cannot, or what it returns are no factors of an adapter; names file and package.
    """
    _check_size(path, path.stat().st_size, max_bytes)
    modules: dict[str, AdapterModule] = {}
    arrays: dict[str, NDArray[np.float32]] = {}
    digest = hashlib.sha256()
    try:
        for name, (a, b, scaling) in sorted(point.load()(path).items()):
            down, up = (
                AdapterTensor(f"{name}.{kind}", np.shape(array), "F32")
                for kind, array in (("a", a), ("b", b))
            )
            for part, array in ((down, a), (up, b)):
                arrays[part.name] = np.ascontiguousarray(array, np.float32)
                digest.update(f"{part.name} {part.shape} {float(scaling)} ".encode())
                digest.update(arrays[part.name].tobytes())
            modules[name] = AdapterModule(name, down.shape[0], float(scaling), down, up, is_embedding=False)
    except Exception as error:  # of a package that is not ours
        raise ModelError(f"{path}: {point.value} of {ENTRY_POINT_GROUP} cannot read it: {error!r}") from error
    if not modules:
        raise ModelError(f"{path}: {point.value} of {ENTRY_POINT_GROUP} finds no factor of an adapter")
    for module in modules.values():
        _check_factors(path, module.name, module.a, module.b)
        if not 1 <= module.rank <= max_rank or not math.isfinite(module.scaling):
            raise ModelError(
                f"{path}: {module.name}: has rank {module.rank} and scaling {module.scaling}; ranks are within 1 to "
                f"{max_rank}, worker.max_adapter_rank, and scalings finite"
            )
    return AdapterFiles(path, modules, digest.hexdigest(), arrays)


def _check_size(path: Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ModelError(f"{path}: has {size} bytes; adapters have at most {max_bytes}, worker.adapter_gib")


def _check_factors(path: Path, name: str, a: AdapterTensor, b: AdapterTensor) -> None:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise ModelError(
            f"{path}: {name}: its factors of {list(a.shape)} and {list(b.shape)} cannot be multiplied"
        )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelError(
                f"{path}: is larger than {_MAX_CONFIG_BYTES} bytes, so it is no config of an adapter"
            )
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read: {error}; an adapter has this file of PEFT, or "
            f"one that a package reads by an entry point of {ENTRY_POINT_GROUP}"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: is no object")
    return config


def _check_config(directory: Path, config: Mapping[str, Any], *, max_rank: int, num_layers: int) -> None:
    """Refuse what is not computed, by its name."""
    path = directory / CONFIG_FILE
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type {kind!r} is not served, only LORA")
    for key, harmless in (
        ("use_dora", (False, None)),
        ("bias", ("none", None)),
        ("lora_bias", (False, None)),
        ("modules_to_save", (None, [])),
        ("fan_in_fan_out", (False, None)),
        ("trainable_token_indices", (None, [], {})),
        ("layer_replication", (None, [])),
        ("megatron_config", (None,)),
        ("use_qalora", (False, None)),
        ("alora_invocation_tokens", (None, [])),
    ):
        if config.get(key) not in harmless:
            raise ModelError(f"{path}: {key} = {config[key]!r} is not served")
    ranks = {"r": config.get("r"), **_pattern(path, config, "rank_pattern")}
    for key, rank in ranks.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= min(max_rank, MAX_RANK):
            raise ModelError(
                f"{path}: rank {rank!r} of {key} is not within 1 to {min(max_rank, MAX_RANK)}, worker.max_adapter_rank"
            )
    alphas = {"lora_alpha": config.get("lora_alpha"), **_pattern(path, config, "alpha_pattern")}
    for key, alpha in alphas.items():
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise ModelError(f"{path}: alpha {alpha!r} of {key} is no finite number")
    layers = config.get("layers_to_transform")
    for index in layers if isinstance(layers, list) else [] if layers is None else [layers]:
        if not isinstance(index, int) or not 0 <= index < num_layers:
            raise ModelError(f"{path}: layers_to_transform names layer {index!r}; the base has {num_layers}")


def _pattern(path: Path, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    pattern = config.get(key) or {}
    if not isinstance(pattern, dict):
        raise ModelError(f"{path}: {key} is no object")
    return pattern


def _read_tensors(path: Path, max_bytes: int) -> dict[str, AdapterTensor]:
    """Read the names and shapes of a file of tensors.

    Raises:
        ModelError: It is missing, larger than `max_bytes`, cut short or not such a file, or has other numbers.
    """
    if path.is_file():
        _check_size(path, path.stat().st_size, max_bytes)
    header = read_header(path, _MAX_HEADER_BYTES)
    for name, tensor in header.tensors.items():
        if tensor.type not in _TYPE_SIZES:
            raise ModelError(
                f"{path}: {name}: type {tensor.type} is not served, only {', '.join(_TYPE_SIZES)}"
            )
    return {name: AdapterTensor(name, tensor.shape, tensor.type) for name, tensor in header.tensors.items()}


def _find_modules(
    path: Path,
    tensors: Mapping[str, AdapterTensor],
    config: Mapping[str, Any],
    max_rank: int,
    num_experts: int,
) -> dict[str, AdapterModule]:
    """Pair the tensors of each module."""
    parts: dict[str, dict[str, AdapterTensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(_BASE_COPIES):
            continue
        match = _PART.match(name.removeprefix(_PREFIX))
        if match is None:
            raise ModelError(f"{path}: {name}: is no factor of an adapter; only lora_A and lora_B are served")
        parts.setdefault(match[1], {})[match[2]] = tensor
    if not parts:
        raise ModelError(f"{path}: holds no factor of an adapter")
    targets = _target_parameters(path, config)
    modules: dict[str, AdapterModule] = {}
    for name, found in sorted(parts.items()):
        if (match := _EXPERTS.match(name)) is None:
            module = _pair(path, name, found, config, targets, max_rank)
        else:
            if not num_experts:
                raise ModelError(f"{path}: {name}: holds factors of experts, and the base has none")
            stacked = f"{match[1]}.{_stacked_parameter(path, match, parts, targets)}"
            module = _pair(path, stacked, found, config, targets, max_rank, num_experts)
        modules[module.name] = module
    return modules


def _target_parameters(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ModelError(f"{path.parent / CONFIG_FILE}: target_parameters = {targets!r} is no list of names")
    return tuple(targets)


def _stacked_parameter(
    path: Path, match: re.Match[str], parts: Mapping[str, object], targets: Sequence[str]
) -> str:
    """Return which parameter of all experts the factors under a name are for.

    Raises:
        ModelError: The names in the file and the config's `target_parameters` do not say it.
    """
    inner, outer = f"{match[1]}.base_layer", match[1]
    adapted = [
        parameter
        for parameter in _STACKED
        if any(f".{match[1]}.{parameter}".endswith(f".{target}") for target in targets)
    ]
    wrapped = [name for name in (inner, outer) if name in parts]
    if len(adapted) != len(wrapped):
        raise ModelError(
            f"{path}: {match[0]}: the file has factors for {len(wrapped)} parameters of these experts, and "
            f"target_parameters = {list(targets)} names {' and '.join(adapted) or 'none'} of {' and '.join(_STACKED)}"
        )
    return adapted[wrapped.index(match[0])]


def _pair(
    path: Path,
    name: str,
    found: Mapping[str, AdapterTensor],
    config: Mapping[str, Any],
    targets: Sequence[str],
    max_rank: int,
    num_experts: int = 0,
) -> AdapterModule:
    is_embedding = any("embedding" in part for part in found)
    names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if set(found) != set(names):
        raise ModelError(f"{path}: {name} has {', '.join(sorted(found))}; it must have {' and '.join(names)}")
    a, b = (found[part] for part in names)
    _check_factors(path, name, a, b)
    rank, rest = divmod(a.shape[0], num_experts or 1)
    if rest:
        raise ModelError(f"{path}: {name}: has {a.shape[0]} rows of A for the base's {num_experts} experts")
    # PEFT finds the values of what it adapts as a parameter under that name
    parameter = f"{name}.weight"
    key = parameter if any(f".{parameter}".endswith(f".{target}") for target in targets) else name
    told = _of_module(key, config.get("rank_pattern") or {}, config["r"])
    if rank != told or rank > max_rank:
        raise ModelError(
            f"{path}: {name}: has rank {rank}; the config says {told}, and {max_rank} is the limit"
        )
    alpha = _of_module(key, config.get("alpha_pattern") or {}, config["lora_alpha"])
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterModule(name, rank, scaling, a, b, is_embedding, num_experts)


def _of_module(name: str, pattern: Mapping[str, Any], otherwise: Any) -> Any:
    """Return the value of the first pattern that fits a module, as PEFT finds it."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", name):
                return value
        except re.error as error:
            raise ModelError(f"pattern {key!r} of {CONFIG_FILE} is not valid: {error}") from error
    return otherwise


def _digest(config: Mapping[str, Any], weights: Path) -> str:
    digest = hashlib.sha256()
    deciding = {key: config.get(key) for key in _DECIDING_KEYS}
    if targets := config.get("target_parameters"):
        deciding["target_parameters"] = sorted(targets)
    digest.update(json.dumps(deciding, sort_keys=True).encode())
    try:
        with weights.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"{weights}: cannot be read: {error}") from error
    return digest.hexdigest()
