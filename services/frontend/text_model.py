"""The text side of the model served: prompts to token ids and back, off the loop where that takes long."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from services.frontend.requests import RawChat
from services.frontend.sampling_fields import check_defaults
from triptych.config.checkpoint import read_generation_defaults
from triptych.errors import FieldViolation, InvalidRequest
from triptych.text.chat_template import ChatTemplate
from triptych.text.detokenizer import IncrementalDetokenizer
from triptych.text.tokenizer import Tokenizer

# 4 kB tokenize in about 1.3 ms: as long as a small model's step. What is longer goes to a thread.
INLINE_CHARS = 4096
_INLINE_TOKENS = 4096
_NUM_THREADS = 2

P = ParamSpec("P")
R = TypeVar("R")


class TextModel:
    """Tokenizer, chat template and sampling defaults of one checkpoint; immutable."""

    def __init__(self, tokenizer: Tokenizer, defaults: Mapping[str, float]) -> None:
        self.tokenizer = tokenizer
        self.defaults = check_defaults(defaults)
        """Sampling fields that the checkpoint sets for requests that leave them out."""
        self._template = ChatTemplate(tokenizer)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    @classmethod
    def from_directory(cls, directory: Path) -> TextModel:
        """Raises ModelError, naming what is missing or not understood."""
        return cls(Tokenizer.from_directory(directory), read_generation_defaults(directory))

    async def encode(
        self, prompt: str | RawChat, path: str, *, add_special_tokens: bool | None = None
    ) -> list[int]:
        """Token ids of a text or of a rendered conversation.

        Args:
            path: of the prompt in the client's words.
            add_special_tokens: None: for a text, yes; a template has written its own.

        Raises:
            InvalidRequest: on `path`: the template refuses the conversation, or there is none.
        """
        if isinstance(prompt, RawChat):
            num_chars = sum(len(message["content"]) for message in prompt.messages)
        else:
            num_chars = len(prompt)
        return await self._run(num_chars <= INLINE_CHARS, self._encode, prompt, path, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids, each in the vocabulary."""
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=skip_special_tokens)
        return await self._run(len(token_ids) <= _INLINE_TOKENS, decode, token_ids)

    async def echo(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The prompt's text as far as it is complete: the output may finish its last character."""
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
        return await self._run(len(prompt_token_ids) <= _INLINE_TOKENS, detokenizer.push, prompt_token_ids)

    def _encode(self, prompt: str | RawChat, path: str, add_special_tokens: bool | None) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False)
        try:
            text = self._template.render(
                prompt.messages, add_generation_prompt=prompt.add_generation_prompt, **prompt.template_kwargs
            )
        except InvalidRequest as error:
            raise InvalidRequest([FieldViolation(path, v.description) for v in error.violations]) from error
        return self.tokenizer.encode(text, add_special_tokens=bool(add_special_tokens))

    async def _run(self, is_short: bool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if is_short:
            return function(*args, **kwargs)
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
