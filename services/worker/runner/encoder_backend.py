"""The forward pass of an encoder over whole texts: a recorded program of native kernels, or operation by operation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import NotRecordable, Recording
from triptych_services.worker.models.encoder import Encoder, TextLayout

log = logging.getLogger(__name__)


class EncoderInputs:
    """The texts of the current step in the host's memory, allocated once, as long as the longest step.

    A recorded program reads the buffers in place.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.token_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self.positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self.token_types = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self.query_starts = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)

    def gather(
        self, texts: Sequence[NDArray[np.integer]], token_types: Sequence[NDArray[np.integer] | None]
    ) -> tuple[int, ...]:
        """Fill in a step of at least one text, and return the length of each.

        Args:
            texts: Token ids of each text.
            token_types: [num_tokens] of each text; None: all are 0.
        """
        lens = tuple(map(len, texts))
        starts = self.query_starts.numpy()[: len(texts) + 1]
        np.cumsum(lens, out=starts[1:])
        self.seq_lens.numpy()[: len(texts)] = lens
        num_tokens = int(starts[-1])
        np.concatenate(texts, out=self.token_ids.numpy()[:num_tokens], casting="same_kind")
        positions, types = self.positions.numpy(), self.token_types.numpy()
        types[:num_tokens] = 0
        for start, length, own in zip(starts.tolist(), lens, token_types, strict=False):
            positions[start : start + length] = np.arange(length)
            if own is not None:
                types[start : start + length] = own
        return lens


class EncoderBackend(Protocol):
    """Computes the texts that the inputs hold."""

    description: str
    """Its name in facts: the instruction set and how the kernels are called, or torch."""
    computes_with_torch: bool
    """Whether torch computes some of the operations, so that its threads need the cores."""

    def forward(self, lens: tuple[int, ...]) -> Tensor:
        """Return the states [num_tokens, hidden_size] of texts of these lengths, valid until the next call."""
        ...


class RecordedEncoder:
    """An `EncoderBackend` that records the model at construction."""

    computes_with_torch = False

    def __init__(self, model: Encoder, inputs: EncoderInputs) -> None:
        """
        Raises:
            NotRecordable: The model computes something that no native kernel does; names it.
        """

        def forward(recording: Recording) -> tuple[Tensor, ...]:
            layout = TextLayout(
                query_starts=recording.input(inputs.query_starts, count="rows"),
                seq_lens=recording.input(inputs.seq_lens, count="rows"),
                token_types=recording.input(inputs.token_types, count="tokens"),
            )
            token_ids = recording.input(inputs.token_ids, count="tokens")
            positions = recording.input(inputs.positions, count="tokens")
            return (model(token_ids, positions, layout),)

        self._program = record(forward)
        self.description = f"{isa()} recorded"

    def forward(self, lens: tuple[int, ...]) -> Tensor:
        num_tokens = sum(lens)
        self._program.run({"tokens": num_tokens, "rows": len(lens)})
        (states,) = self._program.outputs
        return states[:num_tokens]


class EagerEncoder:
    """An `EncoderBackend` that calls the model, operation by operation, on any device."""

    computes_with_torch = True

    def __init__(self, model: Encoder, inputs: EncoderInputs, device: torch.device) -> None:
        self._model, self._inputs, self._device = model, inputs, device
        native = device.type == "cpu" and isa()
        self.description = f"{isa()} eager" if native else "torch"

    def forward(self, lens: tuple[int, ...]) -> Tensor:
        inputs, device, num_tokens = self._inputs, self._device, sum(lens)
        layout = TextLayout(
            query_starts=inputs.query_starts[: len(lens) + 1].to(device),
            seq_lens=inputs.seq_lens[: len(lens)].to(device),
            token_types=inputs.token_types[:num_tokens].to(device),
            seq_lens_list=lens,
        )
        states: Tensor = self._model(
            inputs.token_ids[:num_tokens].to(device), inputs.positions[:num_tokens].to(device), layout
        )
        return states


def create_encoder_backend(
    model: Encoder, inputs: EncoderInputs, device: torch.device, *, enforce_eager: bool
) -> EncoderBackend:
    """Create the backend for a device.

    Args:
        enforce_eager: Whether operations are called one by one, even if they can be recorded.
    """
    if device.type == "cpu" and isa() and not enforce_eager:
        try:
            return RecordedEncoder(model, inputs)
        except NotRecordable as reason:
            log.warning(
                "%s: %s, so its operations are called one by one, slower", type(model).__name__, reason
            )
    return EagerEncoder(model, inputs, device)
