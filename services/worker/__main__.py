"""`python -m services.worker`: one accelerator's process."""

from __future__ import annotations

from services.worker.app import WorkerApp
from triptych.rpc.service_main import main

if __name__ == "__main__":
    main("worker", __doc__, WorkerApp)
