"""`python -m triptych_services.frontend`: the tokenizing gateway's process."""

from __future__ import annotations

from triptych.rpc.service_main import main
from triptych_services.frontend.app import FrontendApp

if __name__ == "__main__":
    main("frontend", __doc__, FrontendApp)
