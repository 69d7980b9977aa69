"""What the failure of a row means for its request, and for the blocks that it has written."""

from __future__ import annotations

from collections import deque

from services.enginecore.request import Request, RequestState
from services.enginecore.scheduler.in_flight import InFlightStep, StepsInFlight
from services.enginecore.scheduler.request_states import RequestStates
from triptych.errors import EngineFailure, InvalidRequest, TriptychError
from triptych.types.step import RowError, RowErrorCode

_MOST_PREFIXES = 64  # remembered, of requests that failed after they had found them in the cache


def error_of(step_id: int, error: RowError) -> TriptychError:
    """Return what the client is told of its row's failure."""
    if error.code is RowErrorCode.INVALID_REQUEST:
        field, _, description = error.message.partition(": ")
        return InvalidRequest(field, description)
    return EngineFailure(f"the worker failed this request in step {step_id}: {error.message}")


class SuspectBlocks:
    """Owned by the scheduler: takes back from the prefix cache what a failed row may have spoiled.

    A chunk of a prompt samples nothing, so garbage in its KV is noticed steps later at the earliest. So nothing that a
    failed request has written is kept, whichever step wrote it.
    """

    def __init__(self, states: RequestStates, in_flight: StepsInFlight) -> None:
        self._states = states
        self._in_flight = in_flight
        self._prefixes: deque[bytes] = deque(maxlen=_MOST_PREFIXES)
        """First block hashes of requests that failed after hits: at a second failure the hits are doubtful, too."""

    def of(self, request: Request) -> set[int]:
        """Return the blocks that a request, running or parked, may have filled with garbage."""
        table = request.blocks
        if request.state is RequestState.PARKED:  # its blocks are given back, under their names
            return set(self._states.blocks.named_blocks(table))
        first = table.num_hits
        if first:
            prefix = table.hashes[0]
            if prefix in self._prefixes:
                first = 0
            else:
                self._prefixes.append(prefix)
        return set(table.block_ids[first:])

    def uncache(self, step: InFlightStep, blocks: set[int]) -> None:
        """Take back `blocks` and whatever this step or a later one has promised to fill.

        Rare enough to be coarse: all such offers are taken back, whoever made them; whoever hit one starts over, and so
        do the parked, whose hits are no longer known.
        """
        manager = self._states.blocks
        suspect_blocks = {*blocks, *step.newly_cached_blocks, *manager.take_newly_cached()}
        suspect_blocks.update(*(later.newly_cached_blocks for later in self._in_flight))
        manager.uncache(suspect_blocks)
        for request in list(self._states.draining.values()):
            self._states.unpark(request)
        for request in self._states.running:
            if not suspect_blocks.isdisjoint(request.blocks.block_ids[: request.blocks.num_hits]):
                self._states.requeue(request)
