"""A check of a scheduler's requests against the steps in flight, for tests and for an idle engine."""

from __future__ import annotations

from triptych_services.enginecore.request import RequestState
from triptych_services.enginecore.scheduler.request_states import RequestStates
from triptych_services.enginecore.scheduler.step_results import StepsInFlight


def check_in_flight(states: RequestStates, in_flight: StepsInFlight) -> None:
    """Check that each request expects the tokens that the steps in flight bring.

    Raises:
        AssertionError: One does not; names it.
    """
    num_in_flight = in_flight.count_tokens()
    for request in states:
        noted, planned = request.num_in_flight, 0
        if request.state is RequestState.RUNNING:
            noted = int(states.rows.num_expected[request.slot] - states.rows.known[request.slot])
        if request.state is RequestState.RUNNING or request.is_draining:
            planned = num_in_flight[request.slot, request.slot_version]
        assert noted == planned, (
            f"request {request.request_id} expects {noted} tokens, steps in flight bring {planned}"
        )
