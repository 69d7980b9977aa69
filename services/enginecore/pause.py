"""What an operator's pause means for planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.enginecore.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause, from the call to Resume."""

    may_finish: Sequence[Request] = ()
    """Those that had begun and are still computed; nobody else is admitted."""
    is_frozen: bool = False
    """Nothing is planned at all."""

    def is_settled(self, num_in_flight: int) -> bool:
        """Whether the last step is back."""
        has_ended = all(request.state is RequestState.ENDED for request in self.may_finish)
        return not num_in_flight and (self.is_frozen or has_ended)
