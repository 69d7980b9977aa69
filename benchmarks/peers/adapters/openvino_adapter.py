"""OpenVINO GenAI: `LLMPipeline` with a scheduler config, which batches continuously."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from protocol import Load, LoadedEngine, Ran, Scored, serve
from scores import scored

CACHE_GB = 2
"""As much as vLLM is given."""


class OpenvinoEngine(LoadedEngine):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._model: openvino.CompiledModel | None = None
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = load.max_num_seqs
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.LLMPipeline(
            load.model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=load.num_threads
        )

    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        token_ids = np.asarray(prompts, dtype=np.int64)  # [num_prompts, prompt_len]
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(token_ids), openvino.Tensor(np.ones_like(token_ids))
        )
        started = time.perf_counter()
        results = self._pipeline.generate(inputs, config)
        wall_s = time.perf_counter() - started
        return Ran(wall_s, [len(tokens) for tokens in results.tokens])

    def score(self, prompt: list[int], tokens: list[int]) -> dict[str, Scored]:
        # A pipeline shows no log-probability of a given token, so the same model is asked without one.
        if self._model is None:
            file = Path(self._load.model) / "openvino_model.xml"
            options = {"INFERENCE_NUM_THREADS": self._load.num_threads}
            self._model = openvino.Core().compile_model(file, "CPU", options)
        ways = {"whole": [prompt + tokens[:-1]], "tokens": [prompt, *([token] for token in tokens[:-1])]}
        return {way: self._scored(steps, tokens) for way, steps in ways.items()}

    def _scored(self, steps: list[list[int]], tokens: list[int]) -> Scored:
        """Feed one sequence in these steps; the last logits of all are those before `tokens`."""
        assert self._model is not None
        request = self._model.create_infer_request()  # with a cache of its own
        logits, num_known = [], 0
        for step in steps:
            positions = np.arange(num_known, num_known + len(step))
            num_known += len(step)
            inputs = {
                "input_ids": np.array([step], np.int64),
                "attention_mask": np.ones((1, num_known), np.int64),
                "position_ids": positions[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            # [len(step), vocab_size], a copy: the next step overwrites it
            logits.append(request.infer(inputs)["logits"][0, -len(tokens) :].astype(np.float64))
        return scored(np.concatenate(logits)[-len(tokens) :], tokens)

    def close(self) -> None:
        del self._pipeline, self._model


if __name__ == "__main__":
    serve(OpenvinoEngine)
