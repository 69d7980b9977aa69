"""One request on its way through the engine core."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

from triptych.errors import InvalidRequest
from triptych.prefix_hash import root_of_request
from triptych.types.kv_transfer import KvSource
from triptych.types.outputs import StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32, RowContent
from triptych.types.submit import RequestHead, SubmitRequest
from triptych_services.enginecore.kv.block_table import BlockTable


class RequestState(Enum):
    """The state of a request.

    WAITING -> RUNNING -> ENDED; a preempted request goes back to WAITING. It may end in any state.
    """

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One choice of a client's request. The engine loop owns it; the scheduler writes everything below `deadline`.

    While it runs its counters are in `RunningRows`, not here: a step that changes only counters touches no request.
    """

    head: RequestHead
    session: int
    """Frontend session that it came on."""
    number: int
    """u32 that names it in its session."""
    content: RowContent
    """Prompt and sampling parameters, the same object for all choices of one client's request."""
    token_ids: array[int]
    """All known tokens, prompt first. Until its first admission all choices may share the array, and then nothing
    writes to it; `own_tokens` copies it. While the request runs, the tokens of its open block may be missing: they are
    in `RunningRows.open_block` until that is full."""
    seed: int
    deadline: float | None = None
    """Seconds on the scheduler's clock; None if it may wait for ever."""
    is_moved: bool = False
    """Another engine has admitted it, and its tenant was charged there."""
    num_engine_deaths: int = 0
    """Engines that died in a row while it was in flight there."""
    kv_lease: bytes = b""
    """The name under which other workers may pull the prompt's blocks. Empty: they may not."""
    kv_source: KvSource | None = None
    """The place at which the prompt's blocks can be pulled. None: there is none."""

    blocks: BlockTable = field(default_factory=BlockTable)
    state: RequestState = RequestState.WAITING
    arrival: int = 0
    """Place in the order of arrival."""
    tenant_index: int = 0
    """Index of its tenant in `FairShares`."""
    limit: int = 0
    """Tokens that it may grow to, prompt included: the smaller of max_tokens and the model's limit. A pooled request
    never grows; its vectors take the place of one token."""
    slot: int = 0
    """Slot of its row in the worker, while it runs or drains."""
    slot_version: int = 0
    """Version of that row."""
    num_deferrals: int = 0
    """Times that the worker was not ready to sample it."""
    deferred_until: float = 0.0
    """Seconds on the scheduler's clock at which a deferred request is tried again."""
    num_in_flight: int = 0
    """Results still to come while it drains."""
    num_cached_tokens: int | None = None
    """Prompt tokens that its first admission found in the cache: here, or at the engine that computed its first output.
    Later admissions do not change it. None: it was never admitted."""
    first_pulled_block: int | None = None
    """Index of the first block of its prompt that came from another worker for it. None: none did."""
    prompt_logprobs_start: int = 0
    """Log-probabilities of the prompt's positions below this have been reported; 0: none."""
    num_accepted_guesses: int = 0
    """Output tokens that the worker had guessed, and that came in a step with the token before. As for the next one,
    those of the engines before are counted in."""
    num_rejected_guesses: int = 0
    """Tokens that the worker had guessed and computed, and that are not in the output."""
    queued_at: float = 0.0
    planned_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None

    @classmethod
    def choices_of(
        cls, submit: SubmitRequest, *, session: int, deadline: float | None = None, guesses: bool = False
    ) -> list[Request]:
        """Return one request for each choice of what a frontend submitted.

        Args:
            submit: The client's request.
            session: The frontend's session.
            deadline: Seconds on the scheduler's clock; None if there is none.
            guesses: Whether the worker guesses tokens, and so needs to know from which outputs it may.
        """
        prompt = array("I")
        assert prompt.itemsize == submit.prompt_token_ids.itemsize, "unsigned int is not 4 bytes here"
        prompt.frombytes(submit.prompt_token_ids.tobytes())
        content = RowContent(
            submit.prompt_token_ids,
            submit.sampling,
            submit.pooling,
            adapter=submit.adapter_digest,
            draft_scope=_scope_of(submit.head) if guesses and submit.sampling.speculation else "",
        )
        root = root_of_request(submit.head.cache_salt, submit.adapter_digest)
        requests = [
            cls(
                head=submit.head,
                session=session,
                number=number,
                content=content,
                token_ids=prompt,
                seed=seed,
                deadline=deadline,
                is_moved=submit.is_moved,
                num_engine_deaths=submit.num_engine_deaths,
                blocks=BlockTable(root),
            )
            for number, seed in zip(submit.numbers.tolist(), submit.seeds.tolist(), strict=True)
        ]
        requests[0].kv_lease, requests[0].kv_source = submit.kv_lease, submit.kv_source
        for request in requests[1:]:  # the first one reports the log-probabilities of the prompt
            request.prompt_logprobs_start = len(prompt)
        for request, emitted in zip(requests, submit.emitted, strict=False):
            if len(emitted):
                request.own_tokens()
                request.token_ids.frombytes(emitted.tobytes())
        for request, num_cached_tokens in zip(requests, submit.cached_tokens, strict=False):
            request.num_cached_tokens = num_cached_tokens
        if submit.guesses is not None:
            number_to_counts = submit.guesses.by_number
            for request in requests:
                counts = number_to_counts.get(request.number, (0, 0))
                request.num_accepted_guesses, request.num_rejected_guesses = counts
        return requests

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.content.prompt_token_ids)

    @property
    def sampling(self) -> SamplingParams:
        return self.content.sampling

    @property
    def is_pooled(self) -> bool:
        """Whether it becomes vectors, and samples nothing."""
        return self.content.pooling is not None

    def own_tokens(self) -> None:
        """Replace the array that all choices share by a copy, which may grow."""
        self.token_ids = self.token_ids[:]

    @property
    def has_emitted(self) -> bool:
        """Whether its client has seen tokens, of this engine or another. While it runs, only full blocks count."""
        return len(self.token_ids) > len(self.content.prompt_token_ids)

    @property
    def was_admitted(self) -> bool:
        """Whether it has run before."""
        return self.planned_at is not None

    @property
    def is_returning(self) -> bool:
        """Whether it was admitted before, here or elsewhere: it keeps its place, and its tenant has paid for it."""
        return self.is_moved or self.planned_at is not None

    @property
    def is_draining(self) -> bool:
        """Whether it was preempted and results for it are still in flight."""
        return self.num_in_flight > 0 and self.state is RequestState.WAITING

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be reported. The first token has none."""
        if self.sampling.prompt_logprobs is None:
            return False
        return max(self.prompt_logprobs_start, 1) < self.num_prompt_tokens

    @property
    def timings(self) -> StageTimings:
        """Time by stage of a request that has ended; 0 for stages that it did not reach."""
        planned = self.ended_at if self.planned_at is None else self.planned_at
        first_token = self.ended_at if self.first_token_at is None else self.first_token_at
        assert planned is not None, f"request {self.head.request_id} has not ended"
        assert first_token is not None
        assert self.ended_at is not None
        return StageTimings(
            queued_ns=_ns(planned - self.queued_at),
            prefill_ns=_ns(first_token - planned),
            decode_ns=_ns(self.ended_at - first_token),
            num_accepted_guesses=self.num_accepted_guesses,
            num_rejected_guesses=self.num_rejected_guesses,
        )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def check_vocabulary(submit: SubmitRequest, vocab_size: int) -> None:
    """Refuse token ids beyond the embedding. The frontend has checked too, but one of them would crash the worker."""
    worst = max(map(largest_token, (submit.prompt_token_ids, *submit.emitted)))
    if worst >= vocab_size:
        raise InvalidRequest("token_ids", f"{worst} is not in the vocabulary, 0..{vocab_size - 1}")


def largest_token(token_ids: U32) -> int:
    """Return the largest token id; -1 if there are none."""
    return int(token_ids.max()) if len(token_ids) else -1


def _scope_of(head: RequestHead) -> str:
    """Return the digest of the outputs from which a worker may guess those of the request."""
    return blake2b(f"{len(head.tenant)} {head.tenant}{head.cache_salt}".encode(), digest_size=16).hexdigest()
