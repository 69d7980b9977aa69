"""Raw requests -> valid ones: every violation at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from triptych.errors import ContextLengthExceeded, FeatureDisabled, FieldViolation, InvalidRequest
from triptych.types.sampling import MAX_BIASES, SamplingParams
from triptych.types.step import U32
from triptych.types.submit import ModelTerms
from triptych_services.frontend.requests.raw import (
    RawChat,
    RawPair,
    RawRequest,
    WrittenMessages,
    WrittenVariable,
    num_chars_of,
    why_too_many_messages,
)
from triptych_services.frontend.requests.sampling import (
    check_sampling,
    find_bad_token_id,
    to_array,
    why_not_text,
)
from triptych_services.frontend.requests.tools import check_tools

COMPLETION_MAX_TOKENS = 16  # where a text or token prompt leaves max_tokens out; a chat gets all that is left
MAX_DEADLINE_S = 1e9
MAX_REQUEST_ID_BYTES = 128
MAX_LABEL_BYTES = 256  # of tenant and cache_salt, which travel with every request
_MAX_FAULTS = 64  # of messages that are reported; a client needs no more to see what is wrong
_I32 = (-(1 << 31), (1 << 31) - 1)
_TEMPLATE_ARGUMENTS = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that only the length of its prompt can still refuse."""

    raw: RawRequest
    prompt: str | U32 | RawChat
    """Token ids are truncated already."""
    sampling: SamplingParams
    """`max_tokens` is None where the client gave none."""

    @property
    def default_max_tokens(self) -> int | None:
        """The limit where the client gave none, or None for all that the context leaves."""
        takes_rest = self.raw.takes_rest_of_context or isinstance(self.prompt, RawChat)
        return None if takes_rest else COMPLETION_MAX_TOKENS


def parse(
    raw: RawRequest, terms: ModelTerms, defaults: Mapping[str, float], max_biases: int = MAX_BIASES
) -> ValidRequest:
    """Check everything that can be checked without the tokenizer.

    Args:
        terms: Facts and limits of the engines that serve the model.
        defaults: Checked sampling fields from the checkpoint, for those that the client left out.
        max_biases: Most entries of `logit_bias`.

    Raises:
        InvalidRequest: Fields are wrong; has every violation found.
        FeatureDisabled: Nothing is wrong, but fields are set that this version does not support; names them all.
    """
    vocab_size, max_model_len = terms.model.vocab_size, terms.model.max_model_len
    checked = check_sampling(raw.sampling, vocab_size=vocab_size, path=raw.path, max_biases=max_biases)
    values = {"max_tokens": None, **defaults, **checked.values}
    if values.get("logprob_token_ids"):
        values.setdefault("logprobs", 0)
    sampling = SamplingParams(**values, output_kind=raw.output_kind)
    if raw.truncate_prompt_tokens == -1:
        raw = replace(raw, truncate_prompt_tokens=_most_prompt_tokens(raw, sampling, max_model_len))
    violations = [
        *raw.violations,
        *check_prompt(raw, vocab_size, max_model_len),
        *check_envelope(raw, terms),
        *checked.violations,
        *_check_together(raw, sampling, terms),
        *_check_emitted(raw, sampling, vocab_size),
    ]
    overflow = _overflow_of_token_ids(raw, max_model_len)
    if violations:
        raise InvalidRequest([*violations, *(overflow.violations if overflow is not None else ())])
    if overflow is not None:
        raise overflow
    unsupported = [*raw.unsupported, *checked.unsupported]
    if unsupported:
        raise FeatureDisabled(unsupported, "this version does not serve it yet; leave it out")
    assert raw.prompt is not None
    assert not isinstance(raw.prompt, RawPair), "only pooled requests have pairs"
    if isinstance(raw.prompt, (str, RawChat)):
        return ValidRequest(raw, raw.prompt, sampling)
    return ValidRequest(raw, to_array(raw.prompt[kept_part(raw, raw.prompt)]), sampling)


def is_request_id(text: str) -> bool:
    """Return whether a text is a valid request id: 1 to 128 printable ASCII characters."""
    return 0 < len(text) <= MAX_REQUEST_ID_BYTES and text.isascii() and text.isprintable()


def why_not_request_id(text: str) -> str | None:
    """Return what is wrong with a request id, or None if nothing is."""
    if is_request_id(text):
        return None
    return f"{text!r:.{MAX_REQUEST_ID_BYTES}} is not printable ASCII, at most {MAX_REQUEST_ID_BYTES} bytes"


