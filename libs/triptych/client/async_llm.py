"""AsyncLLM: stream text into an asyncio program, from a stack of its own or one that runs elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from triptych.client.adapter_methods import AsyncAdapterMethods
from triptych.client.admin_client import EngineMetric, to_pause_mode, to_sleep_level
from triptych.client.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from triptych.client.collect import OutputCollector, stream_outputs
from triptych.client.connection import Connection
from triptych.client.conversation import ChatOptions, Conversation, Tool
from triptych.client.grpc_client import GenerationClient
from triptych.client.pooled import PooledOptions
from triptych.client.prompts import AnyPrompt, AnyPrompts, ParsedPrompt, parse_conversations, parse_prompt
from triptych.client.request import RequestOptions
from triptych.client.served_tokenizer import ServedTokenizer, fetch_tokenizer
from triptych.config import TlsConfig
from triptych.errors import InvalidRequest
from triptych.types.outputs import RequestOutput
from triptych.types.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledRequestOutput,
    PoolingOutput,
    ScoringOutput,
)
from triptych.types.sampling import OutputKind, SamplingParams


class AsyncLLM(AsyncAdapterMethods):
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
        admin_address: str | None = None,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        metadata: Mapping[str, str] | None = None,
        ready_timeout_s: float | None = None,
        **overrides: Any,
    ) -> None:
        """See `LLM`."""
        self._connection = Connection(
            model,
            address=address,
            admin_address=admin_address,
            api_key=api_key,
            tls=tls,
            metadata=metadata,
            ready_timeout_s=ready_timeout_s,
            overrides=overrides,
        )
        self._tokenizer: ServedTokenizer | None = None

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
            ConfigError, ModelError, ModelNotFound, EngineUnavailable: there is no server; says why.
        """
        return await self._connection.start()

    async def close(self) -> None:
        """Abort what runs; stop the stack, if it is ours. Generating again would start another."""
        cluster = await self._connection.disconnect()
        if cluster is not None:
            await asyncio.to_thread(cluster.stop)

    async def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        adapter: str = "",
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to one prompt, in any form that `LLM.generate` takes. Leaving the iterator aborts it.

        `sampling_params.output_kind` says what comes. CUMULATIVE, the default: outputs with one choice each, all of it
        so far. DELTA: the same, with what is new. FINAL_ONLY: one output with all choices. The last output has
        `finished`, usage and timings. Nothing is retried: QueueFull says when to try again.

        Args:
            sampling_params: sent unchanged, with every field; None leaves all but the output kind to the
                model's generation_config.json and the server's defaults.
            adapter: name of a LoRA adapter that is applied; empty: none. See `load_adapter`.
            request_id: a name for it, unique while it runs, for `abort` and the server's log. Empty: one is drawn.
            timeout_s: the request's deadline.
        """
        options = RequestOptions(
            request_id=request_id,
            model=self._connection.model_name,
            adapter=adapter,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        async with aclosing(
            self._stream(parse_prompt(prompt), sampling_params, options, timeout_s)
        ) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        adapter: str = "",
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a conversation: the assistant's next turn. `LLM.chat` says what the options are."""
        chat = ChatOptions(
            tools or (),
            tool_choice,
            parallel_tool_calls,
            chat_template_kwargs or {},
            add_generation_prompt,
            continue_final_message,
        )
        options = RequestOptions(
            request_id=request_id,
            model=self._connection.model_name,
            adapter=adapter,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            chat=chat,
        )
        prompts = parse_conversations(messages)
        if len(prompts) != 1:
            raise InvalidRequest("messages", f"expected one conversation, not {len(prompts)}")
        async with aclosing(self._stream(prompts[0], sampling_params, options, timeout_s)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: AnyPrompt,
        params: BeamSearchParams,
        *,
        adapter: str = "",
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> BeamSearchOutput:
        """Search the likeliest sequences after one prompt; see `LLM.beam_search`."""
        options = RequestOptions(
            model=self._connection.model_name,
            adapter=adapter,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        [output] = await beam_search(
            await self.start(),
            [parse_prompt(prompt)],
            params,
            options,
            concurrency_limit=None,
            on_finished=lambda num_in, num_out: None,
            check_server=self._connection.check,
        )
        return output

    async def abort(self, request_id: str | Sequence[str]) -> list[str]:
        """End requests with what they have, and return the ids of those that were alive."""
        client = await self.start()
        return await client.abort([request_id] if isinstance(request_id, str) else request_id)

    async def check_health(self) -> None:
        """Check that the frontend takes requests now; raises EngineUnavailable, which says why it does not."""
        await (await self.start()).check_health()

    async def embed(
        self,
        prompts: AnyPrompts,
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        **options: Any,
    ) -> list[PooledRequestOutput[EmbeddingOutput]]:
        """Return one vector for each prompt, as `LLM.embed` does."""
        client, given = await self.start(), self._pooled_options(options)
        return await client.pooled.embed(prompts, given, normalize=normalize, dimensions=dimensions)

    async def encode(
        self, prompts: AnyPrompts, *, normalize: bool | None = None, **options: Any
    ) -> list[PooledRequestOutput[PoolingOutput]]:
        """Return the vectors of all tokens of each prompt, as `LLM.encode` does."""
        client, given = await self.start(), self._pooled_options(options)
        return await client.pooled.encode(prompts, given, normalize=normalize)

    async def classify(
        self, prompts: AnyPrompts, *, activation: bool | None = None, **options: Any
    ) -> list[PooledRequestOutput[ClassificationOutput]]:
        """Return one number for each label of the model, for each prompt, as `LLM.classify` does."""
        client, given = await self.start(), self._pooled_options(options)
        return await client.pooled.classify(prompts, given, activation=activation)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activation: bool | None = None,
        **options: Any,
    ) -> list[PooledRequestOutput[ScoringOutput]]:
        """Return how well each document fits its query, as `LLM.score` does."""
        client, given = await self.start(), self._pooled_options(options)
        return await client.pooled.score(queries, documents, given, activation=activation)

    def _pooled_options(self, options: Mapping[str, Any]) -> PooledOptions:
        return PooledOptions(model=self._connection.model_name, **options)

    async def get_tokenizer(self) -> ServedTokenizer:
        """Return the model's tokenizer; see `LLM.get_tokenizer`. Its own calls are plain ones."""
        client = await self.start()
        if self._tokenizer is None:
            self._tokenizer = await fetch_tokenizer(client, self._connection.model_name)
        return self._tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling parameters; see `LLM.get_default_sampling_params`."""
        model = await (await self.start()).get_model(self._connection.model_name)
        return SamplingParams(**model.default_sampling)  # type: ignore[arg-type]

    async def get_metrics(self) -> list[EngineMetric]:
        """Return the engines' counters of this moment, under vLLM's names."""
        return await (await self._connection.admin()).metrics()

    async def sleep(self, level: int = 1, mode: Literal["wait", "abort", "keep"] = "wait") -> int:
        """Free the accelerators' memory until `wake_up`; see `LLM.sleep`."""
        known_level, known_mode = to_sleep_level(level), to_pause_mode(mode)
        return await (await self._connection.admin()).sleep(known_level, known_mode)

    async def wake_up(self) -> None:
        """End a sleep; returns when the engines can compute."""
        await (await self._connection.admin()).wake()

    async def is_sleeping(self) -> bool:
        """Return whether any engine sleeps."""
        return await (await self._connection.admin()).is_asleep()

    async def pause(self, mode: Literal["wait", "abort", "keep"] = "wait") -> None:
        """Plan no more steps until `resume`; returns when none is under way. New requests queue meanwhile.

        Args:
            mode: what becomes of running requests: they finish first, are aborted, or freeze.
        """
        known_mode = to_pause_mode(mode)
        await (await self._connection.admin()).pause(known_mode)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await (await self._connection.admin()).resume()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, and return True; see `LLM.reset_prefix_cache`."""
        await (await self._connection.admin()).reset_prefix_cache()
        return True

    async def _stream(
        self,
        prompt: ParsedPrompt,
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        timeout_s: float | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        client = await self.start()
        kind = OutputKind.CUMULATIVE if sampling_params is None else sampling_params.output_kind
        changes: dict[str, Any] = {"whole_choices": kind is OutputKind.FINAL_ONLY}
        if prompt.cache_salt is not None:
            changes["cache_salt"] = prompt.cache_salt
        options = replace(options, **changes)
        events = client.generate(prompt.content, sampling_params, options, timeout_s=timeout_s)
        async with aclosing(events):
            if kind is OutputKind.FINAL_ONLY:
                collector = OutputCollector(prompt.text)
                async for event in events:
                    collector.add(event)
                yield collector.output
                return
            # Deltas are added up here: sent cumulatively, an answer would travel again with each token.
            is_cumulative = kind is OutputKind.CUMULATIVE
            async for output in stream_outputs(events, prompt.text, is_cumulative=is_cumulative):
                yield output
