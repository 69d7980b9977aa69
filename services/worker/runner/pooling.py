"""From the states of a text's tokens to vectors: pooled, through layers, cut, scaled. On the host, without torch.

    states of a row   chunk 1 | chunk 2 | chunk 3     PooledRow.add, as they are computed
                      vector                          Pooler.vectors, when the last one is there

Each row is computed by itself and in one order of summation, so its vector has the same bits in any batch, however its
text is cut, on any number of threads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.checkpoint.pooling import PoolingSpec
from triptych.errors import ProtocolViolation
from triptych.types.pooling import GENERATION, PoolingKind, PoolingParams, Task
from triptych.types.step import F32, NewRow, RowError, RowKey

I64 = NDArray[np.int64]

log = logging.getLogger(__name__)

_BLOCK = 128  # positions with states added up in float32, which takes half the time that float64 does
_LEAST_LENGTH = 1e-12  # as of torch.nn.functional.normalize
MAX_TOKEN_VECTOR_BYTES = 64 << 20
"""Most bytes of the states of one text that are kept until it ends, and may then be sent in one message."""

NOT_FINITE = RowError("the model's states hold NaN or infinity")


VectorLayer = Callable[[F32], F32]
"""Maps one vector to another, with the same bits whatever other vectors there are."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer:
    """A linear layer for one vector at a time, and an activation behind it."""

    weight: F32
    """[out_features, in_features]"""
    bias: F32 | None = None
    activation: str = "none"
    """As of `apply_activation`."""

    def __call__(self, vector: F32) -> F32:
        # without BLAS, which would sum in another order on another number of threads
        output: F32 = np.einsum("oi,i->o", self.weight, vector)
        if self.bias is not None:
            output = output + self.bias
        return apply_activation(self.activation, output)


def apply_activation(name: str, values: F32) -> F32:
    """Apply an activation to a vector: none, softmax, sigmoid, tanh, relu, gelu or silu."""
    wide = values.astype(np.float64)
    match name:
        case "none":
            return values
        case "softmax":
            powers = np.exp(wide - wide.max())
            wide = powers / powers.sum()
        case "sigmoid":
            wide = _sigmoid(wide)
        case "tanh":
            wide = np.tanh(wide)
        case "relu":
            wide = np.maximum(wide, 0.0)
        case "gelu":
            wide = 0.5 * wide * (1.0 + np.array([math.erf(value / math.sqrt(2.0)) for value in wide]))
        case "silu":
            wide = wide * _sigmoid(wide)
        case _:
            raise ValueError(f"{name} is no activation")
    return wide.astype(np.float32)


class PooledRow:
    """The states of one row so far: a running sum, or those that make its vectors."""

    def __init__(self, kind: PoolingKind | None) -> None:
        """
        Args:
            kind: None: the states of all tokens are kept.
        """
        self._keeps_all = kind is None
        self._kind = kind
        self._parts: list[F32] = []
        self._total: NDArray[np.float64] | None = None
        """Sum of all blocks before the current one."""
        self._block: F32 | None = None
        """Sum of the current block so far."""
        self._num_added = 0

    @property
    def reads_last_alone(self) -> bool:
        """Whether nothing but the state of the last token is needed, so that a text may begin with cached blocks."""
        return not self._keeps_all and self._kind is PoolingKind.LAST

    def wanted(self, start: int, length: int, *, is_last: bool) -> slice:
        """Return which states of a chunk `add` takes; an empty range if it needs none.

        Args:
            start: Position of the chunk's first token.
            is_last: Whether the chunk holds the last token of the text.
        """
        if self._keeps_all or self._kind is PoolingKind.MEAN:
            return slice(0, length)
        if self._kind is PoolingKind.FIRST:
            return slice(0, 1 if start == 0 else 0)
        return slice(length - 1 if is_last else length, length)

    def add(self, states: F32) -> None:
        """Take the wanted states of the next chunk, [num_states, hidden_size], which may be overwritten afterwards."""
        if self._keeps_all or self._kind is not PoolingKind.MEAN:
            self._parts.append(np.array(states, np.float32))
            return
        done = 0
        while done < len(states):
            room = _BLOCK - self._num_added % _BLOCK
            part = states[done : done + room]
            done, self._num_added = done + len(part), self._num_added + len(part)
            if self._block is not None:
                part = np.concatenate((self._block[None], part))
            self._block = np.add.reduce(part, axis=0, dtype=np.float32)  # row by row, whatever their number
            if self._num_added % _BLOCK == 0:
                self._close_block()

    def pooled(self) -> F32:
        """Return the pooled state, [1, hidden_size], or the states of all tokens, [num_tokens, hidden_size]."""
        if self._keeps_all or self._kind is not PoolingKind.MEAN:
            return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        if self._block is not None:
            self._close_block()
        assert self._total is not None, "a text has a token"
        mean: F32 = (self._total / self._num_added).astype(np.float32)[None]
        return mean

    def _close_block(self) -> None:
        assert self._block is not None, "called for a block with states"
        wide = self._block.astype(np.float64)
        self._total = wide if self._total is None else self._total + wide
        self._block = None


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """The vectors of rows that a step has ended."""

    reported: Mapping[RowKey, F32]
    failures: Mapping[RowKey, RowError]


