"""Triptych as it is served: three processes, the public gRPC service, one client.

Options: keys of its config (`model.quantization`), as `triptych serve` takes them. Its worker counts the cores
by itself, as for any user.
"""

from __future__ import annotations

import asyncio
import time

from protocol import Load, LoadedEngine, Ran, serve

from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.launcher.launch import config_from_overrides, launch
from triptych.types.events import DeltaEvent

_WHOLE_ANSWERS = RequestOptions(whole_choices=True)


class TriptychEngine(LoadedEngine):
    def __init__(self, load: Load) -> None:
        self._loop = asyncio.new_event_loop()
        config = config_from_overrides(
            {
                "model.model": load.model,
                "model.max_model_len": load.max_model_len,
                "scheduler.max_num_seqs": load.max_num_seqs,
                "speculative.enabled": "false",  # peers guess nothing
                **load.options,
            }
        )
        self._cluster = launch(config, show_progress=False)
        self._client = self._loop.run_until_complete(self._connect())

    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        return self._loop.run_until_complete(self._run(prompts, max_tokens))

    def pids(self) -> list[int]:
        return list(self._cluster.pids.values())

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()
        self._cluster.stop()

    async def _connect(self) -> GenerationClient:
        return GenerationClient(self._cluster.address)

    async def _run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": True}

        async def complete(prompt: list[int]) -> int:
            num_tokens = 0
            # like the peers' own calls, which give an answer when it is whole
            async for event in self._client.generate(prompt, sampling, _WHOLE_ANSWERS):
                if isinstance(event, DeltaEvent):
                    num_tokens += len(event.token_ids)
            return num_tokens

        started = time.perf_counter()
        num_tokens = await asyncio.gather(*(complete(prompt) for prompt in prompts))
        return Ran(time.perf_counter() - started, list(num_tokens))


if __name__ == "__main__":
    serve(TriptychEngine)
