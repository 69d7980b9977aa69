"""OpenVINO GenAI: `LLMPipeline` with a scheduler config, which batches continuously."""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai
from protocol import Load, LoadedEngine, Ran, serve

CACHE_GB = 2
"""As much as vLLM is given."""


class OpenvinoEngine(LoadedEngine):
    def __init__(self, load: Load) -> None:
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

    def close(self) -> None:
        del self._pipeline


if __name__ == "__main__":
    serve(OpenvinoEngine)
