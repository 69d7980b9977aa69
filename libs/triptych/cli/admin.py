"""Look into an engine and steer it, through any frontend's admin port or at the engine itself
(triptych.admin.v1.AdminService).

triptych admin engines                  the engines behind a frontend
triptych admin status                   its counters; --json for programs
triptych admin watch --interval-s 2     a line every two seconds until Ctrl-C
triptych admin pause --mode keep        plan no more steps until `resume`; requests queue
triptych admin drain                    take no more requests; done when the last has ended
triptych admin sleep                    free the accelerator's memory until `wake`; requests queue
triptych admin sleep --level 2          and the weights in the host's memory as well
triptych admin reset-prefix-cache       forget all prefixes
triptych admin requests                 the requests that are alive at a frontend
triptych admin abort ID …               end some of them
triptych admin load-adapter sql /a/sql  load a LoRA adapter into all engines; requests name the model `sql`
triptych admin unload-adapter sql       no new request may name it; running ones go on
triptych admin adapters                 the adapters that requests may name
triptych admin log-level debug          log more, until it is set again
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.cli.access import add_access_arguments, api_key_of
from triptych.cli.tls import tls_of
from triptych.cli.watch import watch
from triptych.client.admin_client import DEFAULT_ADDRESS, admin_error
from triptych.rpc.channel import credentials_of, open_blocking_channel, with_api_key
from triptych.rpc.tls import create_client_tls
from triptych.types.facts import PauseMode, SleepLevel
from triptych.wire.admin import LOG_LEVELS, log_level_to_proto, pause_mode_to_proto

ADDRESS_ENV = "TRIPTYCH_ADMIN_ADDRESS"
"""The variable that has the address for commands which are given none."""
_MIB = 1 << 20
_MODES = {
    "wait": (PauseMode.WAIT, "let running requests finish"),
    "keep": (PauseMode.KEEP, "freeze them"),
    "abort": (PauseMode.ABORT, "end them, and those that wait"),
}


@dataclass(frozen=True, slots=True)
class _Action:
    """One method of AdminService, as a command."""

    method: str
    help: str
    say: Callable[[Any], str]
    """Puts the response into words."""
    options: Sequence[str] = ()
    """Fields of the request that are options of the command: names in `_OPTIONS`."""
    names_engine: bool = True
    """Whether the request is about one engine."""
    is_stream: bool = False
    """Whether responses are streamed until Ctrl-C; `say` puts their status into a word for each line."""


@dataclass(frozen=True, slots=True)
class _Option:
    """A field of a request, as an option."""

    arguments: dict[str, Any]
    """Arguments of `add_argument`."""
    to_proto: Callable[[Any], Any]
    """Turns what the user gave into the field's value."""
    is_positional: bool = False
    """Whether it is an argument, not an option."""


def run(arguments: argparse.Namespace) -> int:
    """Raises what the engine answers, typed."""
    action = _ACTIONS[arguments.action]
    fields = {name: _OPTIONS[name].to_proto(getattr(arguments, name)) for name in action.options}
    if action.names_engine:
        fields["engine_id"] = arguments.engine_id
    request = getattr(admin_pb2, f"{action.method}Request")(**fields)
    credentials = credentials_of(create_client_tls(tls_of(arguments)))
    with open_blocking_channel(arguments.address, credentials) as channel:
        stub = with_api_key(admin_pb2_grpc.AdminServiceStub(channel), api_key_of(arguments))
        call = getattr(stub, action.method)
        try:
            if action.is_stream:
                _follow(itertools.islice(call(request), arguments.count), action, as_json=arguments.json)
            else:
                response = call(request, timeout=arguments.timeout_s)
                print(json.dumps(_plain(response)) if arguments.json else action.say(response))
        except grpc.RpcError as error:
            raise admin_error(error, arguments.address) from error
    return 0


