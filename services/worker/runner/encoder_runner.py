"""The runner of an encoder: whole texts in one step, no keys and values, vectors in place of tokens.

A text is computed whole in the step in which it enters. Afterwards its slot holds nothing, and waits to be freed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.errors import FeatureDisabled, ProtocolViolation
from triptych.types.facts import WorkerFacts
from triptych.types.pooling import PoolingParams, Task
from triptych.types.step import (
    F32,
    U32,
    NewRow,
    RowError,
    RowKey,
    StepPlan,
    StepResult,
    StepTimings,
    empty_u32,
)
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import NotRecordable, Recording
from triptych_services.worker.kv_transfer.base import BlockStore
from triptych_services.worker.layers.step_context import TextLayout
from triptych_services.worker.models.base import EncoderModel
from triptych_services.worker.runner.base import CompletedStep, StepRunner, do_nothing
from triptych_services.worker.runner.pooling import Pooler

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

    def __init__(self, model: EncoderModel, inputs: EncoderInputs) -> None:
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

    def __init__(self, model: EncoderModel, inputs: EncoderInputs, device: torch.device) -> None:
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
    model: EncoderModel, inputs: EncoderInputs, device: torch.device, *, enforce_eager: bool
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


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One text of a step."""

    key: RowKey
    token_ids: U32
    pooling: PoolingParams


@dataclass(slots=True, eq=False)
class EncoderStep:
    """The texts that a step computes, and the rows that it refuses."""

    texts: list[Text] = field(default_factory=list)
    row_errors: dict[RowKey, RowError] = field(default_factory=dict)


class EncoderRows:
    """Owned by the runner's thread; changed only by plans."""

    def __init__(self, facts: WorkerFacts) -> None:
        self._facts = facts
        self._live = np.zeros(facts.max_num_seqs, np.bool_)

    def clear(self) -> None:
        """Forget every row."""
        self._live[:] = False

    def apply(self, plan: StepPlan) -> EncoderStep:
        """Carry out a plan's removals, and return the texts that enter.

        A row of an earlier step has nothing left to compute, whatever the plan says of it.

        Raises:
            ProtocolViolation: The plan contradicts the rows; they are undefined until `clear()`.
        """
        for slot in plan.removed_slots.tolist():
            if slot >= self._live.size or not self._live[slot]:
                raise ProtocolViolation(f"removed_slots: slot {slot} is not live")
            self._live[slot] = False
        slot_to_length = dict(zip(plan.chunk_slots.tolist(), plan.chunk_lengths.tolist(), strict=True))
        step = EncoderStep()
        num_tokens = 0
        for row in plan.new_rows:
            self._check(row, slot_to_length.get(row.slot, 1))
            self._live[row.slot] = True
            num_tokens += row.num_prompt_tokens
            refusal = _refusal(row)
            if refusal is not None:
                step.row_errors[row.key] = refusal
            elif row.content.pooling is not None:
                step.texts.append(Text(row.key, row.content.prompt_token_ids, row.content.pooling))
        if num_tokens > self._facts.max_num_batched_tokens:
            raise ProtocolViolation(
                f"the step has {num_tokens} tokens; max_num_batched_tokens is {self._facts.max_num_batched_tokens}"
            )
        return step

    def _check(self, row: NewRow, length: int) -> None:
        name, facts = f"new_rows: slot {row.slot}", self._facts
        if row.slot >= self._live.size:
            raise ProtocolViolation(f"{name} is not below max_num_seqs {self._live.size}")
        if self._live[row.slot]:
            raise ProtocolViolation(f"{name} is live; remove it first")
        num_tokens = row.num_prompt_tokens
        if not 0 < num_tokens <= facts.model.max_model_len:
            raise ProtocolViolation(
                f"{name} has {num_tokens} tokens; max_model_len is {facts.model.max_model_len}"
            )
        if (row.num_computed_tokens, row.num_known_tokens, length) != (0, num_tokens, num_tokens):
            raise ProtocolViolation(
                f"{name} computes {length} tokens from {row.num_computed_tokens} on, of {row.num_known_tokens}; an "
                f"encoder computes the {num_tokens} of a text at once"
            )
        largest = int(row.content.prompt_token_ids.max())
        if largest >= facts.model.vocab_size:
            raise ProtocolViolation(
                f"{name} holds token id {largest}; the vocabulary has {facts.model.vocab_size}"
            )


