"""One output that has a form: its matcher, the tokens that may come next, and why it fails. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import CancelledError, wait
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import RowError, RowErrorCode
from triptych_services.worker.sampling.grammars import Compilation, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPILE_TIMEOUT_S = 30.0
"""The longest wait of a request for its grammar. The frontend has compiled it before, in a few seconds at most."""
GRACE_S = 0.005
"""The longest wait of a step for grammars of rows that may be left out: most need no more, and come in one step."""
MASK_BURST_S, MASK_S = 0.25, 0.002
"""CPU time that the masks of one request may take: at the beginning, as automata are built, and for each token more."""
SLOW_MASK_S = 0.0005
"""A mask that is expected to take more counts as slow."""
SLOW_MASKS_S = 0.008
"""The slow masks of one step may take so much time together; the rows of the others leave the step."""
UNKNOWN_MASK_S = 0.002
"""The first mask of a grammar is taken to need so much."""
_FADING = 0.5  # of what a mask is expected to take, with each one of the grammar that takes less
MASK_LIMIT_S = 0.03
"""CPU time that a mask may take, but for one of a request: the one that builds automata, or that a busy machine slowed
down. A mask of 500 optional properties takes 4 ms, those of other forms take less."""
NOT_READY = RowError(
    "structured_outputs: the grammar is being compiled", RowErrorCode.NOT_READY, kv_is_valid=True
)
NO_COMPILER = RowError("structured_outputs: this worker was started without a tokenizer", kv_is_valid=True)
LATE = RowError(
    "structured_outputs: the mask is computed in a later step", RowErrorCode.NOT_READY, kv_is_valid=True
)
MASKED_BY_OTHERS = RowError.of_client(
    "structured_outputs: allowed_token_ids, bad_words, logit_bias or min_tokens mask every token that this form "
    "allows here; allow more, or leave them out"
)
_NO_MATCH = "doesn't satisfy the grammar"
"""How llguidance says that a token does not continue the form, rather than that a limit was reached."""
_NOT_COMPILED = RowError(
    f"structured_outputs: the grammar is not compiled after {COMPILE_TIMEOUT_S:g} s; try again",
    kv_is_valid=True,
)
_SLOW_MASK = RowError.of_client(
    f"structured_outputs: two masks of this form took more CPU time than the limit of {1e3 * MASK_LIMIT_S:g} ms; make "
    "it less ambiguous"
)
_SLOW_MASKS = RowError.of_client(
    f"structured_outputs: the masks of this form took {MASK_BURST_S:g} s of CPU time more than the limit of "
    f"{1e3 * MASK_S:g} ms each; make it less ambiguous"
)


class FormOutput:
    """The state of one request with a form."""

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
        self._had_long_mask = False
        """A mask took more than MASK_LIMIT_S."""
        self._end_ids = frozenset(end_ids)
        self.num_seen = 0
        """Tokens of the output that the matcher has taken."""
        self._has_ended = False
        self._forced: list[int] = []
        """Tokens that the form forces next, the last one first. Empty: it may force one that is not known yet."""

    def advance(self, output: NDArray[np.integer]) -> None:
        """Take in what came since the last call.

        Args:
            output: [num_output] all tokens so far.
        """
        self.take(output[self.num_seen :].tolist())

    def take(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that came since the last call, and no others."""
        if self.error is not None:
            return
        self.num_seen += len(token_ids)
        for token_id in token_ids:
            # A step may be on its way behind the end; its token is dropped.
            self._has_ended = self._has_ended or token_id in self._end_ids
            if self.matcher is None or self._has_ended:
                self._forced.clear()
                return
            if self._forced and self._forced.pop() != token_id:
                self._forced.clear()  # the output spells the text in another way
            if not self.matcher.consume_token(token_id):
                self._fail(_why_not_consumed(self.matcher))

    def may_come(self, token_id: int) -> bool:
        """Return whether the mask surely has this token."""
        if self.matcher is None or self._has_ended or self.matcher.is_error():
            return False
        if token_id in self._end_ids:
            return self.matcher.is_accepting()
        return self.matcher.validate_tokens([token_id]) == 1

    @property
    def forced(self) -> int | None:
        """The only token that the next mask has; None: that is not known, see `find_forced`."""
        return self._forced[-1] if self._forced else None

    def find_forced(self) -> int | None:
        """Return the only token that the next mask has, or None if it may have several.

        Where a form forces a text, llguidance cuts it into tokens for each of their masks. Here that is done for the
        first one, and holds for the others while the output follows. It does not where a token may end within a
        character: llguidance spells the rest of one in another way than the whole.
        """
        assert self.matcher is not None, "nothing forces a token"
        if self._forced or self._has_ended:
            return self.forced
        token_ids = self.matcher.compute_ff_tokens()
        if len(token_ids) > 1 and not self.matcher.compute_ff_bytes().isascii():
            del token_ids[1:]
        self._forced = token_ids[::-1]
        return self.forced

    def look_ahead(self) -> LLMatcher | None:
        """Return a copy of the matcher; None if it takes no token any more."""
        if self.matcher is None or self._has_ended or self.matcher.is_error():
            return None
        return self.matcher.deep_copy()

    def finish_mask(self, bits: NDArray[np.uint32]) -> None:
        """Set what the matcher does not know of, [words], bit t % 32 of word t // 32 for token t."""
        if self._forced:
            return  # there is no error, and the form is not whole
        if self.matcher is not None and self.matcher.is_error():  # its mask would end the output
            self._fail(RowError.of_client(f"structured_outputs: {_first_line(self.matcher.get_error())}"))
        if self.matcher is None:
            bits[:] = 0
        elif self._has_ended or self.matcher.is_accepting():
            for token_id in self._end_ids:
                allow(bits, token_id)

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
        """Write the mask, [words], and measure it. The request fails if two take too long, or all its masks do."""
        assert self.matcher is not None, "nothing to fill it from"
        assert self.compilation is not None, "it gave the matcher"
        started = time.thread_time()
        if (token_id := self.find_forced()) is not None:
            allow(bits, token_id)
        else:
            self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        took_s = time.thread_time() - started
        self.compilation.mask_s = max(took_s, _FADING * (self.compilation.mask_s or 0.0))
        self._mask_s = max(self._mask_s + took_s - MASK_S, 0.0)
        if self.matcher.is_error():
            return  # `finish_mask` says why
        if self._mask_s > MASK_BURST_S:
            self._fail(_SLOW_MASKS)
        elif took_s > MASK_LIMIT_S:
            if self._had_long_mask:
                self._fail(_SLOW_MASK)
            self._had_long_mask = True

    def leave(self) -> None:
        """Get no token until the engine has removed the row; it plans it again a little later."""
        self._fail(LATE)

    @property
    def mask_s(self) -> float | None:
        """CPU time that the next mask is expected to take, in seconds; None: no mask of the grammar was measured."""
        return None if self.compilation is None else self.compilation.mask_s

    def _fail(self, error: RowError) -> None:
        self.matcher, self.error = None, error
        self._forced.clear()


