"""One line in the log for each call of an operator."""

from __future__ import annotations

import logging

from triptych.observe.logging import with_fields
from triptych_services.frontend.access.caller import current_caller

log = logging.getLogger(__name__)


def log_admin_call(peer: str, method: str, request: str, outcome: str) -> None:
    """Say who has called, what, and how it went.

    Args:
        peer: Address of the caller.
        method: Name of the call.
        request: Its arguments. Empty: it has none.
        outcome: Name or number of its status.
    """
    fields = {"key": current_caller().name or "-", "peer": peer, "method": method}
    if request:
        fields["request"] = request
    log.info("admin call", extra=with_fields(**fields, outcome=outcome))
