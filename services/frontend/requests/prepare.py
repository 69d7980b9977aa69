"""Raw requests -> requests ready for an engine: parsed, templated, tokenized, fitted to the context."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from triptych.errors import InvalidRequest
from triptych.types.sampling import MAX_BIASES, SamplingParams
from triptych.types.step import U32
from triptych.types.structured import StructuredOutputs
from triptych.types.submit import ModelTerms, RequestHead
from triptych_services.frontend.requests.grammars.answer_forms import AnswerForm, answer_form
from triptych_services.frontend.requests.identity import draw_seed
from triptych_services.frontend.requests.parse import ValidRequest, fit_to_context, parse
from triptych_services.frontend.requests.raw import RawChat, RawRequest
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
        """Digest of the model's checkpoint."""
        return self.terms.model.identity.fingerprint


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
    if form is not None:
        compiled = await text.grammars.compile(form, terms.model, raw.path)
        sampling = replace(sampling, structured_outputs=compiled.form)
        not_enforced = compiled.not_enforced
    if sampling.bad_words:
        sampling = await _with_tokenized_words(sampling, terms.model.vocab_size, text)
    _check_vocabulary(token_ids, terms.model.vocab_size, raw.path("prompt"))
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


def _check_vocabulary(token_ids: U32, vocab_size: int, path: str) -> None:
    """Refuse a text with tokens that the model lacks; a prompt of ids has been checked before.

    Raises:
        InvalidRequest: The largest token is outside of the vocabulary.
    """
    if (largest := int(token_ids.max())) >= vocab_size:
        reason = f"has the token {largest}, but the model's vocabulary ends at {vocab_size - 1}"
        raise InvalidRequest(path, reason)


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
