"""Creation of a model's pooler, with the layers that follow the pooled state."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.pooling import DenseSpec
from triptych.errors import ModelError
from triptych.types.pooling import PoolingKind
from triptych.types.step import F32
from triptych_services.worker.layers.weights import check_shape
from triptych_services.worker.loader.safetensors import SafetensorsCheckpoint
from triptych_services.worker.models.base import CausalLM, EncoderModel
from triptych_services.worker.runner.pooling import DenseLayer, Pooler
from triptych_services.worker.runner.startup.facts import served_tasks

_NAME_TO_KIND = {"first": PoolingKind.FIRST, "last": PoolingKind.LAST, "mean": PoolingKind.MEAN}
"""`EncoderHead.pooling` -> the kind of pooling."""


def create_pooler(
    architecture: ModelArchitecture, directory: Path, model: CausalLM | EncoderModel
) -> Pooler | None:
    """Create the pooler of a loaded model; None if its vectors are not served.

    Raises:
        FeatureDisabled: See `served_tasks`.
        ModelError: A layer's weights are missing or have another shape.
    """
    pooling = served_tasks(architecture, directory).pooling
    if pooling is None:
        return None
    dense = [load_dense(directory, spec) for spec in pooling.dense]
    own = find_own_pooler(pooling.own_pooler) if pooling.own_pooler else None
    if architecture.encoder is not None:
        head = cast(EncoderModel, model).classifier
        return Pooler(
            pooling,
            architecture.hidden_size,
            dense=dense,
            own=own,
            classifier=None if head is None else head.of_vector,
            classifier_kind=PoolingKind.FIRST if head is None else _NAME_TO_KIND[head.pooling],
        )
    score = getattr(getattr(model, "score", None), "weight", None)
    classifier = DenseLayer(_on_host(score)) if isinstance(score, Tensor) else None
    return Pooler(pooling, architecture.hidden_size, dense=dense, own=own, classifier=classifier)


def find_own_pooler(place: str) -> Callable[[F32], F32]:
    """Import the function of an installed package that pools.

    Args:
        place: `module:function`.
    """
    module_name, function_name = place.split(":")
    function: Callable[[F32], F32] = getattr(import_module(module_name), function_name)
    return function


def load_dense(directory: Path, spec: DenseSpec) -> DenseLayer:
    """Load a layer from its directory within a checkpoint.

    Raises:
        ModelError: Its file is missing or damaged, or a tensor is missing or has another shape.
    """
    checkpoint = SafetensorsCheckpoint(directory / spec.directory)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (spec.out_features, spec.in_features)}
    if spec.bias:
        shapes["linear.bias"] = (spec.out_features,)
    read: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name not in checkpoint.tensors:
            raise ModelError(f"{directory / spec.directory}: {name}: is missing")
        read[name] = checkpoint.read(name, torch.float32)
        check_shape(f"{directory / spec.directory}: {name}", read[name], shape)
    bias = read.get("linear.bias")
    return DenseLayer(
        _on_host(read["linear.weight"]), None if bias is None else _on_host(bias), spec.activation
    )


def _on_host(weight: Tensor) -> F32:
    """Return a copy in float32."""
    values: F32 = weight.detach().to("cpu", torch.float32, copy=True).numpy()
    return values
