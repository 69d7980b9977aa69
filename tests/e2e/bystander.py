"""A client whom nothing that others do may disturb."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from types import TracebackType

NUM_TOKENS = 60


class Bystander:
    """Streams answers to one prompt on a thread, one after the other. Each must be the first one again."""

    def __init__(self, address: str, model: str, prompt: Sequence[int]) -> None:
        body = {
            "model": model, "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        self._request = urllib.request.Request(
            f"http://{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self._answers: list[list[int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Bystander:
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._answers and time.monotonic() < deadline:
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(60)
        if error is None:
            first, *others = self._answers
            assert len(first) == NUM_TOKENS
            assert others, "nothing was streamed meanwhile"
            assert all(answer == first for answer in others)

    def _run(self) -> None:
        while not self._is_over.is_set():
            tokens: list[int] = []
            with urllib.request.urlopen(self._request, timeout=60) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[len(b"data: ") :])
                        tokens += [each for choice in event["choices"] for each in choice["token_ids"]]
            self._answers.append(tokens)
