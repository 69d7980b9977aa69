"""Tokens that depend only on their prefix and, unless greedy, on the seed: a running hash per slot.

    prefix hash   h(t_0 … t_n) = (t_0 + 1) B^n + … + (t_n + 1)        modulo 2^64, so h' = h B + t + 1
    draw          mix(h ^ mix(seed + position G))                     -> a word, EOS, log-probabilities

Batches, chunks, preemptions and crashes change none of it, so a continuation is equal to the last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.checkpoint.pooling import PoolingSpec
from triptych.types.facts import ModelFacts
from triptych.types.sampling import SamplingParams
from triptych.types.step import F32, U32, LogprobColumns, NewRow, PromptLogprobs, RowError, RowKey
from triptych_services.worker.runner.pooling import PooledVectors, Pooler
from triptych_services.worker.runner.prompt_targets import ScoredRow
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.sampling.params import (
    NO_LOGPROBS,
    NOTHING_ALLOWED,
    SamplingColumns,
    TokenHistory,
)
from triptych_services.worker.simulation.choices import ConstrainedChoices
from triptych_services.worker.simulation.hashing import BASE, GOLDEN, U64, mix, salt_of

I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]

_LOW_BITS = np.uint64(0xFFFFFFFF)
_NO_SALT = np.uint64(0)
_ONE_EACH: I64 = np.empty(0, np.int64)

_NEED_LOGITS = {
    "logprob_token_ids": "response.logprobs.token_ids",
    "thinking_token_budget": "length.thinking_token_budget",
}
"""Sampling fields that are refused, since there are no logits to report or to change -> their paths in a request."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTokens:
    """The tokens of sampling rows, in the order of the slots given."""

    token_ids: I64
    """[sum(token_counts)]"""
    token_counts: I64
    """[num_rows] tokens of each, 0 where the row failed; empty means one each."""
    logprobs: LogprobColumns | None
    """Log-probabilities of the rows that asked. Its rows are indices into `token_ids`."""
    failures: tuple[tuple[int, RowError], ...]
    """(row, why), ascending."""


