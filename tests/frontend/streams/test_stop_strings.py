"""A choice finds stop strings in the text of many tokens at once, as if it had looked at one token after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.byte_tokenizer import EOS, byte_tokenizer
from triptych.text.detokenizer import create_detokenizer
from triptych.types.outputs import FinishedRequest, FinishReason, StageTimings
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.types.step import LogprobColumns
from triptych_services.frontend.engines.session import ChoiceOutput
from triptych_services.frontend.streams.logprobs import BatchLogprobs
from triptych_services.frontend.streams.outputs import RequestOutputs

TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_id(EOS)
PARTS = [TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("a", "b", " ", "stop", " stop")]
BYTES = [token_id for text in ("é", "🦊") for token_id in TOKENIZER.encode(text, add_special_tokens=False)]
tokens = st.sampled_from([*PARTS, *PARTS, *BYTES, EOS_ID])
STRINGS = (
    "a",
    "ab",
    "aba",
    "ba",
    "st",
    "op",
    "opa",
    "stop",
    "stop stop",
    "é",
    "é🦊",
    "\ufffd",
    "b\ufffd",
    " ",
)
stops = st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3, unique=True)


@dataclass
class Seen:
    """The part of an answer that a client has."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    texts: list[str] = field(default_factory=list)
    """All text so far behind each batch of tokens."""


class Case(NamedTuple):
    prompt: Sequence[int]
    batches: Sequence[Sequence[int]]
    """Tokens that the engine sends together."""
    reason: FinishReason | None
    """With the last of them; None: it runs on."""
    sampling: SamplingParams


def seen_by_tokens(case: Case) -> Seen:
    """Return what a client has if each token is decoded and searched by itself, with a plain search."""
    sampling, seen, pieces = case.sampling, Seen(), list[str]()
    detokenizer = create_detokenizer(
        TOKENIZER, prompt_token_ids=case.prompt, skip_special_tokens=sampling.skip_special_tokens
    )
    for place, batch in enumerate(case.batches):
        is_last = case.reason is not None and place == len(case.batches) - 1
        hides_last = is_last and case.reason is FinishReason.STOP and not sampling.include_stop_str_in_output
        num_before, batch_pieces = (
            len(seen.token_ids),
            detokenizer.pieces(batch[:-1] if hides_last else batch),
        )
        if is_last:
            batch_pieces.append(detokenizer.flush())
        for number, piece in enumerate(batch_pieces, start=1):
            for character in piece:
                seen.text += character
                ending = [stop for stop in sampling.stop if seen.text.endswith(stop)]
                if ending and num_before + number > sampling.min_tokens:
                    seen.reason, seen.stop_reason = FinishReason.STOP, max(ending, key=len)
                    if not sampling.include_stop_str_in_output:
                        seen.text = seen.text.removesuffix(max(ending, key=len))
                    seen.token_ids += batch[:number]
                    seen.texts.append(seen.text)
                    return seen
        pieces += batch_pieces
        seen.token_ids += batch
        held = 0 if is_last else longest_beginning(seen.text, sampling.stop)
        seen.texts.append(seen.text[: len(seen.text) - held])
    seen.text, seen.reason = seen.texts[-1], case.reason
    if case.reason is FinishReason.STOP:
        seen.stop_reason = case.batches[-1][-1]
    return seen


def longest_beginning(text: str, stop: Sequence[str]) -> int:
    """Return how many of the last characters could still become a stop string."""
    return max(n for string in stop for n in range(len(string)) if text.endswith(string[:n]))


async def seen_of_choice(case: Case) -> Seen:
    """Return what a client has of a choice, which takes each batch at once."""
    outputs, seen = RequestOutputs("r"), Seen()
    choice = outputs.add_choice(case.sampling, TOKENIZER, case.prompt, "")
    for place, batch in enumerate(case.batches):
        is_last = case.reason is not None and place == len(case.batches) - 1
        finish = None
        if is_last and case.reason is not None:
            stop_token_id = batch[-1] if case.reason is FinishReason.STOP else None
            finish = FinishedRequest(1, case.reason, stop_token_id, 0, StageTimings())
        choice.on_output(ChoiceOutput(list(batch), BatchLogprobs(columns_of(batch)), 0, finish))
        choice.release()
        while choice.has_pending:
            delta = await outputs.next_event()
            assert delta is not None
            seen.text += delta.text
            seen.token_ids += delta.token_ids
            seen.logprob_ids += [entry.chosen.token_id for entry in delta.logprobs]
            seen.reason, seen.stop_reason = delta.finish_reason, delta.stop_reason
        seen.texts.append(seen.text)
        if seen.reason is not None:
            break
    outputs.close()
    return seen


def columns_of(token_ids: Sequence[int]) -> LogprobColumns:
    """Return log-probabilities of the chosen tokens alone."""
    count = len(token_ids)
    return LogprobColumns(
        rows=np.arange(count, dtype=np.uint32),
        offsets=np.arange(count + 1, dtype=np.uint32),
        token_ids=np.array(token_ids, np.uint32),
        logprobs=np.full(count, -1.0, np.float32),
        ranks=np.ones(count, np.uint32),
    )


@pytest.mark.thorough
@settings(max_examples=1500, deadline=None)
@given(
    prompt=st.lists(tokens, max_size=3),
    batches=st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=6),
    reason=st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]),
    stop=stops,
    min_tokens=st.integers(0, 12),
    includes=st.booleans(),
    skips_special=st.booleans(),
)
def test_tokens_together_end_where_tokens_one_by_one_do(
    prompt: list[int],
    batches: list[list[int]],
    reason: FinishReason | None,
    stop: list[str],
    min_tokens: int,
    includes: bool,
    skips_special: bool,
) -> None:
    sampling = SamplingParams(
        stop=stop,
        min_tokens=min_tokens,
        include_stop_str_in_output=includes,
        skip_special_tokens=skips_special,
        logprobs=0,
        max_tokens=100,
        output_kind=OutputKind.DELTA,
    )
    case = Case(prompt, batches, reason, sampling)
    found, expected = asyncio.run(seen_of_choice(case)), seen_by_tokens(case)
    expected.logprob_ids = expected.token_ids
    assert found == expected
