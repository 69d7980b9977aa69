"""`python -m triptych_services.frontend`: the tokenizing gateway's process, or the supervisor of several."""

from __future__ import annotations

import sys

from triptych.config.loader import parse_service_arguments
from triptych_services.frontend.siblings.supervisor import num_processes, supervise

if __name__ == "__main__":
    arguments = parse_service_arguments("frontend", __doc__, sys.argv[1:])
    if num_processes(arguments.config.frontend) > 1:
        supervise(arguments)
    else:
        from triptych.rpc.service_main import run_service
        from triptych_services.frontend.app import FrontendApp

        run_service(arguments, "frontend", FrontendApp)
