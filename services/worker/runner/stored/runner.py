"""A runner of a stored program, which imports torch when a request or an operator needs more. Needs no torch.

    stored      rows, inputs, KV cache | program and constants          greedy and sampled tokens
    resumed     the same rows and cache | a `SleepableRunner`             everything

It changes once, between two steps, and the requests that it serves do not notice. The model is loaded on a thread
meanwhile, and what needs it is told to come again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ProtocolViolation
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import SleepLevel, WorkerFacts
from triptych.types.sampling import SAMPLING_FIELDS, SamplingParams
from triptych.types.step import (
    NewRow,
    RowError,
    RowErrorCode,
    RowKey,
    StepPlan,
    StepResult,
    StepTimings,
    empty_u32,
)
from triptych_kernels.cpu.huge_pages import map_zeros
from triptych_kernels.cpu.stored_program import BoundProgram, StoredProgram
from triptych_services.worker.adapters.slots import AdapterUnavailable
from triptych_services.worker.kv_transfer.base import BlockStore
from triptych_services.worker.runner.base import CompletedStep, PendingStep, Runner, do_nothing
from triptych_services.worker.runner.drafting.base import GuessReport
from triptych_services.worker.runner.drafting.create import CreateProposers, create_speculation
from triptych_services.worker.runner.drafting.speculation import max_sampling_places
from triptych_services.worker.runner.publish import publish
from triptych_services.worker.runner.request_rows import RequestRows, StepRows, create_rows
from triptych_services.worker.runner.startup.kv_plan import GUESSES, kv_parts
from triptych_services.worker.runner.step_inputs import StepInputs, StepSizes
from triptych_services.worker.runner.stored.image import Image
from triptych_services.worker.sampling.params import PARAM_COLUMNS
from triptych_services.worker.sampling.sampled import NOT_FINITE, SampledTokens, SamplingPlaces

if TYPE_CHECKING:
    from triptych_services.worker.adapters.store import AdapterStore

log = logging.getLogger(__name__)

INPUT, KV_CACHE, ADAPTERS, BUFFERS, CONSTANTS = "input.", "kv.", "adapters.", "buffers", "constants"
"""Names of regions, or how they begin."""
KEPT_GUESSES = f"{KV_CACHE}{GUESSES}"
"""Name of the region of what is kept of guesses."""
TOKEN_IDS = 1
"""Number of the output with the chosen tokens; the others are logits and hidden states."""

_OF_OTHERS = frozenset(
    (
        *PARAM_COLUMNS, "n", "max_tokens", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
        "repetition_detection", "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
        "output_kind", "speculation",
    )
)  # fmt: skip
"""Fields that a program takes as columns, or that other tiers act on."""
_DEMANDING = tuple((name, spec.default) for name, spec in SAMPLING_FIELDS.items() if name not in _OF_OTHERS)


def is_plain(params: SamplingParams) -> bool:
    """Return whether a program alone serves these parameters."""
    return all(getattr(params, name) == default for name, default in _DEMANDING)


@dataclass(frozen=True, slots=True, eq=False)
class HeldState:
    """The state with which a runner goes on where another has stopped."""

    rows: RequestRows
    kv_memory: mmap.mmap
    """Memory of the KV cache, as `kv_parts` divides it."""
    last_step_id: int
    guess_memory: mmap.mmap | None = None
    """Memory of what is kept of guesses; None: the model has no states, or no row guesses."""
    adapters: AdapterStore | None = None
    """Adapters of the rows and of those to come; None: none are served."""


Resume = Callable[[HeldState], Runner]
"""Creates the runner that serves everything, and goes on with the state of this one. Called on its thread."""
_LOADING = RowError(
    "the model is being loaded for what a stored program does not compute",
    RowErrorCode.NOT_READY,
    kv_is_valid=True,
)


class LateAdapters:
    """The adapters of a stored program; torch is imported when the first is loaded, on the thread that loads it.

    An `AdapterHolder`, and the `AdapterSlots` of the rows.
    """

    def __init__(self, create: Callable[[], AdapterStore]) -> None:
        self._create = create
        self._lock = threading.Lock()
        """Held while the store is created."""
        self._store: AdapterStore | None = None

    def store(self) -> AdapterStore:
        """Return what holds the adapters, created at the first call."""
        with self._lock:
            if self._store is None:
                self._store = self._create()
            return self._store

    def load(self, name: str, source: str, directory: Path) -> AdapterFacts:
        """See `AdapterHolder`."""
        return self.store().load(name, source, directory)

    def unload(self, digest: str) -> None:
        """See `AdapterHolder`."""
        if self._store is not None:
            self._store.unload(digest)

    def list(self) -> tuple[AdapterFacts, ...]:
        """See `AdapterHolder`."""
        return () if self._store is None else self._store.list()

    def slot_of(self, digest: str) -> int:
        """See `AdapterSlots`."""
        if self._store is None:
            raise AdapterUnavailable("none is loaded yet")
        return self._store.slot_of(digest)

    def release(self, slot: int) -> None:
        """See `AdapterSlots`."""
        assert self._store is not None, "it has given the slot"
        self._store.release(slot)


class StoredRunner(Runner):
    """Owned by the worker's runner thread."""

    def __init__(
        self,
        image: Image,
        facts: WorkerFacts,
        *,
        load: Callable[[], Resume],
        proposers: CreateProposers | None = None,
        create_adapters: Callable[[Sequence[NDArray[np.int64]]], AdapterStore] | None = None,
    ) -> None:
        """
        Args:
            load: Loads the model, on any thread, and returns what lets another runner go on.
            proposers: As of `create_speculation`.
            create_adapters: Creates the store of adapters from the slots of the program's layers, [num_slots] each;
                None: none are served.

        Raises:
            AttributeError, KeyError, ValueError: The program does not fit to this process.
        """
        self._facts = facts
        self._load = load
        self._loading: Future[Resume] | None = None
        """The model that is being loaded; None until something needs it."""
        self._sent_back: set[RowKey] = set()
        """Rows that wait for the model and have not been removed yet."""
        slots = _adapter_slots(image.program, facts.max_adapters)
        self._adapters: LateAdapters | None = None
        if create_adapters is not None and slots:
            self._adapters = LateAdapters(partial(create_adapters, tuple(slots.values())))
        self._rows = create_rows(facts, self._adapters)
        self._speculation = create_speculation(self._rows, facts, proposers)
        self._inputs = StepInputs(
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            tables=self._rows.tables,
            max_sampling=max_sampling_places(facts.max_num_seqs, facts.max_samples_per_row),
        )
        _, last_start, last_bytes = kv_parts(facts.kv)[-1]
        self._kv_memory = map_zeros(last_start + last_bytes)
        num_kept = {region.name: region.num_bytes for region in image.program.regions}.get(KEPT_GUESSES, 0)
        self._guess_memory = map_zeros(num_kept) if num_kept else None
        self._program: _LoadedProgram | None = _LoadedProgram(
            image, facts, self._inputs, self._kv_memory, self._guess_memory, slots
        )
        self._last_step_id = 0
        self._full: Runner | None = None
        """The runner that serves everything; None until something needs it."""

    @property
    def facts(self) -> WorkerFacts:
        return self._facts if self._full is None else self._full.facts

    @property
    def adapters(self) -> LateAdapters:
        """The adapters that rows may name, also when torch computes them."""
        assert self._adapters is not None, "worker.max_adapters is 0"
        return self._adapters

    @property
    def has_resumed(self) -> bool:
        """Whether torch computes what a program does not."""
        return self._full is not None

    def prepare(self, plan: StepPlan) -> None:
        """Let another runner take over before a row enters that a program does not serve.

        While the model is loaded, such rows are sent back if the engine takes them again, and all others go on. Rows
        that become vectors are waited for: what is left of one that was sent back has no place in another runner.
        """
        if self.has_resumed or not any(map(_needs_more, plan.new_rows)):
            return
        is_pooled = any(row.content.pooling is not None for row in plan.new_rows)
        if plan.may_defer_rows and not is_pooled and not self._begin_loading().done():
            return
        for row in self._sent_back:  # the engine drops what they still get
            self._rows.sampling.enter(row.slot, SamplingParams(temperature=0.0), 0)
        self._resumed("a request needs more than a stored program")

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> PendingStep:
        """Launch one step; see `Runner.launch`."""
        if self._full is not None:
            return self._full.launch(plan, on_prepared)
        return self._compute(plan, on_prepared)

    def _compute(self, plan: StepPlan, on_prepared: Callable[[], None]) -> PendingStep:
        assert self._program is not None, "dropped when another runner has taken over"
        if plan.step_id != self._last_step_id + 1:
            raise ProtocolViolation(
                f"step_id: {plan.step_id} came after {self._last_step_id}; expected {self._last_step_id + 1}"
            )
        started = time.perf_counter_ns()
        step = self._send_back(plan, self._rows.apply(plan))
        self._last_step_id = plan.step_id
        if not step.slots.size:
            timings = StepTimings(prepare_ns=time.perf_counter_ns() - started)
            return CompletedStep(
                StepResult(plan.step_id, empty_u32(), row_errors=step.row_errors, timings=timings)
            )
        if self._speculation is not None:
            step = self._speculation.guess(step)
        sizes = self._inputs.gather(self._rows, step)
        on_prepared()
        prepared = time.perf_counter_ns()
        sampled = _sampled(self._program.run(sizes), step.places)
        forwarded = time.perf_counter_ns()
        guesses = self._advance(step, sampled, forwarded - prepared)
        timings = StepTimings(
            prepare_ns=prepared - started,
            forward_ns=forwarded - prepared,
            sample_ns=time.perf_counter_ns() - forwarded,
        )
        return CompletedStep(
            publish(plan.step_id, step, self._rows.slot_version, sampled, timings, guesses=guesses)
        )

    def _send_back(self, plan: StepPlan, step: StepRows) -> StepRows:
        """Return the step with those rows marked as not ready that wait for the model. They compute like any other."""
        if self._sent_back:
            removed = set(plan.removed_slots.tolist())
            self._sent_back = {row for row in self._sent_back if row.slot not in removed}
        waiting = {row.key for row in plan.new_rows if _needs_more(row)}
        if not waiting:
            return step
        self._sent_back |= waiting
        return replace(step, row_errors={**dict.fromkeys(waiting, _LOADING), **step.row_errors})

    def _advance(self, step: StepRows, sampled: SampledTokens, forward_ns: int) -> GuessReport | None:
        """Record the tokens of a step, and return what its result says of guesses; None: nothing guesses."""
        self._rows.advance(step, sampled.token_counts)
        self._rows.record(step, sampled.token_ids, sampled.token_counts)
        if self._speculation is None:
            return None
        return self._speculation.finish(step, sampled.token_counts, forward_ns)

    def reset(self) -> None:
        """Forget every row and expect step 1; see `Runner.reset`."""
        if self._full is not None:
            self._full.reset()
            return
        self._rows.clear()
        self._sent_back.clear()
        self._last_step_id = 0

    def block_store(self) -> BlockStore:
        return self._resumed("blocks are transferred").block_store()

    def sleep(self, level: SleepLevel) -> int:
        return self._resumed("it is put to sleep").sleep(level)

    def wake(self) -> None:
        self._resumed("it wakes").wake()

    def _begin_loading(self) -> Future[Resume]:
        """Return the model that is being loaded, on a thread of its own."""
        if self._loading is None:
            loading = self._loading = Future[Resume]()

            def load() -> None:
                try:
                    if self._adapters is not None:
                        self._adapters.store()
                    loading.set_result(self._load())
                except BaseException as error:
                    loading.set_exception(error)

            threading.Thread(target=load, name="load", daemon=True).start()
            log.info("the model is loaded for requests that need more than a stored program; others go on")
        return self._loading

    def _resumed(self, why: str) -> Runner:
        """Return the runner that serves everything, created at the first call.

        Raises:
            ModelError: The checkpoint's files hold another model. The next call tries again.
        """
        if self._full is None:
            started = time.perf_counter()
            try:
                resume = self._begin_loading().result()
            except BaseException:
                self._loading = None
                raise
            adapters = None if self._adapters is None else self._adapters.store()
            self._full = resume(
                HeldState(self._rows, self._kv_memory, self._last_step_id, self._guess_memory, adapters)
            )
            self._program = self._loading = None  # their memory is freed
            log.info("torch serves from now on, after %.1f s: %s", time.perf_counter() - started, why)
        return self._full


