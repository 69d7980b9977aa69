"""From the states of one text to its vectors, on the host: each text by itself, with the same bits anywhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.step import F32, RowError
from triptych_services.worker.models.encoder import Classifier


class EncoderPooler:
    """A `TextPooler` of one model."""

    def __init__(self, kind: PoolingKind, hidden_size: int, classifier: Classifier | None) -> None:
        """
        Args:
            kind: State or mean that becomes the vector, where a client does not say it.
        """
        self._kind = kind
        self._hidden_size = hidden_size
        self._classifier = classifier

    def refusal(self, params: PoolingParams, num_tokens: int) -> RowError | None:
        if params.task is Task.CLASSIFY and self._classifier is None:
            return RowError.of_client("task: classify needs a classifier, and the model has none")
        if not 0 <= params.dimensions <= self._hidden_size:
            return RowError.of_client(
                f"dimensions: {params.dimensions} is not within 1..{self._hidden_size}, the size of the vectors"
            )
        return None

    def pool(self, params: PoolingParams, states: F32) -> F32 | RowError:
        if params.task is Task.CLASSIFY:
            vectors = self._classify(params, states)
        else:
            vectors = states if params.task is Task.TOKEN_EMBED else _POOL[params.kind or self._kind](states)
            vectors = vectors[:, : params.dimensions or None]
            if params.normalize is not False:
                lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))[:, None]
                vectors = vectors / np.maximum(lengths, 1e-12)
        if not np.isfinite(vectors).all():
            return RowError("the model's states hold NaN or infinity")
        return np.array(vectors, np.float32)

    def _classify(self, params: PoolingParams, states: F32) -> F32:
        assert self._classifier is not None, "refused without one"
        pooled = _POOL[PoolingKind.FIRST if self._classifier.pooling == "first" else PoolingKind.MEAN](states)
        scores = self._classifier(torch.from_numpy(pooled).to(self._classifier.device))
        if params.activation is not False:
            scores = torch.sigmoid(scores) if scores.shape[1] == 1 else torch.softmax(scores, dim=-1)
        result: F32 = scores.numpy(force=True)
        return result


_POOL: dict[PoolingKind, Callable[[F32], F32]] = {
    PoolingKind.FIRST: lambda states: states[:1],
    PoolingKind.LAST: lambda states: states[-1:],
    PoolingKind.MEAN: lambda states: states.mean(axis=0, keepdims=True),
}