class Pooler:
    """The way of one model from states to vectors."""

    def __init__(
        self,
        spec: PoolingSpec,
        hidden_size: int,
        *,
        dense: Sequence[DenseLayer] = (),
        own: VectorLayer | None = None,
        classifier: VectorLayer | None = None,
        classifier_kind: PoolingKind = PoolingKind.LAST,
    ) -> None:
        """
        Args:
            dense: Layers of `spec.dense`.
            own: Function of `spec.own_pooler`.
            classifier: From a pooled state, [hidden_size], to a number for each label; None: the model has none.
            classifier_kind: The state that it reads.
        """
        self.spec = spec
        self._hidden_size = hidden_size
        self._dense = tuple(dense)
        self._own = own
        self._classifier = classifier
        self._classifier_kind = classifier_kind

    def refusal(self, params: PoolingParams, num_tokens: int) -> RowError | None:
        """Return why a text is not pooled so, None if it is."""
        if params.task is Task.CLASSIFY:
            if self._classifier is not None:
                return None
            return RowError.of_client("task: classify needs a classifier, and the model has none")
        spec = self.spec if params.task is Task.EMBED else PoolingSpec(self.spec.kind)
        if why := spec.refusal_of_dimensions(params.dimensions, self._hidden_size):
            return RowError.of_client(f"dimensions: {why}")
        num_bytes = 4 * self._hidden_size * num_tokens
        if self._kind(params) is None and num_bytes > MAX_TOKEN_VECTOR_BYTES:
            return RowError.of_client(
                f"prompt: the states of {num_tokens} tokens take {num_bytes} bytes; at most those of "
                f"{MAX_TOKEN_VECTOR_BYTES // (4 * self._hidden_size)} tokens are kept"
            )
        return None

    def row(self, params: PoolingParams) -> PooledRow:
        """Return the empty state of a row that `refusal` lets pass."""
        return PooledRow(self._kind(params))

    def pool(self, params: PoolingParams, states: F32) -> F32 | RowError:
        """Return the vectors of a text that was computed whole, as `vectors` does.

        Args:
            states: [num_tokens, hidden_size] of all its tokens.
        """
        row = self.row(params)
        row.add(states[row.wanted(0, len(states), is_last=True)])
        return self.vectors(params, row)

    def vectors(self, params: PoolingParams, row: PooledRow) -> F32 | RowError:
        """Return the vectors of a row with all its states, [num_vectors, num_columns], or why it has none."""
        vectors = row.pooled()
        if not np.isfinite(vectors).all():
            return NOT_FINITE
        if params.task is Task.EMBED and self._kind(params) is None:
            pooled = self._pool_by_own(vectors)
            if isinstance(pooled, RowError):
                return pooled
            vectors = pooled
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found below
            vectors = self._finish(params, vectors)
        return vectors if np.isfinite(vectors).all() else NOT_FINITE

    def _kind(self, params: PoolingParams) -> PoolingKind | None:
        """Return how a text is pooled; None where the states of all its tokens are kept."""
        if params.task is Task.CLASSIFY:
            return self._classifier_kind
        if params.task is Task.TOKEN_EMBED or (params.kind is None and self._own is not None):
            return None
        return params.kind or self.spec.kind

    def _pool_by_own(self, states: F32) -> F32 | RowError:
        """Return the state that another package's function makes, [1, hidden_size], or how it failed."""
        assert self._own is not None, "all states are kept for it"
        try:
            pooled = np.asarray(self._own(states), np.float32)
        except Exception as error:
            log.exception("the model's pooler failed")
            return RowError(f"the model's pooler failed: {error!r}")
        if pooled.shape != (self._hidden_size,):
            return RowError(
                f"the model's pooler returned {list(pooled.shape)}, must be [{self._hidden_size}]"
            )
        return pooled[None]

    def _finish(self, params: PoolingParams, vectors: F32) -> F32:
        if params.task is Task.CLASSIFY:
            assert self.spec.classifier is not None, "a model with a classifier's layers has its labels"
            assert self._classifier is not None, "refused without one"
            vector = self._classifier(vectors[0])
            if params.activation is not False:
                vector = apply_activation(self.spec.classifier.activation, vector)
            return vector[None]
        if params.task is Task.EMBED:
            (vector,) = vectors
            for layer in self._dense:
                vector = layer(vector)
            vectors = vector[None]
        if params.dimensions:
            vectors = np.ascontiguousarray(vectors[:, : params.dimensions])
        if self.spec.normalize if params.normalize is None else params.normalize:
            wide = vectors.astype(np.float64)
            lengths = np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
            vectors = (wide / np.maximum(lengths, _LEAST_LENGTH)).astype(np.float32)
        return vectors


