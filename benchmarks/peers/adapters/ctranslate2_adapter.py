"""CTranslate2: `Generator.generate_batch`, all prompts in one static batch.

Options: `compute_type`, as CTranslate2 names it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import ctranslate2
from protocol import Load, LoadedEngine, Ran, serve


class CTranslate2Engine(LoadedEngine):
    def __init__(self, load: Load) -> None:
        self._tokens: list[str] = json.loads((Path(load.model) / "vocabulary.json").read_text("utf-8"))
        self._generator = ctranslate2.Generator(
            load.model,
            compute_type=load.options["compute_type"],
            inter_threads=1,
            intra_threads=load.num_threads,
        )

    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        # It takes tokens only by their spelling.
        batch = [[self._tokens[token_id] for token_id in prompt] for prompt in prompts]
        started = time.perf_counter()
        results = self._generator.generate_batch(
            batch,
            max_length=max_tokens,
            min_length=max_tokens,  # which bars the end of sequence
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        wall_s = time.perf_counter() - started
        return Ran(wall_s, [len(result.sequences_ids[0]) for result in results])

    def close(self) -> None:
        self._generator.unload_model()


if __name__ == "__main__":
    serve(CTranslate2Engine)
