"""`AsyncLLM` as vLLM has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from triptych.client import async_llm
from triptych.client.prompts import AnyPrompt
from triptych.types.outputs import RequestOutput
from triptych.vllm.engine.arg_utils import EngineArgs
from triptych.vllm.entrypoints.llm import ModelConfig, check_tags
from triptych.vllm.lora.request import LoadedAdapters, LoRARequest
from triptych.vllm.requests import Seeds, refuse
from triptych.vllm.sampling_params import SamplingParams

_GRACE_S = 5.0


class AsyncLLM(async_llm.AsyncLLM):
    """`triptych.AsyncLLM` with vLLM's arguments and ways.

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="embedded"))
    async for output in engine.generate("Hello", SamplingParams(max_tokens=8), request_id="1"):
        …
    engine.shutdown()
    """

    def __init__(self, model: str | None = None, *, seed: int | None = 0, **arguments: Any) -> None:
        """See `triptych.vllm.LLM`. The stack is started by the first call."""
        self._seeds = Seeds(seed)
        self._loaded = LoadedAdapters()
        self._closing: set[asyncio.Task[None]] = set()
        super().__init__(model, **arguments)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> AsyncLLM:
        """Make one with these arguments.

        Args:
            start_engine_loop: Has no effect, as has `usage_context`.
        """
        refuse(stat_loggers=stat_loggers)
        return cls(**vars(engine_args))

    def generate(  # type: ignore[override]
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to one prompt; see `triptych.AsyncLLM.generate`, which has the options.

        The parameters are taken as they are at this call.

        Args:
            trace_headers: Have no effect.
        """
        refuse(tokenization_kwargs=tokenization_kwargs, data_parallel_rank=data_parallel_rank)
        if isinstance(sampling_params, SamplingParams) and sampling_params.truncate_prompt_tokens is not None:
            options.setdefault("truncate_prompt_tokens", sampling_params.truncate_prompt_tokens)
        params: Any = sampling_params if sampling_params is None else self._seeds.freeze(sampling_params)
        if lora_request is None:
            return super().generate(prompt, params, request_id, priority=priority, **options)
        options = {**options, "adapter": lora_request.lora_name, "priority": priority}
        return self._with_adapter(lora_request, prompt, params, request_id, options)

    async def _with_adapter(
        self, adapter: LoRARequest, prompt: AnyPrompt, params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        for request in self._loaded.missing(adapter):
            await self.load_adapter(request.lora_name, request.lora_path)
            self._loaded.note(request)
        async with aclosing(super().generate(prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling parameters, which may be changed."""
        model = await (await self.start()).get_model(self._connection.model_name)
        return SamplingParams(**model.default_sampling)

    async def get_model_config(self) -> ModelConfig:
        """Return what is known of the model."""
        return ModelConfig.of(await (await self.start()).get_model(self._connection.model_name))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:  # type: ignore[override]
        """End a sleep, and return True when the engines can compute; all of them wakes, whatever the tags are."""
        check_tags(tags)
        await super().wake_up()
        return True

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Plan no more steps until `resume_generation`; see `triptych.AsyncLLM.pause`.

        Args:
            clear_cache: Forget all cached prefixes, where no request is left that holds blocks.
        """
        await self.pause(mode)  # type: ignore[arg-type]
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self.resume()

    def shutdown(self, timeout: float | None = None) -> None:
        """Abort what runs; stop the stack, if it is ours, before this returns.

        Args:
            timeout: Seconds that it may take to end well. None: 5.
        """
        clients, cluster = self._connection.detach()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            clients = []  # their loop has ended, and they with it
        for client in clients:
            task = loop.create_task(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        if cluster is not None:
            cluster.stop(_GRACE_S if timeout is None else timeout)
