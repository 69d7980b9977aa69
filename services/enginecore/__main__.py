"""`python -m triptych_services.enginecore`: scheduler and KV block manager of one model."""

from __future__ import annotations

from triptych.rpc.service_main import main
from triptych_services.enginecore.app import EngineCoreApp

if __name__ == "__main__":
    main("enginecore", __doc__, EngineCoreApp)
