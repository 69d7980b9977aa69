"""Raw requests for vectors -> requests ready for an engine: checked, tokenized, cut where the client asks for it."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from triptych.errors import ContextLengthExceeded, FeatureDisabled, FieldViolation, InvalidRequest
from triptych.types.facts import ModelFacts
from triptych.types.pooling import PoolingParams
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.types.step import U32
from triptych.types.submit import ModelTerms
from triptych_services.frontend.requests.parse import check_envelope, check_prompt, kept_part
from triptych_services.frontend.requests.prepare import PreparedRequest
from triptych_services.frontend.requests.raw import RawChat, RawPair, RawRequest
from triptych_services.frontend.requests.sampling import to_array
from triptych_services.frontend.requests.text_model import TextModel

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
    token_ids = await _encode(raw, text, limit)
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


async def _encode(raw: RawRequest, text: TextModel, limit: int) -> U32:
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
        prompt = prompt.lower() if text.pooling.lower_case else prompt
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
