"""Raw requests -> requests ready for an engine: parsed, templated, tokenized, fitted to the context."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from triptych.errors import ContextLengthExceeded, FeatureDisabled, FieldViolation, InvalidRequest
from triptych.types.facts import ModelFacts
from triptych.types.pooling import PoolingParams
from triptych.types.sampling import MAX_BIASES, OutputKind, SamplingParams
from triptych.types.step import U32
from triptych.types.structured import StructuredOutputs
from triptych.types.submit import ModelTerms, RequestHead
from triptych_services.frontend.requests.grammars.answer_forms import AnswerForm, answer_form
from triptych_services.frontend.requests.identity import draw_seed
from triptych_services.frontend.requests.parse import (
    ValidRequest,
    check_envelope,
    check_prompt,
    fit_to_context,
    kept_part,
    parse,
)
from triptych_services.frontend.requests.raw import RawChat, RawPair, RawRequest
from triptych_services.frontend.requests.sampling import to_array
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.requests.tools import AnswerSplit


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to be submitted."""

    raw: RawRequest
    head: RequestHead
    """As in `raw`, with the request id that was drawn if the client gave none."""
    terms: ModelTerms
    """The facts that it was checked against."""
    prompt_token_ids: U32
    sampling: SamplingParams
    """`max_tokens` is filled in."""
    is_limited_by_context: bool
    """`max_tokens` is all that the context leaves."""
    seed: int
    echo: str
    tokenize_ns: int
    split: AnswerSplit | None = None
    """How the answer to a conversation is split; None: it stays one text."""
    not_enforced: tuple[str, ...] = ()
    """Paths of what schemas ask for and the grammar does not hold the answer to."""

    @property
    def fingerprint(self) -> str:
        """As of `ModelTerms`."""
        return self.terms.fingerprint


async def prepare(
    raw: RawRequest, request_id: str, terms: ModelTerms, text: TextModel, max_biases: int = MAX_BIASES
) -> PreparedRequest:
    """Do everything that comes before the engine.

    Args:
        terms: Facts and limits that the request is checked against.
        max_biases: Most entries of `logit_bias`.

    Raises:
        InvalidRequest, FeatureDisabled, QueueFull: As `parse`, `TextModel.encode`, `fit_to_context` and
            `GrammarChecker.compile`.
    """
    valid = await text.run(raw.size, parse, raw, terms, text.defaults, max_biases)
    raw = valid.raw
    started_ns, max_model_len = time.perf_counter_ns(), terms.model.max_model_len
    token_ids = await _encode(valid, text, max_model_len)
    context = max_model_len if valid.sampling.max_tokens is not None else terms.context_for(len(token_ids))
    sampling = fit_to_context(valid, len(token_ids), context)
    form: StructuredOutputs | AnswerForm | None = sampling.structured_outputs
    split, not_enforced = None, tuple[str, ...]()
    if isinstance(valid.prompt, RawChat):
        split = text.split_answer(valid.prompt, token_ids, has_form=form is not None)
        form = answer_form(valid.prompt, sampling.structured_outputs, split)
    if isinstance(form, StructuredOutputs) and form.choice is not None:
        _check_choice(form.choice, sampling.min_tokens, raw.path("min_tokens"))
    if form is not None:
        compiled = await text.grammars.compile(form, terms.model, raw.path)
        sampling = replace(sampling, structured_outputs=compiled.form)
        not_enforced = compiled.not_enforced
    if sampling.bad_words:
        sampling = await _with_tokenized_words(sampling, terms.model.vocab_size, text)
    _check_vocabulary(token_ids, terms.model.vocab_size, raw)
    echo = await _echo(valid, token_ids, sampling, text) if raw.echo else ""
    if split is not None and sampling.detokenize and split.needs_special_tokens:
        sampling = replace(sampling, skip_special_tokens=False)
    if isinstance(budget := sampling.thinking_token_budget, int):
        has_reasoning = split is not None and split.reasoning is not None
        thinking = None  # a form without reasoning before it leaves no room for thoughts
        if form is None or has_reasoning:
            is_open = split.is_reasoning if split is not None and has_reasoning else None
            path = raw.path("thinking_token_budget")
            thinking = text.thinking_budget(budget, token_ids, is_open=is_open, path=path)
        sampling = replace(sampling, thinking_token_budget=thinking)
    num_tokens = len(token_ids) + (sampling.max_tokens or 0)
    return PreparedRequest(
        raw=raw,
        head=raw.head if raw.head.request_id == request_id else replace(raw.head, request_id=request_id),
        terms=terms,
        prompt_token_ids=token_ids,
        sampling=sampling,
        is_limited_by_context=valid.sampling.max_tokens is None and num_tokens == context,
        seed=draw_seed() if sampling.seed is None else sampling.seed,
        echo=echo,
        tokenize_ns=time.perf_counter_ns() - started_ns,
        split=split if sampling.detokenize else None,
        not_enforced=not_enforced,
    )


