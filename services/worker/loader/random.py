"""Weights drawn from a seed: a model to measure and test with, without files."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.config import EngineConfig, ModelConfig
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import RankFacts, ResolvedConfig
from triptych_services.worker.layers.checkpoint_tensors import TensorTarget, checkpoint_targets
from triptych_services.worker.loader.base import Checkpoint, StoredTensor
from triptych_services.worker.models.registry import create_model

_STANDARD_DEVIATION = 0.02  # as Llama is initialised: activations neither vanish nor overflow


class RandomCheckpoint(Checkpoint):
    """Random weights for any architecture that has a model, which provides names and shapes.

    A tensor depends on the seed, its own name and the kind of device that draws it: CPUs and CUDA devices have
    different generators.
    """

    def __init__(
        self, architecture: ModelArchitecture, seed: int, device: torch.device | None = None
    ) -> None:
        """Find the names and shapes of the tensors.

        Args:
            device: Device that draws the tensors, which stay there; None: the CPU, which is far slower at it.

        Raises:
            FeatureDisabled: No model is registered for the architecture.
        """
        self._seed = seed
        self._device = device or torch.device("cpu")
        # Seed and device are part of the type, so that models of other weights have other fingerprints.
        kind = f"random:{seed}" if self._device.type == "cpu" else f"random:{seed}:{self._device.type}"
        targets = _checkpoint_targets(architecture)
        self.tensors = {
            name: StoredTensor(target.checkpoint_shape, kind, 4 * math.prod(target.checkpoint_shape))
            for name, target in targets.items()
        }
        self._constants = {name: target.constant for name, target in targets.items()}
        self.file_name_to_size: dict[str, int] = {}
        self._drawn: tuple[str, Tensor] | None = None
        """The tensor that is being read part by part, until it is released."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Draw one tensor on the device; see `Checkpoint.read`."""
        shape = self.tensors[name].shape
        if (constant := self._constants[name]) is not None:
            return torch.full(shape, constant, dtype=dtype, device=self._device)
        seed = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(seed[:8], "little", signed=True))
        drawn = torch.empty(shape, device=self._device)
        return drawn.normal_(0.0, _STANDARD_DEVIATION, generator=generator).to(dtype)

    def read_part(self, name: str, dtype: torch.dtype, dim: int, start: int, length: int) -> Tensor:
        if self._drawn is None or self._drawn[0] != name or self._drawn[1].dtype != dtype:
            self._drawn = name, self.read(name, dtype)
        return self._drawn[1].narrow(dim, start, length)

    def release(self, name: str) -> None:
        self._drawn = None

    def read_bytes(self, name: str, start: int, length: int) -> bytes:
        return self.tensors[name].type.encode()


def _checkpoint_targets(architecture: ModelArchitecture) -> dict[str, TensorTarget]:
    """Return name -> place of every tensor, in the family's own layout, in a model without storage."""
    config = ResolvedConfig(
        # the rotary table is not a weight, so its shortest length is enough
        engine=EngineConfig(model=ModelConfig(max_model_len=1)),
        architecture=architecture,
        rank=RankFacts(device="meta"),
    )
    model = create_model(context=ModelContext(config))
    assert isinstance(model, torch.nn.Module), "the contract of CausalLM"
    return checkpoint_targets(model, architecture)
