"""Turns OpenAI's requests into raw requests: maps names, lists what is not served, leaves ranges to the parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from triptych.errors import FieldViolation, InvalidRequest
from triptych.types.sampling import MAX_LOGPROBS
from triptych_services.frontend.http.body import refuse_unsupported
from triptych_services.frontend.http.generation import (
    REFUSED_PROMPT,
    Form,
    base_request,
    is_refused,
    json_form,
    missing,
    sampling_fields,
    with_structured_outputs,
)
from triptych_services.frontend.http.openai.conversation import ContentPart, Message, NamedTool
from triptych_services.frontend.http.openai.schema import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    DetokenizeRequest,
    ResponseFormat,
    SamplingBody,
    StreamOptions,
    TokenizeRequest,
)
from triptych_services.frontend.requests.raw import RawChat, RawRequest
from triptych_services.frontend.requests.sampling import pack_ids
from triptych_services.frontend.requests.tools import reasoning_variables, to_call

CHAT_PATHS = {"prompt": "messages", "template_kwargs": "chat_template_kwargs", "tools.function": ".function"}
"""Fields of a `RawChat` -> their paths in a body, where they differ."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is sent. It outlives the body, which may be large and is freed on the thread that has read it."""

    num_choices: int
    """Per prompt."""
    is_streamed: bool
    includes_usage: bool
    has_running_usage: bool
    """Each chunk has the usage so far."""
    wants_logprobs: bool
    echoes_logprobs: bool
    """The log-probabilities of the prompt come before those of the output."""
    returns_prompt_logprobs: bool
    returns_token_ids: bool
    names_tokens_by_id: bool
    """In log-probabilities: `token_id:123`."""
    has_content: bool = True
    """The answer has content. One that has to call tools has none."""
    skips_special_tokens: bool = True


def completion_requests(body: CompletionRequest, *, label: str, deadline_s: float | None) -> list[RawRequest]:
    """Return one raw request per prompt, in their order. Request ids are numbered where there is a list of prompts."""
    base = _common(body, label, deadline_s)
    sampling = {**base.sampling, "max_tokens": body.max_tokens, "logprobs": body.logprobs}
    has_logprobs = body.logprobs is not None and 0 <= body.logprobs <= MAX_LOGPROBS  # else refused as it is
    if body.echo and has_logprobs and body.prompt_logprobs is None:
        sampling["prompt_logprobs"] = body.logprobs
    base = replace(base, sampling=sampling, echo=bool(body.echo))
    if body.best_of not in (None, 1, sampling["n"]):
        base = replace(base, unsupported=(*base.unsupported, "best_of"))
    prompt = body.prompt
    if prompt is None:
        return [replace(base, prompt=REFUSED_PROMPT if is_refused(body, "prompt") else None)]
    if isinstance(prompt, str):
        return [replace(base, prompt=prompt)]
    if not prompt:
        empty = FieldViolation("prompt", "the list is empty; at least 1 token or 1 prompt is needed")
        return [replace(base, prompt=REFUSED_PROMPT, violations=(*base.violations, empty))]
    if isinstance(prompt[0], int):
        return [replace(base, prompt=pack_ids(prompt))]
    return [
        replace(
            base,
            prompt=each if isinstance(each, str) else pack_ids(each),
            head=replace(base.head, request_id=base.head.request_id and f"{base.head.request_id}-{number}"),
            paths={**base.paths, "prompt": f"prompt[{number}]"},
        )
        for number, each in enumerate(cast(list[str | list[int]], prompt))
    ]


