"""An engine that computes nothing; `options["does"]` says how it fails, `options["wall_s"]` what it claims to take."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from protocol import Load, LoadedEngine, Ran, Scored, serve


class FakeEngine(LoadedEngine):
    def __init__(self, load: Load) -> None:
        self._does = load.options.get("does", "well")
        self._wall_s = float(load.options.get("wall_s", 1.0))
        if self._does == "refuse":
            raise ValueError("q3 is not a mode")
        print("this is no answer")  # engines chatter on stdout

    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        if self._does == "hang":
            time.sleep(60)
        if self._does == "die":
            os._exit(3)
        if self._does == "leave a child":
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            print(f"child {child.pid}", file=sys.stderr)
        length = max_tokens - 1 if self._does == "stop early" and max_tokens > 1 else max_tokens
        return Ran(self._wall_s, [length] * len(prompts))

    def score(self, prompt: list[int], tokens: list[int]) -> dict[str, Scored]:
        return {"tokens": Scored([-float(token) for token in tokens], [len(prompt) > 1] * len(tokens))}

    def close(self) -> None:
        if self._does == "die at the end":
            os._exit(3)


if __name__ == "__main__":
    serve(FakeEngine)
