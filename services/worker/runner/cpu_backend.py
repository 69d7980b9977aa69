"""The forward pass as a recorded program of native kernels: a step is one call, without Python in its middle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from triptych.types.step import StepTimings
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import Program, record
from triptych_kernels.cpu.recording import NotRecordable, Recording
from triptych_kernels.ops import gather_rows
from triptych_kernels.state_batch import StateBatch
from triptych_services.worker.attention.base import AttentionBatch, KvCache, keeps_guesses
from triptych_services.worker.layers.step_context import KeptStates, StepContext
from triptych_services.worker.models.base import CausalLM, logits_of
from triptych_services.worker.runner.backend import ForwardBackend, StepOutput, without_samples
from triptych_services.worker.runner.base import CompletedStep
from triptych_services.worker.runner.drafting.ranks import SharedGuesses
from triptych_services.worker.runner.drafting.speculation import Speculation
from triptych_services.worker.runner.input_batch import InputBatch, InputBuffers, StateBuffers
from triptych_services.worker.runner.pooled_rows import RowPooler
from triptych_services.worker.runner.prompt_logprobs import PromptScorer
from triptych_services.worker.runner.publish import publish
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.runner.step_inputs import StepSizes
from triptych_services.worker.sampling.sampler import Sampler


class RecordedBackend:
    """Records the model at construction."""

    computes_with_torch = False

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[KvCache],
        inputs: InputBuffers,
        *,
        received: Tensor | None = None,
        states_before: Tensor | None = None,
        kept_layers: tuple[int, ...] = (),
        samples: bool = True,
    ) -> None:
        """Record `model` for steps of any size that fits `inputs`.

        Args:
            received, states_before, kept_layers, samples: As of `create_cpu_backend`.

        Raises:
            NotRecordable: the model computes something that no native kernel does; names it.
        """
        entry = inputs.token_ids if received is None else received
        self._samples = samples
        self.program = _record(model, kv_caches, inputs, entry, states_before, kept_layers, samples=samples)
        self.description = f"{isa()} recorded"

    def compute_states(self, sizes: StepSizes) -> Tensor:
        """Compute a stage's states, or those of a model that only pools."""
        self.program.run({"tokens": sizes.num_tokens, "rows": sizes.num_rows})
        (states,) = self.program.outputs
        return states[: sizes.num_tokens]

    def forward(self, sizes: StepSizes) -> StepOutput:
        if not self._samples:
            return without_samples(self.compute_states(sizes))
        self.program.run({"tokens": sizes.num_tokens, "rows": sizes.num_rows, "samples": sizes.num_sampling})
        logits, token_ids, hidden, *kept = self.program.outputs
        return StepOutput(
            logits[: sizes.num_sampling],
            token_ids[: sizes.num_sampling],
            hidden=hidden[: sizes.num_tokens],
            layer_states=kept[0] if kept else None,
        )

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return ()


