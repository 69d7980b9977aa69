"""The runner of a real model: prepare -> forward and choose -> finish -> publish, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from services.worker.attention.base import KvCache
from services.worker.models.base import CausalLM
from services.worker.runner.forward import create_forward_backend
from services.worker.runner.input_batch import InputBuffers
from services.worker.runner.request_rows import RequestRows, StepRows
from services.worker.sampling.sampler import SampledTokens, Sampler
from triptych.errors import ProtocolViolation
from triptych.types.facts import WorkerFacts
from triptych.types.step import RowError, StepPlan, StepResult, StepTimings, empty_u32


class ModelRunner:
    """Owned by the worker's runner thread; nothing here is safe to call from two threads."""

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_caches: Sequence[KvCache],
        facts: WorkerFacts,
        enforce_eager: bool = False,
    ) -> None:
        """Stand ready for step 1.

        Args:
            kv_caches: one per layer, as `allocate_kv_cache` makes them; shape as `facts.kv` says.
            enforce_eager: see `create_forward_backend`.
        """
        self._rows = RequestRows(
            max_num_seqs=facts.max_num_seqs,
            max_model_len=facts.model.max_model_len,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            num_blocks=facts.kv.num_blocks,
            block_size=facts.kv.block_size,
            vocab_size=facts.model.vocab_size,
            eos_token_ids=facts.model.eos_token_ids,
        )
        max_num_seqs, max_blocks = self._rows.block_table.shape
        self._inputs = InputBuffers(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_blocks=max_blocks,
        )
        self._backend = create_forward_backend(model, kv_caches, self._inputs, enforce_eager=enforce_eager)
        self._facts = replace(facts, kernels=self._backend.description)
        self._sampler = Sampler(self._rows.sampling, self._rows.history)
        self._last_step_id = 0

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    def reset(self) -> None:
        """Forget every row and expect step 1."""
        self._rows.clear()
        self._last_step_id = 0

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step; see `Runner.execute`.

        `forward_ns` holds the first choice of tokens, `sample_ns` what some requests ask beyond it. On an
        asynchronous device the one is the time to launch, and the other holds the wait.
        """
        if plan.step_id != self._last_step_id + 1:
            raise ProtocolViolation(
                f"step_id: {plan.step_id} came after {self._last_step_id}; expected {self._last_step_id + 1}"
            )
        started = time.perf_counter_ns()
        step = self._rows.apply(plan)
        self._last_step_id = plan.step_id
        if not step.slots.size:
            return StepResult(
                plan.step_id,
                empty_u32(),
                row_errors=step.row_errors,
                timings=StepTimings(prepare_ns=time.perf_counter_ns() - started),
            )
        sizes = self._inputs.gather(self._rows, step)
        prepared = time.perf_counter_ns()
        output = self._backend.forward(sizes)
        forwarded = time.perf_counter_ns()
        sampled = self._sampler.finish(output.logits, output.token_ids, step.sampling_slots)
        self._rows.advance(step)
        self._rows.record(step, sampled.token_ids)
        timings = StepTimings(
            prepare_ns=prepared - started,
            forward_ns=forwarded - prepared,
            sample_ns=time.perf_counter_ns() - forwarded,
        )
        return self._publish(plan.step_id, step, sampled, timings)

    def _publish(
        self, step_id: int, step: StepRows, sampled: SampledTokens, timings: StepTimings
    ) -> StepResult:
        slots, generation = step.sampling_slots, self._rows.generation
        failures = tuple(
            RowError(int(slots[row]), int(generation[slots[row]]), message)
            for row, message in sampled.failures
        )
        return StepResult(
            step_id,
            sampled.token_ids.astype(np.uint32),
            logprobs=sampled.logprobs,
            row_errors=step.row_errors + failures,
            timings=timings,
        )
