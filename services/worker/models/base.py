"""The interface of a model, whichever family it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torch import Tensor

from triptych.types.step import F32
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.step_context import StepContext, TextLayout
from triptych_services.worker.layers.weights import LoadedTensor


class CausalLM(Protocol):
    """A decoder that predicts the next token; an nn.Module with weights that are undefined until they are loaded."""

    def __init__(self, *, context: ModelContext, prefix: str = "") -> None:
        """Allocate this rank's share of the weights, in the form in which they are computed with.

        Args:
            context: Config, connected ranks, and facts of the checkpoint.
            prefix: Prefix of the model's tensor names in the checkpoint, with the dot; empty unless the model is part
                of another one.

        Raises:
            FeatureDisabled: The architecture or the number of ranks is not supported.
        """
        ...

    def __call__(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Compute the hidden states [num_tokens, hidden_size] of a step's tokens, and write their keys and values.

        Args:
            token_ids: [num_tokens] int64. In a stage of a `StagedModel` that is not the first, the states
                [num_tokens, hidden_size] float32 of the stage before.
            positions: [num_tokens] int64, the position of each token in its sequence.
            context: What the step hands to the layers.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits [num_rows, vocab_size] of some hidden states [num_rows, hidden_size].

        An `AdaptedModel` takes the slots of the rows' adapters, too.
        """
        ...

    def load_weights(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> None:
        """Fill every parameter exactly once from Hugging Face-named tensors.

        Each tensor is copied before the next is read.

        Raises:
            ModelError: A tensor is missing, unexpected, given twice or of another shape; names it.
        """
        ...


class TextClassifier(Protocol):
    """The interface of what an encoder has behind its last layer to classify texts."""

    pooling: str
    """The state that it reads: first, last, or mean, that of all."""

    def of_vector(self, pooled: F32) -> F32:
        """Return the scores [num_labels] of one text, of which the pooled states are [hidden_size]."""
        ...


class EncoderModel(Protocol):
    """A model in which a token sees its whole text; as of `CausalLM`, but for what is said here."""

    @property
    def classifier(self) -> TextClassifier | None:
        """Return the classifier; None: the model only makes vectors."""
        ...

    def __call__(self, token_ids: Tensor, positions: Tensor, layout: TextLayout) -> Tensor:
        """Return the states [num_tokens, hidden_size] after the last layer.

        Args:
            token_ids: [num_tokens] int64, text after text.
            positions: [num_tokens] int64, the position of each token in its text.
            layout: Where each text begins and ends.
        """
        ...


@runtime_checkable
class StagedModel(Protocol):
    """A `CausalLM` that computes only `stage_layers` of its layers if `context.rank` says so.

    The first stage has the embedding, the last one the norm and the head. Any other returns float32 states for the
    next one, which are the residual stream with everything added, and has no `compute_logits`.
    """

    def is_elsewhere(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint belongs to another stage, so that it is not even read."""
        ...


@runtime_checkable
class AdaptedModel(Protocol):
    """A `CausalLM` with layers that read `StepContext.adapter_slots`."""

    def adapts_elsewhere(self, module: str) -> bool:
        """Return whether what adapters add to a module of the checkpoint is computed by another stage."""
        ...

    def compute_logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Return logits as `CausalLM` does.

        Args:
            adapter_slots: [num_rows] int32, -1 for none.
        """
        ...


def logits_of(model: CausalLM, hidden: Tensor, adapter_slots: Tensor | None) -> Tensor:
    """Return the logits of some hidden states, with what the rows' adapters add.

    Args:
        adapter_slots: As of `AdaptedModel`; None: the worker serves no adapters.
    """
    if adapter_slots is None:
        return model.compute_logits(hidden)
    assert isinstance(model, AdaptedModel), "the store of adapters has checked it"
    return model.compute_logits(hidden, adapter_slots)
