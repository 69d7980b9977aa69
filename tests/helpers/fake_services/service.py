"""Shared by the three fakes: bind, report the ports, leave on SIGTERM; misbehave as $FAKE_<NAME> says.

`exit:CODE` leaves right after binding, `stay` ignores SIGTERM, `late:FILE` binds once there is a file.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from triptych.config.loader import parse_service_arguments
from triptych.rpc.server import write_ready_file


def run(name: str, leaf: str) -> None:
    arguments = parse_service_arguments(name, name, sys.argv[1:])
    config = getattr(arguments.config, leaf)
    kind, _, detail = os.environ.get(f"FAKE_{name.upper()}", "").partition(":")
    while kind == "late" and not os.path.exists(detail):
        time.sleep(0.005)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((config.host, config.port))
        except OSError:
            print(f"{leaf}.port: {config.port} is taken", file=sys.stderr)
            raise SystemExit(2) from None
        server.listen()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        upstream = getattr(config, "worker_address", getattr(config, "engine_addresses", "nobody"))
        print(f"{name} calls {upstream}", file=sys.stderr)
        write_ready_file(arguments.ready_file, {"port": server.getsockname()[1], "metrics_port": 1})
        if kind == "exit":
            print(f"{name} meets its end", file=sys.stderr)
            raise SystemExit(int(detail))
        while signal.sigwait({signal.SIGTERM}) and kind == "stay":
            pass
        print(f"{name} leaves", file=sys.stderr)
