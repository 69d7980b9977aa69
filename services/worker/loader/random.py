"""Weights drawn from a seed: a model to measure and test with, without files."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from services.worker.context.model_context import ModelContext
from services.worker.context.resolved_config import RankFacts, ResolvedConfig
from services.worker.layers.weights import find_weight_targets
from services.worker.loader.base import Checkpoint, StoredTensor
from services.worker.models.registry import create_model
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.config import EngineConfig, ModelConfig

_STANDARD_DEVIATION = 0.02  # what Llama is initialised with: activations neither vanish nor overflow


class RandomCheckpoint(Checkpoint):
    """Of any architecture that a model is registered for: the model says which tensors it needs.

    A tensor depends on the seed, its own name and the kind of device that draws it: processors and CUDA devices have
    generators of their own.
    """

    def __init__(
        self, architecture: ModelArchitecture, seed: int, device: torch.device | None = None
    ) -> None:
        """Raises FeatureDisabled for an architecture that no model is registered for.

        Args:
            device: draws the tensors, which stay there; None: the CPU, far slower at it than a GPU.
        """
        self._seed = seed
        self._device = device or torch.device("cpu")
        # Seed and device are part of the type, so that models of other weights have other fingerprints.
        kind = f"random:{seed}" if self._device.type == "cpu" else f"random:{seed}:{self._device.type}"
        self.tensors = {
            name: StoredTensor(shape, kind, 4 * math.prod(shape))
            for name, shape in _checkpoint_shapes(architecture).items()
        }
        self.file_name_to_size: dict[str, int] = {}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """As in `Checkpoint`, but on the device of this one."""
        shape = self.tensors[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        seed = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(seed[:8], "little", signed=True))
        drawn = torch.empty(shape, device=self._device)
        return drawn.normal_(0.0, _STANDARD_DEVIATION, generator=generator).to(dtype)


def _checkpoint_shapes(architecture: ModelArchitecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, in Hugging Face's layout, asked of a model without storage."""
    config = ResolvedConfig(
        # the table of rotary positions is no weight, so the shortest will do
        engine=EngineConfig(model=ModelConfig(max_model_len=1)),
        architecture=architecture,
        rank=RankFacts(device="meta"),
    )
    model = create_model(context=ModelContext(config))
    assert isinstance(model, torch.nn.Module), "the contract of CausalLM"
    return {name: target.checkpoint_shape for name, target in find_weight_targets(model).items()}
