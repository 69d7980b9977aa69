"""One request on its way through the engine core."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from services.enginecore.kv.block import BlockTable
from triptych.types.outputs import StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.submit import SubmitRequest


class RequestState(Enum):
    """Where a request stands.

    WAITING -> RUNNING -> ENDED; a preempted one goes back to WAITING, by way of PARKED while results
    of steps sent before are still to come. It may end from anywhere.
    """

    WAITING = auto()
    PARKED = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Owned by the engine loop; the scheduler writes everything below `deadline`.

    While it runs its counters stand in `RowColumns`, not here: a step that changes nothing but counters
    touches no request.
    """

    request_id: str
    session: int
    """Which frontend stream it came on."""
    number: int
    """u32, its name on that stream."""
    token_ids: array[int]
    """All known tokens, prompt first. While it runs, those of the open block may be missing: they stand in
    `RowColumns.open_block` until it is full."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    """On the scheduler's clock, in seconds."""

    blocks: BlockTable = field(default_factory=BlockTable)
    state: RequestState = RequestState.WAITING
    arrival: int = 0
    """Place in the order of arrival."""
    account: int = 0
    """Its tenant's, in `FairShares`."""
    limit: int = 0
    """Tokens it may grow to, prompt included: the smaller of max_tokens' and the model's."""
    slot: int = 0
    """Its row in the worker, with `generation`: while RUNNING, and of its last run while PARKED."""
    generation: int = 0
    num_in_flight: int = 0
    """Results still to come while PARKED."""
    num_cached_tokens: int = 0
    """Prompt tokens that its first admission found in the cache; recomputing changes nothing here."""
    prompt_logprobs_start: int = 0
    """Log-probabilities of the prompt's positions below this have been reported; 0: none."""
    queued_at: float = 0.0
    planned_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None

    @classmethod
    def from_submit(cls, submit: SubmitRequest, *, session: int, deadline: float | None = None) -> Request:
        """A request as it came over a frontend's stream; `deadline` on the scheduler's clock."""
        token_ids = array("I")
        assert token_ids.itemsize == submit.token_ids.itemsize, "unsigned int is not 4 bytes here"
        token_ids.frombytes(submit.token_ids.tobytes())
        salt = submit.cache_salt.encode()
        return cls(
            request_id=submit.request_id,
            session=session,
            number=submit.number,
            token_ids=token_ids,
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=submit.sampling,
            seed=submit.seed,
            priority=submit.priority,
            tenant=submit.tenant,
            deadline=deadline,
            blocks=BlockTable(extras={0: (salt,)} if salt else {}),
        )

    @property
    def was_admitted(self) -> bool:
        """Whether it has run before."""
        return self.planned_at is not None

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
        assert planned is not None, f"request {self.request_id} has not ended"
        assert first_token is not None
        assert self.ended_at is not None
        return StageTimings(
            queued_ns=_ns(planned - self.queued_at),
            prefill_ns=_ns(first_token - planned),
            decode_ns=_ns(self.ended_at - first_token),
        )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
