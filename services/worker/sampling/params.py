"""What each live request asks of the sampler, as columns indexed by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.sampling.token_counts import TokenCounts
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Flags = NDArray[np.bool_]

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """Views of the runner's rows, indexed by slot; the runner writes, the sampler reads.

    A slot's tokens so far are `token_ids[slot, :num_known[slot]]`; the one being sampled will stand at
    position `num_known[slot]`.
    """

    token_ids: I32
    """[max_num_seqs, max_model_len]"""
    num_prompt: I64
    num_known: I64


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """One request's additions to its logits."""

    token_ids: I64
    biases: F32


class SamplingColumns:
    """Owned by the runner's rows. Numbers stand in columns; what few requests have, in maps by slot."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.temperature: F32 = np.zeros(max_num_seqs, np.float32)
        """0 is greedy."""
        self.first_temperature: F32 = np.zeros(max_num_seqs, np.float32)
        """Of the choice among the logits as the model made them: 0, the cheapest, for a request that chooses among
        changed ones in the end."""
        self.top_k: I32 = np.zeros(max_num_seqs, np.int32)
        """0 is off."""
        self.top_p: F32 = np.ones(max_num_seqs, np.float32)
        self.min_p: F32 = np.zeros(max_num_seqs, np.float32)
        self.seed: I64 = np.zeros(max_num_seqs, np.int64)
        """The bits of a u64."""
        self.presence_penalty: F32 = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty: F32 = np.zeros(max_num_seqs, np.float32)
        self.repetition_penalty: F32 = np.ones(max_num_seqs, np.float32)
        self.min_tokens: I64 = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs: I32 = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        """Alternatives per token; 0: the chosen one alone; -1: none."""
        self.has_penalties: Flags = np.zeros(max_num_seqs, np.bool_)
        self.restricts: Flags = np.zeros(max_num_seqs, np.bool_)
        """Has a logit bias or allowed ids."""
        self.demanding: set[int] = set()
        """Slots that ask for more than one choice among the logits as they are."""
        self.slot_to_end_ids: dict[int, I64] = {}
        """Masked below min_tokens: EOS and the request's stop ids; only where min_tokens > 0."""
        self.slot_to_counts: dict[int, TokenCounts] = {}
        """Only where `has_penalties`."""
        self.slot_to_bias: dict[int, LogitBias] = {}
        self.slot_to_allowed_ids: dict[int, I64] = {}

    def enter(self, slot: int, params: SamplingParams, seed: int) -> RowError | None:
        """Store one request's parameters, trusted as the frontend validated them.

        Returns:
            Why the request cannot be served, None if it can. A refused one is stored as plain greedy.
        """
        refusal = self._refusal(params)
        if refusal is not None:
            params = SamplingParams(temperature=0.0)
        self.temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = np.uint64(seed).view(np.int64)
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.repetition_penalty[slot] = params.repetition_penalty
        self.has_penalties[slot] = params.has_penalties
        self.min_tokens[slot] = params.min_tokens
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.restricts[slot] = bool(params.logit_bias or params.allowed_token_ids)
        changes_logits = params.has_penalties or bool(self.restricts[slot])
        self.first_temperature[slot] = 0.0 if changes_logits else self.temperature[slot]
        if changes_logits or params.min_tokens or params.logprobs is not None:
            self.demanding.add(slot)
        if params.min_tokens:
            self.slot_to_end_ids[slot] = np.unique(
                np.array((*self._eos_token_ids, *params.stop_token_ids), np.int64)
            )
        if params.has_penalties:
            self.slot_to_counts[slot] = TokenCounts()
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias, strict=True)
            self.slot_to_bias[slot] = LogitBias(np.array(token_ids, np.int64), np.array(biases, np.float32))
        if params.allowed_token_ids:
            self.slot_to_allowed_ids[slot] = np.unique(np.array(params.allowed_token_ids, np.int64))
        return refusal

    def leave(self, slot: int) -> None:
        """Drop what a slot keeps outside the columns."""
        self.demanding.discard(slot)
        self.slot_to_end_ids.pop(slot, None)
        self.slot_to_counts.pop(slot, None)
        self.slot_to_bias.pop(slot, None)
        self.slot_to_allowed_ids.pop(slot, None)

    def _refusal(self, params: SamplingParams) -> RowError | None:
        """What the frontend refuses too; here so that no caller of the engine finds a field ignored."""
        if params.bad_words:
            return RowError.of_client("sampling.bad_words: this worker does not filter words; leave it out")
        for field, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ):
            outside = [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]
            if outside:
                return RowError.of_client(
                    f"sampling.{field}: token id {outside[0]} is outside the vocabulary of {self.vocab_size}"
                )
        return None
