"""The runner without a model: real rows, drawn tokens, a device that takes its time."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_json import read_architecture
from triptych.checkpoint.pooling import PoolingSpec
from triptych.config import EngineConfig, SimulationConfig
from triptych.config.step_times import StepTimeModel, StepWork, read_step_time_profile
from triptych.errors import ConfigError, MemoryShort, ModelError, ProtocolViolation
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import Phase, SleepLevel, WorkerFacts
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32, RowError, RowKey, StepPlan, StepResult, StepTimings, empty_u32
from triptych_services.worker.adapters.slots import AdapterUnavailable, SlotTable
from triptych_services.worker.context.resolve import resolve_for_device
from triptych_services.worker.context.resolved_config import DeviceTraits, ResolvedConfig
from triptych_services.worker.kv_transfer.base import BlockStore
from triptych_services.worker.runner.base import CompletedStep, PendingStep, do_nothing
from triptych_services.worker.runner.prompt_targets import take_prompt_targets
from triptych_services.worker.runner.request_rows import Flags, StepRows, create_rows
from triptych_services.worker.runner.startup.facts import served_tasks, worker_facts
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.simulation.blocks import SimulatedBlocks
from triptych_services.worker.simulation.choices import ConstrainedChoices
from triptych_services.worker.simulation.device import SimulatedDevice, use_precise_sleep
from triptych_services.worker.simulation.hashing import salt_of
from triptych_services.worker.simulation.sampler import DrawnTokens, SimulatedSampler, SimulatedVectors
from triptych_services.worker.simulation.stages import SimulatedStages
from triptych_services.worker.simulation.vocabulary import (
    I64,
    hash_ids,
    read_closing_ids,
    read_word_ids,
)

CONFIG_FILE = "adapter_config.json"
_RANK = 1


class SimulatedAdapters:
    """An `AdapterHolder`, and the slots of its rows.

    An adapter is a directory with a config, and its digest is that of the config's bytes.
    """

    def __init__(self, num_slots: int, max_bytes: int) -> None:
        """
        Args:
            num_slots: Different adapters that rows may have at once.
            max_bytes: Bytes of the files of all adapters together.
        """
        self._max_bytes = max_bytes
        self._slots = SlotTable(num_slots)
        self._by_digest: dict[str, tuple[AdapterFacts, int]] = {}
        """Digest -> the adapter, and the bytes of its files."""

    def load(self, name: str, source: str, directory: Path) -> AdapterFacts:
        path = directory / CONFIG_FILE
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            num_bytes = sum(file.stat().st_size for file in directory.iterdir())
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from None
        others = sum(size for facts, size in self._by_digest.values() if facts.digest != digest)
        if others + num_bytes > self._max_bytes:
            short = ModelError if num_bytes > self._max_bytes else MemoryShort  # alone, or beside the others
            raise short(
                f"worker.adapter_gib: {source!r} has {num_bytes} bytes, the others have {others}, "
                f"and {self._max_bytes} is the limit of all together"
            )
        facts = AdapterFacts(name, digest, _RANK, source, num_bytes)
        self._by_digest[digest] = facts, num_bytes
        return facts

    def unload(self, digest: str) -> None:
        self._by_digest.pop(digest, None)

    def list(self) -> tuple[AdapterFacts, ...]:
        return tuple(facts for facts, _ in self._by_digest.values())

    def slot_of(self, digest: str) -> int:
        if digest not in self._by_digest:
            raise AdapterUnavailable(f"{digest} is not loaded")
        return self._slots.take(digest, lambda slot: None)

    def release(self, slot: int) -> None:
        self._slots.release(slot)


_GREEDY = SamplingParams(temperature=0.0)


class SimulatedRunner:
    """A `Runner`. Its rows are those of `ModelRunner`, so that it refuses the same plans."""

    def __init__(
        self,
        *,
        facts: WorkerFacts,
        device: SimulatedDevice,
        word_ids: I64,
        closing_ids: I64 | None = None,
        compiler: GrammarCompiler | None = None,
        eos_probability: float = 0.0,
        stages: SimulatedStages | None = None,
        has_blocks: bool = False,
        max_adapter_bytes: int = 0,
        pooling: PoolingSpec | None = None,
    ) -> None:
        """Create a runner without rows.

        Args:
            word_ids: [n] ascending, n >= 1, the tokens to draw from.
            closing_ids: [n] ascending, the tokens by which forms end what they have opened; None: none.
            compiler: Compiles the forms of outputs; None: requests with one fail.
            stages: They compute the steps; None: the device does.
            has_blocks: Whether blocks have content, which can be transferred; it costs time in each step.
            max_adapter_bytes: Bytes of the files of all adapters together.
            pooling: How the model makes vectors; None: it makes none.
        """
        self._stages = stages
        self._facts = facts
        self._device = device
        self._clock = device.clock
        self.adapters = SimulatedAdapters(facts.max_adapters, max_adapter_bytes)
        self._rows = create_rows(facts, self.adapters if facts.max_adapters else None)
        self._vectors = SimulatedVectors(self._rows, facts.model, pooling)
        self._choices = ConstrainedChoices(
            vocab_size=facts.model.vocab_size,
            word_ids=word_ids,
            closing_ids=np.empty(0, np.int64) if closing_ids is None else closing_ids,
            eos_token_ids=facts.model.eos_token_ids,
            history=self._rows.history,
            compiler=compiler,
        )
        self._sampler = SimulatedSampler(
            self._rows.sampling,
            self._rows.history,
            word_ids=word_ids,
            eos_token_ids=facts.model.eos_token_ids,
            eos_probability=eos_probability,
            choices=self._choices,
        )
        self._num_entered_with: I64 = np.zeros(facts.max_num_seqs, np.int64)
        """[max_num_seqs] tokens that each row knew when it entered. Computing them is prefill."""
        self._last_step_id = 0
        self._blocks = SimulatedBlocks(self._rows, facts.kv.num_blocks) if has_blocks else None

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    def reset(self) -> None:
        """Forget every row and expect step 1."""
        self._rows.clear()
        if self._stages is not None:
            self._stages.forget_rows()
        self._last_step_id = 0

    def block_store(self) -> BlockStore:
        assert self._blocks is not None, "a worker without transfers asks for no blocks"
        return self._blocks

    def sleep(self, level: SleepLevel) -> int:
        """Forget every row; there is no memory to give back."""
        self.reset()
        return 0

    def wake(self) -> None:
        """Do nothing: there is no memory to allocate."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch one step and wait for it."""
        return self.launch(plan).wait()

    def prepare(self, plan: StepPlan) -> None:
        """Do nothing: every plan can be launched."""

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> PendingStep:
        """Carry out one step; see `Runner.launch`. On one device it is done then, and `forward_ns` is the wait."""
        on_prepared()
        if plan.step_id != self._last_step_id + 1:
            raise ProtocolViolation(
                f"step_id: {plan.step_id} came after {self._last_step_id}; expected {self._last_step_id + 1}"
            )
        arrived = self._clock()
        step = self._rows.apply(plan)
        row_errors = {**step.row_errors, **self._enter(plan, step.row_errors)}
        self._last_step_id = plan.step_id
        prepared = self._clock()
        if not step.slots.size:
            timings = StepTimings(prepare_ns=prepared - arrived)
            return CompletedStep(
                StepResult(plan.step_id, empty_u32(), row_errors=row_errors, timings=timings)
            )
        targets = take_prompt_targets(self._rows, step)
        scored = {row.key: self._sampler.score_prompt(row) for row in (targets.rows if targets else ())}
        vectors = self._vectors.compute(step)
        row_errors.update(vectors.failures)
        slots = step.sampling_slots
        self._choices.begin_step(slots, may_defer=plan.may_defer_rows)
        drawn = self._sampler.sample(slots, step.sample_limits)
        # Only blocks need the ids: the hash holds all that the next tokens need of them. A row that failed goes on
        # until it is removed.
        if self._blocks is not None:
            self._record(step, drawn)
        counts = drawn.token_counts
        self._rows.advance(step, np.maximum(counts, 1) if counts.size else None)
        if self._blocks is not None:
            row_errors.update(self._blocks.compute(step, plan.new_rows))
        for row, error in drawn.failures:
            row_errors.setdefault(self._rows.key_of(int(slots[row])), error)
        sampled = self._clock()
        result = StepResult(
            plan.step_id,
            drawn.token_ids.astype(np.uint32),
            counts.astype(np.uint32),
            drawn.logprobs,
            row_errors,
            StepTimings(
                prepare_ns=prepared - arrived,
                sample_ns=sampled - prepared,
                mask_ns=self._choices.take_mask_ns(),
            ),
            scored,
            vectors.reported,
            self._count_guesses(slots),
        )
        if self._stages is not None:
            return self._stages.launch(
                result,
                self._work_of(step),
                decoding_slots=step.slots[~self._is_prefill(step)],
                sampling_slots=slots,
                arrived_ns=arrived,
            )
        done = self._device.wait(self._work_of(step), arrived)
        return CompletedStep(replace(result, timings=replace(result.timings, forward_ns=done - sampled)))

    def _enter(self, plan: StepPlan, refused: Collection[RowKey]) -> dict[RowKey, RowError]:
        """Take in the new rows' prefixes, and return the errors of those that cannot be simulated.

        Args:
            refused: Rows that have an error already; they compute like plain greedy ones.
        """
        errors = {}
        for row in plan.new_rows:
            self._num_entered_with[row.slot] = row.num_known_tokens
            if not self._rows.pooled.samples(row):
                self._vectors.enter(row)
                continue
            sampling = _GREEDY if row.key in refused else row.sampling
            error = self._sampler.enter(row.slot, row.token_ids, sampling, salt_of(row.content.adapter))
            if error is not None:
                errors[row.key] = error
        return errors

    def _record(self, step: StepRows, drawn: DrawnTokens) -> None:
        """Write the ids that the step has drawn behind the known tokens of their rows."""
        slots = step.sampling_slots
        counts = drawn.token_counts if drawn.token_counts.size else np.ones(slots.size, np.int64)
        offsets = np.arange(drawn.token_ids.size) - np.repeat(counts.cumsum() - counts, counts)
        positions = np.repeat(self._rows.num_known[slots], counts) + offsets
        self._rows.token_ids[np.repeat(slots, counts), positions] = drawn.token_ids

    def _count_guesses(self, slots: I64) -> U32:
        """Return the guesses that sampling rows have ready, [num_sampling]: all that may be verified at once."""
        if self._facts.max_samples_per_row == 1:
            return empty_u32()
        guesses = self._sampler.can_guess(slots) * (self._facts.max_samples_per_row - 1)
        return guesses.astype(np.uint32)

    def _is_prefill(self, step: StepRows) -> Flags:
        is_prefill: Flags = step.starts < self._num_entered_with[step.slots]  # [num_rows]
        return is_prefill

    def _work_of(self, step: StepRows) -> StepWork:
        is_prefill = self._is_prefill(step)
        return StepWork(
            num_prefill_tokens=int(step.query_lens[is_prefill].sum()),
            num_decode_rows=int(np.count_nonzero(~is_prefill)),
            num_context_tokens=int(step.starts.sum() + step.query_lens.sum()),
        )