def _check_choice(choice: Sequence[str], min_tokens: int, path: str) -> None:
    """Raise InvalidRequest if an output that is one of some texts cannot have so many tokens.

    Of other forms it is known only while they are written: then the request fails at the token that may not end it.
    """
    if any(len(text) >= min_tokens for text in choice):
        return
    longest = max(len(text.encode()) for text in choice)  # a token of a text has a byte at least
    if min_tokens > longest:
        why = f"{min_tokens} exceeds the {longest} bytes of the longest choice, which has no more tokens"
        raise InvalidRequest([FieldViolation(path, why, str(min_tokens), str(longest))])


async def _encode(valid: ValidRequest, text: TextModel, max_model_len: int) -> U32:
    """Return the tokens of the prompt, which a client may have sent as such."""
    if not isinstance(valid.prompt, (str, RawChat)):
        return valid.prompt
    raw = valid.raw
    return await text.encode(
        valid.prompt,
        raw.path("prompt"),
        add_special_tokens=raw.add_special_tokens,
        max_tokens=raw.truncate_prompt_tokens,
        keeps_beginning=raw.keeps_beginning,
        max_model_len=max_model_len,
    )


def _check_vocabulary(token_ids: U32, vocab_size: int, raw: RawRequest) -> None:
    """Refuse a text with tokens that the model lacks; a prompt of ids has been checked before.

    Raises:
        InvalidRequest: The largest token is outside of the vocabulary.
    """
    if (largest := int(token_ids.max())) >= vocab_size:
        reason = f"has the token {largest}, but the model's vocabulary ends at {vocab_size - 1}"
        raise InvalidRequest(raw.path("prompt"), reason)


async def _echo(valid: ValidRequest, token_ids: U32, sampling: SamplingParams, text: TextModel) -> str:
    """Return the text of the prompt's tokens, which is the prompt itself where that was text and is not cut."""
    if isinstance(valid.prompt, str) and valid.raw.truncate_prompt_tokens is None:
        return valid.prompt
    return await text.echo(token_ids, skip_special_tokens=sampling.skip_special_tokens)


async def _with_tokenized_words(sampling: SamplingParams, vocab_size: int, text: TextModel) -> SamplingParams:
    """Return the parameters with `bad_words` as the worker takes them, without those that the model cannot write."""
    words = [word for word in sampling.bad_words if isinstance(word, str)]
    sequences = [tuple(ids) for ids in await text.encode_words(words)]
    writable = tuple(ids for ids in sequences if ids and max(ids) < vocab_size)
    return replace(sampling, bad_words=writable)


