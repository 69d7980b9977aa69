"""Several engines in one process, each with its own port, scheduler and simulated accelerator.

Writes the ports as JSON, then answers each line on stdin with the seconds that each accelerator has computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import numpy as np

from benchmarks.routing.simulation import STEP_TIMES, TimedDevice, create_facts
from benchmarks.stack.scale_engines import SlowedWorker, create_engine
from triptych.checkpoint.config_json import read_architecture
from triptych.hub import resolve_model
from triptych.types.step import StepPlan
from triptych_services.worker.simulation.runner import SimulatedRunner
from triptych_services.worker.simulation.vocabulary import read_word_ids


class TimedWorker(SlowedWorker):
    """A worker whose steps take as long as their work does, times a factor."""

    def __init__(self, runner: SimulatedRunner, device: TimedDevice, slowdown: float) -> None:
        super().__init__(runner, 0.0)
        self.busy_s = 0.0
        self._device = device
        self._slowdown = slowdown

    async def send(self, plan: StepPlan) -> None:
        result = self._runner.execute(plan)
        loop = asyncio.get_running_loop()
        self.busy_s += self._device.last_s
        self._free_at = max(self._free_at, loop.time()) + self._device.last_s * self._slowdown
        loop.call_at(self._free_at, self._finish, result)


async def serve(num_engines: int, slowdown: float) -> None:
    """Run the engines until stdin is closed."""
    config, facts = create_facts()
    directory = resolve_model(config.model.model)
    architecture = read_architecture(directory)
    words = read_word_ids(directory, architecture.vocab_size, architecture.eos_token_ids)
    workers, servers, ports = [], [], []
    for number in range(num_engines):
        device = TimedDevice(STEP_TIMES)
        worker = TimedWorker(
            SimulatedRunner(facts=facts, device=device, word_ids=np.array(words)), device, slowdown
        )
        server, port = create_engine(config, f"engine-{number}", worker)
        await server.start()
        workers.append(worker)
        servers.append(server)
        ports.append(port)
    print(json.dumps({"ports": ports}), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(json.dumps({"busy_s": [worker.busy_s for worker in workers]}), flush=True)
    print("{}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--slowdown", type=float, required=True)
    known = parser.parse_args()
    asyncio.run(serve(known.engines, known.slowdown))
