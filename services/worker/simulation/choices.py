"""Tokens of requests that may not have any word: forms, biases, bad words and allowed ids, as a simulation has them.

    candidates    the form's mask, or the allowed ids, or all words
    less          bad words, biases of -100, and the end below min_tokens
    weights       1, or e^bias; greedy takes the heaviest
    a form        ends with a chance of 1/4 where it may, and takes a token that closes something with a chance of 1/4

Random words alone would hardly ever close a string, so forms would not end.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError
from triptych_services.worker.sampling.form_output import (
    MASKED_BY_OTHERS,
    FormOutput,
    await_grammars,
    leave_out_late,
)
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.sampling.params import NOTHING_ALLOWED, TokenHistory

I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]

_BANNED = -100.0
_QUARTER = 1 << 62  # of the values of 64 bits


@dataclass(slots=True, eq=False)
class _Request:
    """The constraints of one request, and the part of its output that they read."""

    allowed_ids: I64 | None
    biases: dict[int, float]
    bad_words: Sequence[Sequence[int]]
    stop_ids: frozenset[int]
    is_greedy: bool
    form: FormOutput | None
    output: list[int] = field(default_factory=list)


class ConstrainedChoices:
    """The requests with tokens that are not any word, by slot. Owned by the sampler."""

    def __init__(
        self,
        *,
        vocab_size: int,
        word_ids: I64,
        closing_ids: I64,
        eos_token_ids: Sequence[int],
        history: TokenHistory,
        compiler: GrammarCompiler | None,
    ) -> None:
        """
        Args:
            word_ids, closing_ids: As of `SimulatedRunner`.
            compiler: None: requests with a form fail.
        """
        self._vocab_size = vocab_size
        self._is_word = self._flags(word_ids)
        self._is_closing = self._flags(closing_ids)
        self._eos_token_ids = tuple(eos_token_ids)
        self._history = history
        self._compiler = compiler
        self._requests: dict[int, _Request] = {}
        self._entered: set[int] = set()
        """Slots of the requests with a form that have no matcher yet."""
        self._mask_ns = 0

    def enter(self, slot: int, token_ids: NDArray[np.integer], params: SamplingParams) -> bool:
        """Take in a new row with its known tokens; return whether its tokens are chosen here."""
        self._requests.pop(slot, None)
        self._entered.discard(slot)
        has_any = (
            params.allowed_token_ids or params.logit_bias or params.bad_words or params.structured_outputs
        )
        if not has_any:
            return False
        form = None
        if params.structured_outputs is not None:
            assert params.structured_outputs.grammar is not None, "the frontend has compiled it"
            compilation = None
            if self._compiler is not None:
                compilation = self._compiler.start(params.structured_outputs.grammar)
            form = FormOutput(
                compilation, (*self._eos_token_ids, *params.stop_token_ids), can_keep_first=False
            )
            self._entered.add(slot)
        self._requests[slot] = _Request(
            np.unique(np.array(params.allowed_token_ids, np.int64)) if params.allowed_token_ids else None,
            dict(params.logit_bias or {}),
            params.bad_words,  # type: ignore[arg-type]  # the frontend has made ids of them
            frozenset(params.stop_token_ids),
            params.is_greedy,
            form,
            token_ids[self._history.num_prompt[slot] :].tolist(),
        )
        return True

    def begin_step(self, slots: I64, *, may_defer: bool) -> None:
        """Give requests that are sampled for the first time their matchers, and leave out those that are not ready."""
        if not self._requests:
            return
        requests = ((slot, self._requests[slot]) for slot in slots.tolist() if slot in self._requests)
        slot_to_form = {slot: request.form for slot, request in requests if request.form is not None}
        entered = [form for slot, form in slot_to_form.items() if slot in self._entered]
        self._entered.difference_update(slot_to_form)
        if entered:
            for form, is_missing in zip(entered, await_grammars(entered, may_defer=may_defer), strict=True):
                form.start(is_missing=bool(is_missing), may_defer=may_defer)
        if may_defer:
            leave_out_late(slot_to_form.values())

    def take_mask_ns(self) -> int:
        """Return the time spent on masks since the last call."""
        mask_ns, self._mask_ns = self._mask_ns, 0
        return mask_ns

    def choose(self, slot: int, bits: int, *, is_below_min: bool) -> int | RowError:
        """Return the next token of a slot, or why there is none.

        Args:
            bits: 64 random bits, which decide it.
            is_below_min: Whether the output is shorter than min_tokens.
        """
        request = self._requests[slot]
        may_come = self._candidates(request)
        if isinstance(may_come, RowError):
            return may_come
        may_come &= ~self._flags(self._banned(request, is_below_min=is_below_min))
        if not may_come.any():
            return NOTHING_ALLOWED if request.form is None else MASKED_BY_OTHERS
        if request.form is not None:
            may_come = self._walk(may_come, request, bits)
        token_id = _weighted(np.flatnonzero(may_come), request.biases, bits, is_greedy=request.is_greedy)
        request.output.append(token_id)
        return token_id

    def _banned(self, request: _Request, *, is_below_min: bool) -> set[int]:
        banned = {token_id for token_id, bias in request.biases.items() if bias <= _BANNED}
        if is_below_min:
            banned |= request.stop_ids.union(self._eos_token_ids)
        for word in request.bad_words:
            length = len(word) - 1
            if not length or request.output[-length:] == list(word[:-1]):
                banned.add(int(word[-1]))
        return banned

    def _candidates(self, request: _Request) -> Flags | RowError:
        """Return the tokens that the form, the allowed ids or else the simulation leave, as flags to be changed."""
        if request.form is None:
            if request.allowed_ids is not None:
                return self._flags(request.allowed_ids)
            flags = self._is_word.copy()
            flags[[token_id for token_id, bias in request.biases.items() if bias > 0]] = True
            return flags
        form, started = request.form, time.perf_counter_ns()
        form.advance(np.array(request.output, np.int64))
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        if form.matcher is not None:
            form.fill(words)
        form.finish_mask(words)
        self._mask_ns += time.perf_counter_ns() - started
        if form.error is not None:
            return form.error
        flags = np.unpackbits(words.view(np.uint8), bitorder="little", count=self._vocab_size).view(np.bool_)
        return flags if request.allowed_ids is None else flags & self._flags(request.allowed_ids)

    def _walk(self, may_come: Flags, request: _Request, bits: int) -> Flags:
        """Return the tokens among which a form goes on: its end, what closes something, words, or any."""
        is_end = self._flags([*self._eos_token_ids, *request.stop_ids])
        ends, others = may_come & is_end, may_come & ~is_end
        if ends.any() and (not others.any() or bits % (1 << 64) < _QUARTER):
            return ends
        closing = others & self._is_closing
        if (bits * 0x9E3779B97F4A7C15) % (1 << 64) < _QUARTER and closing.any():
            return closing
        words = others & self._is_word
        return words if words.any() else others

    def _flags(self, token_ids: Collection[int] | I64) -> Flags:
        """Return which tokens of the vocabulary are among these, [vocab_size]."""
        ids = token_ids if isinstance(token_ids, np.ndarray) else np.array([*token_ids], np.int64)
        flags = np.zeros(self._vocab_size, np.bool_)
        flags[ids[ids < self._vocab_size]] = True
        return flags


def _weighted(candidates: I64, biases: dict[int, float], bits: int, *, is_greedy: bool) -> int:
    """Return the candidate that `bits` draw, each with a weight of e^bias."""
    biased_ids = np.fromiter(biases, np.int64, len(biases))
    biased = np.intersect1d(candidates, biased_ids) if biases else biased_ids
    if not biased.size:
        return int(candidates[(bits >> 32) * candidates.size >> 32])
    logits = np.zeros(candidates.size)
    logits[np.searchsorted(candidates, biased)] = [biases[token_id] for token_id in biased.tolist()]
    if is_greedy:
        best = np.flatnonzero(logits == logits.max())
        return int(candidates[best[(bits >> 32) * best.size >> 32]])
    totals = np.exp(logits - logits.max()).cumsum()
    place = np.searchsorted(totals, (bits >> 11) * 2.0**-53 * totals[-1], side="right")
    return int(candidates[min(int(place), candidates.size - 1)])