DEVICE = "simulated"

_GIB = 1 << 30


def create_simulated_runner(
    engine: EngineConfig, directory: Path, *, boot_id: str, on_phase: Callable[[str, float], None]
) -> SimulatedRunner:
    """Read config.json and tokenizer.json, and return a runner that is ready for step 1.

    Call it on the thread that will execute the steps.

    Args:
        directory: Directory of the model, from `triptych.hub`; weights may be missing.
        boot_id: UUID drawn at process start.
    Raises:
        ModelError: Files are missing or not understood.
        ConfigError: The profile cannot be used, or not even one KV block fits.
        FeatureDisabled: An option is set that no worker supports yet.
    """
    started = time.perf_counter()
    on_phase(Phase.LOADING, 0.0)
    simulation, architecture = engine.simulation, read_architecture(directory)
    # Like the accelerators that it simulates, and unlike many a CPU, it has native bfloat16.
    config = resolve_for_device(
        engine, architecture, DeviceTraits(device=DEVICE, prefers_bfloat16=True, native_kernels=False)
    )
    # Every rank simulates all stages, and has as many blocks as the first one.
    config = replace(config, rank=replace(config.rank, stage=0))
    num_stages = simulation.num_stages or config.rank.num_stages
    _check_eos(simulation, architecture)
    vocabulary = directory, architecture.vocab_size, architecture.eos_token_ids
    word_ids, closing_ids = read_word_ids(*vocabulary), read_closing_ids(*vocabulary)
    served = served_tasks(architecture, directory)
    facts = worker_facts(
        config,
        plan_kv_cache(config, _free_bytes(engine)),
        boot_id=boot_id,
        fingerprint=_fingerprint(config, word_ids),
        weights=_digest_tokens(config, word_ids, closing_ids),
        device_name=DEVICE,
        kernels=DEVICE,
        processor=DEVICE,
        is_batch_invariant=True,  # a token is a function of its request alone
        max_samples_per_row=simulation.tokens_per_step,
        weight_bytes=0,
        load_s=time.perf_counter() - started,
        served=served,
        num_stages=num_stages,
    )
    use_precise_sleep()
    step_time = _step_time(simulation)
    return SimulatedRunner(
        facts=facts,
        device=SimulatedDevice(step_time),
        word_ids=word_ids,
        closing_ids=closing_ids,
        compiler=_create_compiler(directory, architecture),
        eos_probability=simulation.eos_probability,
        stages=_create_stages(step_time, num_stages, facts.max_num_seqs),
        has_blocks=engine.worker.kv_transfer,
        max_adapter_bytes=int(engine.worker.adapter_gib * _GIB),
        pooling=served.pooling,
    )