def _follow(responses: Iterable[Any], action: _Action, *, as_json: bool) -> None:
    """Print responses until there are no more, or until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            for response in responses:
                print(json.dumps(_plain(response)), flush=True)
        else:
            statuses = (response.status for response in responses)
            watch(statuses, action.say, lambda line: print(line, flush=True))


def _plain(message: Any) -> dict[str, Any]:
    """Return a message as a program reads it in JSON: its own names, numbers as numbers, words for enums."""
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_field(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return list(value) if field.message_type is None else [_plain(entry) for entry in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.message_type is not None:
        return _plain(value)
    return value if field.enum_type is None else _word(field.enum_type, value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, action in _ACTIONS.items():
        subparser = actions.add_parser(name, help=action.help, description=action.help, allow_abbrev=False)
        subparser.add_argument(
            "--address",
            default=os.environ.get(ADDRESS_ENV) or DEFAULT_ADDRESS,
            metavar="HOST:PORT",
            help="admin port of the frontend, or port of an engine "
            f"(default: ${ADDRESS_ENV}, else {DEFAULT_ADDRESS})",
        )
        add_access_arguments(subparser)
        subparser.add_argument(
            "--engine-id", default="", metavar="ID", help="which one, of several behind a frontend"
        )
        subparser.add_argument("--json", action="store_true", help="print the response as JSON")
        if action.is_stream:
            subparser.add_argument(
                "--count", type=int, metavar="N", help="end after N lines (default: never)"
            )
        else:
            subparser.add_argument(
                "--timeout-s",
                type=float,
                default=600.0,
                metavar="S",
                help="give up waiting; the engine goes on with it (default: 600)",
            )
        for option in action.options:
            if _OPTIONS[option].is_positional:
                subparser.add_argument(option, **_OPTIONS[option].arguments)
                continue
            flag = f"--{option.replace('_ms', '-s')}"
            subparser.add_argument(flag, dest=option, **_OPTIONS[option].arguments)


def _show_engines(response: Any) -> str:
    return "\n".join(
        f"{engine.engine_id:<22} {engine.address:<22} {engine.model or '-':<22} "
        f"{'ready' if engine.ready else 'not ready: ' + engine.why_not_ready}"
        f"{'; no affinity: ' + engine.why_no_affinity if engine.ready and engine.why_no_affinity else ''}"
        for engine in response.engines
    )


def _show_requests(response: Any) -> str:
    """Return a line per request; the first 1000 of many."""
    lines = [
        f"{request.request_id:<38} {request.tenant or '-':<16} {request.model or '-':<16} "
        f"{request.age_ms / 1000:8.1f} s {request.num_choices:>6} choices {request.num_output_tokens:>8} tokens"
        for request in response.requests
    ]
    return "\n".join((*lines, *(["… and more"] if response.next_page_token else [])))


def _show_adapter(adapter: Any) -> str:
    engines = ", ".join(adapter.engine_ids)
    resident = ", ".join(adapter.resident_engine_ids) or "none"
    return (
        f"{adapter.name:<22} rank {adapter.rank:>3} {adapter.digest[:12]} {adapter.source} in {engines}; "
        f"in memory of {resident}"
    )


def _show_adapters(response: Any) -> str:
    return "\n".join(map(_show_adapter, response.adapters)) or "none"


def _show_aborted(response: Any) -> str:
    return "aborted: " + (", ".join(response.aborted_request_ids) or "none; they are not alive here")


def _word(enum: Any, number: int) -> str:
    """Return the word for a value: `ready` for ENGINE_STATE_READY, its number if a later version has added it."""
    value = enum.values_by_number.get(number)
    if value is None:
        return str(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(value.name.removeprefix(prefix).lower())


def _show_status(response: Any) -> str:
    lines = []
    for field in response.status.DESCRIPTOR.fields:
        value = getattr(response.status, field.name)
        if field.name == "num_finished":
            outcomes = admin_pb2.Outcome.DESCRIPTOR
            value = ", ".join(f"{_word(outcomes, entry.outcome)} {entry.count}" for entry in value) or "0"
        elif field.has_presence and not response.status.HasField(field.name):
            value = "-"
        elif field.enum_type is not None:
            value = _word(field.enum_type, value)
        lines.append(f"{field.name:<22} {value}")
    return "\n".join(lines)


_ACTIONS = {
    "engines": _Action(
        "ListEngines", "list the engines behind a frontend", _show_engines, names_engine=False
    ),
    "status": _Action("GetStatus", "print its counters", _show_status),
    "watch": _Action(
        "WatchStatus",
        "print a line of them again and again",
        lambda status: _word(admin_pb2.EngineState.DESCRIPTOR, status.state),
        ("interval_ms",),
        is_stream=True,
    ),
    "pause": _Action(
        "Pause", "plan no more steps; answers when none is under way", lambda _: "paused", ("mode",)
    ),
    "resume": _Action("Resume", "go on after a pause or a drain", lambda _: "resumed"),
    "drain": _Action("Drain", "take no more requests; answers when the last has ended", lambda _: "drained"),
    "sleep": _Action(
        "Sleep",
        "free the worker's accelerator; answers when its memory is free",
        lambda response: f"asleep; {response.released_bytes // _MIB} MiB are free again",
        ("mode", "level"),
    ),
    "wake": _Action("Wake", "bring the worker back; answers when it can compute", lambda _: "awake"),
    "reset-prefix-cache": _Action(
        "ResetPrefixCache",
        "forget all cached prefixes; refused while a request holds blocks",
        lambda response: f"forgot {response.num_blocks} blocks",
    ),
    "requests": _Action(
        "ListRequests", "list the requests that are alive at a frontend", _show_requests, names_engine=False
    ),
    "abort": _Action(
        "AbortRequests",
        "end requests of a frontend with what they have",
        _show_aborted,
        ("request_ids",),
        names_engine=False,
    ),
    "load-adapter": _Action(
        "LoadAdapter",
        "load a LoRA adapter into all engines, or the one of --engine-id; steps go on meanwhile",
        lambda response: f"loaded: {_show_adapter(response.adapter)}",
        ("name", "source"),
    ),
    "unload-adapter": _Action(
        "UnloadAdapter",
        "unload a LoRA adapter: no new request may name it, and running ones go on",
        lambda _: "unloaded",
        ("name",),
    ),
    "adapters": _Action("ListAdapters", "list the LoRA adapters that requests may name", _show_adapters),
    "log-level": _Action(
        "SetLogLevel",
        "set what a frontend logs, or with --engine-id an engine, until it is set again",
        lambda _: "set",
        ("log_level",),
    ),
}

_OPTIONS = {
    "interval_ms": _Option(
        {"type": float, "default": 1.0, "metavar": "S", "help": "seconds between two lines (default: 1)"},
        lambda interval_s: max(0, round(interval_s * 1e3)),
    ),
    "request_ids": _Option({"nargs": "+", "metavar": "ID"}, list, is_positional=True),
    "name": _Option(
        {"metavar": "NAME", "help": "what requests give as their model"}, str, is_positional=True
    ),
    "source": _Option(
        {"metavar": "PATH", "help": "directory on the workers' machines, within model.adapter_root"},
        str,
        is_positional=True,
    ),
    "log_level": _Option(
        {"metavar": "LEVEL", "choices": LOG_LEVELS, "help": ", ".join(LOG_LEVELS)},
        log_level_to_proto,
        is_positional=True,
    ),
    "mode": _Option(
        {
            "choices": _MODES,
            "default": "wait",
            "help": "; ".join(f"{name}: {what}" for name, (_, what) in _MODES.items()) + " (default: wait)",
        },
        lambda name: pause_mode_to_proto(_MODES[name][0]),
    ),
    "level": _Option(
        {
            "type": int,
            "choices": [level.value for level in SleepLevel],
            "default": SleepLevel.WEIGHTS_ON_HOST.value,
            "help": "1: weights wait in the host's memory; 2: they are read again at `wake` (default: 1)",
        },
        int,
    ),
}
