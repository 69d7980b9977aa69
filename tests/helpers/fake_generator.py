"""A generator without engines: checks requests as the real one does, then says a few words."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from tests.helpers.byte_tokenizer import byte_tokenizer
from triptych.errors import EngineUnavailable, InvalidRequest, ModelNotFound, NotKept, TriptychError
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent
from triptych.types.facts import ModelFacts
from triptych.types.identity import ModelIdentity
from triptych.types.logprobs import Logprob, TokenLogprobs
from triptych.types.outputs import FinishReason, StageTimings, Usage
from triptych.types.pooling import PoolingParams, Task
from triptych.types.step import U32, PromptLogprobs
from triptych.types.submit import EngineLimits, ModelTerms
from triptych_services.frontend.generate import Generator, ServedModel
from triptych_services.frontend.pooled_calls import PooledCalls
from triptych_services.frontend.requests.parse import check_chat, fit_to_context, parse
from triptych_services.frontend.requests.prepare import prepare_pooled
from triptych_services.frontend.requests.raw import RawChat, RawRequest, WrittenMessages
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.streams.logprobs import PromptReport
from triptych_services.frontend.streams.outputs import EventReceiver, OutputEvent
from triptych_services.frontend.streams.placement import AttachedEvent
from triptych_services.frontend.streams.resume import ResumeToken, SeenChoice
from triptych_services.frontend.text_calls import TextCalls

MODEL = "tiny/fake"
VOCAB_SIZE = 256
MAX_MODEL_LEN = 64
WORDS = (" Once", " upon", " a", " time", " ü", ".")
TASKS = ("generate", "embed", "token_embed", "classify")
_FACTS = ModelFacts(
    MODEL,
    ModelIdentity("0"),
    VOCAB_SIZE,
    MAX_MODEL_LEN,
    (0,),
    "float32",
    "float32",
    "none",
    tasks=TASKS,
    embedding_size=4,
    num_labels=1,
)
_TERMS = ModelTerms(_FACTS, EngineLimits(), MAX_MODEL_LEN)


class FakeGenerator(Generator):
    """Choice i says i, then WORDS, one token each; then EOS ends it. A prompt's tokens are its UTF-8 bytes."""

    def __init__(self) -> None:
        self.siblings = None
        self.text = _FakeTextCalls(self.find_model)
        self.pooled = PooledCalls(self.generate, self, 1 << 28)  # type: ignore[arg-type] # what it asks a router
        self.reset()

    async def attach(
        self,
        token: ResumeToken,
        seen: Mapping[int, SeenChoice],
        api: str,
        receiver: EventReceiver | None = None,
    ) -> AsyncGenerator[AttachedEvent | Event, None]:
        if self.unready_because:
            raise EngineUnavailable(self.unready_because)
        raise NotKept("no such stream is kept here")
        yield

    def reset(self) -> None:
        """As new; for tests that share a server."""
        self.unready_because = ""
        self.why_waiting = str
        self.most_choices = 16384
        self.admission_errors: list[Exception] = []
        """Raised before admission, one for each of the next requests."""
        self.error_after_words: tuple[int, Exception] | None = None
        """After so many words of each choice."""
        self.hold_after_words: int | None = None
        """Every request stops there until it is closed or `released`. -1: before the first word."""
        self.holding = asyncio.Event()
        self.released = asyncio.Event()
        self.requests: list[RawRequest] = []
        self.closed: list[str] = []
        """Ids of the requests that were closed before their end."""
        self.num_running = 0
        self.aborted: list[str] = []
        """All names that `abort` was asked for."""
        self.changed = asyncio.Event()
        """Set whenever `closed` or `num_running` may have changed."""

    def max_choices(self, model: str) -> int:
        return self.most_choices

    def max_running(self, model: str = "") -> int:
        return 0

    @property
    def num_active(self) -> int:
        return self.num_running

    async def count_active(self) -> int:
        return self.num_running

    async def abort(self, names: Collection[str], *, of_any_tenant: bool = False) -> list[str]:
        self.aborted += names
        return [name for name in names if any(name in raw.client_names for raw in self.requests)]

    async def generate(
        self, raw: RawRequest, receiver: EventReceiver | None = None
    ) -> AsyncGenerator[Event, None]:
        self.requests.append(raw)
        self.num_running += 1
        is_over = False
        try:
            async for event in self._events(raw):
                if receiver is None or isinstance(event, AdmittedEvent | FinishedEvent):
                    yield event
                    continue
                assert isinstance(event, OutputEvent)
                while not receiver.is_ready:
                    await asyncio.sleep(0)
                receiver.take(event)
            is_over = True
        except (TriptychError, ArithmeticError):
            is_over = True
            raise
        finally:
            self.num_running -= 1
            if not is_over:
                self.closed.append(raw.head.request_id)
            self.changed.set()

    async def _events(self, raw: RawRequest) -> AsyncGenerator[Event, None]:
        if self.admission_errors:
            raise self.admission_errors.pop(0)
        self.find_model(raw.model)
        if raw.pooling is not None:
            async for event in self._vectors(raw, raw.pooling):
                yield event
            return
        valid = parse(raw, _TERMS, {})
        prompt = _token_ids(valid.prompt)
        sampling = fit_to_context(valid, len(prompt), MAX_MODEL_LEN)
        assert sampling.max_tokens is not None
        await asyncio.sleep(0)
        token = "" if raw.answer is None else "c2VjcmV0"
        yield AdmittedEvent(raw.head.request_id, MODEL, sampling.seed or 0, prompt, resume_token=token)
        await self._hold_at(-1)
        if sampling.prompt_logprobs is not None:
            report = PromptReport(np.array(prompt, np.uint32), sampling.prompt_logprobs, lambda i: bytes([i]))
            for position in range(1, len(prompt)):
                report.add(_prompt_logprobs(prompt, position, sampling.prompt_logprobs))
            while (part := report.take()) is not None:
                await asyncio.sleep(0)
                yield part
        num_tokens = 0
        if sampling.max_tokens == 0:
            for index in range(sampling.n):
                yield DeltaEvent(
                    index, bytes(prompt).decode() if raw.echo else "", [], (), FinishReason.LENGTH
                )
            yield FinishedEvent(Usage(len(prompt), 0, num_cached_tokens=1), StageTimings())
            return
        texts = [bytes(prompt).decode() if raw.echo else ""] * sampling.n
        for number in range(len(WORDS) + 1):
            await asyncio.sleep(0)
            for index in range(sampling.n):
                word = (str(index), *WORDS)[number]
                num_tokens += 1
                texts[index] += word
                stop = next((stop for stop in sampling.stop if stop in texts[index]), None)
                reason = None
                if stop is not None:
                    reason, word = FinishReason.STOP, ""
                elif number + 1 == sampling.max_tokens:
                    reason = FinishReason.LENGTH
                elif number == len(WORDS):
                    reason = FinishReason.STOP
                text = texts[index] if number == 0 and raw.echo else word
                top = 0 if sampling.logprobs is None else sampling.logprobs
                logprobs = () if sampling.logprobs is None else (_logprobs(number, word, top),)
                yield DeltaEvent(index, text, [number], logprobs, reason, stop)
            if reason is not None:
                break
            if self.error_after_words is not None and number == self.error_after_words[0]:
                raise self.error_after_words[1]
            await self._hold_at(number)
        timings = StageTimings(num_accepted_guesses=2, num_rejected_guesses=1)
        yield FinishedEvent(Usage(len(prompt), num_tokens, num_cached_tokens=1), timings)

    async def _vectors(self, raw: RawRequest, pooling: PoolingParams) -> AsyncGenerator[Event, None]:
        """One number for a classifier, else the first ids of the text."""
        prepared = await prepare_pooled(raw, pooling, raw.head.request_id, _TERMS, self.text_model)
        token_ids = prepared.prompt_token_ids
        yield AdmittedEvent(raw.head.request_id, MODEL, 0, token_ids)
        vectors = np.resize(token_ids.astype(np.float32), (len(token_ids), 4))
        if pooling.task is not Task.TOKEN_EMBED:
            vectors = vectors[:1, : 1 if pooling.task is Task.CLASSIFY else None]
        yield DeltaEvent(0, "", [], (), FinishReason.STOP, vectors=vectors)
        yield FinishedEvent(Usage(len(token_ids), 0), StageTimings())

    async def _hold_at(self, number: int) -> None:
        if number == self.hold_after_words:
            self.holding.set()
            await self.released.wait()

    @functools.cached_property
    def text_model(self) -> TextModel:
        return TextModel(byte_tokenizer(), {}, Path("no-checkpoint"))

    def models(self) -> list[ServedModel]:
        return [ServedModel(MODEL, MAX_MODEL_LEN, VOCAB_SIZE, 1_700_000_000, tasks=TASKS, num_labels=1)]

    def find_model(self, name: str) -> ServedModel:
        if self.unready_because:
            raise EngineUnavailable(self.unready_because)
        if name not in ("", MODEL):
            raise ModelNotFound(f"model: no engine serves {name!r}; served: {MODEL}")
        return self.models()[0]

    @property
    def is_ready(self) -> bool:
        return not self.unready_because

    @property
    def why_not_ready(self) -> str:
        return self.unready_because