def _free_bytes(engine: EngineConfig) -> int:
    """Return the bytes for blocks. These have no memory, so any number that the operator sets is accepted."""
    return sys.maxsize if engine.cache.num_blocks else int(engine.simulation.free_memory_gib * _GIB)


def _create_compiler(directory: Path, architecture: ModelArchitecture) -> GrammarCompiler:
    return GrammarCompiler(
        directory, vocab_size=architecture.vocab_size, eos_token_ids=architecture.eos_token_ids
    )


def _create_stages(step_time: StepTimeModel, num_stages: int, max_num_seqs: int) -> SimulatedStages | None:
    if num_stages == 1:
        return None
    return SimulatedStages(
        step_time,
        num_stages=num_stages,
        max_num_seqs=max_num_seqs,
        clock=time.perf_counter_ns,
        sleep=time.sleep,
    )


def _step_time(simulation: SimulationConfig) -> StepTimeModel:
    if simulation.profile:
        return read_step_time_profile(Path(simulation.profile))
    return StepTimeModel(
        base_ms=simulation.base_ms,
        prefill_token_us=simulation.prefill_token_us,
        decode_row_us=simulation.decode_row_us,
        context_token_ns=simulation.context_token_ns,
    )


def _check_eos(simulation: SimulationConfig, architecture: ModelArchitecture) -> None:
    if simulation.eos_probability and not architecture.eos_token_ids:
        raise ConfigError(
            f"simulation.eos_probability: {simulation.eos_probability:g}, but the model names no EOS token; set it to 0"
        )


def _fingerprint(config: ResolvedConfig, word_ids: I64) -> str:
    """Return a hash of the model's form and of its tokens, with a prefix that no real worker's fingerprint has.

    Builds of the version before know no digest of weights, and compare this alone.
    """
    facts = {
        "architecture": asdict(config.architecture),
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "words": hash_ids(word_ids),
        "eos_probability": config.engine.simulation.eos_probability,
    }
    return "simulated-" + _sha256(facts)


def _digest_tokens(config: ResolvedConfig, word_ids: I64, closing_ids: I64) -> str:
    """Return a hash of what decides the tokens, as the weights of a real model do."""
    return _sha256(
        {
            "words": hash_ids(word_ids, closing_ids),
            "eos_probability": config.engine.simulation.eos_probability,
        }
    )


def _sha256(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
