"""`python -m triptych_services.worker`: one accelerator's process."""

from __future__ import annotations

from triptych.rpc.service_main import main
from triptych_services.worker.app import WorkerApp

if __name__ == "__main__":
    main("worker", __doc__, WorkerApp)
