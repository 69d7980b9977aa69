"""One step, as the engine plans it and the worker answers it: columns, not rows.

A *slot* is a small number that names a live row on one worker stream. Its *version* distinguishes two rows that used
the slot one after the other. The default of a step is "every live slot computes one token", so a plan lists only the
exceptions, and decode inputs are never sent.

    live slots     0  1  2  3  4        removed_slots  [2]        (freed before anything else)
    plan           1  1  -  0  128      new_rows       [row for slot 4]
                                        chunk_slots    [4], chunk_lengths [128]
                                        skipped_slots  [3]
                                        sample_slots   [1], sample_limits [3]

A *sampling row* is one that reaches the end of what is known of it. Its result is zero, one or several tokens: at most
`sample_limits` of them, one where nothing is said. With its tokens the worker says how many guesses it may have for
the row, and the engine gives it no higher limit than one more than these.

    sampling slots 0  1  4              token_counts   [1, 3, 1]
    result         a  bcd  e            token_ids      [a, b, c, d, e]

    slot 1, before the step      position  5  6  7  8        known up to 6, computed up to 5
            after it                       b  c  d           known up to 8, computed up to 7: always all but the last
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from triptych.types.kv_transfer import KvOrders
from triptych.types.pooling import PoolingParams
from triptych.types.row_key import RowKey as RowKey
from triptych.types.sampling import SamplingParams

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]


def empty_u32() -> U32:
    return _EMPTY_U32


_EMPTY_U32: U32 = np.empty(0, dtype=np.uint32)
_EMPTY_U32.flags.writeable = False
_EMPTY_F32: F32 = np.empty(0, dtype=np.float32)
_EMPTY_F32.flags.writeable = False
_CONTENT_BYTES = 168  # of the adapter, the scope and the pooling of a content
_ROW_BYTES = 64  # of a new row's scalar fields, with their tags
_TABLE_BYTES = 8  # of a further table's tag and length


@dataclass(frozen=True, slots=True, eq=False)
class RowContent:
    """The part that all choices of one request have in common. A worker gets it once for all rows that hold it."""

    prompt_token_ids: U32
    """[num_prompt_tokens] read-only."""
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    """How its row becomes vectors; None: it generates tokens. A pooled row samples nothing."""
    adapter: str = ""
    """Digest of the adapter that is applied to the weights, as `AdapterFacts` has it. Empty: none is."""
    draft_scope: str = ""
    """Digest of the request's tenant and cache salt. Guesses at its tokens may come from outputs of this scope only.
    Empty: from its own tokens only."""
    num_bytes: int = field(init=False)
    """An upper bound of its size in a message, in bytes."""

    def __post_init__(self) -> None:
        num_bytes = self.prompt_token_ids.nbytes + self.sampling.num_bytes + _CONTENT_BYTES
        object.__setattr__(self, "num_bytes", num_bytes)  # asked for many times


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """A row that enters the worker's batch: sent once, at admission or after preemption."""

    slot: int
    slot_version: int
    content: RowContent
    """Prompt and sampling, the same object for all choices of one request."""
    emitted_token_ids: U32
    """[num_emitted] the tokens that followed the prompt before a preemption, a crash or a move."""
    num_computed_tokens: int
    """Positions with KV in the blocks already: the first position this row computes."""
    num_cached_tokens: int
    """Positions below this are in shared blocks and are never written. Equal to
    `num_computed_tokens`, or one more when the whole prompt hit the cache and only its last token is
    computed again, for its logits."""
    block_ids: U32
    """[ceil((num_computed_tokens + chunk) / block_size)] the blocks known so far, in order, of the first group. 0, the
    null block, takes the place of a block that the row does not need any more."""
    seed: int
    """u64, never absent: the frontend draws one when the client gave none."""
    prompt_logprobs_start: int = 0
    """With `sampling.prompt_logprobs`: positions of the prompt below this have been reported, before a preemption or a
    crash. 0: none have."""
    group_block_ids: tuple[U32, ...] = ()
    """[num_groups - 1] the same as `block_ids`, of each further group of the worker's `KvLayout`."""

    @property
    def key(self) -> RowKey:
        return RowKey(self.slot, self.slot_version)

    @property
    def sampling(self) -> SamplingParams:
        return self.content.sampling

    @property
    def num_prompt_tokens(self) -> int:
        """Penalties and min_tokens count from here."""
        return len(self.content.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and emitted tokens."""
        return len(self.content.prompt_token_ids) + len(self.emitted_token_ids)

    @property
    def token_ids(self) -> U32:
        """[num_known_tokens] prompt, then emitted tokens."""
        if not len(self.emitted_token_ids):
            return self.content.prompt_token_ids
        return np.concatenate([self.content.prompt_token_ids, self.emitted_token_ids])

    @property
    def num_bytes(self) -> int:
        """An upper bound of its size in a message without its content, in bytes."""
        num_bytes = self.emitted_token_ids.nbytes + self.block_ids.nbytes + _ROW_BYTES
        for block_ids in self.group_block_ids:
            num_bytes += block_ids.nbytes + _TABLE_BYTES
        return num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The work of one step, as read-only columns of u32.

    Order of effects: `removed_slots`, `new_rows`, new blocks, new pages of states, then the computation.
    """

    step_id: int
    """Dense per session: 1, 2, 3, …"""
    last_result_seen: int
    """Step id up to which the engine holds results; the worker may forget them."""
    removed_slots: U32 = field(default_factory=empty_u32)
    new_rows: tuple[NewRow, ...] = ()
    chunk_slots: U32 = field(default_factory=empty_u32)
    """[c] slots that compute another number of tokens than one."""
    chunk_lengths: U32 = field(default_factory=empty_u32)
    """[c] how many, >= 1."""
    skipped_slots: U32 = field(default_factory=empty_u32)
    """Live slots that compute nothing in this step."""
    block_slots: U32 = field(default_factory=empty_u32)
    """[b] the slot that each new block is appended to, in any order."""
    block_ids: U32 = field(default_factory=empty_u32)
    """[b] the new blocks, parallel to `block_slots`."""
    block_groups: U32 = field(default_factory=empty_u32)
    """[b] the group of each new block, parallel to `block_slots`. Empty: all are of the first."""
    state_slots: U32 = field(default_factory=empty_u32)
    """[s] rows that read the state of their page in this step and write it to another one, which takes its place. Their
    first token is not that of a new page. Only where `KvLayout.continues_states`."""
    state_pages: U32 = field(default_factory=empty_u32)
    """[s] the page that each gets, parallel to `state_slots`."""
    sample_slots: U32 = field(default_factory=empty_u32)
    """[m] sampling rows that may get several tokens. Each computes `sample_limits` - 1 positions more than its length
    says, and its blocks hold them all."""
    sample_limits: U32 = field(default_factory=empty_u32)
    """[m] the most tokens that each may get, >= 2."""
    num_tokens: int = 0
    """Tokens computed in this step at most, for logs and metrics."""
    kv_orders: KvOrders | None = None
    """The changes of transfers of KV blocks; None: there are none. A step may hold nothing else."""
    may_defer_rows: bool = False
    """Whether rows that cannot be sampled yet are left out, with `RowErrorCode.NOT_READY`. False: the step waits."""


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """Log-probabilities of some of a batch's tokens.

    Row r belongs to token `rows[r]` of the batch. Its entries are `token_ids[offsets[r]:offsets[r+1]]`: the chosen
    token first, then the best ones in falling order.
    """

    rows: U32
    offsets: U32
    """[len(rows) + 1]"""
    token_ids: U32
    logprobs: F32
    ranks: U32
    """Rank of the chosen token among all, 1 = best; [len(rows)]."""

    @property
    def nbytes(self) -> int:
        return 8 * len(self.token_ids) + 12 * len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of one prompt, each given all tokens before it.

    position         0  1  2  3  4  5  6
    prompt           a  b  c  d  e  f  g
    first chunk         [first_position 1, 3 tokens)    computes positions 0, 1, 2
    second chunk                 [first_position 4, 3)  computes 3 to 6; 6 predicts the first output token
    """

    first_position: int
    """>= 1"""
    token_ids: U32
    """[num_positions, 1 + num_top] the prompt's own token, then the likeliest ones in falling order."""
    logprobs: F32
    """[num_positions, 1 + num_top]"""
    ranks: U32
    """[num_positions] rank of the prompt's own token among all, 1 = best."""

    @property
    def nbytes(self) -> int:
        return 8 * self.token_ids.size + 4 * len(self.ranks)

    @property
    def end(self) -> int:
        """One more than the last position."""
        return self.first_position + len(self.ranks)


class RowErrorCode(Enum):
    """The party that can correct a row's failure."""

    ENGINE_FAILURE = auto()
    """The operator."""
    INVALID_REQUEST = auto()
    """The client, with other parameters. The message begins with the field and a colon."""
    NOT_READY = auto()
    """The row has not failed: its form is still being compiled, or its mask would take the step too long. The engine
    plans it again, a little later."""


@dataclass(frozen=True, slots=True)
class RowError:
    """One row's failure inside a step. It is data, not an exception: the other rows go on."""

    message: str
    code: RowErrorCode = RowErrorCode.ENGINE_FAILURE
    kv_is_valid: bool = False
    """Whether the row's blocks hold the KV of all that it computed. If not, nothing that it wrote may be read, in this
    step or in any before."""

    @classmethod
    def of_client(cls, message: str) -> RowError:
        """Return the failure of a row for which no token can be chosen as its client asked; its KV is valid."""
        return cls(message, RowErrorCode.INVALID_REQUEST, kv_is_valid=True)

    @property
    def is_deferral(self) -> bool:
        """Whether the row has not failed, but is to be planned again."""
        return self.code is RowErrorCode.NOT_READY


@dataclass(frozen=True, slots=True)
class StepTimings:
    """The times of a step, in ns. On an asynchronous device prepare and sample are the host's, during which other
    steps compute."""

    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0
    """Before this step, waiting with nothing to do although the stream was open."""
    gap_ns: int = 0
    """Between the last kernel of the step before and the first of this one, by the device's clock; a wait for a plan
    is part of it. 0: the device does not measure it."""
    mask_ns: int = 0
    """Spent on the masks of forms. A part of `sample_ns`, or of `prepare_ns` on an asynchronous device."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedGuesses:
    """Guesses of one proposer that a step has verified, by their place behind what was known of a row."""

    proposer: str
    verified: U32
    """[num_places] guesses that were computed."""
    accepted: U32
    """[num_places] those of them that were the tokens chosen, as were all before them."""
    rows: U32 = field(default_factory=empty_u32)
    """[num_rows] the sampling rows that it had guesses for, indices, ascending. A worker of the version before names
    none."""
    row_counts: U32 = field(default_factory=empty_u32)
    """[num_rows] its guesses for each of them."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestGuesses:
    """The accepted and rejected guesses at tokens of some requests so far, at all engines that had them."""

    numbers: U32
    """[num_requests] names of the requests."""
    accepted: U32
    """[num_requests] output tokens of each that were guessed ahead, and so took no step of their own."""
    rejected: U32
    """[num_requests] guesses of each that were computed, and did not come."""

    @staticmethod
    def of(number_to_counts: Mapping[int, tuple[int, int]]) -> RequestGuesses | None:
        """Return the columns of accepted and rejected guesses by number; None if there are none."""
        if not number_to_counts:
            return None
        numbers = np.array(list(number_to_counts), np.uint32)
        accepted, rejected = np.array(list(number_to_counts.values()), np.uint32).T
        return RequestGuesses(numbers, accepted, rejected)

    @property
    def by_number(self) -> dict[int, tuple[int, int]]:
        """The accepted and the rejected guesses of each request."""
        counts = zip(self.accepted.tolist(), self.rejected.tolist(), strict=True)
        return dict(zip(self.numbers.tolist(), counts, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The worker's answer to one step.

    Tokens belong to the step's sampling rows by their order. Every other section is a table: a row's key, and what the
    row reports there. A row may be in any of them, or in none.
    """

    step_id: int
    token_ids: U32
    """[sum(token_counts)] the tokens of each sampling row, in ascending slot order."""
    token_counts: U32 = field(default_factory=empty_u32)
    """[num_sampling] tokens of each sampling row; empty means one each. 0 only if the row failed."""
    logprobs: LogprobColumns | None = None
    """Rows are indices into `token_ids`; only for the rows that asked."""
    row_errors: Mapping[RowKey, RowError] = field(default_factory=dict)
    timings: StepTimings = StepTimings()
    prompt_logprobs: Mapping[RowKey, PromptLogprobs] = field(default_factory=dict)
    """Only rows that asked and computed tokens of their prompt, and did not fail."""
    vectors: Mapping[RowKey, F32] = field(default_factory=dict)
    """[num_vectors, num_columns] of each pooled row that computed the last token of its prompt, and did not fail."""
    guess_counts: U32 = field(default_factory=empty_u32)
    """[num_sampling] guesses at the tokens behind these that each sampling row may have; empty means none. A later
    step verifies no more, until the row samples again."""
    guesses: tuple[VerifiedGuesses, ...] = ()
    """One for each proposer that had guesses in this step."""