_SAMPLING = SamplingParams(max_tokens=1, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
"""Parameters that travel with a pooled request. No tier reads them."""
_NOT_SERVED = "this version does not serve it yet; leave it out"


async def prepare_pooled(
    raw: RawRequest, pooling: PoolingParams, request_id: str, terms: ModelTerms, text: TextModel
) -> PreparedRequest:
    """Do everything that comes before the engine, for a request that becomes vectors.

    Args:
        pooling: As in `raw`.
        terms: Facts and limits that the request is checked against.

    Raises:
        InvalidRequest: Fields are wrong, or the text is longer than the model takes and is not to be cut.
        FeatureDisabled: The model does not serve the task, which names those that it serves.
        QueueFull: Too many long texts wait to be tokenized.
    """
    check_task(terms.model, pooling.task.label)
    started_ns, limit = time.perf_counter_ns(), longest_text(terms.model, text)
    if raw.truncate_prompt_tokens == -1:
        raw = replace(raw, truncate_prompt_tokens=limit)
    await text.run(raw.size, _check, raw, pooling, terms, text)
    token_ids = await _encode_pooled(raw, text, limit)
    path = raw.path("prompt")
    if len(token_ids) == 0:
        raise InvalidRequest(path, "the text has no tokens; at least 1 is needed")
    if len(token_ids) > limit:
        raise _too_long(path, len(token_ids), limit)
    if (largest := int(token_ids.max())) >= terms.model.vocab_size:
        why = f"has the token {largest}, but the model's vocabulary ends at {terms.model.vocab_size - 1}"
        raise InvalidRequest(path, why)
    return PreparedRequest(
        raw=raw,
        head=replace(raw.head, request_id=request_id),
        terms=terms,
        prompt_token_ids=token_ids,
        sampling=_SAMPLING,
        is_limited_by_context=False,
        seed=0,
        echo="",
        tokenize_ns=time.perf_counter_ns() - started_ns,
    )


def check_task(model: ModelFacts, task: str) -> None:
    """Refuse a task that a model does not serve.

    Raises:
        FeatureDisabled: Names the task, and those that the model serves.
    """
    if task not in model.tasks:
        raise FeatureDisabled(task, f"the model {model.name!r} serves {', '.join(model.tasks)}")


def longest_text(model: ModelFacts, text: TextModel) -> int:
    """Return the most tokens that a text may have: the context, or less where the checkpoint says so."""
    stated = text.pooling.max_seq_length
    return min(model.max_model_len, stated) if stated else model.max_model_len


def _check(raw: RawRequest, pooling: PoolingParams, terms: ModelTerms, text: TextModel) -> None:
    """Raise everything that can be found wrong without the tokenizer."""
    model = terms.model
    violations = [
        *raw.violations,
        *check_prompt(raw, model.vocab_size, longest_text(model, text) + 1),
        *check_envelope(raw, terms),
    ]
    if pooling.dimensions:
        why = text.pooling.refusal_of_dimensions(pooling.dimensions, model.embedding_size)
        if why:
            limit = str(text.pooling.vector_size(model.embedding_size))
            path = raw.path("dimensions")
            violations.append(FieldViolation(path, why, str(pooling.dimensions), limit))
    if raw.prompt_name and raw.prompt_name not in text.pooling.prompts:
        names = ", ".join(text.pooling.prompts) or "none"
        why = f"{raw.prompt_name!r:.80} is no prompt of the model, which has {names}"
        violations.append(FieldViolation(raw.path("prompt_name"), why))
    if violations:
        raise InvalidRequest(violations)
    if raw.unsupported:
        raise FeatureDisabled(raw.unsupported, _NOT_SERVED)


async def _encode_pooled(raw: RawRequest, text: TextModel, limit: int) -> U32:
    """Return the tokens of the text, cut where the client asks for it."""
    prompt, path = raw.prompt, raw.path("prompt")
    max_tokens = raw.truncate_prompt_tokens
    assert prompt is not None, "it has been checked"
    if isinstance(prompt, RawPair):
        return await text.encode_pair(prompt, path, max_tokens=max_tokens, max_model_len=limit)
    if not isinstance(prompt, (str, RawChat)):
        kept = kept_part(raw, prompt)
        num_kept = kept.stop - kept.start
        return np.zeros(num_kept, np.uint32) if num_kept > limit else to_array(prompt[kept])
    if isinstance(prompt, str):
        name = raw.prompt_name or text.pooling.default_prompt_name
        prompt = text.pooling.prompts.get(name, "") + prompt
        if text.pooling.lower_case:
            prompt = await text.run(len(prompt), str.lower, prompt)
    return await text.encode(
        prompt,
        path,
        add_special_tokens=raw.add_special_tokens,
        max_tokens=max_tokens,
        keeps_beginning=raw.keeps_beginning,
        max_model_len=limit,
    )


def _too_long(path: str, num_tokens: int, limit: int) -> ContextLengthExceeded:
    """The wording is OpenAI's: clients recognize `maximum context length`, and cut the text."""
    error = ContextLengthExceeded(
        path,
        f"This model's maximum context length is {limit} tokens. However, {path} has {num_tokens} tokens; shorten it, "
        "or set truncate_prompt_tokens.",
    )
    error.metadata = {"field": path, "value": str(num_tokens), "limit": str(limit)}
    return error