def allow(bits: NDArray[np.uint32], token_id: int) -> None:
    """Set the bit of a token in a mask, [words]."""
    bits[token_id // 32] |= np.uint32(1 << token_id % 32)


def await_grammars(outputs: Collection[FormOutput], *, may_defer: bool) -> NDArray[np.bool_]:
    """Wait for the grammars of outputs that begin, shortly where rows may be left out; return which are missing."""
    compilations = [each.compilation for each in outputs if each.compilation is not None]
    wait(compilations, GRACE_S if may_defer else COMPILE_TIMEOUT_S)
    return np.array([each.compilation is not None and not each.compilation.done() for each in outputs])


def leave_out_late(outputs: Iterable[FormOutput]) -> None:
    """Leave out of a step the outputs with masks that would hold it for too long: of the slow ones, the slowest.

        expected to take   0.1   0.1   0.3   0.6   2.5   4.9   5.0  ms
                           └── always ──┘  └ up to 8 ms ┘ └ left out

    One slow mask is always computed, so each has its turn when those before it have ended.
    """
    slow: list[tuple[float, int, FormOutput]] = []
    seen: set[int] = set()
    for number, output in enumerate(outputs):
        if output.matcher is None or output.forced is not None:
            continue
        mask_s = output.mask_s
        if mask_s is None:  # the others of this grammar are taken to be like the first
            mask_s = 0.0 if id(output.compilation) in seen else UNKNOWN_MASK_S
            seen.add(id(output.compilation))
        if mask_s > SLOW_MASK_S:
            slow.append((mask_s, number, output))
    total_s = 0.0
    for place, (mask_s, _, output) in enumerate(sorted(slow, key=lambda entry: entry[:2])):
        total_s += mask_s
        if place and total_s > SLOW_MASKS_S:
            output.leave()


def _why_not_consumed(matcher: LLMatcher) -> RowError:
    """Return the error of a row after its matcher has not taken a token."""
    why = _first_line(matcher.get_error())
    if _NO_MATCH in why:
        why = f"the output so far does not have this form: {why}; go on with another request"
    return RowError.of_client(f"structured_outputs: {why}")


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:300]
