"""AsyncLLM: stream text into an asyncio program, from a stack of its own or one that runs elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any

from triptych.client.collect import stream_outputs
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import Prompt, RequestOptions
from triptych.config import EngineConfig, TlsConfig
from triptych.errors import EngineUnavailable
from triptych.launcher.launch import (
    CONNECT_TIMEOUT_S,
    READY_TIMEOUT_S,
    launch,
    request_model,
    stack_config,
)
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.outputs import RequestOutput
from triptych.types.sampling import OutputKind, SamplingParams


class AsyncLLM:
    """A model for asyncio programs.

        async with AsyncLLM() as llm:
            params = SamplingParams(max_tokens=64, output_kind=OutputKind.DELTA)
            async for output in llm.generate("Once upon a time", params):
                print(output.outputs[0].text, end="")

    Belongs to the event loop that it is started on. Needs no `async with`: the first call starts it, and
    `close` ends it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        address: str | None = None,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        ready_timeout_s: float | None = None,
        **overrides: Any,
    ) -> None:
        """See `LLM`."""
        self._config = stack_config(model, address, overrides)
        self._address = address
        self._model_name = request_model(model, address)
        self._api_key = api_key
        self._tls = tls if self._config is None else self._config.tls
        self._ready_timeout_s = ready_timeout_s
        self._cluster: LocalCluster | None = None
        self._client: GenerationClient | None = None
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> GenerationClient:
        """Start the stack or connect to it, unless that is done; returns the client, for its other calls.

        Raises:
            ConfigError, ModelError, ModelNotFound, EngineUnavailable: it cannot be had; says why.
        """
        async with self._starting:
            if self._client is None:
                if self._config is not None:
                    self._cluster = await _launch_on_thread(self._config, self._ready_timeout_s)
                address = self._cluster.address if self._cluster else str(self._address)
                self._client = await GenerationClient.connect(
                    address, self._ready_timeout_s or CONNECT_TIMEOUT_S, api_key=self._api_key, tls=self._tls
                )
            return self._client

    async def close(self) -> None:
        """Abort what runs; stop the stack, if it is ours. Generating again would start another."""
        if self._client is not None:
            await self._client.close()
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.stop)
        self._client = self._cluster = None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to one prompt: text, token ids or messages. Leaving the iterator aborts it.

        Each output holds one choice, as `sampling_params.output_kind` says: CUMULATIVE, the default, all of it so
        far; DELTA what is new; FINAL_ONLY each choice once, when it has ended. The last output has `finished`, usage
        and timings. Nothing is retried: QueueFull says when to try again.

        Args:
            sampling_params: sent unchanged, with every field; None leaves all but the output kind to the
                model's generation_config.json and the server's defaults.
            timeout_s: the request's deadline.
        """
        client = await self.start()
        kind = OutputKind.CUMULATIVE if sampling_params is None else sampling_params.output_kind
        options = RequestOptions(
            request_id=request_id,
            model=self._model_name,
            priority=priority,
            cache_salt=cache_salt,
            truncate_prompt_tokens=truncate_prompt_tokens,
            whole_choices=kind is OutputKind.FINAL_ONLY,
        )
        text = prompt if isinstance(prompt, str) else None
        async with aclosing(client.generate(prompt, sampling_params, options, timeout_s=timeout_s)) as events:
            # Deltas are added up here: sent cumulatively, an answer would travel again with each token.
            is_cumulative = kind is OutputKind.CUMULATIVE
            async for output in stream_outputs(events, text, is_cumulative=is_cumulative):
                yield output


async def _launch_on_thread(config: EngineConfig, ready_timeout_s: float | None) -> LocalCluster:
    """`launch` without blocking the loop; cancelled, it returns when nothing is left running."""
    is_cancelled = threading.Event()

    def check() -> None:
        if is_cancelled.is_set():
            raise EngineUnavailable("the start was cancelled")

    launching = asyncio.create_task(
        asyncio.to_thread(launch, config, ready_timeout_s=ready_timeout_s or READY_TIMEOUT_S, check=check)
    )
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        is_cancelled.set()
        try:
            cluster = await launching
        except Exception:  # ours, or another reason not to have started
            raise asyncio.CancelledError from None
        await asyncio.to_thread(cluster.stop)
        raise
