"""Look into an engine and steer it, through any frontend or at the engine itself (triptych.v1.AdminService).

triptych admin status                   its counters
triptych admin pause --mode keep        plan no more steps until `resume`; requests queue
triptych admin drain                    take no more requests; done when the last has ended
triptych admin sleep                    free the accelerator's memory until `wake`; requests queue
triptych admin sleep --level 2          and the weights in the host's memory as well
triptych admin reset-prefix-cache       forget all prefixes
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import grpc

from triptych.cli.streaming import add_address_argument
from triptych.rpc.channel import open_blocking_channel
from triptych.rpc.status import from_rpc_error
from triptych.types.facts import PauseMode, SleepLevel
from triptych.v1 import admin_pb2, admin_pb2_grpc
from triptych.wire.admin import pause_mode_to_proto

_MIB = 1 << 20
_MODES = {
    "wait": (PauseMode.WAIT, "let running requests finish"),
    "keep": (PauseMode.KEEP, "freeze them"),
    "abort": (PauseMode.ABORT, "end them, and those that wait"),
}

_ACTION_TO_HELP = {
    "status": "print its counters",
    "pause": "plan no more steps; answers when none is under way",
    "resume": "go on after a pause or a drain",
    "drain": "take no more requests; answers when the last has ended",
    "sleep": "free the worker's accelerator; answers when its memory is free",
    "wake": "bring the worker back; answers when it can compute",
    "reset-prefix-cache": "forget all cached prefixes; refused while a request holds blocks",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, text in _ACTION_TO_HELP.items():
        subparser = actions.add_parser(action, help=text, description=text, allow_abbrev=False)
        add_address_argument(subparser)
        subparser.add_argument(
            "--engine-id", default="", metavar="ID", help="which one, of several behind a frontend"
        )
        subparser.add_argument(
            "--timeout-s",
            type=float,
            default=600.0,
            metavar="S",
            help="give up waiting; the engine goes on with it (default: 600)",
        )
        if action in ("pause", "sleep"):
            modes = "; ".join(f"{name}: {what}" for name, (_, what) in _MODES.items())
            subparser.add_argument("--mode", choices=_MODES, default="wait", help=f"{modes} (default: wait)")
        if action == "sleep":
            subparser.add_argument(
                "--level",
                type=int,
                choices=[level.value for level in SleepLevel],
                default=SleepLevel.WEIGHTS_ON_HOST.value,
                help="1: weights wait in the host's memory; 2: they are read again at `wake` (default: 1)",
            )


def run(arguments: argparse.Namespace) -> int:
    """Raises what the engine answers, typed."""
    with open_blocking_channel(arguments.address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            print(_ACTIONS[arguments.action](stub, arguments))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    return 0


def _status(stub: Any, arguments: argparse.Namespace) -> str:
    request = admin_pb2.GetStatusRequest(engine_id=arguments.engine_id)
    status = stub.GetStatus(request, timeout=arguments.timeout_s).status
    lines = []
    for field in status.DESCRIPTOR.fields:
        value = getattr(status, field.name)
        if field.name == "num_finished":
            value = ", ".join(f"{reason} {value[reason]}" for reason in sorted(value)) or "0"
        lines.append(f"{field.name:<22} {str(value).lower() if isinstance(value, bool) else value}")
    return "\n".join(lines)


def _pause(stub: Any, arguments: argparse.Namespace) -> str:
    mode = pause_mode_to_proto(_MODES[arguments.mode][0])
    stub.Pause(admin_pb2.PauseRequest(engine_id=arguments.engine_id, mode=mode), timeout=arguments.timeout_s)
    return "paused"


def _resume(stub: Any, arguments: argparse.Namespace) -> str:
    stub.Resume(admin_pb2.ResumeRequest(engine_id=arguments.engine_id), timeout=arguments.timeout_s)
    return "resumed"


def _drain(stub: Any, arguments: argparse.Namespace) -> str:
    stub.Drain(admin_pb2.DrainRequest(engine_id=arguments.engine_id), timeout=arguments.timeout_s)
    return "drained"


def _sleep(stub: Any, arguments: argparse.Namespace) -> str:
    request = admin_pb2.SleepRequest(
        engine_id=arguments.engine_id,
        level=arguments.level,
        mode=pause_mode_to_proto(_MODES[arguments.mode][0]),
    )
    released_bytes = stub.Sleep(request, timeout=arguments.timeout_s).released_bytes
    return f"asleep; {released_bytes // _MIB} MiB are free again"


def _wake(stub: Any, arguments: argparse.Namespace) -> str:
    stub.Wake(admin_pb2.WakeRequest(engine_id=arguments.engine_id), timeout=arguments.timeout_s)
    return "awake"


def _reset_prefix_cache(stub: Any, arguments: argparse.Namespace) -> str:
    request = admin_pb2.ResetPrefixCacheRequest(engine_id=arguments.engine_id)
    num_blocks = stub.ResetPrefixCache(request, timeout=arguments.timeout_s).num_blocks
    return f"forgot {num_blocks} blocks"


_ACTIONS: dict[str, Callable[[Any, argparse.Namespace], str]] = {
    "status": _status,
    "pause": _pause,
    "resume": _resume,
    "drain": _drain,
    "sleep": _sleep,
    "wake": _wake,
    "reset-prefix-cache": _reset_prefix_cache,
}
"""Each carries out its action and says in words what came of it."""
