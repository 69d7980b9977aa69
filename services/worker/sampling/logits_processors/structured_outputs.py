"""`structured_outputs`: tokens that cannot continue the output in its form are masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.batch import to_device
from services.worker.sampling.grammars import GrammarCompiler, GrammarError
from services.worker.sampling.logits_processors.base import (
    I64,
    ChangedRows,
    Flags,
    OwnRow,
    SlotValues,
)
from services.worker.sampling.params import LogitChange, TokenHistory
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

COMPILE_TIMEOUT_S = 30.0
"""The longest wait of a step for a grammar. The frontend has compiled it before, in a few seconds at most."""
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
    ) -> None:
        """
        Args:
            compiler: None: requests with a form fail.
        """
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
        self._outputs[slot] = _Output(
            prototype, (*self._eos_token_ids, *params.stop_token_ids), can_keep_first=can_keep_first
        )
        return LogitChange.SOMETIMES if can_keep_first else LogitChange.ALWAYS

    def leave(self, slot: int) -> None:
        self._outputs.discard(slot)

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
        matchers = [(each.matcher, index) for index, each in enumerate(outputs) if each.matcher is not None]
        if len(matchers) > 1:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(torch.get_num_threads())
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))
            return
        for matcher, index in matchers:
            matcher.unsafe_compute_mask_ptr(bits[index].ctypes.data, bits.strides[0])


class _Output:
    """The state of one request."""

    def __init__(
        self, prototype: Future[LLMatcher] | None, end_ids: Sequence[int], *, can_keep_first: bool
    ) -> None:
        """
        Args:
            prototype: Matcher before the first token; None: there will be none.
            end_ids: Tokens that end the output: EOS and the request's stop ids.
            can_keep_first: Whether a token that may come is the choice if it is the best of all.
        """
        self.can_keep_first = can_keep_first
        self.matcher: LLMatcher | None = None
        """The request's own matcher; None before the first step and after an error."""
        self.error = None if prototype is not None else NO_COMPILER
        self._prototype = prototype
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
        if self.matcher is None:
            self._start()
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

    def _start(self) -> None:
        assert self._prototype is not None, "else there is an error"
        try:
            self.matcher = self._prototype.result(COMPILE_TIMEOUT_S).deep_copy()
        except TimeoutError:
            why = f"the grammar is not compiled after {COMPILE_TIMEOUT_S:g} s; try again"
            self._fail(RowError(f"structured_outputs: {why}", kv_is_valid=True))
        except GrammarError as error:
            self._fail(RowError(f"structured_outputs: {_first_line(str(error))}", kv_is_valid=True))

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


def _why_not_consumed(matcher: LLMatcher) -> RowError:
    """Return the error of a row whose matcher has not taken a token."""
    why = _first_line(matcher.get_error())
    if _NO_MATCH in why:
        why = f"the output so far does not have this form: {why}; go on with another request"
    return RowError.of_client(f"structured_outputs: {why}")


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:300]
