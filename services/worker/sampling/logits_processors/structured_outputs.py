"""`structured_outputs`: tokens that cannot continue the output in its form are masked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, wait
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.context.rank_group import OneRank, RankGroup
from services.worker.sampling.batch import to_device
from services.worker.sampling.grammars import Compilation, GrammarCompiler, GrammarError
from services.worker.sampling.logits_processors.base import (
    I64,
    ChangedRows,
    Flags,
    OwnRow,
    SlotValues,
)
from services.worker.sampling.params import LogitChange, TokenHistory
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError, RowErrorCode

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

COMPILE_TIMEOUT_S = 30.0
"""The longest wait of a request for its grammar. The frontend has compiled it before, in a few seconds at most."""
GRACE_S = 0.005
"""The longest wait of a step for grammars whose rows may be left out: most need no more, and come in one step then."""
MASK_BURST_S, MASK_S = 0.25, 0.002
"""CPU time that the masks of one request may take: at the beginning, as automata are built, and for each token more."""
_SLOW_MASKS_S = 0.02  # for all masks of a step; beyond it those of the next steps are measured one by one
NOT_READY = RowError(
    "structured_outputs: the grammar is being compiled", RowErrorCode.NOT_READY, kv_is_valid=True
)
NO_COMPILER = RowError("structured_outputs: this worker was started without a tokenizer", kv_is_valid=True)
MASKED_BY_OTHERS = RowError.of_client(
    "structured_outputs: allowed_token_ids, logit_bias or min_tokens mask every token that this form allows here; "
    "allow more, or leave them out"
)
_NO_MATCH = "doesn't satisfy the grammar"
"""How llguidance says that a token does not continue the form, rather than that a limit was reached."""


class StructuredForms:
    """A `JudgingProcessor`.

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
        """Whether rows whose grammar is not compiled are left out of a step, which waits for them otherwise. The runner
        sets it for each step."""
        self._mask_ns = 0
        self._group = group or OneRank()
        self._entered: set[int] = set()
        """Slots of the requests that have no matcher yet."""
        self._measures_each = False
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._history = history
        self._outputs: SlotValues[_Output] = SlotValues(max_num_seqs)
        self._executor: LLExecutor | None = None
        """Threads that compute masks, from the first step that needs several."""

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        form = params.structured_outputs
        if form is None:
            return LogitChange.NEVER
        assert form.grammar is not None, "the frontend has compiled it"
        prototype = None if self._compiler is None else self._compiler.start(form.grammar)
        # Filters work on what the mask leaves, so that the first choice says nothing about the last.
        can_keep_first = params.is_greedy or not params.has_filters
        self._entered.add(slot)
        self._outputs[slot] = _Output(
            prototype, (*self._eos_token_ids, *params.stop_token_ids), can_keep_first=can_keep_first
        )
        return LogitChange.SOMETIMES if can_keep_first else LogitChange.ALWAYS

    def leave(self, slot: int) -> None:
        self._entered.discard(slot)
        self._outputs.discard(slot)

    def begin_step(self, slots: I64, device: torch.device) -> None:
        """Give the requests that are sampled for the first time their matchers, or leave them out.

        Those left out get no token until the engine has removed them. All ranks leave out the same ones: where one has
        no matcher yet, none samples.
        """
        if not self._entered:
            return
        outputs = [self._outputs[slot] for slot in slots.tolist() if slot in self._entered]
        if not outputs:
            return
        self._entered.difference_update(slots.tolist())
        compilations = [each.compilation for each in outputs if each.compilation is not None]
        wait(compilations, GRACE_S if self.may_defer else COMPILE_TIMEOUT_S)
        is_missing = np.array(
            [each.compilation is not None and not each.compilation.done() for each in outputs]
        )
        if self._group.tensor_parallel_size > 1:
            counts = torch.tensor(is_missing[None], dtype=torch.float32, device=device)
            is_missing = self._group.all_reduce(counts)[0].numpy(force=True) > 0
        for output, misses in zip(outputs, is_missing.tolist(), strict=True):
            output.start(is_missing=misses, may_defer=self.may_defer)

    def take_mask_ns(self) -> int:
        mask_ns, self._mask_ns = self._mask_ns, 0
        return mask_ns

    def find_rows(self, slots: I64) -> Flags | None:
        return self._outputs.find_rows(slots)

    def lets_pass(self, slot: int, token_id: int) -> bool:
        output = self._outputs[slot]
        return output.can_keep_first and token_id >= 0 and self._advanced(slot).may_come(token_id)

    def apply(self, logits: Tensor, changed: ChangedRows, own: Sequence[OwnRow]) -> Mapping[int, RowError]:
        outputs = [self._advanced(slot) for _, slot in own]
        vocab_size = logits.shape[1]
        bits = np.zeros((len(own), -(-vocab_size // 32)), np.uint32)  # [num_own, words] 1: may come
        self._fill(bits, outputs)
        for output, row_bits in zip(outputs, bits, strict=True):
            output.finish_mask(row_bits)
        allowed = _unpacked(to_device(bits.view(np.int32), logits.device), vocab_size)
        if len(own) == logits.shape[0]:
            logits.masked_fill_(~allowed, -torch.inf)
        else:
            rows = to_device(np.array([row for row, _ in own]), logits.device)
            logits.index_copy_(0, rows, torch.where(allowed, logits.index_select(0, rows), -torch.inf))
        failed = zip(own, outputs, strict=True)
        return {row: output.error for (row, _), output in failed if output.error is not None}

    def _advanced(self, slot: int) -> _Output:
        """Return the output of a slot after it has taken in the latest tokens."""
        output, history = self._outputs[slot], self._history
        output.advance(history.token_ids[slot, history.num_prompt[slot] : history.num_known[slot]])
        return output

    def _fill(self, bits: NDArray[np.uint32], outputs: Sequence[_Output]) -> None:
        """Write the mask of each output that has a matcher."""
        started = time.perf_counter_ns()
        ready = [(each, index) for index, each in enumerate(outputs) if each.matcher is not None]
        if len(ready) > 1 and not self._measures_each:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(torch.get_num_threads())
            matchers = [(each.matcher, index) for each, index in ready if each.matcher is not None]
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))
        else:
            for output, index in ready:
                output.fill(bits[index])
        elapsed_ns = time.perf_counter_ns() - started
        self._mask_ns += elapsed_ns
        self._measures_each = elapsed_ns > _SLOW_MASKS_S * 1e9


class _Output:
    """The state of one request."""

    def __init__(
        self, compilation: Compilation | None, end_ids: Sequence[int], *, can_keep_first: bool
    ) -> None:
        """
        Args:
            compilation: Gives the matcher before the first token; None: there will be none.
            end_ids: Tokens that end the output: EOS and the request's stop ids.
            can_keep_first: Whether a token that may come is the choice if it is the best of all.
        """
        self.can_keep_first = can_keep_first
        self.compilation = compilation
        self.matcher: LLMatcher | None = None
        """The request's own matcher; None before the first step and after an error."""
        self.error = None if compilation is not None else NO_COMPILER
        self._mask_s = 0.0
        """CPU time of the masks that were measured, less what they may take."""
        self._end_ids = frozenset(end_ids)
        self._num_seen = 0
        """Tokens of the output that the matcher has taken."""
        self._has_ended = False

    def advance(self, output: NDArray[np.integer]) -> None:
        """Take in what came since the last call.

        Args:
            output: [num_output] all tokens so far.
        """
        if self.error is not None:
            return
        for token_id in output[self._num_seen :].tolist():
            # A step may be on its way behind the end; its token is dropped.
            self._has_ended = self._has_ended or token_id in self._end_ids
            if self.matcher is None or self._has_ended:
                break
            if not self.matcher.consume_token(token_id):
                self._fail(_why_not_consumed(self.matcher))
        self._num_seen = output.size

    def may_come(self, token_id: int) -> bool:
        """Return whether the mask surely has this token."""
        if self.matcher is None or self._has_ended or self.matcher.is_error():
            return False
        if token_id in self._end_ids:
            return self.matcher.is_accepting()
        return self.matcher.validate_tokens([token_id]) == 1

    def finish_mask(self, bits: NDArray[np.uint32]) -> None:
        """Set what the matcher does not know of, [words], bit t % 32 of word t // 32 for token t."""
        if self.matcher is not None and self.matcher.is_error():  # its mask would end the output
            self._fail(RowError.of_client(f"structured_outputs: {_first_line(self.matcher.get_error())}"))
        if self.matcher is None:
            bits[:] = 0
        elif self._has_ended or self.matcher.is_accepting():
            for token_id in self._end_ids:
                bits[token_id // 32] |= np.uint32(1 << token_id % 32)

    def start(self, *, is_missing: bool, may_defer: bool) -> None:
        """Take the matcher, or the error of a request that has none.

        Args:
            is_missing: Whether it is not compiled yet, on this rank or another.
        """
        if self.compilation is None:
            return
        if is_missing:
            is_late = time.monotonic() - self.compilation.started_at > COMPILE_TIMEOUT_S
            self._fail(NOT_READY if may_defer and not is_late else _NOT_COMPILED)
            return
        try:
            self.matcher = self.compilation.result().deep_copy()
        except CancelledError:
            self._fail(_NOT_COMPILED)
        except GrammarError as error:
            self._fail(RowError(f"structured_outputs: {_first_line(str(error))}", kv_is_valid=True))

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """Write the mask, [words], and measure it. The request fails if its masks take too long altogether."""
        assert self.matcher is not None, "nothing to fill it from"
        started = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._mask_s = max(self._mask_s + time.thread_time() - started - MASK_S, 0.0)
        if self._mask_s > MASK_BURST_S:
            self._fail(_SLOW_MASKS)

    def _fail(self, error: RowError) -> None:
        self.matcher, self.error = None, error


def _unpacked(words: Tensor, num_bits: int) -> Tensor:
    """Return the bits of each row, [num_rows, num_bits] bool.

    Args:
        words: [num_rows, words] int32, the lowest bit first.
    """
    if words.device.type == "cpu":
        packed = words.numpy().view(np.uint8)
        return torch.from_numpy(
            np.unpackbits(packed, axis=1, bitorder="little", count=num_bits).view(np.bool_)
        )
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> places) & 1).flatten(1)[:, :num_bits].bool()


_NOT_COMPILED = RowError(
    f"structured_outputs: the grammar is not compiled after {COMPILE_TIMEOUT_S:g} s; try again",
    kv_is_valid=True,
)
_SLOW_MASKS = RowError.of_client(
    f"structured_outputs: the masks of this form took {MASK_BURST_S:g} s of CPU time more than the limit of "
    f"{1e3 * MASK_S:g} ms each; make it less ambiguous"
)


def _why_not_consumed(matcher: LLMatcher) -> RowError:
    """Return the error of a row whose matcher has not taken a token."""
    why = _first_line(matcher.get_error())
    if _NO_MATCH in why:
        why = f"the output so far does not have this form: {why}; go on with another request"
    return RowError.of_client(f"structured_outputs: {why}")


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:300]
