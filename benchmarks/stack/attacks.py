"""Requests of a hostile tenant: each costs the frontend as much work as its limits admit."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from triptych.v1 import chat_pb2, generation_pb2

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
REFUSED = frozenset({400})
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind of request, of which a tenant sends many."""

    path: str
    make_body: Callable[[int], Mapping[str, Any]]
    """Makes the JSON body of the n-th request. Bodies differ, so that nothing is remembered."""
    statuses: frozenset[int] = REFUSED
    """Statuses by which it may be answered, beside 429."""
    cpu_s: float = 2.0
    """CPU time that one may cost the frontend and its child processes, in seconds. Line breaks cost minutes once."""


def _generate(**fields: Any) -> dict[str, Any]:
    return {"model": "embedded", "prompt": "Tell me", "max_tokens": 8, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **fields}


def _schema(number: int, num_properties: int) -> dict[str, Any]:
    properties: dict[str, Any] = {f"{number:x}{index:x}": {} for index in range(num_properties)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _json_schema(number: int, num_properties: int) -> dict[str, Any]:
    form = {"name": "x", "schema": _schema(number, num_properties)}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


ATTACKS = {
    "line breaks as a grammar": Attack(
        COMPLETIONS, lambda n: _generate(structured_outputs={"grammar": "\n" * 12_000 + str(n)})
    ),
    "unknown fields": Attack(
        COMPLETIONS, lambda n: _generate(**{f"maximum_tokens_{n}_{index:03}": 0 for index in range(240)})
    ),
    "ambiguous grammar": Attack(
        COMPLETIONS,
        lambda n: _generate(
            structured_outputs={"grammar": f"start: s{n}\ns{n}: s{n} s{n} | T |\nT: /[^\\x00]/"}, top_p=0.9
        ),
    ),
    "grammar that compiles slowly": Attack(
        COMPLETIONS,
        lambda n: _generate(
            structured_outputs={
                "grammar": "start: R0\n"
                + "".join(f"R{i}: R{i + 1} | /b{i}{n}/\n" for i in range(3000))
                + 'R3000: "a"'
            }
        ),
        cpu_s=6.0,
    ),
    "schema of 9,000 properties": Attack(
        COMPLETIONS, lambda n: _generate(**_json_schema(n, 9000)), frozenset({400, 413}), cpu_s=6.0
    ),
    "schema of 400 optional properties": Attack(
        COMPLETIONS, lambda n: _generate(**_json_schema(n, 400), seed=n), frozenset({200})
    ),
    "1 MB to /tokenize": Attack(
        TOKENIZE, lambda n: {"model": "embedded", "prompt": str(10**9 + n) * 100_000}, frozenset({200, 400})
    ),
    "prompt that is cut": Attack(
        COMPLETIONS,
        lambda n: _generate(prompt=str(10**9 + n) * 100_000, truncate_prompt_tokens=8),
        frozenset({200, 400}),
    ),
    "urgent": Attack(
        COMPLETIONS, lambda n: _generate(priority=-(2**31), max_tokens=64, seed=n), frozenset({200, 403})
    ),
    "biases of the whole vocabulary": Attack(
        COMPLETIONS,
        lambda n: _generate(logit_bias={str(token_id): 1 for token_id in range(49_000)}, seed=n),
        frozenset({200, 400}),
    ),
    "stop ids of the whole vocabulary": Attack(
        COMPLETIONS, lambda n: _generate(stop_token_ids=list(range(49_000)), seed=n), frozenset({200, 400})
    ),
    "brackets as arguments": Attack(
        CHAT,
        lambda n: _chat(
            messages=[
                {"role": "user", "content": f"Hi {n}"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 2000}}
                    ],
                },
            ]
        ),
        frozenset({200, 400}),
    ),
    "demanded call of a nested schema": Attack(
        CHAT,
        lambda n: _chat(
            tools=[{"type": "function", "function": {"name": f"f{n}", "parameters": _nested(300)}}],
            tool_choice="required",
        ),
    ),
    "5 MB of reasoning": Attack(
        CHAT,
        lambda n: _chat(
            messages=[
                {"role": "user", "content": f"Hi {n}"},
                {"role": "assistant", "content": "x", "reasoning_content": "y" * 5_000_000},
                {"role": "user", "content": "and?"},
            ]
        ),
        frozenset({200, 400}),
    ),
    "16,384 messages": Attack(
        CHAT,
        lambda n: _chat(messages=[{"role": "user", "content": f"x{n}"}] * 16_384, truncate_prompt_tokens=8),
        frozenset({200, 400}),
    ),
}


def send(address: str, attack: Attack, number: int, key: str) -> int:
    """Send the n-th request of an attack, and return the status of its answer; see `send_body`."""
    return send_body(address, attack.path, write_body(attack, number), key)


def write_body(attack: Attack, number: int) -> bytes:
    """Return the JSON body of the n-th request of an attack."""
    return json.dumps(attack.make_body(number)).encode()


def send_body(address: str, path: str, body: bytes, key: str) -> int:
    """Send one request, and return the status of its answer.

    Args:
        address: HOST:PORT of the HTTP server.
    """
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def write_chat(number: int) -> bytes:
    """Return the n-th message of 16,384 turns for `send_chat`, as the body of the attack of that name."""
    turn = chat_pb2.ChatMessage(role="user")
    turn.parts.add(text=f"x{number}")
    request = generation_pb2.GenerateRequest()
    request.generation.chat.messages.extend([turn] * 16_384)
    request.generation.truncation.max_tokens = 8
    request.generation.length.max_tokens = 8
    return request.SerializeToString()


def send_chat(address: str, message: bytes, key: str) -> str:
    """Send one request over gRPC, on a connection of its own, and return the code of its answer.

    Args:
        address: HOST:PORT of the public gRPC server.
        message: As `write_chat` writes it.
    """
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/triptych.v1.GenerationService/Generate")
        try:
            call(message, timeout=TIMEOUT_S, metadata=(("authorization", f"Bearer {key}"),))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def flood_headers(address: str, num_bytes: int) -> bytes:
    """Send `num_bytes` of headers on one connection without a key, and return what comes back before it is closed."""
    host, _, port = address.rpartition(":")
    chunk = b"".join(b"a%d: b\r\n" % index for index in range(1000))
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        num_sent = 0
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            while num_sent < num_bytes:
                connection.sendall(chunk)
                num_sent += len(chunk)
            connection.sendall(b"\r\n")
        except OSError:  # it was closed by the server, as it should
            pass
        try:
            return connection.recv(1 << 16)
        except OSError:
            return b""
