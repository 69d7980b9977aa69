"""Shared by the three fakes: bind, report the ports, leave on SIGTERM; misbehave as $FAKE_<NAME> says.

`exit:CODE` leaves right after binding, `stay` ignores SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from triptych.config.loader import parse_service_arguments
from triptych.rpc.server import write_ready_file


def run(name: str, leaf: str) -> None:
    arguments = parse_service_arguments(name, name, sys.argv[1:])
    config = getattr(arguments.config, leaf)
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
        kind, _, code = os.environ.get(f"FAKE_{name.upper()}", "").partition(":")
        if kind == "exit":
            print(f"{name} meets its end", file=sys.stderr)
            raise SystemExit(int(code))
        while signal.sigwait({signal.SIGTERM}) and kind == "stay":
            pass
        print(f"{name} leaves", file=sys.stderr)