def _refusal(row: NewRow) -> RowError | None:
    """Return why a row cannot be served; None if it can."""
    pooling = row.content.pooling
    if pooling is None or pooling.task is Task.GENERATE:
        return RowError.of_client("task: the model is an encoder, which generates nothing")
    if row.content.adapter:
        return RowError.of_client("adapter: the model is an encoder, which takes none here")
    return None


class EncoderRunner(StepRunner):
    """Computes a step when it is launched, on any device. Owned by the worker's runner thread."""

    def __init__(
        self,
        *,
        model: EncoderModel,
        facts: WorkerFacts,
        device: torch.device,
        pooler: Pooler,
        separator: int | None = None,
        enforce_eager: bool = False,
    ) -> None:
        """
        Args:
            separator: Token between the texts of a pair, the second of which has another token type. None: pairs have
                one type.
        """
        self._pooler = pooler
        self._separator = separator
        self._rows = EncoderRows(facts)
        self._inputs = EncoderInputs(
            max_num_seqs=facts.max_num_seqs, max_num_batched_tokens=facts.max_num_batched_tokens
        )
        with torch.inference_mode():
            self._backend = create_encoder_backend(model, self._inputs, device, enforce_eager=enforce_eager)
        self._facts = replace(facts, kernels=self._backend.description)
        self._last_step_id = 0

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    @property
    def computes_with_torch(self) -> bool:
        """Whether torch computes the layers, so that it needs the cores."""
        return self._backend.computes_with_torch

    def block_store(self) -> BlockStore:
        raise FeatureDisabled("worker.kv_transfer = true", "an encoder leaves no keys and values to transfer")

    def reset(self) -> None:
        """Forget every row and expect step 1."""
        self._rows.clear()
        self._last_step_id = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> CompletedStep:
        """Compute one step; see `StepRunner.launch`."""
        if plan.step_id != self._last_step_id + 1:
            raise ProtocolViolation(
                f"step_id: {plan.step_id} came after {self._last_step_id}; expected {self._last_step_id + 1}"
            )
        started = time.perf_counter_ns()
        step = self._rows.apply(plan)
        self._last_step_id = plan.step_id
        errors, texts = dict(step.row_errors), list[Text]()
        for text in step.texts:
            refusal = self._pooler.refusal(text.pooling, len(text.token_ids))
            if refusal is None:
                texts.append(text)
            else:
                errors[text.key] = refusal
        vectors: dict[RowKey, F32] = {}
        prepared = forwarded = started
        if texts:
            lens = self._inputs.gather(
                [text.token_ids for text in texts], [self._token_types(text) for text in texts]
            )
            on_prepared()
            prepared = time.perf_counter_ns()
            states: F32 = self._backend.forward(lens).float().numpy(force=True)
            forwarded = time.perf_counter_ns()
            self._pool(texts, states, vectors, errors)
        done = time.perf_counter_ns()
        timings = StepTimings(
            prepare_ns=prepared - started, forward_ns=forwarded - prepared, sample_ns=done - forwarded
        )
        return CompletedStep(
            StepResult(plan.step_id, empty_u32(), row_errors=errors, timings=timings, vectors=vectors)
        )

    def _token_types(self, text: Text) -> NDArray[np.int64] | None:
        """Return the token types of a pair that is classified; None if they are all 0."""
        if self._separator is None or text.pooling.task is not Task.CLASSIFY:
            return None
        return second_text(text.token_ids, self._separator)

    def _pool(
        self, texts: Sequence[Text], states: F32, vectors: dict[RowKey, F32], errors: dict[RowKey, RowError]
    ) -> None:
        first = 0
        for text in texts:
            end = first + len(text.token_ids)
            pooled = self._pooler.pool(text.pooling, states[first:end])
            first = end
            if isinstance(pooled, RowError):
                errors[text.key] = pooled
            else:
                vectors[text.key] = pooled


def second_text(token_ids: U32, separator: int) -> NDArray[np.int64] | None:
    """Return 1 for each token behind the first separator, and 0 for the others; None if there is none behind it."""
    separators = np.flatnonzero(token_ids == separator)
    if separators.size == 0 or separators[0] + 1 >= len(token_ids):
        return None
    types = np.zeros(len(token_ids), np.int64)
    types[separators[0] + 1 :] = 1
    return types
