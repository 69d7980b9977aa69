"""LLM: generate text from a plain program, with a stack of its own or one that runs elsewhere."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from triptych.client.batch import Batch, Job, ProgressBar
from triptych.client.conversation import ChatOptions, Conversation, Tool
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import (
    Prompt,
    RequestOptions,
    split_conversations,
    split_prompts,
)
from triptych.config import EngineConfig, TlsConfig
from triptych.errors import InvalidRequest
from triptych.launcher.launch import (
    CONNECT_TIMEOUT_S,
    READY_TIMEOUT_S,
    launch,
    request_model,
    stack_config,
)
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.outputs import RequestOutput
from triptych.types.sampling import SamplingParams


class LLM:
    """A model for plain programs.

        with LLM() as llm:                              # starts a stack of its own
            outputs = llm.generate(["Hello, my name is", "The sky is"], SamplingParams(max_tokens=16))
        llm = LLM(address="127.0.0.1:50051")            # or uses one that runs

    `close` (or the end of `with`, of the object, of the program) stops a stack of its own.
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
        """Start a stack and wait until it serves, or connect to one.

        Args:
            model: without `address`, what to serve: a directory, a .gguf file, a hub id or `embedded`,
                the default. With it, which of the models served there to use; None where it is the only one.
            address: host:port of a frontend's gRPC server.
            api_key: for a frontend that asks for one; None: $TRIPTYCH_API_KEY, if it is set.
            tls: for a frontend that serves TLS: `TlsConfig(ca="ca.pem")`; None: as $TRIPTYCH_TLS_CA and the like say.
            ready_timeout_s: None: 600 for a stack of our own, 30 for another.
            overrides: options of a stack of our own, by key or bare name: `max_num_seqs=16`,
                `**{"scheduler.max_num_seqs": 16}`.

        Raises:
            ConfigError, ModelError, ModelNotFound, EngineUnavailable: it cannot be had; says why.
        """
        config = stack_config(model, address, overrides)
        self._model_name = request_model(model, address)
        self._session = _Session()
        self._finalizer = weakref.finalize(self, self._session.close)
        try:
            self._session.open(config, address, api_key, tls, ready_timeout_s)
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
        return self._session.client.address

    def close(self) -> None:
        """Hang up; stop the stack, if it is ours. A second call does nothing."""
        self._finalizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int = 0,
        cache_salt: str = "",
        truncate_prompt_tokens: int | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; returns when all are done, in the order of the prompts.

        Any number of prompts may be given: a bounded number is in flight, and a server that is full is
        asked again when it said.

        Args:
            prompts: text, token ids or messages, one of these or a list of them.
            sampling_params: for all prompts, or a list with one for each; sent unchanged. None leaves all
                to the model's generation_config.json and the server's defaults.
            use_tqdm: show a progress bar with tokens/s.

        Raises:
            InvalidRequest: a prompt or parameter is refused; names it. No other request is left running.
            QueueFull, EngineUnavailable, GenerationLost: the server took nothing for two minutes.
        """
        options = RequestOptions(
            model=self._model_name,
            priority=priority,
            cache_salt=cache_salt,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return self._run(split_prompts(prompts), sampling_params, options, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them: the assistant's next turn in each.

        Args:
            tools: functions that the model may call, in OpenAI's form. Calls come as `tool_calls` of the output.
            tool_choice: auto, none, required, or `{"type": "function", "function": {"name": …}}`. None: auto.
            parallel_tool_calls: an answer may hold several calls.
            chat_template_kwargs: extra variables for the chat template, as `{"enable_thinking": False}`.
            add_generation_prompt: open the assistant's turn.
        """
        chat = ChatOptions(
            tools, tool_choice, parallel_tool_calls, chat_template_kwargs or {}, add_generation_prompt
        )
        options = RequestOptions(model=self._model_name, priority=priority, cache_salt=cache_salt, chat=chat)
        return self._run(split_conversations(messages), sampling_params, options, use_tqdm)

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(prompts):
                raise InvalidRequest(
                    "sampling_params", f"{len(sampling_params)} of them for {len(prompts)} prompts"
                )
            jobs = [Job(*pair) for pair in zip(prompts, sampling_params, strict=True)]
        else:
            jobs = [Job(prompt, sampling_params) for prompt in prompts]
        session = self._session
        with ProgressBar(len(jobs), is_shown=use_tqdm) as bar:
            batch = Batch(session.client, jobs, options, on_finished=bar.add, check_server=session.check)
            return session.loop.run(batch.run())


class _Session:
    """The resources of an LLM. They are kept apart from it so that its finalizer does not keep it alive."""

    def __init__(self) -> None:
        self.loop = LoopThread("triptych-llm")
        self._client: GenerationClient | None = None
        self._cluster: LocalCluster | None = None

    def open(
        self,
        config: EngineConfig | None,
        address: str | None,
        api_key: str | None,
        tls: TlsConfig | None,
        ready_timeout_s: float | None,
    ) -> None:
        if config is not None:
            self._cluster = launch(config, ready_timeout_s=ready_timeout_s or READY_TIMEOUT_S)
            address, tls = self._cluster.address, config.tls
        self._client = self.loop.run(
            GenerationClient.connect(
                str(address), ready_timeout_s or CONNECT_TIMEOUT_S, api_key=api_key, tls=tls
            )
        )

    @property
    def client(self) -> GenerationClient:
        if self._client is None:
            raise RuntimeError("this LLM has been closed")
        return self._client

    def check(self) -> None:
        """Raises what took our own stack down, if anything did."""
        if self._cluster is not None:
            self._cluster.check()

    def close(self) -> None:
        if self.loop.is_current():  # the garbage collector runs finalizers wherever it happens to be
            threading.Thread(target=self.close).start()
            return
        if self._client is not None:
            self.loop.run(self._client.close())
            self._client = None
        self.loop.close()
        if self._cluster is not None:
            self._cluster.stop()


_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for synchronous callers, from any thread, until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Wait for the coroutine's result. KeyboardInterrupt cancels it and waits for it to clean up."""
        outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()
        started: list[asyncio.Task[_T]] = []

        def start() -> None:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(lambda ended: _copy(ended, outcome))
            started.append(task)

        def cancel() -> None:
            if started:
                started[0].cancel()
            else:  # interrupted before `start` was scheduled
                coroutine.close()
                outcome.set_exception(concurrent.futures.CancelledError())

        try:
            self._loop.call_soon_threadsafe(start)
            return outcome.result()
        except BaseException:
            if not outcome.done():  # we were interrupted, not the coroutine
                self._loop.call_soon_threadsafe(cancel)
                concurrent.futures.wait([outcome])
            raise

    def is_current(self) -> bool:
        """Whether the caller is on the loop's own thread, where `run` would wait for itself."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the loop and join the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def _copy(task: asyncio.Task[_T], outcome: concurrent.futures.Future[_T]) -> None:
    if task.cancelled():
        outcome.set_exception(concurrent.futures.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
