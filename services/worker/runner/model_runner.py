"""The runner of a real model: prepare -> forward and choose -> finish -> publish.

On a CPU a step is complete when it has been launched. An asynchronous device computes one step while the next is
prepared and launched: docs/adr/0008.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from triptych.errors import FeatureDisabled, ProtocolViolation
from triptych.types.facts import WorkerFacts
from triptych.types.pooling import GENERATION
from triptych.types.step import StepPlan, StepResult, StepTimings, empty_u32
from triptych_kernels.cpu.program import Program
from triptych_services.worker.adapters.store import AdapterStore
from triptych_services.worker.attention.base import AttentionBackend, KvCache
from triptych_services.worker.attention.create import describe_kernels
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.context.rank_group import OneRank, RankGroup
from triptych_services.worker.kv_transfer.base import BlockStore
from triptych_services.worker.kv_transfer.cpu_store import CpuBlockStore
from triptych_services.worker.models.base import CausalLM, logits_of
from triptych_services.worker.runner.backend import ForwardBackend, StepLauncher
from triptych_services.worker.runner.base import CompletedStep, PendingStep, StepRunner, do_nothing
from triptych_services.worker.runner.cpu_backend import ImmediateSteps, RecordedBackend, create_cpu_backend
from triptych_services.worker.runner.cuda.create import create_cuda_backend, create_graph_recorder
from triptych_services.worker.runner.cuda.forward import LastTokens
from triptych_services.worker.runner.cuda.steps_in_flight import DeviceSteps
from triptych_services.worker.runner.cuda.streams import DeviceStream
from triptych_services.worker.runner.drafting.create import CreateProposers, create_speculation
from triptych_services.worker.runner.drafting.ranks import SharedGuesses
from triptych_services.worker.runner.drafting.speculation import Speculation, max_sampling_places
from triptych_services.worker.runner.graph_sizes import LEAST_GRAPH_TOKENS
from triptych_services.worker.runner.input_batch import FeedbackBuffers, InputBuffers
from triptych_services.worker.runner.pipeline_stage import PipelineStage, create_stage_steps
from triptych_services.worker.runner.pooled_rows import RowPooler
from triptych_services.worker.runner.pooling import Pooler
from triptych_services.worker.runner.prompt_logprobs import PromptScorer
from triptych_services.worker.runner.request_rows import RequestRows, create_rows
from triptych_services.worker.runner.startup.kv_cache import parts_of_caches
from triptych_services.worker.runner.stored.runner import ADAPTERS, INPUT, KV_CACHE, HeldState
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.sampling.logits_processors.create import create_logits_processors
from triptych_services.worker.sampling.logits_processors.structured_outputs import StructuredForms
from triptych_services.worker.sampling.sampler import Sampler

log = logging.getLogger(__name__)

_PROGRESS_S = 5.0  # between two log lines on captured graphs


@dataclass(frozen=True, slots=True)
class LastingParts:
    """Parts that outlive a runner, since they are as good for the next one."""

    grammars: GrammarCompiler | None = None
    """Compiler of structured outputs; None: they are refused."""
    adapters: AdapterStore | None = None
    """Adapters of the model; None: rows with one fail."""
    proposers: CreateProposers | None = None
    """Creates what guesses tokens, where a row may get several in a step; None: `ngram_only`."""


class ModelRunner(StepRunner):
    """The runner of one loaded model. Owned by the worker's runner thread, which makes all calls."""

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_caches: Sequence[KvCache],
        facts: WorkerFacts,
        attention: AttentionBackend | None = None,
        enforce_eager: bool = False,
        stream: DeviceStream | None = None,
        group: RankGroup | None = None,
        stage: PipelineStage | None = None,
        max_graph_tokens: int = LEAST_GRAPH_TOKENS,
        lasting: LastingParts | None = None,
    ) -> None:
        """Prepare for step 1.

        Args:
            kv_caches: One per layer, in the shape of `facts.kv`; see `allocate_kv_cache`.
            attention: Backend; None: the project's own kernels for the device.
            enforce_eager: See `create_cpu_backend` and `create_graph_recorder`.
            stream: Connection to the asynchronous device that holds the model; None: the thread that launches a step
                also computes it.
            group: The connected ranks, which compute the same steps; None: one rank.
            stage: The part of the layers that `model` is, computed without a `stream`; None: all of them.
            max_graph_tokens: Number of tokens of the longest step with prompts that an asynchronous device records.
            lasting: Parts that outlive the runner; None: none of them.

        Raises:
            FeatureDisabled: The model computes no adapters.
        """
        self._group = group or OneRank()
        self._kv_caches = kv_caches
        self._lasting = lasting = lasting or LastingParts()
        if lasting.adapters is not None:
            assert isinstance(model, nn.Module), "the contract of CausalLM"
            lasting.adapters.attach(model)
        self._rows = create_rows(facts, lasting.adapters)
        self._inputs = _create_inputs(
            self._rows, facts, attention or PagedAttention(), reads_last_tokens=stream is not None
        )
        self._forms = StructuredForms(
            facts.max_num_seqs,
            compiler=lasting.grammars,
            eos_token_ids=facts.model.eos_token_ids,
            history=self._rows.history,
            group=self._group,
        )
        self._speculation = self._create_speculation(facts, is_recorded_late=stream is not None)
        scorer = PromptScorer(self._rows, partial(logits_of, model), self._inputs.adapter_slots)
        self._pooler = RowPooler(self._rows)
        self._generates = GENERATION in facts.model.tasks
        parts = model, self._create_sampler(facts), scorer
        self._backend, self._steps = (
            self._steps_on_host(*parts, stage=stage, enforce_eager=enforce_eager)
            if stream is None
            else self._steps_on_device(*parts, stream, facts, enforce_eager, max_graph_tokens)
        )
        kernels = describe_kernels(self._backend.description, self._inputs.attention)
        self._facts = replace(facts, kernels=kernels)
        self._last_step_id = 0

    def _create_speculation(
        self, facts: WorkerFacts, *, is_recorded_late: bool
    ) -> Speculation | SharedGuesses | None:
        """Return what guesses, at rank 0 alone; None if a row gets one token in a step."""
        if facts.max_samples_per_row == 1:
            return None
        own = None
        if self._group.rank == 0:
            own = create_speculation(
                self._rows, facts, self._lasting.proposers, self._forms, is_recorded_late=is_recorded_late
            )
        return own if self._group.size == 1 else SharedGuesses(self._rows, self._group, own)

    def _create_sampler(self, facts: WorkerFacts) -> Sampler:
        history = self._rows.history
        processors = create_logits_processors(
            max_num_seqs=facts.max_num_seqs,
            eos_token_ids=facts.model.eos_token_ids,
            history=history,
            forms=self._forms,
        )
        return Sampler(self._rows.sampling, history, processors)

    def _steps_on_host(
        self,
        model: CausalLM,
        sampler: Sampler,
        scorer: PromptScorer,
        *,
        stage: PipelineStage | None,
        enforce_eager: bool,
    ) -> tuple[ForwardBackend, StepLauncher]:
        """Create the backend and the launcher of steps that the thread which launches them also computes."""
        backend = create_cpu_backend(
            model,
            self._kv_caches,
            self._inputs,
            enforce_eager=enforce_eager or not self._group.is_recordable,
            received=None if stage is None else stage.received,
            kept_layers=() if self._speculation is None else self._speculation.state_layers,
            samples=self._generates and (stage is None or stage.is_last),
        )
        steps: StepLauncher = ImmediateSteps(
            backend=backend,
            sampler=sampler,
            scorer=scorer,
            pooler=self._pooler,
            rows=self._rows,
            speculation=self._speculation,
        )
        if stage is not None:
            steps = create_stage_steps(stage, steps, backend.compute_states, self._rows)
        return backend, steps

    def _steps_on_device(
        self,
        model: CausalLM,
        sampler: Sampler,
        scorer: PromptScorer,
        stream: DeviceStream,
        facts: WorkerFacts,
        enforce_eager: bool,
        max_graph_tokens: int,
    ) -> tuple[ForwardBackend, StepLauncher]:
        """Create the backend and the launcher of steps that an asynchronous device computes."""
        assert not isinstance(self._speculation, SharedGuesses), "refused on devices"
        last_tokens = LastTokens(facts.max_num_seqs, stream.device)
        backend = create_cuda_backend(
            model,
            self._kv_caches,
            self._inputs,
            stream=stream,
            last_tokens=last_tokens,
            max_model_len=facts.model.max_model_len,
            vocab_size=facts.model.vocab_size,
            recorder=create_graph_recorder(stream.device, enforce_eager=enforce_eager),
            max_graph_tokens=max_graph_tokens,
            samples=self._generates,
        )
        steps = DeviceSteps(
            backend=backend,
            sampler=sampler,
            scorer=scorer,
            pooler=self._pooler,
            rows=self._rows,
            stream=stream,
            last_tokens=last_tokens,
            gather=lambda step: self._inputs.gather(self._rows, step),
            retries=self._group.size == 1,
            speculation=self._speculation,
        )
        return backend, steps

    def pool_with(self, pooler: Pooler) -> None:
        """Serve pooled rows from now on. Called before step 1."""
        self._rows.pooled.pooler = pooler

    def go_on_for(self, held: HeldState) -> None:
        """Take over the rows of another runner, which has used the same cache, and expect its next step."""
        self._rows.take_over(held.rows)
        self._last_step_id = held.last_step_id

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    @property
    def computes_with_torch(self) -> bool:
        """See `ForwardBackend`."""
        return self._backend.computes_with_torch

    def recorded(self) -> tuple[Program, Mapping[str, Tensor]] | None:
        """Return the recorded program of whole steps, and its inputs, caches and slots of adapters by the names of
        their regions.

        None where no program is recorded, or where it is a stage's, or that of a model that only pools.
        """
        if not isinstance(self._backend, RecordedBackend) or not isinstance(self._steps, ImmediateSteps):
            return None
        if not self._generates:
            return None
        caches = {f"{KV_CACHE}{name}": part for name, part in parts_of_caches(self._kv_caches).items()}
        inputs = {f"{INPUT}{name}": tensor for name, tensor in self._inputs.tensors().items()}
        adapters = self._lasting.adapters
        tables = [] if adapters is None else adapters.sites.addresses
        slots = {f"{ADAPTERS}{number}": addresses for number, addresses in enumerate(tables)}
        return self._backend.program, {**inputs, **caches, **slots}

    def block_store(self) -> BlockStore:
        """Return the KV blocks as bytes; see `Runner.block_store`."""
        device = self._kv_caches[0].device
        if device.type != "cpu":
            raise FeatureDisabled(
                "worker.kv_transfer", f"blocks in the memory of {device} are not transferred yet"
            )
        return CpuBlockStore(self._kv_caches)

    def reset(self) -> None:
        """Forget every row and expect step 1; see `Runner.reset`."""
        self._steps.settle()
        self._rows.clear()
        self._last_step_id = 0

    @torch.inference_mode()
    def capture_graphs(self, on_progress: Callable[[float], None]) -> None:
        """Capture every CUDA graph that a step may need, before step 1, so that no step waits for its capture.

        Args:
            on_progress: Called after each capture with the share of graphs that exist.
        """
        captures = self._backend.graph_captures()
        started = logged = time.perf_counter()
        for num_done, capture in enumerate(captures, 1):
            with self._group.step():
                capture()
            on_progress(num_done / len(captures))
            if (now := time.perf_counter()) - logged > _PROGRESS_S or num_done == len(captures):
                log.info("captured %d of %d CUDA graphs in %.1f s", num_done, len(captures), now - started)
                logged = now

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> PendingStep:
        """Launch one step; see `Runner.launch`."""
        if plan.step_id != self._last_step_id + 1:
            raise ProtocolViolation(
                f"step_id: {plan.step_id} came after {self._last_step_id}; expected {self._last_step_id + 1}"
            )
        started = time.perf_counter_ns()
        step = self._rows.apply(plan)
        self._last_step_id = plan.step_id
        self._forms.may_defer = plan.may_defer_rows
        if not step.slots.size:
            timings = StepTimings(prepare_ns=time.perf_counter_ns() - started)
            return CompletedStep(
                StepResult(plan.step_id, empty_u32(), row_errors=step.row_errors, timings=timings)
            )
        with self._group.step():
            waiting_since = time.perf_counter_ns()
            self._steps.await_inputs(step)
            started += time.perf_counter_ns() - waiting_since  # to wait is not to prepare
            if self._speculation is not None and step.sample_limits is not None:
                waiting_since = time.perf_counter_ns()
                self._steps.settle()  # guesses follow the tokens of all steps before
                started += time.perf_counter_ns() - waiting_since
                step = self._speculation.guess(step)
            sizes = self._inputs.gather(self._rows, step)
            on_prepared()
            return self._steps.launch(plan.step_id, step, sizes, started)


def _create_inputs(
    rows: RequestRows, facts: WorkerFacts, attention: AttentionBackend, *, reads_last_tokens: bool
) -> InputBuffers:
    """Create the inputs of steps.

    Args:
        reads_last_tokens: Whether a step is launched before the tokens of the one before it are on the host.
    """
    max_sampling = max_sampling_places(facts.max_num_seqs, facts.max_samples_per_row)
    if reads_last_tokens:  # each is a row, and graphs of so many rows are as many tokens
        max_sampling = min(max_sampling, facts.max_num_batched_tokens)
    sizes = {
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "max_sampling": max_sampling,
    }
    feedback = FeedbackBuffers(**sizes) if reads_last_tokens else None
    return InputBuffers(
        **sizes,
        tables=rows.tables,
        attention=attention,
        feedback=feedback,
        has_adapters=rows.adapters is not None,
    )
