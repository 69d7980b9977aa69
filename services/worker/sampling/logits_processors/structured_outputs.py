"""`structured_outputs`: tokens that cannot continue the output in its form are masked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError
from triptych_services.worker.context.rank_group import OneRank, RankGroup
from triptych_services.worker.sampling.form_output import (
    MASKED_BY_OTHERS,
    SLOW_MASK_S,
    FormOutput,
    allow,
    await_grammars,
    leave_out_late,
)
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.sampling.logits_processors.base import (
    I64,
    Flags,
    OwnRow,
    SlotValues,
)
from triptych_services.worker.sampling.params import LogitChange, TokenHistory

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_SLOW_MASKS_S = 0.005  # for the masks that threads compute together; beyond it the next step measures each


class StructuredForms:
    """A `MaskingProcessor` and a `JudgingProcessor`.

    The matchers advance by the tokens of the history since the step before. A request that enters with tokens, after a
    preemption or a crash, advances by all of these.
    """

    needs_history = True
    fault = MASKED_BY_OTHERS

    def __init__(
        self,
        max_num_seqs: int,
        *,
        compiler: GrammarCompiler | None,
        eos_token_ids: Sequence[int],
        history: TokenHistory,
        group: RankGroup | None = None,
    ) -> None:
        """
        Args:
            compiler: None: requests with a form fail.
            group: The ranks that sample the same rows, which leave out the same ones; None: one rank.
        """
        self.may_defer = False
        """Whether rows without a compiled grammar, or with a late mask, are left out of a step. It waits for them
        otherwise. The runner sets it for each step."""
        self._mask_ns = 0
        self._group = group or OneRank()
        self._entered: set[int] = set()
        """Slots of the requests that have no matcher yet."""
        self._measures_each = False
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._history = history
        self._outputs: SlotValues[FormOutput] = SlotValues(max_num_seqs)
        self._executor: LLExecutor | None = None
        """Threads that compute masks, from the first step with many."""

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        form = params.structured_outputs
        if form is None:
            return LogitChange.NEVER
        assert form.grammar is not None, "the frontend has compiled it"
        prototype = None if self._compiler is None else self._compiler.start(form.grammar)
        # Filters work on what the mask leaves, so that the first choice says nothing about the last.
        can_keep_first = params.is_greedy or not params.has_filters
        self._entered.add(slot)
        self._outputs[slot] = FormOutput(
            prototype, (*self._eos_token_ids, *params.stop_token_ids), can_keep_first=can_keep_first
        )
        return LogitChange.SOMETIMES if can_keep_first else LogitChange.ALWAYS

    def leave(self, slot: int) -> None:
        self._entered.discard(slot)
        self._outputs.discard(slot)

    def begin_step(self, slots: I64, device: torch.device) -> None:
        """Give the requests that are sampled for the first time their matchers, or leave them out; advance all others.

        Those left out get no token until the engine has removed them. All ranks leave out the same ones: where one has
        no matcher yet, none samples.
        """
        flags = self._outputs.find_rows(slots)
        if flags is None:
            return
        own_slots = slots[flags]
        if self._entered:
            self._start([slot for slot in own_slots.tolist() if slot in self._entered], device)
        self._advance(own_slots)

    def _start(self, slots: Sequence[int], device: torch.device) -> None:
        """Give requests their matchers, or leave them out."""
        if not slots:
            return
        outputs = [self._outputs[slot] for slot in slots]
        self._entered.difference_update(slots)
        is_missing = await_grammars(outputs, may_defer=self.may_defer)
        if self._group.tensor_parallel_size > 1:
            counts = torch.tensor(is_missing[None], dtype=torch.float32, device=device)
            is_missing = self._group.all_reduce(counts)[0].numpy(force=True) > 0
        for output, misses in zip(outputs, is_missing.tolist(), strict=True):
            output.start(is_missing=misses, may_defer=self.may_defer)

    def _advance(self, slots: I64) -> None:
        """Let the matchers take in the tokens since the step before, nearly always one."""
        history = self._history
        num_prompt, num_known = history.num_prompt[slots], history.num_known[slots]
        newest = history.token_ids[slots, num_known - 1]
        columns = (slots, num_prompt, num_known, newest)
        for slot, first, end, token_id in zip(*(column.tolist() for column in columns), strict=True):
            output = self._outputs[slot]
            num_new = end - first - output.num_seen
            if num_new == 1:
                output.take((token_id,))
            elif num_new:
                output.take(history.token_ids[slot, first + output.num_seen : end].tolist())

    @property
    def tokenizer(self) -> LLTokenizer | None:
        """Cuts texts as the model's tokenizer does; None before the first grammar is compiled."""
        return None if self._compiler is None else self._compiler.tokenizer

    def look_ahead(self, slot: int) -> LLMatcher | None:
        """Return a copy of the matcher of a slot that has taken in all known tokens; None: nothing can be matched.

        The request's own matcher takes in the tokens as well, which the next step would let it do otherwise.
        """
        if slot not in self._outputs:
            return None
        self._advance(np.array([slot]))
        return self._outputs[slot].look_ahead()

    def take_mask_ns(self) -> int:
        mask_ns, self._mask_ns = self._mask_ns, 0
        return mask_ns

    def find_rows(self, slots: I64) -> Flags | None:
        return self._outputs.find_rows(slots)

    def settle(self, slots: I64, token_ids: I64) -> I64:
        settled, started = list[int](), self._mask_ns
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            output = self._outputs[slot]
            is_settled = token_id < 0 or token_id == output.forced
            if not is_settled and not (output.can_keep_first and output.may_come(token_id)):
                token_id = self._forced(output)
            settled.append(token_id)
        self._measures_each |= self._mask_ns - started > _SLOW_MASKS_S * 1e9
        return np.array(settled, np.int64)

    def _forced(self, output: FormOutput) -> int:
        """Return the only token that may come, or -1 where that is not known, or may take long to find."""
        forced = output.forced
        if forced is None and self._is_fast(output):
            started = time.perf_counter_ns()
            forced = output.find_forced()
            self._mask_ns += time.perf_counter_ns() - started
        return -1 if forced is None else forced

    def _is_fast(self, output: FormOutput) -> bool:
        """Return whether the next mask of an output need not be measured."""
        if output.matcher is None or self._measures_each:
            return False
        return output.mask_s is not None and output.mask_s <= SLOW_MASK_S

    def masks(
        self, vocab_size: int, own: Sequence[OwnRow]
    ) -> tuple[NDArray[np.uint32], Mapping[int, RowError]]:
        outputs = [self._outputs[slot] for _, slot in own]
        # Ranks measure different times. They would have to agree, in each step with a form.
        if self.may_defer and self._group.tensor_parallel_size == 1:
            leave_out_late(outputs)
        bits = np.zeros((len(own), -(-vocab_size // 32)), np.uint32)
        self._fill(bits, outputs)
        for output, row_bits in zip(outputs, bits, strict=True):
            output.finish_mask(row_bits)
        failed = zip(own, outputs, strict=True)
        return bits, {row: output.error for (row, _), output in failed if output.error is not None}

    def _fill(self, bits: NDArray[np.uint32], outputs: Sequence[FormOutput]) -> None:
        """Write the mask of each output that has a matcher."""
        started = time.perf_counter_ns()
        fast: list[tuple[LLMatcher, int]] = []
        for index, output in enumerate(outputs):
            if output.matcher is None:
                continue
            if self._is_fast(output):
                fast.append((output.matcher, index))
            else:
                output.fill(bits[index])
        started_together = time.perf_counter_ns()
        together: list[tuple[LLMatcher, int]] = []
        expected_s = 0.0
        for matcher, index in fast:
            if (token_id := outputs[index].find_forced()) is not None:
                allow(bits[index], token_id)
            else:
                together.append((matcher, index))
                expected_s += outputs[index].mask_s or 0.0
        if expected_s <= SLOW_MASK_S:  # to wake threads would take longer
            for _, index in together:
                outputs[index].fill(bits[index])
        else:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(torch.get_num_threads())
            self._executor.unsafe_compute_mask_ptr(together, bits.ctypes.data, bits.strides[0], len(bits))
        ended = time.perf_counter_ns()
        self._mask_ns += ended - started
        self._measures_each = ended - started_together > _SLOW_MASKS_S * 1e9