def _record(
    model: CausalLM,
    kv_caches: Sequence[KvCache],
    inputs: InputBuffers,
    entry: Tensor,
    states_before: Tensor | None,
    kept_layers: tuple[int, ...],
    *,
    samples: bool,
) -> Program:
    if inputs.attention.writer == "torch":
        raise NotRecordable("attention in plain torch loops over the rows of each step")

    def forward(recording: Recording) -> tuple[Tensor, ...]:
        def optional_input(tensor: Tensor | None, count: str) -> Tensor | None:
            return None if tensor is None else recording.input(tensor, count=count)

        query_starts = recording.input(inputs.query_starts, count="rows")
        seq_lens = recording.input(inputs.seq_lens, count="rows")
        attention = tuple(
            AttentionBatch(
                slot_mapping=recording.input(group.slot_mapping, count="tokens"),
                block_tables=recording.input(group.block_tables, count="rows"),
                query_starts=query_starts,
                seq_lens=seq_lens,
                backend=inputs.attention,
            )
            for group in inputs.groups
        )
        state = None
        if inputs.state is not None:
            view = partial(recording.input, count="rows")
            state = _state_input(inputs.state, query_starts, view, has_guesses=keeps_guesses(kv_caches))
        kept = KeptStates(kept_layers) if kept_layers else None
        hidden = model(
            recording.input(entry, count="tokens"),
            recording.input(inputs.positions, count="tokens"),
            StepContext(
                attention,
                kv_caches,
                state,
                optional_input(inputs.adapter_slots, "tokens"),
                [cache.state for cache in kv_caches],
                [cache.guesses for cache in kv_caches],
                optional_input(states_before, "tokens"),
                kept,
            ),
        )
        if not samples:
            return (hidden,)
        sampling_tokens = recording.input(inputs.sampling_tokens, count="samples")
        adapters = optional_input(inputs.sampling_adapters, "samples")
        logits = logits_of(model, gather_rows(hidden, sampling_tokens), adapters)
        sampling = inputs.sampling.columns.map(lambda column: recording.input(column, count="samples"))
        outputs = logits, sampling.choose(logits), hidden
        return outputs if kept is None else (*outputs, kept.joined(hidden.dtype))

    return record(forward)


def _state_input(
    state: StateBuffers, query_starts: Tensor, view: Callable[[Tensor], Tensor], *, has_guesses: bool
) -> StateBatch:
    """Return the pages of states of each step, and its guesses where some are kept; `view` makes inputs of columns."""
    return StateBatch(
        view(state.read_pages),
        view(state.write_pages),
        query_starts,
        guesses=state.guesses(view) if has_guesses else None,
    )


class EagerBackend:
    """A `ForwardBackend` that calls the model, operation by operation."""

    computes_with_torch = True

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[KvCache],
        inputs: InputBuffers,
        *,
        received: Tensor | None = None,
        states_before: Tensor | None = None,
        kept_layers: tuple[int, ...] = (),
        samples: bool = True,
    ) -> None:
        """
        Args:
            received, states_before, kept_layers, samples: As of `create_cpu_backend`.
        """
        self._samples = samples
        self._model = model
        self._kv_caches = kv_caches
        self._state_pages = [cache.state for cache in kv_caches]
        self._kept_guesses = [cache.guesses for cache in kv_caches]
        self._inputs = inputs
        self._received = received
        self._states_before = states_before
        self._kept_layers = kept_layers
        self._device = kv_caches[0].device
        native = self._device.type == "cpu" and isa()
        self.description = f"{isa()} eager" if native else "torch"

    def compute_states(self, sizes: StepSizes) -> Tensor:
        return self._run(self._inputs.batch(sizes, self._device), None)

    def forward(self, sizes: StepSizes) -> StepOutput:
        batch = self._inputs.batch(sizes, self._device)
        kept = KeptStates(self._kept_layers) if self._kept_layers else None
        hidden = self._run(batch, kept)
        if not self._samples:
            return without_samples(hidden)
        # [num_sampling, hidden_size]: logits cost as much as several layers, so only for rows that sample
        logits = logits_of(self._model, gather_rows(hidden, batch.sampling_tokens), batch.sampling_adapters)
        layer_states = None if kept is None else kept.joined(hidden.dtype)
        return StepOutput(logits, batch.sampling.choose(logits), hidden=hidden, layer_states=layer_states)

    def _run(self, batch: InputBatch, kept: KeptStates | None) -> Tensor:
        num_tokens, state = len(batch.token_ids), batch.state
        if state is not None and self._inputs.state is not None and keeps_guesses(self._kv_caches):
            num_rows = len(state.read_pages)
            state = replace(state, guesses=self._inputs.state.guesses(lambda column: column[:num_rows]))
        entry = batch.token_ids if self._received is None else self._received[:num_tokens]
        context = StepContext(
            batch.attention,
            self._kv_caches,
            state,
            batch.adapter_slots,
            self._state_pages,
            self._kept_guesses,
            None if self._states_before is None else self._states_before[:num_tokens],
            kept,
        )
        return self._model(entry, batch.positions, context)

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return ()