def fit_to_context(request: ValidRequest, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """The sampling parameters with `max_tokens` filled in, now that the prompt's length is known.

    What the client asked for is never cut down; what it left open is.

    Raises:
        InvalidRequest: prompt and output do not fit; names both numbers and the limit.
    """
    raw, sampling = request.raw, request.sampling
    if num_prompt_tokens == 0:
        raise InvalidRequest(raw.path("prompt"), "the prompt has no tokens; at least 1 is needed")
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise _prompt_too_long(raw, num_prompt_tokens, max_model_len)
    max_tokens = sampling.max_tokens
    if max_tokens is None:
        max_tokens = min(request.default_max_tokens or num_left, num_left)
    elif max_tokens > num_left:
        raise _exceeds_context(
            raw.path("max_tokens"),
            num_prompt_tokens,
            max_tokens,
            max_model_len,
            f"reduce the prompt, or ask for at most {num_left} tokens",
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            raw.path("min_tokens"), f"{sampling.min_tokens} exceeds max_tokens, here {max_tokens}"
        )
    for number, token_ids in enumerate(raw.emitted.values()):
        if len(token_ids) >= max_tokens:
            why = f"{len(token_ids)} tokens leave nothing to generate: max_tokens is {max_tokens}"
            raise InvalidRequest(f"{raw.path('emitted')}[{number}].token_ids", why)
    return sampling if sampling.max_tokens == max_tokens else replace(sampling, max_tokens=max_tokens)


def prompt_has_too_many_chars(
    path: str, num_chars: int, max_model_len: int, max_chars_per_token: int, num_contexts: int
) -> ContextLengthExceeded:
    """Return the refusal of a text that is too long, whatever its tokens are.

    Args:
        num_contexts: Contexts that it may fill.
    """
    more, remedy = "more tokens than that", "reduce the prompt, or set truncate_prompt_tokens"
    if num_contexts > 1:
        more, remedy = f"more tokens than {num_contexts} times that", "split the text"
    error = ContextLengthExceeded(
        path,
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {num_chars} "
        f"characters, which are {more}: its longest token has {max_chars_per_token}; {remedy}.",
    )
    error.metadata = {"field": path, "limit": str(max_model_len), "num_chars": str(num_chars)}
    return error


def check_chat(chat: RawChat, path_of: Callable[[str], str]) -> list[FieldViolation]:
    """Return what is wrong with a conversation, whatever the template makes of it.

    Args:
        path_of: Gives the paths of "prompt", "template_kwargs" and of the fields that `check_tools` asks for, as the
            client wrote them.
    """
    path = path_of("prompt")
    violations = check_tools(chat.tools, chat.tool_choice, path_of)
    if not chat.messages:
        violations.append(FieldViolation(path, "the conversation is empty; at least 1 message is needed"))
    if (why := why_too_many_messages(len(chat.messages))) is not None:
        return [FieldViolation(path, why)]
    messages = chat.messages
    faults = messages.faults if isinstance(messages, WrittenMessages) else _faults_of(messages)
    violations += [FieldViolation(f"{path}{where}", why) for where, why in islice(faults, _MAX_FAULTS)]
    for name in chat.template_kwargs:
        if name in _TEMPLATE_ARGUMENTS or not name.isidentifier():
            violations.append(
                FieldViolation(
                    f"{path_of('template_kwargs')}.{name}", "is not a name that a template variable may have"
                )
            )
    return violations


def write_messages(messages: Sequence[Mapping[str, Any]]) -> WrittenMessages:
    """Return the messages of a conversation, checked and written as JSON."""
    is_too_long = why_too_many_messages(len(messages)) is not None
    faults = () if is_too_long else tuple(islice(_faults_of(messages), _MAX_FAULTS))
    written = json.dumps(messages, default=dict).encode()
    return WrittenMessages(written, len(messages), num_chars_of(messages), faults)


def write_variable(value: Any) -> Any:
    """Return a list or an object as a `WrittenVariable`, and any other value of JSON as it is."""
    if not isinstance(value, (list, tuple, dict)):
        return value
    return WrittenVariable(json.dumps(value, default=dict).encode(), len(value))


def _faults_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with messages, as the `faults` of `WrittenMessages`."""
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            yield f"[{index}].role", f"{role!r} is not a role; it is a word"
        elif (why := why_not_text(role)) is not None:
            yield f"[{index}].role", why
        is_left_out = content is None and message.get("tool_calls")
        if not is_left_out and (why := why_not_text(content)) is not None:
            yield f"[{index}].content", why


def check_prompt(raw: RawRequest, vocab_size: int, max_model_len: int) -> list[FieldViolation]:
    """Return what is wrong with a prompt, whatever its tokens are."""
    prompt, path = raw.prompt, raw.path("prompt")
    if prompt is None:
        return [FieldViolation(path, "no prompt is given; give text, token ids or messages")]
    if isinstance(prompt, RawChat):
        violations = check_chat(prompt, raw.path)
        if raw.echo:
            violations.append(FieldViolation(raw.path("echo"), "has no meaning in a chat; leave it out"))
        return violations
    if isinstance(prompt, RawPair):
        return [
            FieldViolation(where, why)
            for where, text in ((path, prompt.first), (prompt.second_path or path, prompt.second))
            if (
                why := why_not_text(text)
                or (None if text else "the text is empty; at least 1 token is needed")
            )
        ]
    if len(prompt) == 0:
        return [FieldViolation(path, "the prompt is empty; at least 1 token is needed")]
    if isinstance(prompt, str):
        why = why_not_text(prompt)
        return [] if why is None else [FieldViolation(path, why)]
    kept = kept_part(raw, prompt)
    if kept.stop - kept.start >= max_model_len:
        return []  # refused for its length; looking at each of millions of ids would take long
    bad = find_bad_token_id(prompt[kept], vocab_size)
    if bad is not None:
        return [FieldViolation(f"{path}[{kept.start + bad[0]}]", bad[1])]
    return []


def _most_prompt_tokens(raw: RawRequest, sampling: SamplingParams, max_model_len: int) -> int:
    """Return how many tokens of the prompt the context has room for, beside the output that is asked for."""
    takes_rest = raw.takes_rest_of_context or isinstance(raw.prompt, RawChat)
    num_output = sampling.max_tokens or (1 if takes_rest else COMPLETION_MAX_TOKENS)
    return max(1, max_model_len - num_output)


def kept_part(raw: RawRequest, token_ids: Sequence[int]) -> slice[int, int, None]:
    """Return the ids of a prompt that are left after truncation."""
    limit, length = raw.truncate_prompt_tokens, len(token_ids)
    num_kept = length if not isinstance(limit, int) or limit < 1 else min(limit, length)
    return slice(0, num_kept) if raw.keeps_beginning else slice(length - num_kept, length)


def _overflow_of_token_ids(raw: RawRequest, max_model_len: int) -> ContextLengthExceeded | None:
    """Return the refusal of a prompt of token ids that leaves no room for output, or None if it leaves some."""
    if raw.prompt is None or isinstance(raw.prompt, (str, RawChat, RawPair)):
        return None
    kept = kept_part(raw, raw.prompt)
    num_kept = kept.stop - kept.start
    return _prompt_too_long(raw, num_kept, max_model_len) if num_kept >= max_model_len else None


def check_envelope(raw: RawRequest, terms: ModelTerms) -> list[FieldViolation]:
    """Return what is wrong with everything besides prompt and sampling."""
    found: list[tuple[str, ...]] = []  # what `FieldViolation` takes
    if raw.head.request_id and (why := why_not_request_id(raw.head.request_id)) is not None:
        found.append(("request_id", why))
    for name, text in (("tenant", raw.head.tenant), ("cache_salt", raw.head.cache_salt)):
        if (why := why_not_text(text)) is not None:
            found.append((name, why))
        elif (num_bytes := len(text.encode())) > MAX_LABEL_BYTES:
            why = f"{num_bytes} bytes are above the limit {MAX_LABEL_BYTES}"
            found.append((name, why, str(num_bytes), str(MAX_LABEL_BYTES)))
    if type(raw.head.priority) is not int or not _I32[0] <= raw.head.priority <= _I32[1]:
        found.append(("priority", f"{raw.head.priority!r} is not an integer of {_I32[0]}..{_I32[1]}"))
    elif raw.head.priority and not terms.limits.has_priorities:
        found.append(
            ("priority", f"{raw.head.priority} is not 0, and the engine's scheduler.policy has no priorities")
        )
    truncate = raw.truncate_prompt_tokens
    if truncate is not None and (type(truncate) is not int or truncate < 1):
        why = f"{truncate!r} is below the limit 1, and not -1, which keeps as many tokens as fit"
        found.append(("truncate_prompt_tokens", why, f"{truncate!r}", "1"))
    elif truncate is not None and truncate > _I32[1]:
        why = f"{truncate!s:.80} is above the limit {_I32[1]}"
        found.append(("truncate_prompt_tokens", why, f"{truncate!s:.80}", str(_I32[1])))
    deadline_s = raw.deadline_s
    if deadline_s is not None and not 0 < deadline_s <= MAX_DEADLINE_S:  # NaN is refused, too
        limit = f"above 0 and at most {MAX_DEADLINE_S:g} seconds"
        found.append(("deadline_s", f"{deadline_s:g} is refused; a deadline is {limit}"))
    return [FieldViolation(raw.path(name), *rest) for name, *rest in found]


def _check_together(raw: RawRequest, sampling: SamplingParams, terms: ModelTerms) -> list[FieldViolation]:
    """Check fields that are valid by themselves against each other."""
    found: list[tuple[str, ...]] = []  # what `FieldViolation` takes
    if sampling.min_tokens and sampling.allowed_token_ids:
        masked = {*terms.model.eos_token_ids, *sampling.stop_token_ids}
        if masked.issuperset(sampling.allowed_token_ids):
            why = (
                "names only tokens that end the output, and min_tokens "
                f"{sampling.min_tokens} masks those; allow another, or set min_tokens to 0"
            )
            found.append(("allowed_token_ids", why))
    forces_calls = isinstance(raw.prompt, RawChat) and raw.prompt.demands_calls
    if forces_calls and sampling.ignore_eos:
        found.append(("ignore_eos", "goes on past the calls that tool_choice demands; leave it out"))
    if sampling.structured_outputs is not None:
        if sampling.ignore_eos:
            why = "goes on past the end of a form, where nothing may follow; leave it out"
            found.append(("ignore_eos", why))
        if not terms.model.eos_token_ids:
            found.append(("structured_outputs", "cannot end: this model has no end-of-sequence token"))
    if sampling.max_tokens == 0 and not raw.echo and sampling.prompt_logprobs is None:
        why = "0 is below the limit 1; without output there must be echo or prompt_logprobs"
        found.append(("max_tokens", why, "0", "1"))
    if sampling.n > terms.limits.max_choices:
        limit = terms.limits.max_choices
        why = f"{sampling.n} choices are above the limit {limit}: so many run and wait together at most"
        found.append(("n", why, str(sampling.n), str(limit)))
    if sampling.n > 1 and sampling.is_greedy:
        why = (
            f"{sampling.n} choices of greedy sampling (temperature {sampling.temperature:g}) would all be "
            "equal; the limit is 1, or raise temperature"
        )
        found.append(("n", why, str(sampling.n), "1"))
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        why = f"{sampling.min_tokens} exceeds max_tokens {sampling.max_tokens}"
        found.append(("min_tokens", why, str(sampling.min_tokens), str(sampling.max_tokens)))
    if sampling.logprob_token_ids and sampling.logprobs:
        why = f"has no place beside the {sampling.logprobs} best alternatives; leave one of them out"
        found.append(("logprob_token_ids", why))
    if not sampling.detokenize:
        if sampling.stop:
            found.append(("stop", "is looked for in the text, but detokenize is false"))
        if raw.echo:
            found.append(("echo", "repeats the prompt's text, but detokenize is false"))
    return [FieldViolation(raw.path(name), *rest) for name, *rest in found]


def _check_emitted(raw: RawRequest, sampling: SamplingParams, vocab_size: int) -> list[FieldViolation]:
    """Check that the output tokens so far can be those of this request."""
    path = raw.path("emitted")
    violations = []
    for number, (index, token_ids) in enumerate(raw.emitted.items()):
        if index >= sampling.n:
            why = f"{index} is no choice of this request, which has {sampling.n}"
            violations.append(FieldViolation(f"{path}[{number}].index", why))
        if (bad := find_bad_token_id(token_ids, vocab_size)) is not None:
            violations.append(FieldViolation(f"{path}[{number}].token_ids[{bad[0]}]", bad[1]))
    if raw.emitted and sampling.prompt_logprobs is not None:
        why = "is sent before any output, which has begun already; leave it out"
        violations.append(FieldViolation(raw.path("prompt_logprobs"), why))
    return violations


def _prompt_too_long(raw: RawRequest, num_prompt_tokens: int, max_model_len: int) -> ContextLengthExceeded:
    remedy = f"reduce the prompt to at most {max_model_len - 1} tokens, or set truncate_prompt_tokens"
    return _exceeds_context(raw.path("prompt"), num_prompt_tokens, 1, max_model_len, remedy)


def _exceeds_context(
    path: str, num_prompt_tokens: int, max_tokens: int, max_model_len: int, remedy: str
) -> ContextLengthExceeded:
    """The wording is OpenAI's: clients recognize `maximum context length`, shorten the conversation and retry."""
    num_tokens = num_prompt_tokens + max_tokens
    error = ContextLengthExceeded(
        path,
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {num_tokens} tokens "
        f"({num_prompt_tokens} in the prompt, {max_tokens} in the completion); {remedy}.",
    )
    error.metadata = {
        "field": path,
        "value": str(num_tokens),
        "limit": str(max_model_len),
        "num_prompt_tokens": str(num_prompt_tokens),
        "max_tokens": str(max_tokens),
    }
    return error