def chat_request(body: ChatCompletionRequest, *, label: str, deadline_s: float | None) -> RawRequest:
    """Return the conversation as one raw request."""
    base = _common(body, label, deadline_s)
    violations = list(base.violations)
    paths = {**base.paths, **CHAT_PATHS}
    max_tokens, logprobs = body.max_tokens, None
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            description = (
                f"{max_tokens} contradicts max_completion_tokens {body.max_completion_tokens}; send one"
            )
            violations.append(FieldViolation("max_tokens", description))
        max_tokens = body.max_completion_tokens
        paths["max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        logprobs = body.top_logprobs or 0
        paths["logprobs"] = "top_logprobs"
    elif body.top_logprobs:
        violations.append(FieldViolation("top_logprobs", f"{body.top_logprobs} needs logprobs to be true"))
    if body.logprob_token_ids and not body.logprobs:
        violations.append(FieldViolation("logprob_token_ids", "needs logprobs to be true"))
    prompt: RawChat | str | None = to_chat(body)
    if body.add_generation_prompt and body.continue_final_message:
        why = "true contradicts continue_final_message: a turn is opened or continued"
        violations.append(FieldViolation("add_generation_prompt", why))
    if body.messages is None:
        prompt = REFUSED_PROMPT if is_refused(body, "messages") else None
    return replace(
        base,
        prompt=prompt,
        sampling={**base.sampling, "max_tokens": max_tokens, "logprobs": logprobs},
        paths=paths,
        violations=tuple(violations),
    )


def read_completion(
    body: CompletionRequest, *, label: str, deadline_s: float | None
) -> tuple[AnswerOptions, list[RawRequest]]:
    """Return what `answer_options` and `completion_requests` make of a body."""
    raws = completion_requests(body, label=label, deadline_s=deadline_s)
    return answer_options(body), raws


def read_chat(
    body: ChatCompletionRequest, *, label: str, deadline_s: float | None
) -> tuple[AnswerOptions, RawRequest]:
    """Return what `answer_options` and `chat_request` make of a body."""
    raw = chat_request(body, label=label, deadline_s=deadline_s)
    return answer_options(body), raw


def read_tokenize(body: TokenizeRequest) -> tuple[str, str | RawChat, bool | None, bool]:
    """Return the model that is named, the prompt, and whether special tokens are added and texts are returned."""
    prompt = tokenize_prompt(body)
    return body.model or "", prompt, body.add_special_tokens, bool(body.return_token_strs)


def read_detokenize(body: DetokenizeRequest) -> tuple[str, Sequence[int], bool]:
    """Return the model that is named, the ids, and whether special tokens are skipped."""
    return body.model or "", pack_ids(detokenize_ids(body)), body.skip_special_tokens is not False


def tokenize_prompt(body: TokenizeRequest) -> str | RawChat:
    """Return what is to be tokenized.

    Raises:
        InvalidRequest, FeatureDisabled: All that is wrong with the body.
    """
    violations = list(body.violations)
    if not violations and (body.prompt is None) == (body.messages is None):
        given = "neither is" if body.prompt is None else "both are"
        violations.append(FieldViolation("prompt", f"give either prompt or messages; {given} given"))
    if violations:
        raise InvalidRequest(violations)
    refuse_unsupported(body)
    return to_chat(body) if body.prompt is None else body.prompt


def detokenize_ids(body: DetokenizeRequest) -> list[int]:
    """Return the token ids to detokenize.

    Raises:
        InvalidRequest: All that is wrong with the body.
    """
    violations = list(body.violations)
    if body.tokens is None and not violations:
        violations.append(FieldViolation("tokens", "none are given; send a list of token ids"))
    if violations:
        raise InvalidRequest(violations)
    return body.tokens or []


def to_chat(body: ChatFields) -> RawChat:
    """Return the conversation as the chat template sees it: each content one text, absent names left out."""
    choice = body.tool_choice
    chat = RawChat(
        messages=[_to_message(message) for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        documents=tuple(body.documents or ()),
        template_kwargs=body.chat_template_kwargs or {},
        tools=tuple(
            tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in body.tools or ()
        ),
        tool_choice=choice.function.name if isinstance(choice, NamedTool) else choice or "auto",
    )
    if not isinstance(body, ChatCompletionRequest):
        return chat
    return replace(
        chat,
        template_kwargs={**reasoning_variables(body.reasoning_effort), **chat.template_kwargs},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        includes_reasoning=body.include_reasoning is not False,
    )


def answer_options(body: CompletionRequest | ChatCompletionRequest) -> AnswerOptions:
    """Return how the answer is to be sent. A bad `n` is refused before anything is made of it."""
    sampling = sampling_fields(body)
    has_number = body.logprobs is not None and body.logprobs is not False
    wants_logprobs = has_number or bool(body.logprob_token_ids)
    stream_options = body.stream_options or StreamOptions()
    return AnswerOptions(
        num_choices=sampling["n"] or 1,
        is_streamed=bool(body.stream),
        includes_usage=bool(stream_options.include_usage),
        has_running_usage=bool(stream_options.include_usage and stream_options.continuous_usage_stats),
        wants_logprobs=wants_logprobs,
        echoes_logprobs=wants_logprobs and isinstance(body, CompletionRequest) and bool(body.echo),
        returns_prompt_logprobs=body.prompt_logprobs is not None,
        returns_token_ids=bool(body.return_token_ids),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        has_content=not isinstance(body, ChatCompletionRequest) or body.tool_choice in (None, "auto", "none"),
        skips_special_tokens=sampling["skip_special_tokens"] is not False,
    )


def _common(body: SamplingBody, label: str, deadline_s: float | None) -> RawRequest:
    """Return the request without what the two kinds of completion name differently."""
    base = base_request(body, _read_form(body), label=label, deadline_s=deadline_s)
    return replace(
        base,
        sampling={
            **base.sampling,
            "prompt_logprobs": body.prompt_logprobs,
            "logprob_token_ids": body.logprob_token_ids,
        },
        resumes=bool(body.stream_options and body.stream_options.include_event_ids),
        violations=(*base.violations, *_misuse_of_stream(body)),
    )


def _misuse_of_stream(body: SamplingBody) -> list[FieldViolation]:
    violations = []
    if body.stream and body.prompt_logprobs is not None:
        why = "comes with whole answers only; leave it out, or set stream to false"
        violations.append(FieldViolation("prompt_logprobs", why))
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        why = "needs include_usage to be true"
        violations.append(FieldViolation("stream_options.continuous_usage_stats", why))
    if options is not None and not body.stream:
        why = "only a stream has options; set stream to true"
        violations.append(FieldViolation("stream_options", why))
    return violations


def _to_message(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = _joined(content)
    turn: dict[str, Any] = {"role": message.role, "content": content}
    reasoning = message.reasoning_content or message.reasoning
    others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    turn |= {name: value for name, value in others.items() if value is not None}
    if message.tool_calls:
        turn["tool_calls"] = [
            to_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    return turn


def _joined(parts: Sequence[ContentPart]) -> str:
    return "\n".join(text for part in parts if (text := part.shown) is not None)


def _read_form(body: SamplingBody) -> Form:
    """Return the form that a completion or a chat completion asks for."""
    given = body.response_format
    form = Form() if given is None else _from_response_format(given)
    return with_structured_outputs(form, "response_format", body.structured_outputs)


def _from_response_format(given: ResponseFormat) -> Form:
    path = "response_format.json_schema"
    if given.type == "json_schema" and given.json_schema is None:
        return missing(path, "the type json_schema needs it")
    schema = given.json_schema.schema_ if given.json_schema is not None else None
    if given.json_schema is not None and schema is None:
        return missing(f"{path}.schema", "send the JSON schema of the answer")
    is_strict = given.json_schema is None or given.json_schema.strict is not False
    return json_form(given.type, schema, "response_format", f"{path}.schema", is_strict=is_strict)