class SimulatedSampler:
    """Owned by the runner; reads the columns and the counters of its rows.

    Temperature 0 ignores the seed; min_tokens, stop ids and all that `ConstrainedChoices` takes are honoured. Other
    parameters that shape a distribution change nothing: all words are equally likely.
    """

    def __init__(
        self,
        columns: SamplingColumns,
        history: TokenHistory,
        *,
        word_ids: I64,
        eos_token_ids: tuple[int, ...],
        eos_probability: float,
        choices: ConstrainedChoices,
    ) -> None:
        """
        Args:
            word_ids: [n] ascending, n >= 1: what is drawn from; no EOS among them.
            choices: Chooses for the requests that may not have any word.
            eos_token_ids: the first is drawn with `eos_probability`; one at least unless that is 0.
        """
        assert not eos_probability or eos_token_ids, "checked at start-up"
        max_num_seqs, max_model_len = history.token_ids.shape
        self._columns = columns
        self._history = history
        self._word_ids = word_ids
        self._eos_token_ids = eos_token_ids
        self._eos_probability = eos_probability
        self._prefix_hash: U64 = np.zeros(max_num_seqs, np.uint64)
        """Over the `num_known` tokens of each slot."""
        self._min_tokens: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs]"""
        self._choices = choices
        self._is_constrained: Flags = np.zeros(max_num_seqs, np.bool_)
        """[max_num_seqs] whether `choices` has the request."""
        self._masks_words: Flags = np.zeros(max_num_seqs, np.bool_)
        """[max_num_seqs] whether the request has min_tokens and stop ids, which may be words."""
        self._slot_to_stop_ids: dict[int, frozenset[int]] = {}
        """Slot of each request with min_tokens -> its stop ids."""
        self._powers = np.full(max_model_len, BASE)
        """[max_model_len] of `BASE`, from 0 up."""
        self._powers[0] = 1
        np.multiply.accumulate(self._powers, out=self._powers)

    def enter(
        self,
        slot: int,
        token_ids: NDArray[np.integer],
        params: SamplingParams,
        salt: np.uint64 = _NO_SALT,
    ) -> RowError | None:
        """Hash a new row's tokens, [num_known >= 1], and store its parameters, which its columns hold already.

        Args:
            salt: Number of the row's adapter; other tokens follow with another one.

        Returns:
            Why the request cannot be served, or None if it can.
        """
        terms = (token_ids.astype(np.uint64) + np.uint64(1)) * self._powers[token_ids.size - 1 :: -1]
        before = np.array([salt]) * self._powers[token_ids.size - 1] * BASE  # like a token before the first
        self._prefix_hash[slot] = (before + terms.sum(dtype=np.uint64))[0]
        self._min_tokens[slot] = params.min_tokens
        self._slot_to_stop_ids.pop(slot, None)
        self._is_constrained[slot] = self._choices.enter(slot, token_ids, params)
        self._masks_words[slot] = params.min_tokens > 0 and bool(params.stop_token_ids)
        if params.min_tokens:
            self._slot_to_stop_ids[slot] = frozenset(params.stop_token_ids)
        for name, path in _NEED_LOGITS.items():
            if getattr(params, name):
                return RowError.of_client(f"{path}: the simulated worker has no logits; leave it out")
        return None

    def sample(self, slots: I64, limits: I64 | None = None) -> DrawnTokens:
        """Draw the next tokens of each slot, and extend its prefix by them.

        A row with a limit gets a number of tokens that depends on its prefix and the limit only, as if so many guesses
        had been right. The tokens themselves are the ones that it would get one by one. A constrained row gets one.

        Args:
            slots: [num_rows]
            limits: [num_rows] the most tokens of each, >= 1; None: one each.
        """
        positions = self._history.num_known[slots]
        if limits is not None:
            limits = np.where(self._is_constrained[slots], 1, limits)
        token_ids, bits, failures = self._draw(slots, positions)
        token_counts = _ONE_EACH
        if limits is not None or failures:
            token_counts = np.ones(slots.size, np.int64)
            if limits is not None:
                token_counts += (mix(bits) % limits.astype(np.uint64)).view(np.int64)
            token_counts[[row for row, _ in failures]] = 0
            rows = np.repeat(np.arange(slots.size), token_counts)
            starts = np.cumsum(token_counts) - token_counts
            flat_ids, flat_bits = token_ids[rows], bits[rows]
            for place in range(1, int(token_counts.max())):
                more = np.flatnonzero(token_counts > place)
                indices = starts[more] + place
                flat_ids[indices], flat_bits[indices], more_failures = self._draw(
                    slots[more], positions[more] + place
                )
                assert not more_failures, "a row that may have a token may have the next one"
            token_ids, bits, slots = flat_ids, flat_bits, slots[rows]
        return DrawnTokens(token_ids, token_counts, self._gather_logprobs(token_ids, slots, bits), failures)

    def can_guess(self, slots: I64) -> Flags:
        """Return which rows may get several tokens in a step, [num_rows]."""
        return ~self._is_constrained[slots]

    def _draw(self, slots: I64, positions: I64) -> tuple[I64, U64, tuple[tuple[int, RowError], ...]]:
        """Draw the token of each slot at its position, [num_rows], and extend its prefix by it.

        Returns:
            The tokens, the bits that they were drawn by, and the rows that failed, with a token of 0.
        """
        columns, history = self._columns, self._history
        seeds = np.where(columns.temperature[slots] > 0, columns.seeds[slots], 0).view(np.uint64)
        bits = mix(self._prefix_hash[slots] ^ mix(seeds + positions.view(np.uint64) * GOLDEN))
        token_ids = self._word_ids[_below(bits, self._word_ids.size)]
        below_min_tokens = positions - history.num_prompt[slots] < self._min_tokens[slots]
        if self._eos_probability:
            chances = (mix(bits) >> np.uint64(11)) * 2.0**-53  # of the 53 bits that a float64 holds
            token_ids[(chances < self._eos_probability) & ~below_min_tokens] = self._eos_token_ids[0]
        failures = self._choose_anew(token_ids, slots, bits, below_min_tokens)
        self._prefix_hash[slots] = self._prefix_hash[slots] * BASE + (token_ids + 1).view(np.uint64)
        return token_ids, bits, failures

    def score_prompt(self, row: ScoredRow) -> PromptLogprobs:
        """Return log-probabilities of some of a prompt's tokens.

        They are drawn from each token, the token before it and its position.
        Every token is the likeliest at its place, and the words after it follow, as in the output.
        """
        first, end = row.first_position, row.first_position + row.num_positions
        before, own = (
            self._history.token_ids[row.key.slot, start : start + row.num_positions].astype(np.uint64)
            for start in (first - 1, first)
        )
        bits = mix(mix(before * BASE + own) + np.arange(first, end).astype(np.uint64) * GOLDEN)
        num_top = min(row.num_top, self._word_ids.size)
        token_ids, logprobs = self._candidates(own.view(np.int64), bits, num_top)
        ranks = np.ones(row.num_positions, np.uint32)
        return PromptLogprobs(first, token_ids, logprobs, ranks)

    def _choose_anew(
        self, token_ids: I64, slots: I64, bits: U64, below_min_tokens: Flags
    ) -> tuple[tuple[int, RowError], ...]:
        """Choose anew, in place, for constrained rows, and where the draw is a stop id below min_tokens."""
        failures = []
        may_differ = self._is_constrained[slots] | (below_min_tokens & self._masks_words[slots])
        for row in np.flatnonzero(may_differ).tolist():
            slot = int(slots[row])
            if self._is_constrained[slot]:
                chosen = self._choices.choose(slot, int(bits[row]), is_below_min=bool(below_min_tokens[row]))
                token_ids[row] = 0 if isinstance(chosen, RowError) else chosen
                if isinstance(chosen, RowError):
                    failures.append((row, chosen))
                continue
            stop_ids = self._slot_to_stop_ids.get(slot, frozenset())
            if int(token_ids[row]) not in stop_ids:
                continue
            choices = np.setdiff1d(self._word_ids, [*stop_ids.union(self._eos_token_ids)], assume_unique=True)
            if choices.size:
                token_ids[row] = choices[_below(bits[row : row + 1], choices.size)[0]]
            else:
                token_ids[row] = 0
                failures.append((row, NOTHING_ALLOWED))
        return tuple(failures)

    def _gather_logprobs(self, token_ids: I64, slots: I64, bits: U64) -> LogprobColumns | None:
        """Return those of the tokens with slots that asked; None if none did.

        The chosen token is the likeliest, and the words after it follow as (1 - q) q^rank.
        """
        num_top = self._columns.num_logprobs[slots].astype(np.int64)  # [num_tokens]
        rows = np.flatnonzero(num_top != NO_LOGPROBS)
        if not rows.size:
            return None
        num_top = np.minimum(num_top[rows], self._word_ids.size)
        candidates, logprobs = self._candidates(token_ids[rows], bits[rows], int(num_top.max()))
        kept = np.arange(candidates.shape[1]) <= num_top[:, None]
        offsets = np.zeros(rows.size + 1, np.uint32)
        np.cumsum(1 + num_top, out=offsets[1:])
        return LogprobColumns(
            rows=rows.astype(np.uint32),
            offsets=offsets,
            token_ids=candidates[kept],
            logprobs=logprobs[kept],
            ranks=np.ones(rows.size, np.uint32),
        )

    def _candidates(self, chosen: I64, bits: U64, num_top: int) -> tuple[U32, F32]:
        """Return ids and log-probabilities, [num_tokens, 1 + num_top]: each chosen token, then the best ones."""
        num_words, ranks = self._word_ids.size, np.arange(num_top)
        chosen = chosen[:, None]
        top_ids = self._word_ids[(np.searchsorted(self._word_ids, chosen) + ranks) % num_words]
        top_ids[:, :1] = chosen  # itself already, unless it is no word
        ratio = 0.25 + 0.5 * (bits[:, None] & _LOW_BITS) * 2.0**-32  # q
        top_logprobs = np.log1p(-ratio) + ranks * np.log(ratio)
        token_ids = np.hstack((chosen, top_ids)).astype(np.uint32)
        return token_ids, np.hstack((np.log1p(-ratio), top_logprobs)).astype(np.float32)


def _below(bits: U64, bound: int) -> I64:
    """Return numbers spread evenly over [0, bound), bound < 2^32, from the upper half of the bits.

    Source: Lemire, arXiv:1805.10941.
    """
    return ((bits >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).view(np.int64)


class SimulatedVectors:
    """The pooled rows of a simulation. Owned by its runner.

    The state of a token is drawn from it, all tokens before it and the adapter. So a vector is a function of its
    request, in any batch and in any chunks.
    """

    def __init__(self, rows: RequestRows, model: ModelFacts, spec: PoolingSpec | None) -> None:
        """`spec`: As the model's directory has it; None: it makes no vectors, and rows that ask for some fail."""
        self._rows = rows
        self._width = model.embedding_size or model.num_labels
        self._pooler: Pooler | None = None
        if spec is not None:
            num_labels = model.num_labels
            classifier = (lambda pooled: np.resize(pooled, num_labels)) if num_labels else None
            self._pooler = rows.pooled.pooler = Pooler(spec, self._width, classifier=classifier)
        self._slot_to_salt: dict[int, np.uint64] = {}

    def enter(self, row: NewRow) -> None:
        """Take in a row that never samples."""
        self._slot_to_salt[row.slot] = salt_of(row.content.adapter)

    def compute(self, step: StepRows) -> PooledVectors:
        """Return the vectors of the rows with prompts that end in a step, before it counts as computed."""
        vectors: dict[RowKey, F32] = {}
        failures: dict[RowKey, RowError] = {}
        pooled = self._rows.pooled.slot_to_pooling
        if not pooled:
            return PooledVectors(vectors, failures)
        assert self._pooler is not None, "the rows let no pooled row pass without"
        ends = step.starts + step.query_lens
        for slot, end in zip(step.slots.tolist(), ends.tolist(), strict=True):
            if slot not in pooled or end != self._rows.num_prompt[slot]:
                continue
            made = self._pooler.pool(pooled[slot].params, self._states_of(slot, end))
            if isinstance(made, RowError):
                failures[self._rows.key_of(slot)] = made
            else:
                vectors[self._rows.key_of(slot)] = made
        return PooledVectors(vectors, failures)

    def _states_of(self, slot: int, num_tokens: int) -> F32:
        """Return the states of a row's first tokens, [num_tokens, width], within [-1, 1)."""
        powers: U64 = np.cumprod(np.full(num_tokens, BASE, np.uint64), dtype=np.uint64)
        terms = (self._rows.token_ids[slot, :num_tokens].astype(np.uint64) + np.uint64(1)) * powers
        names = np.cumsum(terms, dtype=np.uint64) + self._slot_to_salt[slot]
        bits = mix(names[:, None] + np.arange(self._width, dtype=np.uint64) * GOLDEN)
        return ((bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23)) - np.float32(1)
