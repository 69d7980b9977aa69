"""`python -m services.enginecore`: scheduler and KV block manager of one model."""

from __future__ import annotations

from services.enginecore.app import EngineCoreApp
from triptych.rpc.service_main import main

if __name__ == "__main__":
    main("enginecore", __doc__, EngineCoreApp)
