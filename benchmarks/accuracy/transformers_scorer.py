"""transformers on the weights that it reads from the GGUF file by itself: the reference, and its bfloat16."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.accuracy.base import Pass, Scores
from tests.oracle.entries import Entry
from tests.oracle.reference import load_reference, weights_file
from triptych.hub.cache import cache_home


class TransformersScorer:
    """Keeps its scores under `$TRIPTYCH_HOME/accuracy`: they are the same at every run, and take a minute."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._directory = directory
        self._dtype = dtype

    @property
    def name(self) -> str:
        return f"transformers {str(self._dtype).removeprefix('torch.')}"

    def score(self, entries: Sequence[Entry]) -> Iterator[tuple[Pass, list[Scores]]]:
        scores = []
        for entry in entries:
            file = self._file(entry)
            if not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                draft = file.with_suffix(f".{os.getpid()}.npy")
                np.save(draft, self._compute(entry))
                draft.replace(file)
            logprobs, is_best = np.load(file)
            scores.append(Scores(logprobs, is_best > 0))
        yield Pass.WHOLE, scores

    def _file(self, entry: Entry) -> Path:
        parts = (transformers.__version__, torch.__version__, entry.prompt, entry.tokens)
        digest = hashlib.sha256(weights_file(self._directory).read_bytes() + repr(parts).encode()).hexdigest()
        return cache_home() / "accuracy" / f"{self.name.replace(' ', '-')}-{digest[:16]}.npy"

    @functools.cached_property
    def _model(self) -> Any:
        return load_reference(self._directory).to(self._dtype)

    @torch.inference_mode()
    def _compute(self, entry: Entry) -> np.ndarray:
        """Return [2, num_tokens]: log-probabilities, and 1 where no token was likelier."""
        sequence, chosen = torch.tensor([entry.prompt + entry.tokens[:-1]]), torch.tensor(entry.tokens)
        logits = (
            self._model(sequence, logits_to_keep=len(chosen)).logits[0].double()
        )  # [num_tokens, vocab_size]
        logprobs = torch.log_softmax(logits, dim=-1)[torch.arange(len(chosen)), chosen]
        return torch.stack([logprobs, (logits.argmax(dim=-1) == chosen).double()]).numpy()