class _FakeTextCalls(TextCalls):
    """A text's tokens are its UTF-8 bytes."""

    def __init__(self, find_model: Callable[[str], ServedModel]) -> None:
        self._find_model = find_model

    async def tokenize(
        self,
        prompt: str | RawChat,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        paths: Mapping[str, str] = MappingProxyType({}),
    ) -> list[int]:
        self._find_model(model)
        if isinstance(prompt, RawChat) and (
            violations := check_chat(prompt, lambda name: paths.get(name, name))
        ):
            raise InvalidRequest(violations)
        return _token_ids(prompt)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        path: str = "token_ids",
    ) -> str:
        if bad := [token_id for token_id in token_ids if not 0 <= token_id < VOCAB_SIZE]:
            raise InvalidRequest(path, f"{bad[0]} is not in the vocabulary, 0..{VOCAB_SIZE - 1}")
        return bytes(list(token_ids)).decode(errors="replace")


def _token_ids(prompt: str | Sequence[int] | U32 | RawChat) -> list[int]:
    if isinstance(prompt, RawChat):
        messages = prompt.messages
        if isinstance(messages, WrittenMessages):
            messages = json.loads(messages.json)
        prompt = "".join(f"{message['role']}:{message['content']}" for message in messages)
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def _prompt_logprobs(prompt: Sequence[int], position: int, num_top: int) -> PromptLogprobs:
    """The token is the second best of all; the best is `A`, those after it follow in the alphabet."""
    top = [65, prompt[position], *range(66, 66 + num_top)][:num_top]
    return PromptLogprobs(
        position,
        np.array([[prompt[position], *top]], np.uint32),
        np.array([[-position, *(-position + 0.5 - 0.5 * rank for rank in range(num_top))]], np.float32),
        np.array([2], np.uint32),
    )


def _logprobs(token_id: int, text: str, num_top: int) -> TokenLogprobs:
    top = tuple(Logprob(100 + rank, -0.25 * rank, f"t{rank}", rank) for rank in range(1, num_top))
    worst = (Logprob(200, float("-inf"), "\ufffd", num_top, b"\xe2\x80"),) if num_top else ()
    return TokenLogprobs.of(Logprob(token_id, -0.5, text, 1), top + worst)