class ImmediateSteps:
    """A `StepLauncher`. Owned by the `ModelRunner`; uses its rows and its sampler."""

    def __init__(
        self,
        *,
        backend: ForwardBackend,
        sampler: Sampler,
        scorer: PromptScorer,
        pooler: RowPooler,
        rows: RequestRows,
        speculation: Speculation | SharedGuesses | None = None,
    ) -> None:
        """
        Args:
            speculation: Hears of the tokens of each step; None: no row guesses.
        """
        self._backend = backend
        self._sampler = sampler
        self._scorer = scorer
        self._pooler = pooler
        self._rows = rows
        self._speculation = speculation

    def await_inputs(self, step: StepRows) -> None:
        """Do nothing: all inputs are in the rows."""

    def launch(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> CompletedStep:
        """Compute a step. `forward_ns` includes the first choice of tokens; `sample_ns` is the time of what some
        requests need beyond it."""
        prepared = time.perf_counter_ns()
        output = self._backend.forward(sizes)
        forwarded = time.perf_counter_ns()
        chosen = output.logits, output.token_ids, step.sampling_slots
        if step.places is None:
            sampled = self._sampler.finish(*chosen)
        else:
            sampled = self._sampler.finish_places(*chosen, step.places)
        targets = self._scorer.take_targets(step)
        scored = None if targets is None else self._scorer.finish(output, targets)
        parts = self._pooler.take_parts(step)
        pooled = self._pooler.finish(output, parts) if parts else None
        self._rows.advance(step, sampled.token_counts)
        self._rows.record(step, sampled.token_ids, sampled.token_counts)
        guesses = None
        if self._speculation is not None:
            guesses = self._speculation.finish(
                step, sampled.token_counts, forwarded - prepared, output.hidden, output.layer_states
            )
        timings = StepTimings(
            prepare_ns=prepared - started_ns,
            forward_ns=forwarded - prepared,
            sample_ns=time.perf_counter_ns() - forwarded,
            mask_ns=self._sampler.take_mask_ns(),
        )
        return CompletedStep(
            publish(step_id, step, self._rows.slot_version, sampled, timings, scored, pooled, guesses)
        )

    def settle(self) -> None:
        """Do nothing, since no step is in flight."""


log = logging.getLogger(__name__)


def create_cpu_backend(
    model: CausalLM,
    kv_caches: Sequence[KvCache],
    inputs: InputBuffers,
    *,
    enforce_eager: bool,
    received: Tensor | None = None,
    states_before: Tensor | None = None,
    kept_layers: tuple[int, ...] = (),
    samples: bool = True,
) -> RecordedBackend | EagerBackend:
    """Create the backend for a device that has completed a step when it has launched it.

    Args:
        inputs: Buffers in which every step is gathered.
        enforce_eager: Whether the model's operations are called one by one, even if they can be recorded.
        received: [max_num_batched_tokens, hidden_size] float32 on the device, the states of the stage before, which the
            model reads in place of token ids; None: it is the first stage.
        states_before: As of `StepContext`, for the longest step; the caller fills it in before each.
        kept_layers: As of `KeptStates.layers`; empty: no states between layers are kept.
        samples: Whether the model has a head. If not, it is a stage of which `compute_states` is called, not `forward`,
            or no row of it samples.
    """
    options: dict[str, Any] = {
        "received": received,
        "states_before": states_before,
        "kept_layers": kept_layers,
        "samples": samples,
    }
    if kv_caches[0].device.type == "cpu" and isa() and not enforce_eager:
        try:
            return RecordedBackend(model, kv_caches, inputs, **options)
        except NotRecordable as reason:
            log.warning(
                "%s: %s, so its operations are called one by one, slower", type(model).__name__, reason
            )
    return EagerBackend(model, kv_caches, inputs, **options)
