"""Beam search on the client: each step asks for the best next tokens of every beam, as ordinary requests.

It finds the beams that transformers' `num_beams` does (`early_stopping=False`). The prefix cache keeps what the beams
share, so a step computes only the end of each.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from triptych.client.batch import MAX_IN_FLIGHT, Batch, Job
from triptych.client.batch_stream import BatchStream
from triptych.client.grpc_client import GenerationClient, ServedModel
from triptych.client.prompts import ParsedPrompt, is_token_ids
from triptych.client.request import RequestOptions
from triptych.errors import FieldViolation, InvalidRequest
from triptych.types.logprobs import Logprob, TokenLogprobs
from triptych.types.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search, under vLLM's names."""

    beam_width: int
    """Beams that are kept, and sequences that come back. With the tokens that end a sequence at most 20."""
    max_tokens: int
    """New tokens per sequence at most."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    temperature: float = 0.0
    """0 or 1, which mean the same: beams are compared by the model's own log-probabilities."""
    length_penalty: float = 1.0
    """A score is the sum of log-probabilities over the number of new tokens to this power. Above 0 favours length."""
    include_stop_str_in_output: bool = False
    """Leave the end-of-sequence token in `tokens` and `text`. The score counts it anyway."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest if a value is out of range; it has every violation."""
        violations = [
            FieldViolation(name, f"{value!r:.40} is not an integer of at least 1")
            for name, value in (("beam_width", self.beam_width), ("max_tokens", self.max_tokens))
            if type(value) is not int or value < 1
        ]
        if self.temperature not in (0.0, 1.0):
            why = (
                f"{self.temperature!r:.40} is neither 0 nor 1: the model's own log-probabilities are compared"
            )
            violations.append(FieldViolation("temperature", why))
        if not isinstance(self.length_penalty, int | float) or not math.isfinite(self.length_penalty):
            violations.append(
                FieldViolation("length_penalty", f"{self.length_penalty!r:.40} is not a finite number")
            )
        if violations:
            raise InvalidRequest(violations)


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that was found."""

    tokens: list[int]
    """Token ids of the prompt and of the output."""
    logprobs: list[TokenLogprobs]
    """One entry per output token: it and the candidates beside it."""
    cum_logprob: float
    """Sum of the output tokens' natural log-probabilities, the end-of-sequence token's with them."""
    score: float
    """`cum_logprob` over the number of new tokens to the power of `length_penalty`."""
    finish_reason: str
    """stop or length."""
    stop_reason: int | None = None
    """The end-of-sequence token that ended it."""
    text: str = ""
    """Text of `tokens`, without special tokens."""


@dataclass(slots=True)
class BeamSearchOutput:
    """Result of a beam search for one prompt."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
    """The best first; as many as `beam_width`."""


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...] = ()
    """Output tokens."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    cum_logprob: float = 0.0

    def extended(self, token: Logprob, candidates: TokenLogprobs) -> _Beam:
        entry = TokenLogprobs.of(token, candidates.top)
        total = self.cum_logprob + token.logprob
        return _Beam((*self.token_ids, token.token_id), (*self.logprobs, entry), total)


class BeamState:
    """The search for one prompt. Find the next tokens of each of `beams`, give them to `advance`, until `is_done`."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int]) -> None:
        self._params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._finished: list[tuple[float, _Beam]] = []
        """Score and beam, the best first; at most `beam_width`."""
        self.beams = [_Beam()]
        """Those to go on with, the best first."""
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """Best next tokens needed of each beam: enough to go on with if all tokens that may end it are among them."""
        return self._params.beam_width + len(self._eos_token_ids)

    def advance(self, answers: Sequence[TokenLogprobs]) -> None:
        """Take one step.

        Args:
            answers: The next tokens of each beam, the best first.
        """
        width, length = self._params.beam_width, len(self.beams[0].token_ids) + 1
        is_last = length == self._params.max_tokens
        found = [
            (beam.cum_logprob + token.logprob, beam, token, answer)
            for beam, answer in zip(self.beams, answers, strict=True)
            for token in answer.top
        ]
        found.sort(key=lambda candidate: -candidate[0])
        beams: list[_Beam] = []
        for rank, (_, beam, token, answer) in enumerate(found):
            ends = is_last or token.token_id in self._eos_token_ids
            if ends and rank < width:  # a lower one is there only to go on with
                extended = beam.extended(token, answer)
                self._finished.append((self._score(extended.cum_logprob, length), extended))
            elif not ends and len(beams) < width:
                beams.append(beam.extended(token, answer))
        self._finished.sort(key=lambda entry: -entry[0])
        del self._finished[width:]
        self.beams = beams
        is_full = len(self._finished) == width
        self.is_done = not beams or (
            is_full and self._score(beams[0].cum_logprob, length) <= self._finished[-1][0]
        )

    def sequences(self, prompt_token_ids: Sequence[int]) -> Iterator[BeamSearchSequence]:
        """Yield what has been found, the best first."""
        for score, beam in self._finished:
            is_stopped = beam.token_ids[-1] in self._eos_token_ids
            num_kept = len(beam.token_ids)
            if is_stopped and not self._params.include_stop_str_in_output:
                num_kept -= 1
            yield BeamSearchSequence(
                tokens=[*prompt_token_ids, *beam.token_ids[:num_kept]],
                logprobs=list(beam.logprobs[:num_kept]),
                cum_logprob=beam.cum_logprob,
                score=score,
                finish_reason="stop" if is_stopped else "length",
                stop_reason=beam.token_ids[-1] if is_stopped else None,
            )

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / float(length**self._params.length_penalty)