@dataclass(slots=True, eq=False)
class EnteredPooling:
    """One pooled row, from its entry on."""

    params: PoolingParams
    row: PooledRow
    """Its states so far."""


class PooledSlots:
    """Owned by the runner's rows."""

    def __init__(self, max_num_seqs: int, tasks: tuple[str, ...]) -> None:
        """
        Args:
            tasks: As of `ModelFacts`.
        """
        self._tasks = tasks
        self.pooler: Pooler | None = None
        """Set before the first row enters; None: rows are not pooled."""
        self.never_sample: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        """[max_num_seqs]"""
        self.slot_to_pooling: dict[int, EnteredPooling] = {}
        """Slot to the pooling of rows that are pooled and have not been refused."""

    def check(self, row: NewRow) -> None:
        """Raise ProtocolViolation for a pooled row that holds more than a prompt, or leaves out states that it needs.

        Only a row that reads its last state alone may begin behind cached blocks.
        """
        pooling = row.content.pooling
        if pooling is None:
            return
        if row.num_known_tokens > row.num_prompt_tokens:
            raise ProtocolViolation(
                f"new_rows: slot {row.slot} is pooled, and has {row.num_known_tokens} tokens, of which only "
                f"{row.num_prompt_tokens} are its prompt"
            )
        skips = row.num_computed_tokens > 0 and self.pooler is not None
        if skips and self.pooler is not None and not self.pooler.row(pooling).reads_last_alone:
            raise ProtocolViolation(
                f"new_rows: slot {row.slot} begins at position {row.num_computed_tokens}, and needs the states of all "
                "its prompt"
            )

    def enter(self, row: NewRow, refusal: RowError | None) -> RowError | None:
        """Note a row that `samples` does not hold of. Returns why it cannot be served, None if it can.

        Args:
            refusal: Why it cannot, for another reason.
        """
        self.never_sample[row.slot] = True
        pooling = row.content.pooling
        task = Task.GENERATE if pooling is None else pooling.task
        if pooling is None or self.pooler is None or task.label not in self._tasks:
            return RowError.of_client(f"task: {task.label} is none of this model's: {', '.join(self._tasks)}")
        refusal = self.pooler.refusal(pooling, row.num_prompt_tokens) or refusal
        if refusal is None:
            self.slot_to_pooling[row.slot] = EnteredPooling(pooling, self.pooler.row(pooling))
        return refusal

    def samples(self, row: NewRow) -> bool:
        """Return whether a row gets tokens."""
        return row.content.pooling is None and GENERATION in self._tasks

    def skip_ended(self, query_lens: I64, num_computed: I64, num_known: I64) -> None:
        """Set the length of rows to 0 of which all is computed, since nothing more becomes known.

        Args:
            query_lens: [max_num_seqs] like the others.
        """
        if self.never_sample.any():
            query_lens[self.never_sample & (num_computed >= num_known)] = 0

    def leave(self, slot: int) -> None:
        self.never_sample[slot] = False
        self.slot_to_pooling.pop(slot, None)


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(-np.abs(values))  # never above 1
    return np.where(values >= 0, 1.0, powers) / (1.0 + powers)
