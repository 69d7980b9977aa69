"""Answers as /openapi.json describes them. `objects` writes their JSON without building them."""

from __future__ import annotations

from typing import Literal

from triptych_services.frontend.http.answers import Answer


class PromptTokensDetails(Answer):
    cached_tokens: int
    """Found in the prefix cache."""


class CompletionTokensDetails(Answer):
    reasoning_tokens: int
    """Thought before the answer, where the model's reasoning is known apart."""
    accepted_prediction_tokens: int
    """Guessed ahead by the engine, so that they took no step of their own."""
    rejected_prediction_tokens: int
    """Guessed ahead by the engine, computed, and not in the output. They are not counted as output."""


class MovesAnswer(Answer):
    """A note that the request has moved from one engine to another, since the first was lost or stopped."""

    moves: int
    """Times that it moved; of several choices, the most."""
    exact: bool
    """All its engines compute the same bits: the output is the one that it would have been."""


class UsageAnswer(Answer):
    """Counts in tokens, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """Not in the counts of a chunk with a choice, like the other details."""
    completion_tokens_details: CompletionTokensDetails | None = None
    triptych: MovesAnswer | None = None


class CompletionLogprobs(Answer):
    """One entry per token in each list."""

    tokens: list[str]
    """A part of a character is spelled by its bytes: `bytes:\\xe2\\x80`."""
    token_logprobs: list[float | None]
    """-9999 represents minus infinity; null for the first token of a prompt that is repeated."""
    top_logprobs: list[dict[str, float] | None]
    """The chosen token and its best rivals, by text; null as in token_logprobs."""
    text_offset: list[int]
    """Characters of the tokens before."""


class PromptToken(Answer):
    """A candidate for one position of a prompt."""

    logprob: float
    """-9999 represents minus infinity."""
    rank: int
    """1 is the best of the vocabulary."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt, by id: itself, then the best ones; null for the first. Only if asked for."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`; in a stream in the first chunk of a choice."""
    token_ids: list[int] | None = None
    """With `return_token_ids`: the new tokens of the output."""
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it. `abort`: the request was aborted, with finish_reason length.
    `repetition_detected`: the output repeated itself, likewise."""


class CompletionAnswer(Answer):
    """A completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str | None
    """It is equal where the same weights answer."""
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CompletionChunk(Answer):
    """One event of a completion that streams."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str | None
    """It is equal where the same weights answer."""
    choices: list[CompletionChoice]
    """One, or none in the chunk with the usage."""
    usage: UsageAnswer | None = None
    """Only with `stream_options.include_usage`; null but in the last chunk, unless continuous_usage_stats is set."""


class Candidate(Answer):
    token: str
    logprob: float
    """-9999 represents minus infinity."""
    bytes: list[int]
    """Those of the token: a part of a UTF-8 text, where `token` may show U+FFFD."""


class ChatToken(Candidate):
    top_logprobs: list[Candidate]


class ChatLogprobs(Answer):
    content: list[ChatToken]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class ToolCallAnswer(Answer):
    id: str
    """For the message of role tool that answers it."""
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    """Null where there are only calls."""
    refusal: None
    reasoning_content: str | None = None
    """The text that the model thought before it answered."""
    tool_calls: list[ToolCallAnswer] | None = None
    """Calls that the model makes."""


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None
    """With `return_token_ids`: the tokens of the output."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    """The stop token id or stop string that ended it. `abort`: the request was aborted, with finish_reason length.
    `repetition_detected`: the output repeated itself, likewise."""


class ChatCompletionAnswer(Answer):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str | None
    """It is equal where the same weights answer."""
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt, by id: itself, then the best ones; null for the first. Only if asked for."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""


class CalledFunctionDelta(Answer):
    name: str | None = None
    """In the first chunk of a call."""
    arguments: str
    """More of the JSON text."""


class ToolCallDeltaAnswer(Answer):
    """The new part of a call."""

    index: int
    """Which call of the choice, 0, 1, …"""
    id: str | None = None
    """In the first chunk of a call, like its type."""
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChatDelta(Answer):
    """The new part of a choice."""

    role: Literal["assistant"] | None = None
    """In the first chunk of a choice."""
    content: str | None = None
    reasoning_content: str | None = None
    """New text of what the model thinks before it answers."""
    tool_calls: list[ToolCallDeltaAnswer] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None
    """With `return_token_ids`: the new tokens."""
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it. `abort`: the request was aborted, with finish_reason length.
    `repetition_detected`: the output repeated itself, likewise."""


class ChatCompletionChunk(Answer):
    """One event of a chat completion that streams."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str | None
    """It is equal where the same weights answer."""
    choices: list[ChatChunkChoice]
    """One, or none in the chunk with the usage."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`, in the first chunk of each choice."""
    usage: UsageAnswer | None = None
    """Only with `stream_options.include_usage`; null but in the last chunk, unless continuous_usage_stats is set."""


class ModelAnswer(Answer):
    id: str
    object: Literal["model"]
    created: int
    """Unix seconds."""
    owned_by: str
    root: str
    """The name of the model that `id` is a name of."""
    parent: str | None
    """The model that it adapts, of an adapter."""
    max_model_len: int
    """Tokens of prompt and output together."""


class ModelListAnswer(Answer):
    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """The tokens as the vocabulary spells them, with `return_token_strs`."""


class DetokenizeAnswer(Answer):
    prompt: str


class TokenizerInfoAnswer(Answer):
    """The special tokens and the chat template that the server uses."""

    tokenizer_class: str
    """Its class in the library `transformers`."""
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    """Jinja source; null where the model has none."""


class AbortAnswer(Answer):
    aborted_request_ids: list[str]
    """Those that were alive. They end with what they have."""
