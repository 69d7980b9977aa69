"""llama.cpp at its barest: `llama-batched-bench`, its own measurement of the bare batch loop.

No server and no sampling: it feeds random tokens of its own, as many as asked for. That is less work than the
others do; it is in the table to show what the server costs llama.cpp.

Options: `bin`, the directory of its programs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from protocol import Load, LoadedEngine, Ran, serve


class LlamaBatchedBench(LoadedEngine):
    def __init__(self, load: Load) -> None:
        self._load = load

    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        num_prompts, prompt_len = len(prompts), len(prompts[0])
        threads = str(self._load.num_threads)
        process = subprocess.Popen(
            [
                str(Path(self._load.options["bin"]) / "llama-batched-bench"), "--model", self._load.model,
                "--threads", threads, "--threads-batch", threads,
                "--ctx-size", str(num_prompts * (prompt_len + max_tokens)), "--no-kv-unified",
                "-npp", str(prompt_len), "-ntg", str(max_tokens), "-npl", str(num_prompts),
                "--output-format", "jsonl",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        output = process.communicate()[0]
        sys.stderr.write(output)
        results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if process.returncode != 0 or len(results) != 1:
            raise RuntimeError(
                f"llama-batched-bench: status {process.returncode}, {len(results)} results instead of 1"
            )
        (result,) = results
        # Its first step of generation follows the prompt's logits: for one new token, the prompt is all.
        wall_s = result["t_pp"] if max_tokens == 1 else result["t"]
        return Ran(wall_s, [result["tg"]] * result["pl"])

    def pids(self) -> list[int]:
        return []  # one process per run, gone after it

    def close(self) -> None:
        """Nothing runs between two batches."""


if __name__ == "__main__":
    serve(LlamaBatchedBench)
