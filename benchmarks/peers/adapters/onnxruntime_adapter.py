"""ONNX Runtime GenAI: its `Generator` with a batch, all prompts of one length.

Its engine with continuous batching needs paged attention, which its CPU provider does not have.
"""

from __future__ import annotations

import json
import time

import numpy as np
import onnxruntime_genai
from protocol import Load, LoadedEngine, Ran, Scored, serve
from scores import scored

MAX_BATCH = 32
"""Sequences that a `Generator` takes at most; more go through several, one after the other."""


class OnnxRuntimeEngine(LoadedEngine):
    def __init__(self, load: Load) -> None:
        config = onnxruntime_genai.Config(load.model)
        # No end of sequence, as with `ignore_eos`.
        session_options = {"intra_op_num_threads": load.num_threads}
        model = {"eos_token_id": [], "decoder": {"session_options": session_options}}
        config.overlay(json.dumps({"model": model}))
        self._model = onnxruntime_genai.Model(config)

    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        started = time.perf_counter()
        num_tokens: list[int] = []
        for first in range(0, len(prompts), MAX_BATCH):
            num_tokens += self._run_batch(prompts[first : first + MAX_BATCH], max_tokens)
        return Ran(time.perf_counter() - started, num_tokens)

    def _run_batch(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        generator = self._generator(len(prompts), len(prompts[0]) + max_tokens)
        generator.append_tokens(np.array(prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [len(generator.get_sequence(row)) - len(prompt) for row, prompt in enumerate(prompts)]

    def score(self, prompt: list[int], tokens: list[int]) -> dict[str, Scored]:
        ways = {"whole": [prompt + tokens[:-1]], "tokens": [prompt, *([token] for token in tokens[:-1])]}
        return {way: self._scored(steps, tokens) for way, steps in ways.items()}

    def _scored(self, steps: list[list[int]], tokens: list[int]) -> Scored:
        """Feed one sequence in these steps; the last logits of all are those before `tokens`."""
        generator = self._generator(1, sum(map(len, steps)) + 1)
        logits = []
        for step in steps:
            generator.append_tokens(np.array([step], np.int32))
            output = generator.get_output("logits")  # [1, len(step), vocab_size]
            logits.append(output[0, -len(tokens) :].astype(np.float64))
        return scored(np.concatenate(logits)[-len(tokens) :], tokens)

    def _generator(self, batch_size: int, length: int) -> onnxruntime_genai.Generator:
        """Return a generator of greedy sequences of exactly `length` tokens, prompts included."""
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=batch_size, max_length=length, min_length=length, do_sample=False
        )
        return onnxruntime_genai.Generator(self._model, params)

    def close(self) -> None:
        del self._model


if __name__ == "__main__":
    serve(OnnxRuntimeEngine)
