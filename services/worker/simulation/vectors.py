"""Vectors of a simulated worker: drawn from the tokens, and pooled like those of a model."""

from __future__ import annotations

import numpy as np

from triptych.checkpoint.pooling import PoolingSpec
from triptych.types.facts import ModelFacts
from triptych.types.step import F32, NewRow, RowError, RowKey
from triptych_services.worker.runner.pooling import PooledVectors, Pooler
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.simulation.hashing import BASE, GOLDEN, U64, mix, salt_of


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
