"""llama.cpp as it is served: `llama-server` over HTTP on loopback, prompts as token ids.

Options: `bin`, the directory of its programs. It divides its KV cache evenly among a fixed number of slots, and
unused ones cost time; so each workload gets a server with as many slots as streams, started outside the clock.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol import Load, LoadedEngine, Ran, Scored, serve

READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 3600.0  # the driver's own deadline is shorter
NUM_BEST = 100  # tokens that it is asked to report log-probabilities of
CONTEXT_STEP = 256  # llama.cpp rounds a slot's context up to this itself


class LlamaServerEngine(LoadedEngine):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._server: subprocess.Popen[bytes] | None = None
        self._geometry = (0, 0)
        self._port = 0
        self._fit(1, CONTEXT_STEP)

    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        # One more than is needed: it takes an answer that fills its slot for one that was cut short.
        self._fit(len(prompts), max(map(len, prompts)) + max_tokens + 1)
        with ThreadPoolExecutor(len(prompts)) as pool:
            started = time.perf_counter()
            num_tokens = list(pool.map(lambda prompt: self._complete(prompt, max_tokens), prompts))
            return Ran(time.perf_counter() - started, num_tokens)

    def score(self, prompt: list[int], tokens: list[int]) -> dict[str, Scored]:
        # A request per token: its own cache leaves only the last token of each prompt to compute.
        self._fit(1, len(prompt) + len(tokens) + 1)
        scored = Scored([], [])
        for at, token in enumerate(tokens):
            body = {"prompt": prompt + tokens[:at], "n_predict": 1, "n_probs": NUM_BEST, "cache_prompt": True}
            answer = json.loads(self._request("/completion", json.dumps(body).encode()))
            best = answer["completion_probabilities"][0]["top_logprobs"]
            id_to_logprob = {one["id"]: one["logprob"] for one in best}
            if token not in id_to_logprob:
                raise RuntimeError(f"token {at} of the continuation is not among the {NUM_BEST} likeliest")
            scored.logprobs.append(id_to_logprob[token])
            scored.is_best.append(best[0]["id"] == token)
        return {"tokens": scored}

    def pids(self) -> list[int]:
        return [self._server.pid] if self._server else []

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._server = None

    def _fit(self, num_slots: int, num_tokens: int) -> None:
        """Have a server with that many slots, for at least that many tokens each."""
        context = -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP
        if self._geometry == (num_slots, context):
            return
        self.close()
        self._geometry = (num_slots, context)
        threads = str(self._load.num_threads)
        self._port = _free_port()
        self._server = subprocess.Popen(
            [
                str(Path(self._load.options["bin"]) / "llama-server"), "--model", self._load.model,
                "--threads", threads, "--threads-batch", threads, "--parallel", str(num_slots),
                "--ctx-size", str(num_slots * context), "--no-kv-unified", "--no-warmup", "--no-ui",
                "--cache-ram", "0", "--port", str(self._port),
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._server is not None
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._server.returncode}")
            with contextlib.suppress(OSError):  # not listening, or not ready yet
                self._request("/health")
                return
            time.sleep(0.01)
        raise RuntimeError(f"llama-server is not ready after {READY_TIMEOUT_S:g} s")

    def _complete(self, prompt: list[int], max_tokens: int) -> int:
        """Return the number of new tokens."""
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "ignore_eos": True,
            "samplers": ["top_k"],  # greedy; its chain for temperature 0 is a tenth slower
            "top_k": 1,
            "cache_prompt": False,
        }
        answer = json.loads(self._request("/completion", json.dumps(body).encode()))
        if answer["truncated"] or answer["tokens_evaluated"] != len(prompt):
            raise RuntimeError(
                f"llama-server: {answer['tokens_evaluated']} of {len(prompt)} prompt tokens evaluated, "
                f"truncated: {answer['truncated']}"
            )
        return int(answer["tokens_predicted"])

    def _request(self, path: str, body: bytes | None = None) -> bytes:
        """Return the answer to a GET, or to a POST if there is a body; an error status raises OSError."""
        url, headers = f"http://127.0.0.1:{self._port}{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            return bytes(response.read())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    serve(LlamaServerEngine)
