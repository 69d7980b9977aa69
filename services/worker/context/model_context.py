"""Everything that a process builds a model from, as the operator, the checkpoint and the other ranks provide it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from triptych.checkpoint.architecture import ModelArchitecture
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_services.worker.context.device import STORED_DTYPES, TORCH_DTYPES
from triptych_services.worker.context.rank_group import OneRank, RankGroup
from triptych_services.worker.context.resolved_config import RankFacts, ResolvedConfig


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The one object that is handed down a model: every model and layer is made with `context` and `prefix`.

    ModelContext
      config         values: what the operator said, with `auto` resolved, and the checkpoint's architecture
      group          a connection: the ranks that compute each layer together
      tensor_types, tensor_formats   facts of the checkpoint that is being loaded
    """

    config: ResolvedConfig
    group: RankGroup = field(default_factory=OneRank)
    """Connected ranks, `config.rank.tensor_parallel_size` of them."""
    tensor_types: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor in the checkpoint -> form of its stored elements, which quantized weights keep where they can.
    Empty: nothing is kept."""
    tensor_formats: Mapping[str, QuantizedFormat] = field(default_factory=dict)
    """Likewise of tensors of codes: name -> their format."""

    @property
    def architecture(self) -> ModelArchitecture:
        return self.config.architecture

    @property
    def rank(self) -> RankFacts:
        return self.config.rank

    @property
    def dtype(self) -> torch.dtype:
        """Precision of activations, and of weights that are neither quantized nor widened by their kernels."""
        return TORCH_DTYPES[self.config.dtype]

    @property
    def max_positions(self) -> int:
        """Length of the longest sequence that this worker admits."""
        return self.config.engine.model.max_model_len or self.architecture.max_context

    def tensor_type(self, name: str) -> str:
        """Return the form of the stored elements of a tensor under our layers' name; empty if it is not known."""
        return self.tensor_types.get(self.architecture.stored_names.holder(name).name, "")

    def tensor_format(self, name: str) -> QuantizedFormat | None:
        """Return the format of the codes of a tensor under our layers' name; None if it is floating point."""
        return self.tensor_formats.get(self.architecture.stored_names.holder(name).name)

    def stored_dtype(self, sources: Iterable[str]) -> torch.dtype:
        """Return the precision that holds a weight made of these tensors of the checkpoint.

        Beside activations in float32 that is the tensors' own if they share one, so that nothing is lost.
        """
        if self.config.dtype != "float32":
            return self.dtype
        otherwise = TORCH_DTYPES[self.config.weight_dtype]
        dtypes = {STORED_DTYPES.get(self.tensor_type(name), otherwise) for name in sources}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    @property
    def device(self) -> torch.device:
        """Device of this rank's weights."""
        return torch.device(self.config.rank.device)
