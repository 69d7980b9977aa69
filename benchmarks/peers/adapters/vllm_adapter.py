"""vLLM: its `LLM` class, scheduler and engine process included, no HTTP server.

Processes that it spawns import this file again: everything happens under `__main__`.
"""

from __future__ import annotations

import time

from protocol import Load, LoadedEngine, Ran, Scored, serve


class VllmEngine(LoadedEngine):
    def __init__(self, load: Load) -> None:
        from vllm import LLM

        self._llm = LLM(
            load.model,
            dtype="bfloat16",
            max_model_len=load.max_model_len,
            max_num_seqs=load.max_num_seqs,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - started
        return Ran(wall_s, [len(output.outputs[0].token_ids) for output in outputs])

    def score(self, prompt: list[int], tokens: list[int]) -> dict[str, Scored]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt + tokens}], sampling, use_tqdm=False)
        scores = [
            entries[token]
            for entries, token in zip(output.prompt_logprobs[len(prompt) :], tokens, strict=True)
        ]
        return {"whole": Scored([one.logprob for one in scores], [one.rank == 1 for one in scores])}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    serve(VllmEngine)