@dataclass(frozen=True, slots=True)
class _Search:
    """One prompt under way."""

    number: int
    token_ids: list[int]
    options: RequestOptions
    state: BeamState


async def beam_search(
    client: GenerationClient,
    prompts: Sequence[ParsedPrompt],
    params: BeamSearchParams,
    options: RequestOptions,
    *,
    concurrency_limit: int | None,
    on_finished: Callable[[int, int], None],
    check_server: Callable[[], None],
) -> list[BeamSearchOutput]:
    """Search for several prompts, as many at a time as fill the window of requests.

    Args:
        concurrency_limit: Prompts at a time, at most. None: as many as fit.
        on_finished: Called for each prompt with its number of tokens and that of its outputs.
        check_server: As in `Batch`.

    Raises:
        InvalidRequest: A prompt or a parameter is refused; names it.
    """
    model = await client.get_model(options.model)
    num_ends = 0 if params.ignore_eos else len(model.eos_token_ids)
    if params.beam_width + num_ends > MAX_LOGPROBS:
        limit = MAX_LOGPROBS - num_ends
        raise InvalidRequest("beam_width", f"{params.beam_width} is above the limit {limit} of this model")
    if concurrency_limit is not None and concurrency_limit < 1:
        raise InvalidRequest("concurrency_limit", f"{concurrency_limit} is below the limit 1")
    at_a_time = min(concurrency_limit or MAX_IN_FLIGHT, max(1, MAX_IN_FLIGHT // params.beam_width))
    outputs: list[BeamSearchOutput] = []
    async with client.open_batch() as stream:
        for first in range(0, len(prompts), at_a_time):
            group = prompts[first : first + at_a_time]
            starting = (
                _begin(client, model, params, options, number, prompt)
                for number, prompt in enumerate(group, first)
            )
            searches = await asyncio.gather(*starting)
            await _run(stream, searches, check_server)
            for search in searches:
                output = BeamSearchOutput(list(search.state.sequences(search.token_ids)))
                await _add_texts(client, model, output)
                on_finished(len(search.token_ids), sum(len(found.logprobs) for found in output.sequences))
                outputs.append(output)
    return outputs


async def _begin(
    client: GenerationClient,
    model: ServedModel,
    params: BeamSearchParams,
    options: RequestOptions,
    number: int,
    prompt: ParsedPrompt,
) -> _Search:
    if prompt.cache_salt is not None:
        options = replace(options, cache_salt=prompt.cache_salt)
    if is_token_ids(prompt.content):
        token_ids = list(cast("Sequence[int]", prompt.content))
    else:
        tokenized = await client.tokenize(prompt.content, model=model.name, chat=options.chat)
        token_ids = tokenized.token_ids
    if len(token_ids) + params.max_tokens > model.max_model_len:
        why = f"prompt {len(token_ids)} + max_tokens {params.max_tokens} exceeds max_model_len {model.max_model_len}"
        raise InvalidRequest(f"prompts[{number}]", why)
    return _Search(number, token_ids, options, BeamState(params, model.eos_token_ids))


async def _run(stream: BatchStream, searches: Sequence[_Search], check_server: Callable[[], None]) -> None:
    """Take steps until all are done: one batch for the beams of all that are not."""
    while active := [search for search in searches if not search.state.is_done]:
        jobs = []
        for search in active:
            # The token that is drawn does not count; only what could have been.
            sampling = {
                "max_tokens": 1,
                "temperature": 0.0,
                "logprobs": search.state.num_candidates,
                "detokenize": False,
            }
            jobs += [
                Job(ParsedPrompt([*search.token_ids, *beam.token_ids]), sampling, search.options)
                for beam in search.state.beams
            ]
        batch = Batch(stream, jobs, on_finished=lambda output: None, check_server=check_server)
        answers = await batch.run()
        place = 0
        for search in active:
            num_beams = len(search.state.beams)
            own = answers[place : place + num_beams]
            place += num_beams
            for error in filter(None, (answer.error for answer in own)):
                raise _named(error, search.number) from None
            search.state.advance([cast("list[TokenLogprobs]", a.outputs[0].logprobs)[0] for a in own])


def _named(error: Exception, number: int) -> Exception:
    """Return the error of a beam, with the number of its prompt."""
    if not isinstance(error, InvalidRequest):
        return error
    return InvalidRequest([replace(v, field=f"prompts[{number}].{v.field}") for v in error.violations])


async def _add_texts(client: GenerationClient, model: ServedModel, output: BeamSearchOutput) -> None:
    texts = (client.detokenize(found.tokens, model=model.name) for found in output.sequences)
    for found, text in zip(output.sequences, await asyncio.gather(*texts), strict=True):
        found.text = text
