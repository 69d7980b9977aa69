"""LLM: generate text from a plain program, with a stack of its own or one that runs elsewhere."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from triptych.client.adapter_methods import AdapterMethods
from triptych.client.admin_client import AdminClient, EngineMetric, to_pause_mode, to_sleep_level
from triptych.client.batch import (
    MAX_IN_FLIGHT,
    Batch,
    Job,
    ProgressBar,
    UseTqdm,
    make_jobs,
    raise_failures,
    window_of,
)
from triptych.client.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from triptych.client.connection import Connection
from triptych.client.conversation import ChatOptions, Conversation, Tool
from triptych.client.grpc_client import GenerationClient
from triptych.client.loop_thread import LoopThread
from triptych.client.pooled import PooledCalls, PooledMethods, PooledOptions
from triptych.client.prompts import AnyPrompts, parse_conversations, parse_prompts
from triptych.client.request import RequestOptions
from triptych.client.served_tokenizer import ServedTokenizer, fetch_tokenizer
from triptych.config import TlsConfig
from triptych.errors import EngineUnavailable, InvalidRequest
from triptych.types.outputs import RequestOutput
from triptych.types.sampling import SamplingParams

_T = TypeVar("_T")


class LLM(PooledMethods, AdapterMethods):
    """A model for plain programs.

        with LLM() as llm:                              # starts a stack of its own
            outputs = llm.generate(["Hello, my name is", "The sky is"], SamplingParams(max_tokens=16))
        llm = LLM(address="127.0.0.1:50051")            # or uses one that runs

    `close` (or the end of `with`, of the object, of the program) stops a stack of its own. Threads may share it.
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
        """Start a stack and wait until it serves, or connect to one.

        Args:
            model: without `address`, what to serve: a directory, a .gguf file, a hub id or `embedded`,
                the default. With it, which of the models served there to use; None where it is the only one.
            address: host:port of a frontend's gRPC server. None: $TRIPTYCH_ADDRESS, if it is set; else, and where it
                is empty, a stack of our own.
            admin_address: host:port of that frontend's admin server, for `sleep` and the like. None:
                $TRIPTYCH_ADMIN_ADDRESS, if it is set.
            api_key: for a frontend that asks for one; None: $TRIPTYCH_API_KEY, if it is set.
            tls: for a frontend that serves TLS: `TlsConfig(ca="ca.pem")`; None: as $TRIPTYCH_TLS_CA and the like say.
            metadata: sent with each call, for gateways on the way.
            ready_timeout_s: None: 600 for a stack of our own, 30 for another.
            overrides: options of a stack of our own, by key, bare name or vLLM's name: `max_num_seqs=16`,
                `**{"scheduler.max_num_seqs": 16}`, `gpu_memory_utilization=0.8`.

        Raises:
            ConfigError, ModelError, ModelNotFound, EngineUnavailable: there is no server; says why.
        """
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
        self._loop = LoopThread("triptych-llm")
        self._finalizer = weakref.finalize(self, _close, self._loop, self._connection)
        try:
            self._loop.run(self._connection.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The frontend in use, host:port."""
        return self._client().address

    def close(self) -> None:
        """Hang up; stop the stack, if it is ours. A second call does nothing."""
        self._finalizer()

    def generate(
        self,
        prompts: AnyPrompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        on_error: Literal["raise", "return"] = "raise",
        adapter: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str | Sequence[str] = "",
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | Sequence[float | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; returns when all are done, in the order of the prompts.

        Any number of prompts may be given: a bounded number is in flight, and a server that is full is
        asked again when it said. A prompt that fails leaves the others alone.

        Args:
            prompts: one prompt or many (a list, an iterator, a 2-D array). A prompt is a text, token ids (a list, a
                tuple, an array), messages, or vLLM's `{"prompt": …}` or `{"prompt_token_ids": …}`, perhaps with a
                `cache_salt`.
            sampling_params: for all prompts, or a list with one for each; sent unchanged. None leaves all
                to the model's generation_config.json and the server's defaults.
            use_tqdm: show a progress bar with tokens/s; or what makes it, in place of `tqdm.tqdm`.
            on_error: what follows when a prompt has failed and the others are finished. `raise` its error where it
                is the only one, or else PartialFailure, which has all `outputs`; `return` them: those of prompts
                that failed have an `error` and no choices.
            adapter: name of a LoRA adapter that is applied; empty: none. See `load_adapter`.
            priority: lower runs first. This and the next may be lists with one entry for each prompt.
            tenant: the tenant that the tokens are charged to.
            cache_salt: share cached prefixes only with requests of the same salt.
            truncate_prompt_tokens: keep only the last tokens of a prompt, this many.
            timeout_s: seconds for each prompt, from its first sending to its end.

        Raises:
            InvalidRequest: what is given has not the form above; names it. Nothing was sent.
            PartialFailure: see `on_error`.
            TriptychError: no prompt could be served: the key is refused, or the server took nothing for two minutes.
        """
        jobs = make_jobs(
            parse_prompts(prompts),
            sampling_params,
            RequestOptions(model=self._connection.model_name, truncate_prompt_tokens=truncate_prompt_tokens),
            adapter=adapter,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        return self._run_batch(jobs, use_tqdm, on_error)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        adapter: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str | Sequence[str] = "",
        timeout_s: float | Sequence[float | None] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or many: the assistant's next turn in each.

        Args:
            tools: functions that the model may call, in OpenAI's form. Calls come as `tool_calls` of the output.
            tool_choice: auto, none, required, or `{"type": "function", "function": {"name": …}}`. None: auto.
            parallel_tool_calls: an answer may hold several calls.
            chat_template_kwargs: extra variables for the chat template, as `{"enable_thinking": False}`.
            add_generation_prompt: open the assistant's turn; False with `continue_final_message`.
            continue_final_message: go on with the last message.
        """
        chat = ChatOptions(
            tools or (),
            tool_choice,
            parallel_tool_calls,
            chat_template_kwargs or {},
            add_generation_prompt,
            continue_final_message,
        )
        jobs = make_jobs(
            parse_conversations(messages),
            sampling_params,
            RequestOptions(model=self._connection.model_name, chat=chat),
            adapter=adapter,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        return self._run_batch(jobs, use_tqdm, on_error)

    def beam_search(
        self,
        prompts: AnyPrompts,
        params: BeamSearchParams,
        use_tqdm: UseTqdm = False,
        *,
        concurrency_limit: int | None = None,
        adapter: str = "",
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> list[BeamSearchOutput]:
        """Search the likeliest sequences after one prompt or many, as transformers does with `num_beams`.

        Args:
            prompts: as `generate` takes them.
            concurrency_limit: prompts that are worked on at a time, at most. None: as many as fit.

        Raises:
            InvalidRequest: a prompt or a parameter is refused; names it.
        """
        options = RequestOptions(
            model=self._connection.model_name,
            adapter=adapter,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        parsed = parse_prompts(prompts)
        with ProgressBar(len(parsed), use_tqdm) as bar:
            return self._loop.run(
                beam_search(
                    self._client(),
                    parsed,
                    params,
                    options,
                    concurrency_limit=concurrency_limit,
                    on_finished=bar.count,
                    check_server=self._connection.check,
                )
            )

    def get_tokenizer(self) -> ServedTokenizer:
        """Return the model's tokenizer, as transformers would make it of the server's files. They are fetched once."""
        client = self._client()
        if self._tokenizer is None:
            self._tokenizer = self._loop.run(fetch_tokenizer(client, self._connection.model_name))
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling parameters, from its generation_config.json; all others have their default.

        `dataclasses.replace` changes single fields.
        """
        model = self._loop.run(self._client().get_model(self._connection.model_name))
        return SamplingParams(**model.default_sampling)  # type: ignore[arg-type]

    def get_metrics(self) -> list[EngineMetric]:
        """Return the engines' counters of this moment, under vLLM's names."""
        return self._steer(AdminClient.metrics)

    def sleep(self, level: int = 1, mode: Literal["wait", "abort", "keep"] = "wait") -> int:
        """Free the accelerators' memory until `wake_up`, and return how many bytes were. Requests queue meanwhile.

        Args:
            level: 1: weights wait in the host's memory. 2: they are dropped, and read again.
            mode: what becomes of all running requests, other clients' too: they finish, are aborted, or go on later.
        """
        known_level, known_mode = to_sleep_level(level), to_pause_mode(mode)
        return self._steer(lambda admin: admin.sleep(known_level, known_mode))

    def wake_up(self) -> None:
        """End a sleep; returns when the engines can compute."""
        self._steer(AdminClient.wake)

    def is_sleeping(self) -> bool:
        """Return whether any engine sleeps."""
        return self._steer(AdminClient.is_asleep)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, and return True.

        Raises:
            WrongState: A request holds blocks.
        """
        self._steer(AdminClient.reset_prefix_cache)
        return True

    def _steer(self, call: Callable[[AdminClient], Coroutine[Any, Any, _T]]) -> _T:
        self._client()

        async def run() -> _T:
            return await call(await self._connection.admin())

        return self._loop.run(run())

    def _pool(self, call: Callable[[PooledCalls], Coroutine[Any, Any, _T]]) -> _T:
        return self._loop.run(call(self._client().pooled))

    def _pooled_options(self, **given: Any) -> PooledOptions:
        return PooledOptions(model=self._connection.model_name, **given)

    def _client(self) -> GenerationClient:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM has been closed")
        return self._loop.run(self._connection.start())

    def _run_batch(self, jobs: list[Job], use_tqdm: UseTqdm, on_error: str) -> list[RequestOutput]:
        if on_error not in ("raise", "return"):
            raise InvalidRequest("on_error", f"expected raise or return, not {on_error!r:.80}")
        client = self._client()
        with ProgressBar(len(jobs), use_tqdm) as bar:
            outputs = self._loop.run(_run(client, jobs, bar, self._connection.check))
        if on_error == "raise":
            raise_failures(outputs)
        return outputs


async def _run(
    client: GenerationClient, jobs: list[Job], bar: ProgressBar, check_server: Callable[[], None]
) -> list[RequestOutput]:
    max_in_flight = MAX_IN_FLIGHT
    if len(jobs) > max_in_flight:
        with contextlib.suppress(
            EngineUnavailable
        ):  # the batch waits for engines; none is known to be wider now
            max_in_flight = window_of((await client.get_model(jobs[0].options.model)).max_running)
    async with client.open_batch() as stream:
        batch = Batch(
            stream, jobs, on_finished=bar.add, check_server=check_server, max_in_flight=max_in_flight
        )
        return await batch.run()


def _close(loop: LoopThread, connection: Connection) -> None:
    """End what an LLM holds; kept apart from it, so that its finalizer does not keep it alive."""
    if loop.is_current():  # the garbage collector runs finalizers wherever it happens to be
        threading.Thread(target=_close, args=(loop, connection)).start()
        return
    cluster = loop.run(connection.disconnect())
    loop.close()
    if cluster is not None:
        cluster.stop()