class _LoadedProgram:
    """A program with its memory."""

    def __init__(
        self,
        image: Image,
        facts: WorkerFacts,
        inputs: StepInputs,
        kv_memory: mmap.mmap,
        guess_memory: mmap.mmap | None,
        adapter_slots: Mapping[str, NDArray[np.int64]],
    ) -> None:
        """
        Args:
            adapter_slots: As of `_adapter_slots`.
        """
        sizes = {region.name: region.num_bytes for region in image.program.regions}
        buffers = map_zeros(max(sizes[BUFFERS], 1))
        arrays = {f"{INPUT}{name}": array for name, array in inputs.arrays.items()}
        arrays.update(adapter_slots)
        for name, array in arrays.items():
            if sizes.get(name, array.nbytes) != array.nbytes:
                raise ValueError(f"{name} has {array.nbytes} bytes, and {sizes[name]} in the program")
        own = {BUFFERS: buffers, CONSTANTS: image.constants, KV_CACHE: kv_memory}
        if guess_memory is not None:
            own[KEPT_GUESSES] = guess_memory
        self._kept = {name: np.frombuffer(memory, np.uint8) for name, memory in own.items()}
        addresses = {name: int(array.ctypes.data) for name, array in {**arrays, **self._kept}.items()}
        for name, start, _ in kv_parts(facts.kv):
            addresses[f"{KV_CACHE}{name}"] = addresses[KV_CACHE] + start
        self._program = BoundProgram(image.program, addresses)
        self._token_ids = self._output(image.program, TOKEN_IDS)

    def _output(self, program: StoredProgram, number: int) -> NDArray[np.int64]:
        """Return an output that is a column of int64."""
        output = program.outputs[number]
        if output.dtype != "int64" or len(output.shape) != 1:
            raise ValueError(f"output {number} is {output.dtype} {list(output.shape)}, not token ids")
        memory = (ctypes.c_int64 * output.shape[0]).from_address(self._program.address(output))
        return np.ctypeslib.as_array(memory)

    def run(self, sizes: StepSizes) -> NDArray[np.int64]:
        """Compute the step in the inputs, and return a copy of the chosen tokens, [num_sampling]."""
        self._program.run({"tokens": sizes.num_tokens, "rows": sizes.num_rows, "samples": sizes.num_sampling})
        return self._token_ids[: sizes.num_sampling].copy()


def _needs_more(row: NewRow) -> bool:
    """Return whether a program alone does not serve a row."""
    return row.content.pooling is not None or not is_plain(row.sampling)


def _adapter_slots(program: StoredProgram, max_adapters: int) -> dict[str, NDArray[np.int64]]:
    """Return the addresses of adapters that a program reads, by name of the region: [max_adapters] for each layer."""
    return {
        region.name: np.zeros(max_adapters, np.int64)
        for region in program.regions
        if region.name.startswith(ADAPTERS)
    }


def _sampled(token_ids: NDArray[np.int64], places: SamplingPlaces | None) -> SampledTokens:
    """Return the tokens; a row without a choice fails, since its logits are not finite.

    Args:
        token_ids: [num_sampling]
        places: None: no row guesses.
    """
    if places is not None:
        return places.sampled(token_ids)
    failed = np.flatnonzero(token_ids < 0)
    token_ids[failed] = 0
    return SampledTokens(token_ids, None, tuple((int(row), NOT_FINITE) for row in failed))
