"""From the events of one generation to the outputs that a Python program sees."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from triptych.types.events import (
    AdmittedEvent,
    DeltaEvent,
    Event,
    FinishedEvent,
    PromptLogprobsEvent,
    ResumableEvent,
)
from triptych.types.logprobs import Logprob, TokenLogprobs
from triptych.types.outputs import CompletionOutput, RequestOutput, append_calls


class OutputCollector:
    """Adds up the deltas of one request; `output` is what there is so far."""

    def __init__(self, prompt: str | None) -> None:
        self.output = RequestOutput(request_id="", prompt=prompt, prompt_token_ids=[], outputs=[])

    def add(self, event: Event) -> None:
        output = self.output
        match event:
            case DeltaEvent():
                while len(output.outputs) <= event.index:
                    output.outputs.append(CompletionOutput(index=len(output.outputs)))
                _append(output.outputs[event.index], event)
            case PromptLogprobsEvent():
                output.prompt_logprobs = output.prompt_logprobs or [None]
                output.prompt_logprobs += _prompt_entries(event)
            case AdmittedEvent():
                output.request_id = event.request_id
                output.prompt_token_ids = list(event.prompt_token_ids)
            case FinishedEvent():
                output.finished, output.usage, output.timings = True, event.usage, event.timings


async def stream_outputs(
    events: AsyncIterator[Event], prompt: str | None, *, is_cumulative: bool
) -> AsyncIterator[RequestOutput]:
    """Yield one RequestOutput per delta of a choice; the last one has `finished`, usage and timings.

    A choice's last delta waits for the event after it (which follows at once), so that the last output
    carries text and totals together.

    All outputs share one list of the prompt's ids. An output does not change once it has been yielded.

    Args:
        is_cumulative: Each output holds all of its choice so far. Otherwise it holds what is new.
    """
    request_id = ""
    prompt_token_ids: list[int] = []
    index_to_total: dict[int, CompletionOutput] = {}
    held: RequestOutput | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def output_of(choices: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(request_id, prompt, prompt_token_ids, choices, prompt_logprobs=prompt_logprobs)

    async for event in events:
        if isinstance(event, AdmittedEvent):
            request_id, prompt_token_ids = event.request_id, list(event.prompt_token_ids)
            continue
        if isinstance(event, PromptLogprobsEvent):
            prompt_logprobs = prompt_logprobs or [None]
            prompt_logprobs += _prompt_entries(event)
            continue
        if isinstance(event, FinishedEvent):
            last = held or output_of([])
            last.finished, last.usage, last.timings = True, event.usage, event.timings
            yield last
            return
        if isinstance(event, ResumableEvent):
            continue
        if held is not None:
            yield held
            held = None
        choice = CompletionOutput(index=event.index)
        if is_cumulative:
            choice = index_to_total.setdefault(event.index, choice)
        _append(choice, event)
        if is_cumulative:
            calls = [replace(call) for call in choice.tool_calls]
            rows = None if choice.logprobs is None else choice.logprobs.copy()
            choice = replace(choice, token_ids=choice.token_ids.copy(), logprobs=rows, tool_calls=calls)
        output = output_of([choice])
        if event.finish_reason is not None:
            held = output
        else:
            yield output


def _prompt_entries(event: PromptLogprobsEvent) -> list[TokenLogprobs]:
    """One entry per position of a part of the prompt."""
    part = event.logprobs
    token_bytes = iter(event.token_bytes)
    entries = []
    for token_ids, logprobs, rank in zip(
        part.token_ids.tolist(), part.logprobs.tolist(), part.ranks.tolist(), strict=True
    ):
        ranks = rank, *range(1, len(token_ids))
        own, *top = map(Logprob.of_bytes, token_ids, logprobs, token_bytes, ranks)
        entries.append(TokenLogprobs.of(own, tuple(top)))
    return entries


def _append(choice: CompletionOutput, delta: DeltaEvent) -> None:
    choice.text += delta.text
    choice.reasoning += delta.reasoning
    append_calls(choice.tool_calls, delta.tool_calls)
    choice.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        if choice.logprobs is None:
            choice.logprobs = []
        choice.logprobs.extend(delta.logprobs)
        choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + _sum_chosen(delta.logprobs)
    if delta.finish_reason is not None:
        choice.finish_reason = delta.finish_reason.word
        choice.stop_reason = delta.stop_reason


def _sum_chosen(logprobs: Iterable[TokenLogprobs]) -> float:
    return sum(entry.chosen.logprob for entry in logprobs)
