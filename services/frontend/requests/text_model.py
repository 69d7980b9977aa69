"""The text side of the model served: prompts to token ids and back, off the loop where that takes long."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from triptych.checkpoint.config_json import read_generation_defaults
from triptych.checkpoint.pooling import PoolingSpec, read_pooling
from triptych.errors import FieldViolation, InvalidRequest
from triptych.text.answer_parser import ReasoningFormat
from triptych.text.detokenizer import create_detokenizer
from triptych.text.tokenizer import Tokenizer
from triptych.text.tool_formats import choose_reasoning_format, choose_tool_format
from triptych.types.output_limits import ThinkingBudget
from triptych.types.step import U32
from triptych_services.frontend.offload.fair_threads import FairThreads
from triptych_services.frontend.offload.long_texts import LONG_TEXT, LongTextEncoder
from triptych_services.frontend.requests.chat_renderer import ChatRenderer, TakesLong
from triptych_services.frontend.requests.grammars.answer_forms import DEMANDED_FORMAT
from triptych_services.frontend.requests.grammars.compiler import GrammarChecker
from triptych_services.frontend.requests.parse import prompt_has_too_many_chars
from triptych_services.frontend.requests.plain_tools import PLAIN_FORMAT
from triptych_services.frontend.requests.raw import RawChat, RawPair
from triptych_services.frontend.requests.sampling import check_defaults, why_not_text
from triptych_services.frontend.requests.tools import AnswerSplit, schemas_of

# 4 kB tokenize in about 1.3 ms: as long as a small model's step. What is longer goes to a thread.
INLINE_SIZE = 4096
_NUM_THREADS = 3  # of which one tenant has two: the tokenizer computes without the interpreter's lock
CONTEXTS_TOKENIZED = 4
"""A text that is cut, or that is only tokenized, may fill so many contexts."""
ALWAYS_TOKENIZED = 1 << 16
"""Characters that such a text may have however short the context is; they take 0.1 to 0.4 s."""
_OPENING_TOKENS = 16  # at the end of a prompt, of which the opening of a reasoning takes fewer

P = ParamSpec("P")
R = TypeVar("R")


class TextModel:
    """Tokenizer, chat template and sampling defaults of one checkpoint; immutable."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        defaults: Mapping[str, float],
        directory: Path,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """
        Args:
            directory: Where the checkpoint's files are.
            tool_call_parser, reasoning_parser: See `FrontendConfig`.
        """
        self.tokenizer = tokenizer
        self.directory = directory
        template = "\n".join((tokenizer.chat_template or "", *tokenizer.other_templates.values()))
        self._template = ChatRenderer(tokenizer)
        if tool_call_parser == "auto" and template.strip() and not self._template.knows_tools:
            tool_call_parser = PLAIN_FORMAT
        self._tool_format = choose_tool_format(tool_call_parser, template)
        self._reasoning_format = choose_reasoning_format(reasoning_parser, template)
        formats = {"tool_calls": self._tool_format, "reasoning": self._reasoning_format}
        self.formats = {part: each.name for part, each in formats.items() if each is not None}
        """Parts of answers to conversations -> the names of the formats that they are known by."""
        self.defaults = check_defaults(defaults)
        """Sampling fields that the checkpoint sets for requests that leave them out."""
        self.grammars = GrammarChecker(tokenizer)
        self._long_texts = LongTextEncoder(tokenizer)
        self._threads = FairThreads(_NUM_THREADS, inline_size=INLINE_SIZE, what="long prompts")

    @classmethod
    def from_directory(cls, directory: Path, **parsers: str) -> TextModel:
        """Raises ModelError, naming what is missing or not understood."""
        tokenizer, defaults = Tokenizer.from_directory(directory), read_generation_defaults(directory)
        return cls(tokenizer, defaults, directory, **parsers)

    async def run(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that works on a prompt: here if it is short, else on a thread.

        Raises:
            QueueFull: Too many long prompts wait already.
        """
        return await self._threads.run(size, function, *args, **kwargs)

    async def encode(
        self,
        prompt: str | RawChat,
        path: str,
        *,
        max_model_len: int,
        fits_context: bool = True,
        add_special_tokens: bool | None = None,
        max_tokens: int | None = None,
        keeps_beginning: bool = False,
    ) -> U32:
        """Return the token ids of a text or of a rendered conversation.

        Args:
            path: of the prompt in the client's words.
            max_model_len: Tokens of the model's context.
            fits_context: Whether a text that must have more tokens than the context is refused before it is tokenized.
                Otherwise, and where it is cut, it may be a few contexts long.
            add_special_tokens: None: for a text, yes; a template has written its own.
            max_tokens: Cut the text, so that there are at most so many tokens.
            keeps_beginning: What is cut off is its end, not its beginning.

        Raises:
            InvalidRequest: on `path`: the template refuses the conversation, there is no template, or the text is too
                long.
            QueueFull: Too many long prompts wait to be tokenized.
        """
        if isinstance(prompt, RawChat):
            try:
                text = await self.run(prompt.size, self._render, prompt, path)
            except TakesLong:
                text = await self.run(max(prompt.size, INLINE_SIZE + 1), self._render, prompt, path)
            adds_special = bool(add_special_tokens)
        else:
            text, adds_special = prompt, add_special_tokens is not False
        num_contexts = 1 if fits_context and max_tokens is None else CONTEXTS_TOKENIZED
        max_chars = self.tokenizer.max_chars_per_token
        is_short = num_contexts > 1 and len(text) <= ALWAYS_TOKENIZED
        if max_chars is not None and not is_short and len(text) > num_contexts * max_model_len * max_chars:
            raise prompt_has_too_many_chars(path, len(text), max_model_len, max_chars, num_contexts)
        return await self.run(len(text), self._encode, text, path, adds_special, max_tokens, keeps_beginning)

    @functools.cached_property
    def pooling(self) -> PoolingSpec:
        """The facts of the checkpoint that requests for vectors are checked against.

        Raises:
            FeatureDisabled, ModelError: As `read_pooling`.
        """
        return read_pooling(self.directory)

    def labels(self, num_labels: int) -> tuple[str, ...]:
        """Return the names of a classifier's labels; numbered ones where the checkpoint does not name so many."""
        spec = self.pooling.classifier
        if spec is not None and len(spec.labels) == num_labels:
            return spec.labels
        return tuple(f"LABEL_{index}" for index in range(num_labels))

    async def encode_pair(
        self, pair: RawPair, path: str, *, max_tokens: int | None, max_model_len: int
    ) -> U32:
        """Return the token ids of two texts, as the model's post-processor joins them.

        Args:
            path: Path of the first text in the client's words.
            max_tokens: Cut the longer one, so that there are at most so many tokens. None: nothing is cut.
            max_model_len: Tokens that the model takes.

        Raises:
            InvalidRequest: The texts have too many characters.
            QueueFull: Too many long texts wait to be tokenized.
        """
        limit = max(LONG_TEXT, ALWAYS_TOKENIZED, CONTEXTS_TOKENIZED * max_model_len)
        if len(pair) > limit:
            why = f"{len(pair)} characters of both texts are above the limit {limit}"
            raise InvalidRequest([FieldViolation(path, why, str(len(pair)), str(limit))])
        ids = await self.run(
            len(pair), self.tokenizer.encode_pair, pair.first, pair.second, max_tokens=max_tokens
        )
        return np.array(ids, dtype=np.uint32)

    async def find_offsets(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Return where in a text each of its tokens begins and ends, in code points."""
        return await self.run(
            len(text), self.tokenizer.find_offsets, text, add_special_tokens=add_special_tokens
        )

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of words at the beginning of a text, and behind a space."""
        return await self.run(sum(map(len, words)), self._encode_words, words)

    def split_answer(
        self, chat: RawChat, prompt_token_ids: U32, *, has_form: bool = False
    ) -> AnswerSplit | None:
        """Return how the answer to a conversation is split, or None if it stays one text.

        Args:
            has_form: The content has a form. Then the model reasons before it, unless the prompt or the client says
                that it does not.
        """
        reasoning, tool_format = self._reasoning_format, self._tool_format
        if chat.template_tools is None:
            tool_format = None
        elif chat.demands_calls:
            tool_format = DEMANDED_FORMAT
        is_held = has_form or chat.demands_calls
        is_reasoning = False
        if reasoning is not None:
            end = self.tokenizer.decode(
                prompt_token_ids[-_OPENING_TOKENS:].tolist(), skip_special_tokens=False
            )
            is_reasoning = end.rstrip().endswith(reasoning.opening) or (
                chat.continue_final_message and self._thinks_in_last_turn(prompt_token_ids, reasoning)
            )
            if is_held and not is_reasoning and not _may_reason(chat, end, reasoning):
                reasoning = None
        if reasoning is None and tool_format is None:
            return None
        return AnswerSplit(
            reasoning=reasoning,
            is_reasoning=is_reasoning,
            tool_format=tool_format,
            tools=schemas_of(chat.tools),
            max_calls=None if chat.parallel_tool_calls else 1,
            sends_reasoning=chat.includes_reasoning,
            names_tool=chat.names_tool,
            is_either=has_form and not chat.demands_calls,
        )

    def _thinks_in_last_turn(self, prompt_token_ids: U32, reasoning: ReasoningFormat) -> bool:
        """Return whether the turn that a prompt ends with has opened the reasoning and not closed it.

        Special tokens are between turns: what is opened before one of them is of a turn before. A model that writes the
        marks with several tokens each is not known to think here.
        """
        opening_id, closing_id = map(self.tokenizer.token_id, (reasoning.opening, reasoning.closing))
        if opening_id is None or closing_id is None:
            return False
        opened_at = _last_place(prompt_token_ids, opening_id)
        ends = (closing_id, *self.tokenizer.special_ids)
        return opened_at >= 0 and not np.isin(prompt_token_ids[opened_at + 1 :], ends).any()

    def thinking_budget(
        self, num_tokens: int, prompt_token_ids: U32, *, is_open: bool | None, path: str
    ) -> ThinkingBudget:
        """Return a budget as the worker takes it.

        Args:
            is_open: Whether the prompt has opened the reasoning. None: find it out.
            path: The field in the client's words.

        Raises:
            InvalidRequest: It is not known how this model thinks, or how to end it.
        """
        reasoning = self._reasoning_format
        if reasoning is None:
            why = "it is not known how this model thinks: leave it out, or set frontend.reasoning_parser"
            raise InvalidRequest(path, why)
        opening_id, closing_id = map(self.tokenizer.token_id, (reasoning.opening, reasoning.closing))
        if opening_id is None or closing_id is None:
            why = f"{reasoning.opening} and {reasoning.closing} are not one token each of this model; leave it out"
            raise InvalidRequest(path, why)
        if is_open is None:
            is_open = _last_place(prompt_token_ids, opening_id) > _last_place(prompt_token_ids, closing_id)
        return ThinkingBudget(num_tokens, opening_id, closing_id, is_open)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids, each in the vocabulary."""
        return await self.run(
            len(token_ids), self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    async def echo(self, prompt_token_ids: U32, *, skip_special_tokens: bool) -> str:
        """The prompt's text as far as it is complete: the output may finish its last character."""
        detokenizer = create_detokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
        return await self.run(len(prompt_token_ids), lambda: detokenizer.push(prompt_token_ids.tolist()))

    def _encode(
        self, text: str, path: str, add_special_tokens: bool, max_tokens: int | None, keeps_beginning: bool
    ) -> U32:
        arguments: Any = {
            "add_special_tokens": add_special_tokens,
            "max_tokens": max_tokens,
            "keeps_beginning": keeps_beginning,
        }
        if len(text) > LONG_TEXT:
            return self._long_texts.encode(text, path, **arguments)
        return np.array(self.tokenizer.encode(text, **arguments), dtype=np.uint32)

    def _encode_words(self, words: Sequence[str]) -> list[list[int]]:
        bare_words = dict.fromkeys(word.lstrip(" ") for word in words)
        texts = [text for word in bare_words for text in (word, f" {word}") if text]
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def _render(self, chat: RawChat, path: str) -> str:
        tools = chat.template_tools
        if tools is not None and not chat.demands_calls and self._tool_format is None:
            why = "it is not known how this model writes calls of tools; set frontend.tool_call_parser"
            raise InvalidRequest("tools", why)
        try:
            text = self._template.render(
                chat.messages,
                tools=tools,
                documents=chat.documents or None,
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                **chat.template_kwargs,
            )
        except InvalidRequest as error:
            raise InvalidRequest([FieldViolation(path, v.description) for v in error.violations]) from error
        why_not = why_not_text(text)
        if why_not is not None:  # names, tools and variables are in it as well
            raise InvalidRequest(path, f"is no text as the chat template writes it: {why_not}")
        return text


def _may_reason(chat: RawChat, prompt_end: str, reasoning: ReasoningFormat) -> bool:
    """Return whether an answer may begin with reasoning that the prompt has not opened."""
    is_off = chat.template_kwargs.get("enable_thinking") is False
    is_over = prompt_end.rstrip().endswith(reasoning.closing)
    return not is_off and not is_over and not chat.continue_final_message


def _last_place(token_ids: U32, token_id: int) -> int:
    """Return the last place of a token, or -1."""
    places = np.flatnonzero(token_ids == token_id)
    return int(places[-1]) if len(places) else -1
