"""`python -m services.frontend`: the tokenizing gateway's process."""

from __future__ import annotations

from services.frontend.app import FrontendApp
from triptych.rpc.service_main import main

if __name__ == "__main__":
    main("frontend", __doc__, FrontendApp)
