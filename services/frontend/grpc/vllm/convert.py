"""Messages of vLLM's gRPC service -> raw requests; events of a generation -> its messages."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from triptych.compat import vllm_engine_pb2 as pb
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent, PromptLogprobsEvent
from triptych.types.logprobs import LogprobRows, TokenLogprobs
from triptych.types.sampling import OutputKind
from triptych.types.step import U32
from triptych.types.structured import StructuredOutputs
from triptych.types.submit import RequestHead
from triptych_services.frontend.requests.raw import RawRequest

_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
_ZERO_MEANS_ONE = ("n", "top_p", "repetition_penalty")
_AS_THEY_ARE = (
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
)
_PATHS = {
    name: f"sampling_params.{name}"
    for name in (*_OPTIONAL, *_ZERO_MEANS_ONE, *_AS_THEY_ARE, "temperature", "truncate_prompt_tokens")
} | {"deadline_s": "the call's deadline"}
_PROMPT_PATHS = {"tokenized": "tokenized.input_ids", "text": "text"}
_UNSUPPORTED = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
    "data_parallel_rank",
)


def to_raw_request(request_id: str, request: pb.GenerateRequest, deadline_s: float | None) -> RawRequest:
    """Return the request as the frontend knows it.

    Sampling fields that are left out have vLLM's defaults, not those of the checkpoint: gateways learn these by
    GetModelInfo, and fill them in.
    """
    params = request.sampling_params
    kind = request.WhichOneof("input")
    prompt: Any = {"tokenized": request.tokenized.input_ids, "text": request.text, None: None}[kind]
    constraint = params.WhichOneof("constraint")
    unsupported = [field.name for field, _ in request.ListFields() if field.name in _UNSUPPORTED]
    sampling = {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    sampling |= {name: getattr(params, name) or 1 for name in _ZERO_MEANS_ONE}
    sampling |= {name: getattr(params, name) for name in _AS_THEY_ARE}
    sampling["temperature"] = params.temperature if params.HasField("temperature") else 1.0
    sampling["structured_outputs"] = _to_structured(params, constraint)
    sampling["detokenize"] = bool(params.stop)
    return RawRequest(
        api="grpc",
        prompt=prompt,
        head=RequestHead(request_id),
        sampling=sampling,
        takes_rest_of_context=True,
        output_kind=OutputKind.DELTA if request.stream else OutputKind.FINAL_ONLY,
        truncate_prompt_tokens=(
            params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
        ),
        deadline_s=deadline_s,
        paths={
            **_PATHS,
            "prompt": _PROMPT_PATHS.get(kind or "", "input"),
            "structured_outputs": f"sampling_params.{constraint or 'constraint'}",
        },
        unsupported=tuple(unsupported),
    )


def read_generate(request_id: str, deadline_s: float | None, data: bytes) -> tuple[bool, RawRequest]:
    """Return whether the answer is streamed, and the request, of which a child process is given the bytes.

    Args:
        request_id: Its id where its client gives none.

    Raises:
        DecodeError: The bytes are no such request.
    """
    request = pb.GenerateRequest.FromString(data)
    raw = to_raw_request(request.request_id or request_id, request, deadline_s)
    if request.HasField("tokenized"):  # an array is handed over without looking at each id
        raw = replace(raw, prompt=array("I", request.tokenized.input_ids))
    return request.stream, raw


def _to_structured(params: pb.SamplingParams, constraint: str | None) -> StructuredOutputs | None:
    match constraint:
        case "json_schema":
            return StructuredOutputs(json=params.json_schema)
        case "regex":
            return StructuredOutputs(regex=params.regex)
        case "grammar":
            return StructuredOutputs(grammar=params.grammar)
        case "choice":
            return StructuredOutputs(choice=list(params.choice.choices))
        case "structural_tag":
            return StructuredOutputs(structural_tag=params.structural_tag)
        case "json_object" if params.json_object:
            return StructuredOutputs(json_object=True)
        case _:
            return None


class VllmEncoder:
    """Turns the events of one request into messages: chunks of new tokens, then a `complete` per choice.

    As in vLLM, the `complete` of a stream repeats the choice's last tokens, and otherwise has all of them.
    """

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._prompt_token_ids: Sequence[int] | U32 = ()
        self._input_logprobs: pb.InputLogProbs | None = None
        self._begun: set[int] = set()
        self._complete: dict[int, pb.GenerateComplete] = {}
        """Kept until the prompt tokens that were found in the cache are known."""

    def encode(self, event: Event) -> Iterator[pb.GenerateResponse]:
        """Yield the messages that an event means."""
        match event:
            case AdmittedEvent():
                self._prompt_token_ids = event.prompt_token_ids
            case PromptLogprobsEvent():
                self._add_prompt(event)
            case DeltaEvent():
                if self._is_streamed:
                    yield pb.GenerateResponse(chunk=self._chunk(event))
                if event.finish_reason is not None:
                    self._complete[event.index] = self._end(event)
            case FinishedEvent():
                for _, complete in sorted(self._complete.items()):
                    complete.cached_tokens = event.usage.num_cached_tokens
                    yield pb.GenerateResponse(complete=complete)

    def _add_prompt(self, event: PromptLogprobsEvent) -> None:
        part = event.logprobs
        if self._input_logprobs is None:
            self._input_logprobs = pb.InputLogProbs(
                token_ids=list(map(int, self._prompt_token_ids)),
                token_logprobs=[pb.InputTokenLogProb()],  # the first token has none
                top_logprobs=[pb.TopLogProbs()],
            )
        columns = self._input_logprobs
        for token_ids, logprobs in zip(part.token_ids.tolist(), part.logprobs.tolist(), strict=True):
            columns.token_logprobs.add(value=logprobs[0])
            columns.top_logprobs.add(token_ids=token_ids[1:], values=logprobs[1:])

    def _chunk(self, event: DeltaEvent) -> pb.GenerateStreamChunk:
        is_first = event.index not in self._begun
        self._begun.add(event.index)
        return pb.GenerateStreamChunk(
            index=event.index,
            token_ids=event.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(event.token_ids),
            output_logprobs=_output_logprobs(event.logprobs),
            input_logprobs=self._input_logprobs if is_first else None,
        )

    def _end(self, event: DeltaEvent) -> pb.GenerateComplete:
        assert event.finish_reason is not None
        complete = pb.GenerateComplete(
            index=event.index,
            output_ids=event.token_ids,
            finish_reason=event.finish_reason.word,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(event.token_ids),
            output_logprobs=_output_logprobs(event.logprobs),
            input_logprobs=self._input_logprobs,
        )
        if isinstance(event.stop_reason, str):
            complete.matched_stop_str = event.stop_reason
        elif event.stop_reason is not None:
            complete.matched_token_id = event.stop_reason
        return complete


def _output_logprobs(entries: Sequence[TokenLogprobs]) -> pb.OutputLogProbs | None:
    if not entries:
        return None
    rows = LogprobRows.of(entries)
    width, logprobs = rows.num_candidates, rows.logprobs.tolist()
    places = [slice(start + 1, start + width) for start in range(0, len(logprobs), width)]
    return pb.OutputLogProbs(
        token_ids=rows.token_ids[::width],
        token_logprobs=logprobs[::width],
        top_logprobs=[pb.TopLogProbs(token_ids=rows.token_ids[at], values=logprobs[at]) for at in places],
    )
